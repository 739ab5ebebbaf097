package resume_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/resume"
)

func ExampleToken() {
	token := resume.TokenOf("8266A1B2C3000000052B0229296E04")
	ts, ok := token.ClusterTime()
	fmt.Println(token.Data(), ts.T, ts.I, ok)
	// Output: 8266A1B2C3000000052B0229296E04 1721873091 5 true
}

func ExamplePosition_Compare() {
	earlier := resume.Position{Token: resume.TokenOf("8266A1B2C30000000529")}
	later := resume.Position{Token: resume.TokenOf("8266A1B2C30000000629")}
	byTime := resume.Position{ClusterTime: bson.Timestamp{T: 0x66A1B2C3, I: 6}}
	fmt.Println(earlier.Compare(later), later.Compare(byTime), later.Compare(later))
	// Output: -1 1 0
}

// A position is saved in the transaction of the effects, and never goes back.
func ExamplePosition() {
	var (
		ctx context.Context
		db  *mongo.Database
	)
	var saved resume.Position
	positions := db.Collection("positions")
	err := positions.FindOne(ctx, bson.D{{Key: "_id", Value: "orders"}}).Decode(&saved)
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		log.Fatal(err)
	}

	// The server rejects a token whose history it has lost, and may still have the time.
	opts := options.ChangeStream()
	if !saved.Token.IsZero() {
		opts.SetResumeAfter(bson.Raw(saved.Token))
	}
	stream, err := db.Collection("orders").Watch(ctx, mongo.Pipeline{}, opts)
	if err != nil {
		log.Fatal(err)
	}

	for stream.Next(ctx) {
		token := resume.Token(stream.ResumeToken()).Clone()
		next := resume.Position{Token: token}
		next.ClusterTime, _ = token.ClusterTime()
		if next.Compare(saved) <= 0 {
			continue
		}
		// … the effect of the event.
		update := bson.D{{Key: "$set", Value: next}}
		if _, err := positions.UpdateByID(ctx, "orders", update, options.UpdateOne().SetUpsert(true)); err != nil {
			log.Fatal(err)
		}
		saved = next
	}
}
