package consumer_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// A permanent error, such as an index with other options, ends Run only at its start.
func TestAHandlerThatCannotBePreparedDoesNotBlockItsPartition(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer(consumer.WithRetry(soon))
	addHandlerAs(t, c, "good", "*", k.insertInto("good"))
	k.publish(newMessage("k", "first", "0"))
	k.start(c)
	k.waitCount("good", 1)

	var repaired atomic.Bool
	errIndex := errors.New("another index has this name")
	h := consumer.Func(k.insertInto("effects"), "counted").WithPreparation(module.Key{}, func(context.Context) error {
		if repaired.Load() {
			return nil
		}
		return errIndex
	})
	if err := c.Handle("late", h); err != nil {
		t.Fatal(err)
	}
	const n = 12
	k.publish(newMessages(3, n)...)
	k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == n+1 })
	if got := k.countDocuments(setaside.DefaultCollection); got != n || k.countDocuments("effects") != 0 {
		t.Errorf("messages that are set aside: got %d, want %d", got, n)
	}
	s := c.Status()
	if !s.Ready || !slices.ContainsFunc(s.Reasons, func(r string) bool { return strings.Contains(r, errIndex.Error()) && strings.Contains(r, `"late"`) }) {
		t.Errorf("status: got %+v, want ready, and a reason about the handler", s)
	}

	repaired.Store(true)
	k.waitCount("effects", n)
	k.untilSettled(1, n+1)
	k.checkOnce("effects", n)
	if s := c.Status(); len(s.Reasons) > 0 {
		t.Errorf("reasons after the repair: %v", s.Reasons)
	}
}

// The names of retry topics contain the name of the group.
func TestRetryTopicsNeedAGroupThatIsANameOfTopics(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.group = "shop/shipping"
	c := k.newConsumer()
	err := c.Handle("h", consumer.Func(nop, "a"), consumer.WithRetryTopics(time.Second))
	if err == nil || !strings.Contains(err.Error(), `"shop/shipping"`) {
		t.Errorf("Handle: got %v, want an error about the group", err)
	}
	if err := c.Handle("h", consumer.Func(nop, "a")); err != nil {
		t.Errorf("Handle without retry topics: %v", err)
	}
}

func TestABatchHasItsSize(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c, err := consumer.New(k.group, k.db, consumer.WithKafka(k.cfg), consumer.WithTopics(k.topic))
	if err != nil {
		t.Fatal(err)
	}

	var largest atomic.Int64
	const n = 60
	done := make(chan struct{}, n)
	err = c.Handle("counted", consumer.Batch(0, func(_ context.Context, ms []*consumer.Message) error {
		largest.Store(max(largest.Load(), int64(len(ms))))
		for range ms {
			done <- struct{}{}
		}
		return nil
	}, "counted"), consumer.WithMode(consumer.AtLeastOnce))
	if err != nil {
		t.Fatal(err)
	}

	k.publish(newMessages(1, n)...)
	k.start(c)
	for range n {
		k.waitFor("all messages", done)
	}
	if got := largest.Load(); got < 2 {
		t.Errorf("largest batch: got %d, want several messages", got)
	}
	if err := c.Handle("bad", consumer.Batch(501, func(context.Context, []*consumer.Message) error { return nil }, "a")); err == nil {
		t.Error("a batch of 501 messages: got no error")
	}
}
