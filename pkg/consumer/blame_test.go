package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// After the client's Timeout, the driver replaces every error of a transaction's callback by its own timeout.
func TestAPoisonMessageThatOutlastsTheClientsTimeoutIsADeadLetter(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1, options.Client().SetTimeout(300*time.Millisecond))
	dead := newDisposed()
	c := k.newConsumer(consumer.WithDisposer(dead), withTries(1))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
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

	k.publish(newMessages(1, 5)...)
	k.start(c)
	k.waitFor("the dead letter", dead.more)
	k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 5 })
	if got := dead.listAll(); len(got) != 1 || got[0].m.Offset != 2 {
		t.Errorf("%d messages were disposed of: %+v", len(got), got)
	}
}

// During an outage of MongoDB the consumer reports it once, and its end once, during any wait of the driver.
func TestAnOutageOfTheDatabaseIsReportedOnce(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	k := newKit(t, 2, options.Client().SetAppName(app))
	var mu sync.Mutex
	var reports []error
	c := k.newConsumer(consumer.WithErrorHook(func(_ context.Context, err error) {
		mu.Lock()
		defer mu.Unlock()
		reports = append(reports, err)
	}))
	reported := func(over bool) bool {
		mu.Lock()
		defer mu.Unlock()
		for _, err := range reports {
			if e, ok := errors.AsType[*consumer.OutageError](err); ok && e.Over == over {
				return true
			}
		}
		return false
	}
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessages(8, 20)...)
	k.start(c)
	k.waitCount("effects", 20)

	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"find", "aggregate", "insert", "update", "commitTransaction"}},
		{Key: "blockConnection", Value: true},
		{Key: "blockTimeMS", Value: 8000},
		{Key: "closeConnection", Value: true},
	})
	k.publish(newMessages(8, 40)[20:]...)
	k.waitUntil("the outage to be reported", func(context.Context) bool { return reported(false) })
	off()
	k.waitCount("effects", 40)
	k.waitUntil("the end to be reported", func(context.Context) bool { return reported(true) })

	mu.Lock()
	defer mu.Unlock()
	if len(reports) != 2 {
		t.Error(fmt.Errorf("%d reports, want 2: %w", len(reports), errors.Join(reports...)))
	}
}

// A message whose handler outlives the transaction every time meets its policy, whether the server rejects an operation of the
// handler or the commit. Nothing else waits for it.
func TestAMessageThatOutlastsEveryTransactionIsADeadLetter(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]string{"commit": "none", "operation": "effects"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			admin := stacktest.Client(t).Database("admin")
			insert := k.insertInto("effects")
			dead := newDisposed()
			var outages atomic.Int32
			c := k.newConsumer(consumer.WithDisposer(dead), withTries(1), consumer.WithErrorHook(func(_ context.Context, err error) {
				k.logError(err)
				if _, ok := errors.AsType[*consumer.OutageError](err); ok {
					outages.Add(1)
				}
			}))
			addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
				if string(m.Value) != "1" {
					return insert(ctx, m)
				}

				// A server that aborts a transaction for its age does the same to the session.
				session := mongo.SessionFromContext(ctx).ID()
				if err := admin.RunCommand(k.context(), bson.D{{Key: "killSessions", Value: bson.A{session}}}).Err(); err != nil {
					k.logError(err)
				}
				select {
				case <-time.After(2600 * time.Millisecond):
				case <-ctx.Done():
					return ctx.Err()
				}
				if fails == "effects" {
					return insert(ctx, m)
				}
				return nil
			})
			k.publish(newMessages(1, 3)...)
			k.start(c)

			k.waitFor("the dead letter", dead.more)
			k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })
			got := dead.listAll()
			if len(got) != 1 || got[0].m.Offset != 1 {
				t.Fatalf("%d messages were disposed of: %+v", len(got), got)
			}
			if _, ok := errors.AsType[*consumer.LifetimeError](got[0].cause); !ok {
				t.Errorf("the cause is %v", got[0].cause)
			}
			if n := outages.Load(); n != 0 {
				t.Errorf("%d outages were reported", n)
			}
		})
	}
}

// A handler inserts a document that exists and discards the error, so MongoDB aborts each of its transactions.
func TestAMessageWhoseHandlerDiscardsAnErrorIsADeadLetter(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.Claimed} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			same := bson.D{{Key: "_id", Value: "same"}}
			if _, err := k.newCollection("articles").InsertOne(t.Context(), same); err != nil {
				t.Fatal(err)
			}
			insert := k.insertInto("effects")
			dead := newDisposed()
			c := k.newConsumer(consumer.WithMode(mode), consumer.WithDisposer(dead), withTries(1))
			addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
				if string(m.Value) != "1" {
					return insert(ctx, m)
				}
				_, _ = k.db.Collection("articles").InsertOne(ctx, same)
				if mode == consumer.Claimed {
					return nil
				}
				return insert(ctx, m)
			})
			k.publish(newMessages(1, 3)...)
			k.start(c)

			k.waitFor("the dead letter", dead.more)
			k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })
			got := dead.listAll()
			if len(got) != 1 || got[0].m.Offset != 1 {
				t.Errorf("%d messages were disposed of: %+v", len(got), got)
			}
		})
	}
}

// The query of one message takes longer than its handler allows it. The error is that of a database that does not respond.
func TestAMessageThatAloneMeetsNoDatabaseHoldsUpItsKeyAlone(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.Claimed, consumer.AtLeastOnce} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			articles := k.newCollection("articles")
			if _, err := articles.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "same"}}); err != nil {
				t.Fatal(err)
			}
			insert := k.insertInto("effects")
			c := k.newConsumer(consumer.WithMode(mode), consumer.WithRetry(soon))
			addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
				if string(m.Key) != "key01" || string(m.Value) != "1" {
					return insert(ctx, m)
				}
				ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				return articles.FindOne(ctx, bson.D{{Key: "$where", Value: "sleep(200) || true"}}).Err()
			})
			k.publish(newMessages(8, 16)...)
			k.start(c)

			k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 16 })
			k.publish(newMessages(8, 24)[16:]...)
			k.waitCount("effects", 22)
			k.waitUntil("the other message of the key to wait", func(ctx context.Context) bool { return k.countWaitingFor(ctx, "key01") == 2 })
		})
	}
}

// One transaction that takes long to commit does not count as an outage, and no other lane waits for it.
func TestASlowCommitIsNoOutage(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	k := newKit(t, 1, options.Client().SetAppName(app))
	var outages atomic.Int32
	c := k.newConsumer(consumer.WithErrorHook(func(_ context.Context, err error) {
		k.logError(err)
		if _, ok := errors.AsType[*consumer.OutageError](err); ok {
			outages.Add(1)
		}
	}))
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessages(1, 1)...)
	k.start(c)
	k.waitCount("effects", 1)

	stacktest.FailCommand(t, app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 6000},
	})
	k.publish(newMessages(1, 2)[1:]...)
	k.waitCount("effects", 2)
	if n := outages.Load(); n != 0 {
		t.Errorf("%d outages were reported", n)
	}
}
