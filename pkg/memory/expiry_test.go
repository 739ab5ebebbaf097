package memory_test

import (
	"context"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/memory"
)

// The record of an event carries its expiry: an event that was delivered in time and is read too late is not handled.
func TestTheExpiryOfAnEventReachesTheConsumer(t *testing.T) {
	t.Parallel()
	past := time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
	w := &world{T: t, db: memory.NewDB(memory.WithClock(memory.NewManualClock(past))), broker: memory.NewBroker()}
	w.dead = memory.NewLetters(w.db)
	var err error
	w.box, err = memory.NewOutbox(w.db)
	w.ok(err)
	w.inbox, err = memory.NewInbox(w.db)
	w.ok(err)
	relay, err := memory.NewRelay(w.box, w.broker)
	w.ok(err)

	w.append(deposit("late", 1).With(event.WithExpiresAt(past.Add(time.Hour))),
		deposit("fresh", 1).With(event.WithExpiresAt(time.Now().Add(time.Hour))))
	w.ok(relay.Flush(w.context()))

	handled := make(chan string, 10)
	c := w.consumer("g", "outbox.event.account")
	w.ok(c.HandleFunc("Deposited", func(_ context.Context, m *consumer.Message) error {
		handled <- string(m.Key)
		return nil
	}, "Deposited"))
	w.start("consumer", c.Run)

	w.ok(w.broker.AwaitCommitted(w.context(), "g", "outbox.event.account"))
	letters, err := w.dead.All(w.context())
	w.ok(err)
	if len(letters) != 1 || letters[0].Class != consumer.ClassExpired || len(handled) != 1 || <-handled != "fresh" {
		t.Errorf("letters %+v, %d events handled; want a letter of the late event", letters, len(handled))
	}
}
