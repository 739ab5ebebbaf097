package process_test

import (
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
