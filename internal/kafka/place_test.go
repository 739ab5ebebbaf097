package kafka

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
)

func TestALeaderThatComesBackIsFoundSoonByWhatWaits(t *testing.T) {
	t.Parallel()
	_, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	r := open(t, onFake(brokers...))
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
	r.place(&Layout{Topics: map[string]TopicLayout{"a": {Partitions: []PartitionLayout{{Leader: -1}}}}})
	if r.slow() {
		t.Error("metadata are asked for although nothing waits")
	}
	r.send(t, rec("a", "k", "k/1"))
	r.Flush()
	r.acks.until(metadataEvery/2, "the leader is found again", func() bool { return len(r.acks.acked) == 2 })
	inOrder(t, read(t, brokers, "a"), 1, 2)
}
