package kafka

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/kafka/batch"
)

// A next generation that cannot be had leaves the sink as it was: what may stand is sent again under the old identity, and
// the list of senders names the generation that this identity belongs to.
func TestN04_AMoveThatFailsLeavesNothingInQuarantine(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(2, "a"))
	r := open(t, onFake(brokers...))
	x := rec("a", "k", "k/0")
	x.Partition = 1
	r.send(t, x)
	r.Flush()
	r.acks.resolved(1)
	var sick atomic.Bool
	sick.Store(true)
	on := func(kmsg.Request) bool { return sick.Load() }
	kc.Fault(
		kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: -1, When: on},
		kfake.Fault{Keys: []kmsg.Key{kmsg.InitProducerID}, Err: kerr.TransactionalIDAuthorizationFailed, Count: -1, When: on},
	)
	x = rec("a", "k", "k/1")
	x.Partition = 1
	r.send(t, x)
	r.Flush()
	p := r.topics["a"].parts[1]
	until(t, "the batch may stand", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return p.mayStand()
	})
	before := r.session.Senders()
	r.drainLimit = 50 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	if err := r.move(ctx); !errors.Is(err, kafka.TransactionalIDAuthorizationFailed) {
		t.Fatalf("the move ended with %v", err)
	}
	after := r.session.Senders()
	if len(after) != len(before) || after[len(after)-1].Generation != before[len(before)-1].Generation {
		t.Errorf("senders %+v after a move that failed, %+v before", after, before)
	}
	if r.producer != batch.Producer(r.session.Producer()) {
		t.Errorf("sending as %+v, the session is %+v", r.producer, r.session.Producer())
	}
	sick.Store(false)
	r.acks.resolved(2)
	inOrder(t, read(t, brokers, "a"), 1, 2)
}
