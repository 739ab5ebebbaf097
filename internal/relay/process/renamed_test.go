package process_test

import (
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
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
