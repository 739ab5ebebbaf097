package problems

import (
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// TestAnOutageOfKafkaIsOneProblem: an owner that reaches no broker reports each of its topics. The outage is the problem, together with the
// topics that have another cause. If brokers respond, each topic is a problem.
func TestAnOutageOfKafkaIsOneProblem(t *testing.T) {
	t.Parallel()
	slots := []SlotStatus{liveSlot(func(s *SlotStatus) {
		s.Unwritable = []UnwritableTopic{{Topic: "a", Kind: kafkawire.TopicUnreachable}, {Topic: "b", Kind: kafkawire.TopicMissing}}
	})}

	for reachable, want := range map[bool]string{
		false: "kafka_unreachable/n1 topic_unwritable/b",
		true:  "topic_unwritable/a topic_unwritable/b",
	} {
		node := liveNode("n1")
		node.KafkaReachable = reachable
		var got []string
		for _, problem := range List(Facts{Now: now, Watcher: "orders", Slots: slots, Nodes: []nodes.Node{node, liveNode("n2")}}) {
			got = append(got, problem.ID)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("reachable %t: got %v, want %s", reachable, got, want)
		}
	}
}

// TestATopicOfAnotherWatcherNamesThatWatcher: a list has the topics of all watchers of the state database.
func TestATopicOfAnotherWatcherNamesThatWatcher(t *testing.T) {
	t.Parallel()
	slots := []SlotStatus{liveSlot(func(s *SlotStatus) { s.Unwritable = []UnwritableTopic{{Topic: "a", Kind: kafkawire.TopicMissing}} })}
	for watcher, want := range map[string]string{"orders": "Topic a cannot be written", "stock": "Topic a of watcher orders cannot be written"} {
		list := List(Facts{Now: now, Watcher: watcher, Slots: slots})
		if len(list) == 0 || list[0].Title != want {
			t.Errorf("%s: %+v, want the title %q", watcher, list, want)
		}
	}
}
