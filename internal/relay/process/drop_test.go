package process_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/figures"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestADroppedCollectionIsFollowed: after a drop, the same owner delivers the envelopes of the next collection of that
// name, without a sweep.
func TestADroppedCollectionIsFollowed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(3)
	b.start()
	b.consume(3)
	epoch := b.status().Epoch

	for round := range 2 {
		if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
			t.Fatal(err)
		}
		b.append(3)
		got := b.consume(3 * (round + 2))

		if n := len(got); n != 3*(round+2) {
			t.Errorf("%d records after %d drops: something came twice", n, round+1)
		}

		for _, r := range got {
			for _, h := range r.Headers {
				if h.Key == record.HeaderRedelivered {
					t.Errorf("%d/%d is flagged", r.Partition, r.Offset)
				}
			}
		}
	}

	if now := b.status().Epoch; now != epoch {
		t.Errorf("the epoch went from %d to %d", epoch, now)
	}
}

// TestWhatWaitsGoesWithItsCollection: on_drop decides what becomes of parked envelopes when their collection or database is dropped.
// Discarded ones open the gates of their keys, so that the next collection of the name is delivered.
func TestWhatWaitsGoesWithItsCollection(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		onDrop   string
		database bool // is watched and dropped as a whole
		payloads []string
	}{
		{"discard", false, []string{"late", "new", "old", "old"}},
		{"discard", true, []string{"late", "new"}},
		{"keep", false, []string{"late", "old", "old"}},
	} {
		t.Run(c.onDrop+map[bool]string{true: " of a database"}[c.database], func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			missing := "late-" + b.topic
			set := []string{"on_drop=" + c.onDrop, "topics.rules=[{match: {aggregatetype: order}, to: [" + missing + "]}]"}
			if c.database {
				set = append(set, "watch=["+b.db.Name()+".*]")
			}
			b.start(set...)
			b.appendTo("outbox", "old", "old")
			stacktest.Eventually(t, "both are parked", func() bool { return b.countWaiting(bson.D{{Key: "reason", Value: "parked"}}) == 2 })

			backup, err := mongodb.FindAll[bson.Raw](t.Context(), b.db.Collection("outbox"), "reading the outbox", bson.D{})
			if err != nil {
				t.Fatal(err)
			}
			if c.database {
				err = b.db.Drop(t.Context())
			} else {
				err = b.db.Collection("outbox").Drop(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			b.appendTo("outbox", "late")
			want := int64(1)
			if c.onDrop == "keep" {
				want = 3
			}
			stacktest.Eventually(t, "the event of the next collection is parked", func() bool { return b.countWaiting(bson.D{}) == want })
			logged := b.count("audit", bson.D{{Key: "kind", Value: "waiting_discarded"}, {Key: "fields.count", Value: 2}})
			if discards := c.onDrop == "discard"; (logged == 1) != discards {
				t.Errorf("the audit log has %d entries of 2 discarded events", logged)
			}
			b.checkDiscarded(c.onDrop == "discard")
			if c.onDrop == "discard" && !c.database {
				// The fix of the problem: a restored event is sent.
				if _, err := b.db.Collection("outbox").InsertMany(t.Context(), backup); err != nil {
					t.Fatal(err)
				}
			}

			stacktest.CreateTopic(t, missing, 1)
			read := *b
			read.topic = missing
			n := len(c.payloads)
			if c.onDrop == "discard" {
				b.appendTo("outbox", "new")
			}
			var got []string
			for _, r := range read.consume(n) {
				got = append(got, string(r.Value))
			}
			slices.Sort(got)
			if !slices.Equal(got, c.payloads) {
				t.Errorf("delivered %q, want %q", got, c.payloads)
			}
		})
	}
}

// checkDiscarded fails the test unless two discarded events of the outbox are a problem, or none if wanted is false. It acknowledges the
// problem, which ends it.
func (b *bundle) checkDiscarded(wanted bool) {
	b.t.Helper()
	op := admin.New(admin.Operator{State: b.state, Watcher: "default"})
	read := func() (found []problems.Problem) {
		view, err := op.Overview(b.t.Context())
		if err != nil {
			b.t.Fatal(err)
		}
		return slices.DeleteFunc(view.Problems, func(problem problems.Problem) bool { return problem.Kind != problems.EventsDiscarded })
	}

	found := read()
	if !wanted {
		if len(found) > 0 {
			b.t.Errorf("no event was discarded: %+v", found)
		}
		return
	}
	if len(found) != 1 || found[0].Object != b.db.Name()+".outbox" || found[0].Count != 2 || found[0].Since == nil || !strings.Contains(found[0].Fix, found[0].Acknowledge) {
		b.t.Fatalf("%+v", found)
	}
	if err := op.Acknowledge(b.t.Context(), found[0].Acknowledge); err != nil {
		b.t.Fatal(err)
	}
	if found := read(); len(found) > 0 {
		b.t.Errorf("after the acknowledgement: %+v", found)
	}
}

// TestN19_ClaimedEnvelopesGoWithTheirCollection: a collection is dropped after its scheduled envelopes were claimed, and before they are due.
func TestN19_ClaimedEnvelopesGoWithTheirCollection(t *testing.T) {
	t.Parallel()
	for _, onDrop := range []string{"discard", "keep"} {
		t.Run(onDrop, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			stop := b.start("node=a")
			b.append(1)
			b.consume(1)
			if err := stop(); err != nil {
				t.Fatal(err)
			}

			b.insertClaim("default/0of1", 20, time.Now().Add(time.Hour))
			b.start("on_drop="+onDrop, "node=b")
			if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
				t.Fatal(err)
			}
			// The relay handles the drop before the next event.
			b.append(1)
			b.consume(2)

			want, entries := int64(0), int64(1)
			if onDrop == "keep" {
				want, entries = 20, 0
			}
			stacktest.Eventually(t, "the claimed envelopes are handled", func() bool {
				n, err := waiting.CountClaimed(t.Context(), b.state.Collection(waiting.ClaimsName), "default")
				return err == nil && n == want
			})
			// The owner writes to the log in the background.
			stacktest.Eventually(t, "the audit log has an entry of the discarded events, if there are any", func() bool {
				return b.count("audit", bson.D{{Key: "kind", Value: "waiting_discarded"}, {Key: "fields.count", Value: 20}}) == entries
			})
			if n := b.countWaiting(bson.D{}); n > 0 {
				t.Errorf("%d wait", n)
			}
		})
	}
}

// Scheduled events are in the outbox itself, so a drop takes them away. The problem has their number, also if waiting events are kept, and
// each of two slots gets the event of the drop.
func TestScheduledEventsOfADroppedOutboxAreAProblem(t *testing.T) {
	t.Parallel()
	for _, set := range [][]string{nil, {"on_drop=keep"}, {"slots=2"}} {
		t.Run(fmt.Sprint(set), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.start(set...)
			b.append(1)
			b.append(3, event.WithDueAt(time.Now().Add(time.Hour)))
			op := admin.New(admin.Operator{State: b.state, Watcher: "default"})
			stacktest.Eventually(t, "the scheduled events are counted", func() bool {
				stored, err := figures.Read(t.Context(), b.state, "default")
				return err == nil && stored.Figures.CountScheduledOf(b.db.Name(), "outbox") == 3
			})

			if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
				t.Fatal(err)
			}
			// The relay handles the drop before the next event.
			b.append(1)
			b.consume(2)
			var found []problems.Problem
			stacktest.Eventually(t, "the drop is a problem", func() bool {
				view, err := op.Overview(t.Context())
				found = slices.DeleteFunc(view.Problems, func(problem problems.Problem) bool { return problem.Kind != problems.EventsDiscarded })
				return err == nil && len(found) > 0
			})
			if len(found) != 1 || found[0].Object != b.db.Name()+".outbox" || found[0].Count != 3 || !strings.Contains(found[0].Detail, "3 were scheduled") {
				t.Errorf("%+v", found)
			}
		})
	}
}

// The owner ends after it has found the drop, and before it has removed all waiting events. The next one reads the drop again: there is one
// problem, with the events of both.
func TestADropIsAProblemBeforeItsEventsAreRemoved(t *testing.T) {
	t.Parallel()
	b := setup(t)
	node := stacktest.Name(t)
	set := []string{"topics.rules=[{match: {aggregatetype: order}, to: [late-" + b.topic + "]}]"}
	stop := b.start(append(set, "node="+node)...)
	b.appendTo("outbox", "old", "old")
	stacktest.Eventually(t, "both are parked", func() bool { return b.countWaiting(bson.D{{Key: "reason", Value: "parked"}}) == 2 })

	allow := stacktest.FailCommand(t, "outrelay state "+node, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"delete"}}, {Key: "errorCode", Value: 189}})
	if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	op := admin.New(admin.Operator{State: b.state, Watcher: "default"})
	listed := func() (found []problems.Problem) {
		view, err := op.Overview(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(view.Problems, func(problem problems.Problem) bool { return problem.Kind != problems.EventsDiscarded })
	}
	stacktest.Eventually(t, "the drop is a problem", func() bool { return len(listed()) == 1 })
	if n := b.countWaiting(bson.D{}); n != 2 {
		t.Errorf("%d events wait while none can be removed", n)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	allow()

	b.start(append(set, "node=b")...)
	stacktest.Eventually(t, "the next owner removes them", func() bool { return b.countWaiting(bson.D{}) == 0 })
	if found := listed(); len(found) != 1 || found[0].Count != 2 {
		t.Errorf("%+v", found)
	}
}
