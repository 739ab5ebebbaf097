package process_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestATopicForWhichOnlySideDeliveriesWaitIsAProblem: a scheduled event is due for a missing topic, to which the stream sends nothing.
// The problem, its metric, the audit log and the list of waiting events have the topic and the reason. So they have with the next owner,
// which only finds the stored event. The event is sent when the topic exists.
func TestATopicForWhichOnlySideDeliveriesWaitIsAProblem(t *testing.T) {
	t.Parallel()
	b := setup(t)
	missing := "late-" + b.topic
	b.append(1, event.WithTopic(missing), event.WithDueAt(time.Now().Add(time.Second)))

	for _, node := range []string{"first", "second"} {
		var relay *process.Relay
		stop := b.startAs(func(r *process.Relay) { relay = r }, "node="+node)
		stacktest.Eventually(t, "the topic is a problem of "+node, func() bool {
			return slices.ContainsFunc(relay.Problems(), func(p problems.Problem) bool {
				return p.Kind == problems.TopicUnwritable && p.Object == missing && p.Count == 1 && p.Unit == "event waits" &&
					strings.Contains(p.Detail, "does not exist") && strings.Contains(p.Fix, "outrelay topics create "+missing) && p.Command != ""
			})
		}, func() any { return relay.Problems() })
		stacktest.Eventually(t, "the metric has the problem", func() bool { return relay.ProblemSeconds(t, problems.TopicUnwritable) > 0 })
		stacktest.Eventually(t, "the event is parked", func() bool { return b.countWaiting(bson.D{{Key: "reason", Value: "parked"}}) == 1 })
		b.waitNoted(node, string(nodes.TopicParked))
		stacktest.Eventually(t, "the list of waiting events has the reason", func() bool {
			list, err := b.newOperator().Waiting().List(t.Context(), admin.WaitingFilter{}, 0, "")
			return err == nil && len(list.Items) == 1 && strings.Contains(list.Items[0].Why, "does not exist")
		})
		if node == "first" {
			if err := stop(); err != nil {
				t.Fatal(err)
			}
		}
	}

	stacktest.CreateTopic(t, missing, 1)
	read := *b
	read.topic = missing
	read.consume(1)
	stacktest.Eventually(t, "no event waits", func() bool { return b.countWaiting(bson.D{}) == 0 && len(b.status().Unwritable) == 0 })
}

// A topic was deleted, and created again with fewer partitions or not at all. The next owner finds that in its takeover, and the fix
// and the command contain the number of partitions that the records had.
func TestATakeoverNamesThePartitionsThatATopicNeeds(t *testing.T) {
	t.Parallel()
	for name, partitions := range map[string]int{"smaller": 2, "missing": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			topic := stacktest.NewTopics(t).Create(name, 6)
			appendRound := func(round string) {
				t.Helper()
				for i := range 30 {
					e := event.New(event.Aggregate{Type: "order", ID: fmt.Sprint(i)}, "Placed", event.Bytes("", []byte(round)), event.WithTopic(topic))
					if err := b.box.Append(t.Context(), e); err != nil {
						t.Fatal(err)
					}
				}
			}

			stop := b.start("node=a")
			appendRound("first")
			read := *b
			read.topic = topic
			read.consume(30)
			stacktest.Eventually(t, "the position is stored", func() bool { return b.status().Unresolved == 0 })
			if err := stop(); err != nil {
				t.Fatal(err)
			}

			deleteTopics(t, []string{topic})
			if partitions > 0 {
				stacktest.CreateTopicOn(t, stacktest.Brokers(t), topic, partitions, 1)
			}
			appendRound("second")
			var relay *process.Relay
			b.startAs(func(r *process.Relay) { relay = r }, "node=b")
			stacktest.EventuallyIn(t, time.Minute, "the fix has the number of partitions", func() bool {
				return slices.ContainsFunc(relay.Problems(), func(problem problems.Problem) bool {
					return problem.Kind == problems.TopicUnwritable && problem.Object == topic && problem.Partitions == 6 &&
						strings.Contains(problem.Fix, "outrelay topics create "+topic+" --partitions 6") && problem.Command != ""
				})
			}, func() any { return relay.Problems() })
		})
	}
}
