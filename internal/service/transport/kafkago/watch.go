package kafkago

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport/kafkalog"
)

// assigned are the partitions from which this member has assigned the group, as its leader. kafka-go reads them once for each
// generation, and gets none of any topic while one topic does not exist.
type assigned struct {
	mu     sync.Mutex
	counts map[string]int // partitions by topic; nil: this member has not assigned since the last take
}

// take returns the partitions that this member has assigned since the last call, and whether it has assigned at all.
func (a *assigned) take() (counts map[string]int, leads bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	counts = a.counts
	a.counts = nil
	return counts, counts != nil
}

// noting is a way to assign that notes the partitions.
type noting struct {
	kafka.GroupBalancer
	assigned *assigned
}

// AssignGroups assigns the partitions, and notes them.
func (n noting) AssignGroups(members []kafka.GroupMember, partitions []kafka.Partition) kafka.GroupMemberAssignments {
	counts := map[string]int{}
	for _, partition := range partitions {
		counts[partition.Topic]++
	}
	n.assigned.mu.Lock()
	n.assigned.counts = counts
	n.assigned.mu.Unlock()
	return n.GroupBalancer.AssignGroups(members, partitions)
}

// watcher compares the partitions of the topics with those that the leader has assigned. The watcher of kafka-go would end a generation
// at once, again and again, while one of its topics does not exist.
type watcher struct {
	read   func(ctx context.Context, topics []string) (*kafkawire.Layout, error)
	topics []string // of this member
	every  time.Duration
}

// await blocks until a topic has other partitions than those that were assigned, or ctx ends. A topic that does not exist is no change:
// kafkalog.Client.Follow leaves it out.
func (w *watcher) await(ctx context.Context, counts map[string]int) {
	// Other members may read more topics.
	topics := slices.Compact(slices.Sorted(slices.Values(slices.AppendSeq(slices.Clone(w.topics), maps.Keys(counts)))))
	every := w.every
	if len(counts) < len(topics) {
		every = min(every, kafkalog.MissingInterval)
	}

	for retry.Sleep(ctx, every) == nil {
		call, cancel := context.WithTimeout(ctx, kafkalog.RequestTimeout)
		layout, err := w.read(call, topics)
		cancel()
		// The reader reports that no broker responds.
		if err != nil {
			continue
		}
		for _, topic := range topics {
			if found := layout.Topics[topic]; found.Err == nil && len(found.Partitions) > 0 && len(found.Partitions) != counts[topic] {
				return
			}
		}
	}
}
