package kafka

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
)

func TestALeaderThatComesBackIsFoundSoonByWhatWaits(t *testing.T) {
	t.Parallel()
	_, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	r := open(t, onFake(brokers...))
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
	mostly(t, r, metadataEvery/2, func(i int) {
		r.place(&Layout{Topics: map[string]TopicLayout{"a": {Partitions: []PartitionLayout{{Leader: -1}}}}})
		if i == 1 && r.slow() {
			t.Error("metadata are asked for although nothing waits")
		}
	})
	inOrder(t, read(t, brokers, "a"), 1, 6)
}

// mostly sends a record five times, each after leaders have changed, and fails unless most of them are acknowledged within the bound: a
// machine may stand still once or twice. r has sent one record of topic a before.
func mostly(t *testing.T, r *rig, within time.Duration, change func(i int)) {
	t.Helper()
	var took []time.Duration
	for i := 1; i <= 5; i++ {
		change(i)
		begin := time.Now()
		r.send(t, rec("a", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
		r.acks.resolved(i + 1)
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	if took[2] > within {
		t.Errorf("leaders were found again after %s; they are looked for every %s anyway", took, metadataEvery)
	}
}
