package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// The driver turns whatever a transaction's callback returns after the client's Timeout into a time-out of its own.
func TestAPoisonMessageThatOutlastsTheClientsTimeoutIsADeadLetter(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1, options.Client().SetTimeout(300*time.Millisecond))
	dead := newDisposed()
	c := k.consumer(consumer.WithDisposer(dead), consumer.OnFailure(tries(1)))
	handle(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Value) != "2" {
			return nil
		}
		select {
		case <-time.After(400 * time.Millisecond):
			return errors.New("no such article")
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	k.publish(numbered(1, 5)...)
	k.start(c)
	k.await("the dead letter", dead.more)
	k.until("all offsets", func(context.Context) bool { return k.committed(1)[0] == 5 })
	if got := dead.all(); len(got) != 1 || got[0].m.Offset != 2 {
		t.Errorf("%d messages were disposed of: %+v", len(got), got)
	}
}

// While MongoDB is away the consumer reports it once, and once when it is over, whatever the driver waits for.
func TestAnOutageOfTheDatabaseIsReportedOnce(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	k := newKit(t, 2, options.Client().SetAppName(app))
	var mu sync.Mutex
	var told []error
	c := k.consumer(consumer.OnError(func(_ context.Context, err error) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, err)
	}))
	reported := func(over bool) bool {
		mu.Lock()
		defer mu.Unlock()
		for _, err := range told {
			if e, ok := errors.AsType[*consumer.OutageError](err); ok && e.Over == over {
				return true
			}
		}
		return false
	}
	handle(t, c, "counted", k.effects("effects"))
	k.publish(numbered(8, 20)...)
	k.start(c)
	k.untilCount("effects", 20)

	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"find", "aggregate", "insert", "update", "commitTransaction"}},
		{Key: "blockConnection", Value: true},
		{Key: "blockTimeMS", Value: 8000},
		{Key: "closeConnection", Value: true},
	})
	k.publish(numbered(8, 40)[20:]...)
	k.until("the outage to be reported", func(context.Context) bool { return reported(false) })
	off()
	k.untilCount("effects", 40)
	k.until("the end to be reported", func(context.Context) bool { return reported(true) })

	mu.Lock()
	defer mu.Unlock()
	if len(told) != 2 {
		t.Error(fmt.Errorf("%d reports: %w", len(told), errors.Join(told...)))
	}
}
