package process_test

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestARepeatedStepIsAProblemEverywhere: a stream that is reopened without moving, and a write of the ledger that is repeated, show in
// /readyz, the status, the log and the metric of the alerts, until they succeed.
func TestARepeatedStepIsAProblemEverywhere(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		part, text string
		kind       problems.Kind
		app        string // of the client whose commands fail
		fail       bson.D
		waits      bool // the event is for a missing topic
	}{
		{"stream", "MongoDB returned InterruptedDueToReplStateChange (11602)", problems.StreamStopped, "outrelay stream ", bson.D{
			{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "errorCode", Value: 11602},
		}, false},
		{"transactions", "WriteConflict", problems.WriteRejected, "outrelay state ", bson.D{
			{Key: "failCommands", Value: bson.A{"commitTransaction"}},
			{Key: "errorCode", Value: 112},
			{Key: "errorLabels", Value: bson.A{"TransientTransactionError"}},
		}, true},
		// Every document is rejected, also the letters.
		{"ledger", "DocumentValidationFailure", problems.WriteRejected, "outrelay state ", bson.D{
			{Key: "failCommands", Value: bson.A{"insert", "update", "bulkWrite"}}, {Key: "errorCode", Value: 121},
		}, true},
	} {
		t.Run(c.part, func(t *testing.T) {
			t.Parallel()
			b := setupOn(t, stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true}).MongoURI())
			node := stacktest.Name(t)
			var r *process.Relay
			b.startAs(func(relay *process.Relay) { r = relay; r.Hasten(10 * time.Second) }, "node="+node, "http.readiness=1s")
			b.log.wait(t, "took over")
			repaired := stacktest.FailCommandOn(t, b.client, c.app+node, "alwaysOn", c.fail)
			topic := b.topic
			if c.waits {
				topic = "missing-" + b.topic
			}
			b.append(1, event.WithTopic(topic))

			named := func(text string) bool { return strings.Contains(text, c.text) }
			problem := func() (p admin.SlotProblem) {
				for _, p := range b.status().Problems {
					if p.Part == c.part {
						return p
					}
				}
				return p
			}
			stacktest.Eventually(t, "/readyz fails", func() bool {
				ok, _, reasons := r.Ready()
				return !ok && slices.ContainsFunc(reasons, named)
			}, func() any { _, _, reasons := r.Ready(); return reasons })
			stacktest.Eventually(t, "the status shows the problem", func() bool { p := problem(); return named(p.Text) && p.ForS > 1 })
			stacktest.Eventually(t, "the list has the problem", func() bool {
				return slices.ContainsFunc(r.Problems(), func(p problems.Problem) bool { return p.Kind == c.kind && named(p.Detail) && p.Fix != "" })
			}, func() any { return r.Problems() })
			stacktest.Eventually(t, "the metric shows its age", func() bool { return r.ProblemSeconds(t, c.kind) > 1 })
			b.log.wait(t, c.text)
			if c.kind == problems.StreamStopped {
				// Events that nobody can read have no age, so the lag is the time for which the stream stands.
				stacktest.Eventually(t, "the status shows a lag", func() bool { lag := b.status().LagS; return lag != nil && *lag > 1 }, func() any { return b.status().LagS })
			}

			repaired()
			stacktest.Eventually(t, "the problem ends", func() bool {
				ok, _, _ := r.Ready()
				return ok && problem() == admin.SlotProblem{} && r.ProblemSeconds(t, c.kind) == 0
			})
		})
	}
}

// TestATakeoverWithoutACoordinatorIsAProblemEverywhere: the coordinator of transactions is missing, so the takeover waits. /readyz, the
// status and the list have the step, the last error and the fix, in the same words, until the takeover goes on.
func TestATakeoverWithoutACoordinatorIsAProblemEverywhere(t *testing.T) {
	t.Parallel()
	b := setup(t)
	kc, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(3, b.topic))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kc.Close)
	var missing atomic.Bool
	missing.Store(true)
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.FindCoordinator}, Err: kerr.CoordinatorNotAvailable, Count: -1, When: func(kmsg.Request) bool {
		return missing.Load()
	}})
	b.env = append(b.env, "OUTRELAY_KAFKA_BROKERS="+strings.Join(kc.ListenAddrs(), ","))
	b.append(1)
	var r *process.Relay
	b.startAs(func(relay *process.Relay) { r = relay }, "http.readiness=1s")

	isReason := func(reason string) bool { return strings.HasPrefix(reason, "takeover: ") }
	stacktest.Eventually(t, "/readyz fails", func() bool {
		ok, phase, reasons := r.Ready()
		return !ok && phase == "taking-over" && slices.ContainsFunc(reasons, isReason)
	}, func() any { _, _, reasons := r.Ready(); return reasons })
	var text string
	stacktest.Eventually(t, "the status shows the problem", func() bool {
		for _, p := range b.status().Problems {
			if p.Part == "takeover" && p.ForS > 1 {
				text = p.Text
			}
		}
		return text != ""
	}, func() any { return b.status().Problems })

	for _, want := range []string{"taking transactional id outrelay.", "Coordinator Not Available", "transaction.state.log.replication.factor", "outrelay doctor"} {
		if !strings.Contains(text, want) {
			t.Errorf("the problem %q lacks %q", text, want)
		}
	}
	_, _, reasons := r.Ready()
	if !slices.ContainsFunc(reasons, func(reason string) bool { return strings.HasPrefix(reason, "takeover: "+text+" (for ") }) {
		t.Errorf("/readyz has %q, want %q", reasons, text)
	}
	stacktest.Eventually(t, "the list has the problem", func() bool {
		return slices.ContainsFunc(r.Problems(), func(p problems.Problem) bool { return p.Detail == "takeover: "+text })
	}, func() any { return r.Problems() })

	missing.Store(false)
	b.log.wait(t, "took over")
	stacktest.Eventually(t, "the problem ends", func() bool {
		ok, _, reasons := r.Ready()
		return ok && len(reasons) == 0 && len(b.status().Problems) == 0 && len(r.Problems()) <= 1
	}, func() any { return r.Problems() })
}
