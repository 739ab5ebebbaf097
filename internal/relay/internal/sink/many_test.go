package sink

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// openManyPartitions opens a sink that does not run, with partitions that have no leaders.
func openManyPartitions(t *testing.T, topics, partitions int) *testSink {
	t.Helper()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1))
	u := fakeOptions(brokers...)
	u.noRun = true
	r := openSink(t, u)
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range topics {
		r.findOrAddTopicLocked(fmt.Sprint("t", i)).addPartitions(partitions)
	}
	return r
}

// TestOpenBatchesOfManyPartitionsKeepToTheBudget: the brokers are away, and one small record waits in each of 12,000 partitions.
func TestOpenBatchesOfManyPartitionsKeepToTheBudget(t *testing.T) {
	t.Parallel()
	const topics, partitions = 2000, 6
	r := openManyPartitions(t, topics, partitions)
	x := newRecord("", "k", string(make([]byte, 250)))
	for i := range topics {
		for p := range int32(partitions) {
			x.Topic, x.Partition = fmt.Sprint("t", i), p
			r.send(t, x)
		}
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	held := 0
	for _, top := range r.topics {
		for _, p := range top.partitions {
			chunks, _, _, _ := p.queue[0].builder.Records()
			for _, chunk := range chunks {
				held += cap(chunk)
			}
		}
	}
	if most := 2 * int(r.batches.unresolvedBytes); held > most {
		t.Errorf("%d records of %d bytes hold %d bytes, want at most %d", topics*partitions, r.batches.unresolvedBytes, held, most)
	}
}

// TestQuietPartitionsAreKeptAliveSomeAtATime: each partition costs some requests, and the goroutine
// that sends them also releases the quarantine.
func TestQuietPartitionsAreKeptAliveSomeAtATime(t *testing.T) {
	t.Parallel()
	const topics, partitions = 10, 10
	r := openManyPartitions(t, topics, partitions)
	r.mu.Lock()
	for _, top := range r.topics {
		for _, p := range top.partitions {
			p.lastUsed = time.Now().Add(-r.keeper.expiry.IdleAfter() - time.Second)
		}
	}
	r.mu.Unlock()

	total, rounds := 0, 0
	for more := true; more; rounds++ {
		var n int
		idle, _, again := r.keeper.quietPartitions()
		if n = len(idle); n > aliveChunk {
			t.Fatalf("%d partitions in one round, want at most %d", n, aliveChunk)
		}
		total, more = total+n, again
	}
	if total != topics*partitions || rounds != (topics*partitions+aliveChunk-1)/aliveChunk {
		t.Errorf("%d partitions in %d rounds, want %d", total, rounds, topics*partitions)
	}
}

// TestLimitsThatCouldNotBeReadAreReadLater: limits of a topic that could not be read while brokers
// were away are read later.
func TestLimitsThatCouldNotBeReadAreReadLater(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var away atomic.Bool
	away.Store(true)
	kc.ControlKey(int16(kmsg.DescribeConfigs), func(req kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		own := strings.Contains(fmt.Sprint(req.(*kmsg.DescribeConfigsRequest).Resources), "max.message.bytes")
		if own && away.Load() {
			return nil, errors.New("away"), true
		}
		return nil, nil, false
	})
	r := openSink(t, fakeOptions(brokers...))
	r.send(t, newRecord("a", "k", "k/0"))
	r.Flush()
	r.acks.waitResolved(1) // the topic is open

	away.Store(false)
	stacktest.Eventually(t, "the limit is read", func() bool {
		retry.Signal(r.refresher.wake)
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.topics["a"].maxBytes > 0
	})
}
