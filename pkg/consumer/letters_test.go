package consumer_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// newDesk returns the dead letters of the kit's database.
func (k *kit) newDesk() *deadletter.Desk {
	k.Helper()
	desk, err := deadletter.New(k.db)
	if err != nil {
		k.Fatal(err)
	}
	return desk
}

// requeue requeues the letters of the kit's group that q selects, and checks their number.
func (k *kit) requeue(q deadletter.Query, r deadletter.RequeueOptions, want int64) {
	k.Helper()
	q.Group = k.group
	if n, err := k.newDesk().Requeue(k.context(), q, r); n != want || err != nil {
		k.Fatalf("requeued letters: got %d (%v), want %d", n, err, want)
	}
}

// untilLetters waits until n letters are committed by a majority.
func (k *kit) untilLetters(n int64) {
	k.Helper()
	desk := k.newDesk()
	k.waitUntil(fmt.Sprintf("%d letters", n), func(ctx context.Context) bool {
		got, err := desk.Count(ctx, deadletter.Query{})
		return err == nil && got == n
	})
}

// readValues returns the values in a collection of effects, in their order.
func (k *kit) readValues(name string) (list []string) {
	k.Helper()
	cur, err := k.db.Collection(name).Find(k.context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "$natural", Value: 1}}))
	if err != nil {
		k.Fatal(err)
	}

	var docs []struct{ Value string }
	if err := cur.All(k.context(), &docs); err != nil {
		k.Fatal(err)
	}

	for _, d := range docs {
		list = append(list, d.Value)
	}

	return list
}

// untilNoneWaits waits until no message is set aside.
func (k *kit) untilNoneWaits() {
	k.Helper()
	k.waitUntil("no message to be set aside", func(context.Context) bool { return k.countDocuments(setaside.DefaultCollection) == 0 })
}

// The letter goes back to the handler that gave it up, before the messages of its key that failed after it. Other handlers
// and other groups do not see it. Messages that wait are in one collection for all consumers, so the desk needs no options of
// the consumer.
func TestARequeuedLetterIsForItsHandlerAloneAndComesFirst(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	var fixed, editedTried atomic.Bool
	effects := k.insertInto("effects")
	c := k.newConsumer(consumer.WithRetry(soon), consumer.WithCollections("marks"))
	addHandlerAs(t, c, "h", "counted", func(ctx context.Context, m *consumer.Message) error {
		if string(m.Value) == "edited" {
			editedTried.Store(true)
		}

		switch {
		case fixed.Load():
			return effects(ctx, m)
		case string(m.Value) == "0":
			return consumer.Reject(errAway)
		default:
			return errAway
		}
	})
	addHandlerAs(t, c, "other", "counted", k.insertInto("others"))

	foreign := *k
	foreign.group += "-foreign"
	f := foreign.newConsumer()
	addHandlerAs(t, f, "h", "counted", k.insertInto("foreign"))

	k.publish(newMessages(1, 4)...)
	k.start(c)
	k.start(f)
	k.waitCount("others", 4)
	k.waitCount("foreign", 4)
	k.untilLetters(1)
	k.waitCount(setaside.DefaultCollection, 3)

	edit := func(l *deadletter.Letter) error {
		l.Value = []byte("edited")
		return nil
	}
	k.requeue(deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{Edit: edit}, 1)
	k.requeue(deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{Edit: edit}, 0)
	// An attempt at a later message may have begun before the letter was requeued.
	k.waitUntil("the requeued letter to be tried", func(context.Context) bool { return editedTried.Load() })
	fixed.Store(true)
	k.waitCount("effects", 4)
	k.untilNoneWaits()
	if got, want := k.readValues("effects"), []string{"edited", "1", "2", "3"}; !slices.Equal(got, want) {
		t.Errorf("the handler got %q, want %q", got, want)
	}
	k.checkOnce("others", 4)
	k.checkOnce("foreign", 4)
	if n := k.countDocuments(deadletter.DefaultCollection); n != 1 {
		t.Errorf("letters: got %d, want the requeued one", n)
	}
}

// Requeues work while no member runs, and survive members that end while they handle them.
func TestARequeueWhileNoMemberRunsIsFoundByTheNextOne(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	const keys, n = 6, 24
	effects := k.insertInto("effects")
	member := func(h consumer.HandlerFunc) *consumer.Consumer {
		c := k.newConsumer(consumer.WithRetry(consumer.NoRetry()), consumer.WithSharedTransaction(1))
		addHandlerAs(t, c, "h", "counted", h)
		return c
	}

	k.publish(newMessages(keys, n)...)
	stop := k.start(member(func(context.Context, *consumer.Message) error { return errAway }))
	k.untilLetters(n)
	stop()
	k.requeue(deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{}, n)

	// The first member ends in the middle, before its transaction commits.
	var handled atomic.Int64
	reached := make(chan struct{})
	stop = k.start(member(func(ctx context.Context, m *consumer.Message) error {
		if err := effects(ctx, m); err != nil {
			return err
		}
		switch count := handled.Add(1); {
		case count == n/2:
			close(reached)
			fallthrough
		case count > n/2:
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}))
	k.waitFor("half of the messages", reached)
	stop()
	k.start(member(effects))
	k.waitCount("effects", n)
	k.untilNoneWaits()
	k.checkOnce("effects", n)
	if got := k.countDocuments(deadletter.DefaultCollection); got != n {
		t.Errorf("letters: got %d, want the %d that were requeued", got, n)
	}
}

// A letter that is given up again after its requeue is another letter, in every mode of the inbox.
func TestARequeuedLetterCanBeGivenUpAgain(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]consumer.Mode{
		"transactional": consumer.Transactional, "claimed": consumer.Claimed, "at least once": consumer.AtLeastOnce,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)

			var deliveries atomic.Int64
			c := k.newConsumer(consumer.WithRetry(consumer.NoRetry()), consumer.WithMode(mode))
			effects := k.insertInto("effects")

			addHandlerAs(t, c, "h", "counted", func(ctx context.Context, m *consumer.Message) error {
				if deliveries.Add(1) < 3 {
					return errAway
				}
				if m.Delivery != 2 {
					return fmt.Errorf("delivery %d", m.Delivery)
				}
				return effects(ctx, m)
			})

			k.publish(newMessages(1, 1)...)
			k.start(c)

			for letters := range int64(2) {
				k.untilLetters(letters + 1)
				k.requeue(deadletter.Query{Handler: "h"}, deadletter.RequeueOptions{}, 1)
			}

			k.waitCount("effects", 1)
			k.untilNoneWaits()
			k.checkOnce("effects", 1)
			if n := k.countDocuments(deadletter.DefaultCollection); n != 2 {
				t.Errorf("letters: got %d, want 2", n)
			}
		})
	}
}

// A consumer with WithDeadLetters writes them as these options say.
func TestTheLettersOfAConsumerFollowItsOptions(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer(consumer.WithRetry(consumer.NoRetry()), consumer.WithDeadLetters(
		deadletter.WithCollection("graves"),
		deadletter.WithExpiry(time.Hour),
		deadletter.WithRedaction(func(_ context.Context, l *deadletter.Letter) error {
			l.Value = []byte("hidden")
			return nil
		})))
	addHandlerAs(t, c, "h", "counted", func(context.Context, *consumer.Message) error { return errAway })
	k.publish(newMessages(1, 1)...)
	k.start(c)
	k.waitUntil("a letter", func(context.Context) bool { return k.countDocuments("graves") == 1 })

	var l deadletter.Letter
	if err := k.db.Collection("graves").FindOne(k.context(), bson.D{}).Decode(&l); err != nil || string(l.Value) != "hidden" {
		t.Errorf("letter: got %+v (%v), want its value hidden", l, err)
	}
	specs, err := k.db.Collection("graves").Indexes().ListSpecifications(k.context())
	if err != nil {
		t.Fatal(err)
	}
	hasExpiry := false
	for _, s := range specs {
		hasExpiry = hasExpiry || s.ExpireAfterSeconds != nil && *s.ExpireAfterSeconds == 3600
	}
	if !hasExpiry {
		t.Errorf("no index lets the letters expire: %+v", specs)
	}
	if _, err := consumer.New("g", k.db, consumer.WithBrokers("x:1"), consumer.WithDeadLetters(deadletter.WithCollection(""))); err == nil {
		t.Error("New accepts a wrong option of the letters")
	}
}
