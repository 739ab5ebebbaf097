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
	var took []time.Duration
	for i := 1; i <= 5; i++ {
		r.place(&Layout{Topics: map[string]TopicLayout{"a": {Partitions: []PartitionLayout{{Leader: -1}}}}})
		if i == 1 && r.slow() {
			t.Error("metadata are asked for although nothing waits")
		}
		begin := time.Now()
		r.send(t, rec("a", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
		r.acks.resolved(i + 1)
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	if took[2] > metadataEvery/2 { // most of them: a machine may stand still once or twice
		t.Errorf("leaders were found again after %s; they are looked for every %s anyway", took, metadataEvery)
	}
	inOrder(t, read(t, brokers, "a"), 1, 6)
}
