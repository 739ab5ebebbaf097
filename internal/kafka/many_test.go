package kafka

import (
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
)

// many opens a sink that does not run, with partitions of which none has a leader.
func many(t *testing.T, topics, partitions int) *rig {
	t.Helper()
	_, brokers := fake(t, kfake.NumBrokers(1))
	u := onFake(brokers...)
	u.noRun = true
	r := open(t, u)
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range topics {
		r.topicOf(fmt.Sprint("t", i)).grow(partitions)
	}
	return r
}

// A burst has passed, then the brokers are away, and one small record waits in each of 12,000 partitions.
func TestOpenBatchesOfManyPartitionsKeepToTheBudget(t *testing.T) {
	t.Parallel()
	const topics, partitions = 2000, 6
	r := many(t, topics, partitions)
	r.mu.Lock()
	for _, top := range r.topics {
		for _, p := range top.parts {
			p.hint = hintLimit
		}
	}
	r.mu.Unlock()
	x := rec("", "k", string(make([]byte, 250)))
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
		for _, p := range top.parts {
			held += cap(p.q[0].b.Buffer())
		}
	}
	if most := 2*int(r.queued) + DefaultParkBytes/2; held > most {
		t.Errorf("%d records of %d bytes hold %d bytes, want at most %d", topics*partitions, r.queued, held, most)
	}
	if r.batches != topics*partitions {
		t.Errorf("%d batches are counted", r.batches)
	}
}

// Each partition costs some requests, and the goroutine that asks also releases the quarantine.
func TestQuietPartitionsAreKeptAliveSomeAtATime(t *testing.T) {
	t.Parallel()
	const topics, partitions = 10, 10
	r := many(t, topics, partitions)
	r.mu.Lock()
	for _, top := range r.topics {
		for _, p := range top.parts {
			p.used = time.Now().Add(-r.expiry.IdleAfter() - time.Second)
		}
	}
	r.mu.Unlock()
	total, rounds := 0, 0
	for more := true; more; rounds++ {
		var n int
		idle, _, again := r.quiet()
		if n = len(idle); n > aliveChunk {
			t.Fatalf("%d in one go", n)
		}
		total, more = total+n, again
	}
	if total != topics*partitions || rounds != (topics*partitions+aliveChunk-1)/aliveChunk {
		t.Errorf("%d partitions in %d rounds", total, rounds)
	}
}
