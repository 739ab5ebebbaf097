package consumer_test

import (
	"context"
	"testing"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// An operator requeues a letter to a handler of another type. The handler does not get the message, which would be decoded as its own type
// and take effect.
func TestARequeueToAHandlerOfAnotherTypeIsGivenUp(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandlerAs(t, c, "placing", "placed", func(context.Context, *consumer.Message) error { return consumer.Reject(errWanted) })
	addHandlerAs(t, c, "billing", "billed", k.insertInto("bills"))
	k.publish(newMessage("a", "placed", "0"))
	k.start(c)
	k.untilLetters(1)

	k.requeue(deadletter.Query{Handler: "placing"}, deadletter.RequeueOptions{Handlers: []string{"billing"}}, 1)
	k.untilLetters(2)
	k.untilNoneWaits()

	n, err := k.newDesk().Count(k.context(), deadletter.Query{Handler: "billing"})
	if bills := k.countDocuments("bills"); n != 1 || err != nil || bills != 0 {
		t.Errorf("%d letters of billing (%v), %d bills", n, err, bills)
	}
}
