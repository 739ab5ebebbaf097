package consumer_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// A requeued message may arrive while a later one of its key is handled. It runs after that message, and before messages that have not begun.
func TestARequeuedMessageNeverRunsWithAnotherOfItsKey(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.Claimed, consumer.AtLeastOnce} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			// Messages that share a transaction begin together.
			c := k.newConsumer(consumer.WithMode(mode), consumer.WithRetry(soon), consumer.WithSharedTransaction(1))
			var running atomic.Int32
			var repaired atomic.Bool
			started, release := make(chan struct{}, 100), make(chan struct{})
			var mu sync.Mutex
			var order []string
			addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
				if string(m.Value) == "bad" && !repaired.Load() {
					return consumer.Reject(errWanted)
				}
				if string(m.Key) != "a" {
					return nil
				}
				if n := running.Add(1); n > 1 {
					t.Errorf("%d handlers of the key run at once", n)
				}
				defer running.Add(-1)

				started <- struct{}{}
				select {
				case <-release:
				case <-ctx.Done():
					return ctx.Err()
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, string(m.Value))
				return nil
			})
			k.publish(newMessage("a", "counted", "bad"), newMessage("b", "counted", "bad"), newMessage("c", "counted", "bad"))
			k.start(c)
			k.untilLetters(3)
			repaired.Store(true)
			k.publish(newMessage("a", "counted", "1"), newMessage("a", "counted", "2"))
			k.waitFor("message 1", started)

			// The member finds the letter of key a not later than that of key b, and has both before it looks for that of key c.
			for _, key := range []string{"a", "b", "c"} {
				k.requeue(deadletter.Query{Key: []byte(key)}, deadletter.RequeueOptions{}, 1)
				if key != "a" {
					k.waitUntil("another key to be handled", func(ctx context.Context) bool { return k.countWaitingFor(ctx, key) == 0 })
				}
			}
			close(release)
			k.waitUntil("all messages", func(context.Context) bool {
				mu.Lock()
				defer mu.Unlock()
				return len(order) == 3
			})
			if want := []string{"1", "bad", "2"}; !slices.Equal(order, want) {
				t.Errorf("order of the key: got %v, want %v", order, want)
			}
			k.waitUntil("the offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 5 })
		})
	}
}

// countWaitingFor counts the messages of a key that are set aside.
func (k *kit) countWaitingFor(ctx context.Context, key string) int64 {
	k.Helper()
	n, err := k.db.Collection(setaside.DefaultCollection).CountDocuments(ctx, bson.D{{Key: "k", Value: []byte(key)}})
	if err != nil {
		k.Fatal(err)
	}
	return n
}

// The handler of a batch gets messages of many keys at once.
func TestManyRequeuesKeepTheirKeysApart(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const keys, each = 4, 60
	c := k.newConsumer(consumer.WithRetry(soon), consumer.WithSharedTransaction(8))
	var running [keys]atomic.Int32
	effects := k.insertInto("effects")
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		var key, value int
		if _, err := fmt.Sscanf(string(m.Key)+" "+string(m.Value), "key%d %d", &key, &value); err != nil {
			return err
		}
		if m.Delivery == 0 && value%5 == 0 {
			return consumer.Reject(errWanted)
		}
		if n := running[key].Add(1); n > 1 {
			t.Errorf("%d handlers of key %d run at once", n, key)
		}
		defer running[key].Add(-1)
		<-time.After(5 * time.Millisecond)
		return effects(ctx, m)
	})
	k.start(c)
	all := newMessages(keys, keys*each)
	desk, err := deadletter.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	requeued := int64(0)
	k.publish(all...)
	k.waitUntil("all effects", func(ctx context.Context) bool {
		n, err := desk.Requeue(ctx, deadletter.Query{All: true}, deadletter.RequeueOptions{})
		if err != nil {
			t.Fatal(err)
		}
		requeued += n
		return k.countDocuments("effects") == len(all)
	})

	if requeued != keys*each/5 {
		t.Errorf("requeued messages: got %d, want %d", requeued, keys*each/5)
	}
}
