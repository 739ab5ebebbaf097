package consumer_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// The hook gets each message that was given up, with its place. One that panics, or does not return, stops no message.
func TestTheHookGetsMessagesThatWereGivenUp(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	given, release := make(chan consumer.GivenUp, 10), make(chan struct{})
	c := k.newConsumer(consumer.WithRetry(consumer.NoRetry()), consumer.WithGivenUpHook(func(message consumer.GivenUp) {
		given <- message
		<-release
		panic("boom")
	}))
	addHandlerAs(t, c, "h", "counted", func(context.Context, *consumer.Message) error { return errAway })
	k.publish(newMessages(1, 3)...)
	k.start(c)
	k.waitUntil("three letters", func(context.Context) bool { return k.countDocuments(deadletter.DefaultCollection) == 3 })
	close(release)

	for offset := range int64(3) {
		select {
		case got := <-given:
			if got.ID.Offset != offset || got.ID.Handler != "h" || got.ID.Topic == "" || got.Class != deadletter.ClassHandler || !strings.Contains(got.Reason, errAway.Error()) || got.Attempts != 1 {
				t.Errorf("message %d: got %+v", offset, got)
			}
		case <-time.After(time.Minute):
			t.Fatalf("message %d: the hook was not called", offset)
		}
	}
}
