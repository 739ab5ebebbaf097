package process_test

import (
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// TestN27_ACollectionThatIsRenamedIntoScopeIsSwept: its documents were inserted under a name that is not
// watched.
func TestN27_ACollectionThatIsRenamedIntoScopeIsSwept(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("start=now", "watch="+b.db.Name()+".outbox*")
	b.log.wait(t, "took over")
	stash, err := outbox.New(b.db, outbox.WithoutTransaction(), outbox.WithCollection("stash"))
	if err != nil {
		t.Fatal(err)
	}

	var list []event.Event
	for i := range 50 {
		list = append(list, event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte(fmt.Sprint(i)))))
	}
	if err := stash.Append(t.Context(), list...); err != nil {
		t.Fatal(err)
	}

	b.append(1)
	if err := b.client.Database("admin").RunCommand(t.Context(), bson.D{
		{Key: "renameCollection", Value: b.db.Name() + ".stash"}, {Key: "to", Value: b.db.Name() + ".outbox_old"},
	}).Err(); err != nil {
		t.Fatal(err)
	}

	late, err := outbox.New(b.db, outbox.WithoutTransaction(), outbox.WithCollection("outbox_old"))
	if err != nil {
		t.Fatal(err)
	}
	if err := late.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: "k"}, "Placed", event.Bytes("", []byte("50")))); err != nil {
		t.Fatal(err)
	}

	next := 0
	for _, r := range b.consume(52) {
		if string(r.Key) != "k" {
			continue
		}
		if string(r.Value) != fmt.Sprint(next) {
			t.Fatalf("got %s, want %d", r.Value, next)
		}
		next++
	}
	if next != 51 {
		t.Fatalf("%d events of the renamed collection, want 51", next)
	}

	stacktest.Eventually(t, "the relay is live without a lag", func() bool { w := b.status(); return w.State == "live" && w.LagS != nil && *w.LagS == 0 })
}

// While no owner ran, collections got watched names and were dropped, one was renamed on to a name that is not watched, and one got
// its first name back. The events after them are not delayed.
func TestRenamedCollectionsThatAreGoneDelayNoOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	watch := "watch=" + b.db.Name() + ".outbox*"
	stop := b.start(watch, "node=a")
	b.append(1)
	b.consume(1)
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	rename := func(from, to string) {
		t.Helper()
		if err := b.client.Database("admin").RunCommand(t.Context(), bson.D{
			{Key: "renameCollection", Value: b.db.Name() + "." + from}, {Key: "to", Value: b.db.Name() + "." + to},
		}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	const renames = 10
	for i := range renames {
		from, to := fmt.Sprint("stash", i), fmt.Sprint("outbox_", i)
		if err := b.db.CreateCollection(t.Context(), from); err != nil {
			t.Fatal(err)
		}
		rename(from, to)
		switch i {
		case 0:
			rename(to, "elsewhere")
		case 1:
			rename(to, from)
		default:
			if err := b.db.Collection(to).Drop(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	b.append(1)

	b.start(watch, "node=b")
	b.waitOwned("b")
	began := time.Now()
	b.consume(2)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("%d renames delayed an event by %s", renames, took.Round(time.Second))
	}
}

// An envelope of a renamed collection may be swept and come from the stream too. A record that the sweep sends at once is flagged, and so is
// the record of one that has to wait.
func TestN27_AWaitingEnvelopeOfARenamedCollectionIsFlagged(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("node=a", "watch="+b.db.Name()+".outbox*", "topics.template=late-"+b.topic)
	b.waitOwned("a")
	b.appendTo("stash", "swept")
	b.rename("stash", "outbox")
	b.appendTo("outbox", "streamed")
	stacktest.Eventually(t, "both events wait", func() bool { return b.countWaiting(bson.D{}) == 2 })
	if n := b.countWaiting(bson.D{{Key: "origin", Value: waiting.OriginSweep}, {Key: "redelivered", Value: true}}); n != 1 {
		t.Errorf("%d waiting events are those of a sweep, want one", n)
	}
}
