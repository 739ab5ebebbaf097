package kafkago

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/kafkawire"
)

// The leader compares the layout with its assignment. Its first assignment may have none of the partitions, if a topic was missing for a
// moment; a topic that is missing now is no reason for another generation.
func TestTheLeaderNoticesOtherPartitions(t *testing.T) {
	t.Parallel()
	of := func(n int) kafkawire.TopicLayout {
		return kafkawire.TopicLayout{Partitions: make([]kafkawire.PartitionLayout, n)}
	}
	missing := kafkawire.TopicLayout{Err: kafka.UnknownTopicOrPartition}

	for name, test := range map[string]struct {
		assigned map[string]int
		now      map[string]kafkawire.TopicLayout
		changed  bool
	}{
		"the same":                     {map[string]int{"a": 2, "b": 1}, map[string]kafkawire.TopicLayout{"a": of(2), "b": of(1)}, false},
		"grown":                        {map[string]int{"a": 2, "b": 1}, map[string]kafkawire.TopicLayout{"a": of(3), "b": of(1)}, true},
		"nothing was assigned":         {map[string]int{}, map[string]kafkawire.TopicLayout{"a": of(2), "b": of(1)}, true},
		"one topic is missing":         {map[string]int{"a": 2, "b": 1}, map[string]kafkawire.TopicLayout{"a": of(2), "b": missing}, false},
		"of a topic of another member": {map[string]int{"a": 2, "b": 1, "c": 1}, map[string]kafkawire.TopicLayout{"a": of(2), "b": of(1), "c": of(4)}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			reads := 0
			watcher := &watcher{topics: []string{"a", "b"}, every: time.Millisecond, read: func(context.Context, []string) (*kafkawire.Layout, error) {
				// The first request fails, and a layout without a change is read twice.
				if reads++; reads == 1 {
					return nil, errors.New("no broker responds")
				}
				if reads == 3 {
					cancel()
				}
				return &kafkawire.Layout{Topics: test.now}, nil
			}}

			watcher.await(ctx, test.assigned)
			if changed := ctx.Err() == nil; changed != test.changed {
				t.Errorf("another generation: %v, want %v", changed, test.changed)
			}
		})
	}
}

// Only the leader of a generation has assigned its partitions.
func TestOnlyTheLeaderWatches(t *testing.T) {
	t.Parallel()
	assigned := &assigned{}
	if _, leads := assigned.take(); leads {
		t.Error("a member that has not assigned is the leader")
	}

	balancer := noting{spread{}, assigned}
	members := []kafka.GroupMember{{ID: "m", Topics: []string{"a"}}}
	if got := balancer.AssignGroups(members, []kafka.Partition{{Topic: "a", ID: 0}, {Topic: "a", ID: 1}}); len(got["m"]["a"]) != 2 {
		t.Errorf("assignments: %v", got)
	}
	if counts, leads := assigned.take(); !leads || counts["a"] != 2 {
		t.Errorf("after an assignment: %v, %v", counts, leads)
	}
	if _, leads := assigned.take(); leads {
		t.Error("the assignment of an earlier generation counts for the next one")
	}
	balancer.AssignGroups(members, nil)
	if counts, leads := assigned.take(); !leads || len(counts) != 0 {
		t.Errorf("after an assignment of nothing: %v, %v", counts, leads)
	}
}
