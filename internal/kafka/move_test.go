package kafka

import (
	"context"
	"errors"
	"testing"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/kafka/batch"
)

// A next generation that cannot be had leaves the sink as it was: it goes on under the old identity, and the list of senders
// names the generation that this identity belongs to.
func TestN04_AMoveThatFailsChangesNothing(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	r := open(t, onFake(brokers...))
	r.sequence(t, "a", 0, 1)
	r.acks.resolved(1)
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.InitProducerID}, Err: kerr.TransactionalIDAuthorizationFailed, Count: 1})
	before := r.session.Senders()
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	if err := r.moveToNextGeneration(ctx); !errors.Is(err, kafka.TransactionalIDAuthorizationFailed) {
		t.Fatalf("the move ended with %v", err)
	}
	after := r.session.Senders()
	if len(after) != len(before) || after[len(after)-1].Generation != before[len(before)-1].Generation {
		t.Errorf("senders %+v after a move that failed, %+v before", after, before)
	}
	if r.producer != batch.Producer(r.session.Producer()) {
		t.Errorf("sending as %+v, the session is %+v", r.producer, r.session.Producer())
	}
	r.sequence(t, "a", 1, 2)
	r.acks.resolved(2)
	inOrder(t, read(t, brokers, "a"), 1, 2)
}
