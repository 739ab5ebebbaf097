package sink

import (
	"context"
	"errors"
	"testing"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestN04_AMoveThatFailsChangesNothing: if the next generation cannot be acquired, the sink
// continues with the old identity, and the list of senders names the generation of that identity.
func TestN04_AMoveThatFailsChangesNothing(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	r := openSink(t, fakeOptions(brokers...))
	r.sendSequence(t, "a", 0, 1)
	r.acks.waitResolved(1)

	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.InitProducerID}, Err: kerr.TransactionalIDAuthorizationFailed, Count: 1})
	before := r.keeper.session.Senders()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if err := r.keeper.moveToNextGeneration(ctx); !errors.Is(err, kafka.TransactionalIDAuthorizationFailed) {
		t.Fatalf("the move ended with %v, want TransactionalIDAuthorizationFailed", err)
	}

	after := r.keeper.session.Senders()
	if len(after) != len(before) || after[len(after)-1].Generation != before[len(before)-1].Generation {
		t.Errorf("senders %+v after the failed move, want %+v", after, before)
	}
	if r.producer != batch.Producer(r.keeper.session.Producer()) {
		t.Errorf("the sink sends as %+v, want the session's producer %+v", r.producer, r.keeper.session.Producer())
	}

	r.sendSequence(t, "a", 1, 2)
	r.acks.waitResolved(2)
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 2)
}

// TestN04_RecordsFlowWhileTheNextGenerationCannotBeTaken: the transactional id of the owner hangs, and the coordinator of the
// next one does not respond. Records do not need it.
func TestN04_RecordsFlowWhileTheNextGenerationCannotBeTaken(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	r := openSink(t, fakeOptions(brokers...))
	r.sendSequence(t, "a", 0, 1)
	r.acks.waitResolved(1)

	away := kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.InitProducerID}, Err: kerr.CoordinatorNotAvailable, Count: -1})
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	moved := make(chan error, 1)
	go func() { moved <- r.keeper.moveToNextGeneration(ctx) }()
	stacktest.Eventually(t, "the coordinator has rejected some attempts", func() bool { return away.Hits() > 3 })

	r.sendSequence(t, "a", 1, 20)
	r.acks.waitResolved(20)
	select {
	case err := <-moved:
		t.Errorf("the move ended with %v before the records were acked", err)
	default:
	}

	// The quarantine is read by the same goroutine, so the move does not wait for as long as the coordinator is away.
	if err := <-moved; err == nil || ctx.Err() != nil {
		t.Errorf("the move ended with %v, and the context with %v", err, ctx.Err())
	}
	r.sendSequence(t, "a", 20, 21)
	r.acks.waitResolved(21)
}
