package process_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/figures"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestOneProcessCountsForAWatcher whose slots several processes own. Its metrics and the overview of any process have the same numbers, and
// when it stops, another one counts.
func TestOneProcessCountsForAWatcher(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(6)
	missing := "missing-" + b.topic
	b.append(2, event.WithTopic(missing))
	b.append(1, event.WithDueAt(time.Now().Add(time.Hour)))
	b.append(1, event.WithExpiry(time.Now().Add(-time.Hour)))

	relays := map[string]*process.Relay{}
	stops := map[string]func() error{}
	for _, node := range []string{"one", "two"} {
		stops[node] = b.startAs(func(relay *process.Relay) { relays[node] = relay }, "node="+node, "slots=2")
	}
	counting := func() (nodes []string) {
		for node, relay := range relays {
			if relay.Counts() {
				nodes = append(nodes, node)
			}
		}
		return nodes
	}
	b.consume(6)
	stacktest.Eventually(t, "each node owns a slot", func() bool {
		status, err := admin.ReadStatus(t.Context(), b.state)
		return err == nil && len(status.Slots) == 2 && status.Slots[0].HasOwner() && status.Slots[1].HasOwner() && status.Slots[0].Node != status.Slots[1].Node
	})

	op := admin.New(admin.Operator{State: b.state, Watcher: "default"})
	var view admin.Overview
	var nodes []string
	stacktest.Eventually(t, "one node has counted", func() bool {
		stored, err := figures.Read(t.Context(), b.state, "default")
		if err != nil {
			t.Fatal(err)
		}
		if view, err = op.Overview(t.Context()); err != nil {
			t.Fatal(err)
		}
		nodes = counting()
		counts := stored.Figures.Counts
		return len(nodes) == 1 && stored.Current && view.Counts == counts && counts.Parked == 2 && counts.Scheduled == 1 && counts.Pending == 0
	}, func() any { return []any{nodes, view.Counts} })
	if len(view.WaitingTopics) != 1 || view.WaitingTopics[0].Topic != missing || !strings.Contains(view.WaitingTopics[0].Collections[0], b.db.Name()) {
		t.Errorf("%+v", view.WaitingTopics)
	}
	if parked := relays[nodes[0]].Gauge(t, "outrelay_waiting_envelopes", "parked"); parked != 2 {
		t.Errorf("the metric has %v parked envelopes, want 2", parked)
	}

	// The process that does not count has the problems of the watcher as well, with the same fixes.
	isOfTopic := func(problem problems.Problem) bool {
		return problem.Kind == problems.TopicUnwritable && problem.Object == missing && problem.Count == 2 && strings.Contains(problem.Command, "--topic "+missing)
	}
	isOfLetters := func(problem problems.Problem) bool { return problem.Kind == problems.DeadLetters && problem.Count == 1 }
	stacktest.Eventually(t, "both processes have the problems", func() bool {
		for _, relay := range relays {
			if list := relay.Problems(); !slices.ContainsFunc(list, isOfTopic) || !slices.ContainsFunc(list, isOfLetters) {
				return false
			}
		}
		return true
	}, func() any { return []any{relays["one"].Problems(), relays["two"].Problems()} })

	first := nodes[0]
	if err := stops[first](); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "the other node counts", func() bool {
		for node, relay := range relays {
			if node != first && relay.Counts() {
				return true
			}
		}
		return false
	})
}

// TestASlowCountDelaysNoProblem: the first count takes so long that a pause in proportion to it would last minutes. A topic that cannot be
// written is a problem within seconds, and the documents are counted again.
func TestASlowCountDelaysNoProblem(t *testing.T) {
	t.Parallel()
	b := setupOn(t, stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true}).MongoURI())
	node := stacktest.Name(t)
	fast := stacktest.FailCommandOn(t, b.client, "outrelay state "+node, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"count"}}, {Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 8000},
	})
	b.append(1)
	var relay *process.Relay
	b.startAs(func(r *process.Relay) { relay = r }, "node="+node)
	stacktest.Eventually(t, "the documents are counted", func() bool { return relay.Counts() })
	fast()

	missing := "missing-" + b.topic
	b.append(2, event.WithTopic(missing))
	stacktest.Eventually(t, "the topic is a problem", func() bool {
		return slices.ContainsFunc(relay.Problems(), func(p problems.Problem) bool { return p.Kind == problems.TopicUnwritable && p.Object == missing })
	}, func() any { return relay.Problems() })
	stacktest.Eventually(t, "the documents are counted again", func() bool { return relay.Gauge(t, "outrelay_waiting_envelopes", "parked") == 2 })
}

// TestAWatcherWithNothingToReadFails: the age of a missing name outlives the process that has found it. After five minutes it is a failure,
// which is logged once; next to an existing outbox it stays a warning.
func TestAWatcherWithNothingToReadFails(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		others      bool // an outbox exists
		severity    problems.Severity
		consequence string
	}{
		{"nothing else", false, problems.Fail, "the watcher has nothing to read, so no event is sent"},
		{"an outbox", true, problems.Warn, "no event is sent from it; the other outboxes are read"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			typo := b.db.Name() + ".outbx"
			set := "watch=[" + typo + "]"
			if c.others {
				set = "watch=[" + typo + ", " + b.db.Name() + ".outbox]"
				b.append(1)
			}

			find := func(relay *process.Relay) (found problems.Problem) {
				for _, problem := range relay.Problems() {
					if problem.Kind == problems.OutboxNotReadable && problem.Object == typo {
						found = problem
					}
				}
				return found
			}
			var relay *process.Relay
			stop := b.startAs(func(r *process.Relay) { relay = r }, set)
			stacktest.Eventually(t, "the name is missing, with its age", func() bool {
				problem := find(relay)
				return problem.Severity == problems.Warn && problem.ForS > 6
			}, func() any { return relay.Problems() })
			if problem := find(relay); problem.Consequence != c.consequence || !strings.Contains(problem.Fix, "check the name in watch") {
				t.Errorf("%+v", problem)
			}
			if err := stop(); err != nil {
				t.Fatal(err)
			}

			older := bson.D{{Key: "figures.unreadable.0.since", Value: time.Now().Add(-time.Hour)}}
			if _, err := b.state.Collection("figures").UpdateByID(t.Context(), "default", bson.D{{Key: "$set", Value: older}}); err != nil {
				t.Fatal(err)
			}
			stop = b.startAs(func(r *process.Relay) { relay = r }, set)
			stacktest.Eventually(t, "the next process has the age", func() bool {
				problem := find(relay)
				return problem.Severity == c.severity && problem.ForS >= 3600
			}, func() any { return relay.Problems() })
			stacktest.Eventually(t, "it has counted again", func() bool { return relay.Counts() && find(relay).ForS >= 3600 })
			view, err := admin.New(admin.Operator{State: b.state, Watcher: "default"}).Overview(t.Context())
			if err != nil || problems.Worst(view.Problems) != c.severity {
				t.Errorf("the status has the severity %q, want %q: %v, %+v", problems.Worst(view.Problems), c.severity, err, view.Problems)
			}
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			wantLines := 0
			if c.severity == problems.Fail {
				wantLines = 1
			}
			if n := strings.Count(b.log.wait(t, "lease released"), `level=WARN msg="the watcher has nothing to read, so no event is sent" name=`+typo); n != wantLines {
				t.Errorf("%d lines, want %d", n, wantLines)
			}
		})
	}
}
