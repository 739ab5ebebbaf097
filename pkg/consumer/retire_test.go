package consumer_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// Handlers that attach to no partition, and inboxes with another name, have no marks in the collections of the default names.
func TestARunningHandlerOfAnyKindIsNotRetired(t *testing.T) {
	t.Parallel()
	for name, option := range map[string]consumer.Option{
		"AtLeastOnce": consumer.WithMode(consumer.AtLeastOnce), "other collections": consumer.WithCollections("own"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			c := k.newConsumer(option)
			addHandler(t, c, "fails", func(context.Context, *consumer.Message) error { return errFlaky },
				consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}, Min: time.Hour, Max: time.Hour}))
			k.publish(newMessage("a", "fails", "1"))
			stop := k.start(c)
			k.waitUntil("the message to be set aside", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 1 })

			migration := k.newConsumer(option)
			if err := migration.Retire(k.context(), "fails"); !errors.Is(err, consumer.ErrRunning) {
				t.Errorf("while a member runs: got %v, want %v", err, consumer.ErrRunning)
			}
			if got := k.countDocuments(setaside.DefaultCollection); got != 1 {
				t.Errorf("messages of a running handler: got %d, want 1", got)
			}

			stop()
			if err := migration.Retire(k.context(), "fails"); err != nil {
				t.Fatal(err)
			}
			// The id of the topic belongs to the group, so it stays.
			marks, err := k.db.Collection("own_offsets").CountDocuments(k.context(), bson.D{{Key: "_id.l", Value: bson.D{{Key: "$ne", Value: -2}}}})
			if err != nil {
				t.Fatal(err)
			}
			if got := k.countDocuments(setaside.DefaultCollection); got != 0 || marks != 0 {
				t.Errorf("after Retire: got %d messages and %d watermarks, want none", got, marks)
			}
		})
	}
}

func TestRetireNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	if err := k.newConsumer().Retire(k.context(), ""); err == nil {
		t.Error("Retire without a name: got no error")
	}
	if n, err := k.db.Collection("inbox_offsets").CountDocuments(k.context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("documents: got %d (%v), want none", n, err)
	}
}
