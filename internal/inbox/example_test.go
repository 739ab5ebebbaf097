package inbox_test

import (
	"context"
	"errors"
	"log"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// A webhook whose sender repeats it until it gets an answer. The payment is booked once.
func ExampleInbox_Once() {
	var (
		ctx       context.Context
		db        *mongo.Database
		webhookID string
	)
	box, err := inbox.New(db)
	if err != nil {
		log.Fatal(err)
	}
	if err := box.EnsureIndexes(ctx); err != nil {
		log.Fatal(err)
	}

	err = box.Once(ctx, "payments", webhookID, func(ctx context.Context) error {
		_, err := db.Collection("payments").InsertOne(ctx, bson.D{{Key: "webhook", Value: webhookID}})
		return err
	})
	if err != nil && !errors.Is(err, inbox.ErrDuplicate) {
		log.Fatal(err)
	}
}

// A letter is printed before it is recorded in the database. The claim prevents others from
// printing it at the same time.
func ExampleInbox_Claim() {
	var (
		ctx    context.Context
		db     *mongo.Database
		box    *inbox.Inbox
		events *outbox.Box
		entry  inbox.Entry
		print  func(context.Context) error
	)
	claim, err := box.Claim(ctx, entry, 0)
	if errors.Is(err, inbox.ErrDuplicate) || errors.Is(err, inbox.ErrClaimed) {
		return
	}
	if err != nil {
		log.Fatal(err)
	}

	defer func() { _ = claim.Release(ctx) }()
	err = claim.Hold(ctx, func(ctx context.Context) error {
		if err := print(ctx); err != nil {
			return err
		}

		return events.Transaction(ctx, func(ctx context.Context) error {
			if _, err := db.Collection("letters").InsertOne(ctx, bson.D{{Key: "printed", Value: true}}); err != nil {
				return err
			}
			return claim.Handled(ctx)
		})
	})
	if err != nil {
		log.Fatal(err)
	}
}
