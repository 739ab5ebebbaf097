package consumer_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/outrelay/outrelay/internal/consumerparts"
	"github.com/outrelay/outrelay/internal/setaside"
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
	h := consumerparts.Prepared(consumer.Func(k.insertInto("effects"), "counted"), func(context.Context) error {
		if repaired.Load() {
			return nil
		}
		return errIndex
	}).(consumer.Handler)
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
