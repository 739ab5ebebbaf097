package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/resume"
)

func TestN28_MergeStartsAtTheLeast(t *testing.T) {
	t.Parallel()
	at := func(sec uint32) bson.Timestamp { return bson.Timestamp{T: sec, I: 1} }
	old := []Document{
		{
			ID: "w/0of2", Epoch: 4, Seq: 9, ClusterTime: at(200), Token: resume.TokenOf("82000000C8000000012B02"), Beside: "8200000070", PipelineHash: "h",
			Offsets: []TopicOffsets{{"t", []int64{5, -1, 9}}, {"u", []int64{1}}},
			Passed:  []Passed{{"0of1", "82000000AA"}, {"1of3", "8200000001"}},
		},
		{
			ID: "w/1of2", Epoch: 7, Fence: 3, ClusterTime: at(100), Token: resume.TokenOf("8200000064000000012B02"), Beside: "8200000090", PipelineHash: "h",
			Offsets: []TopicOffsets{{"t", []int64{3, 8}}},
		},
	}

	pos := func(d Document) string {
		return cmp.Or(d.Token.Data(), fmt.Sprintf("82%08X%08X", d.ClusterTime.T, d.ClusterTime.I))
	}
	got := Merge([]string{"w/0of3", "w/1of3", "w/2of3"}, old,
		[]record.Sender{{ID: 11, EndOffsets: map[string][]int64{"t": {4}}}}, pos)
	if len(got) != 3 {
		t.Fatalf("%d documents, want 3", len(got))
	}

	for i := range got {
		d := &got[i]
		if d.ClusterTime != at(100) || !d.Token.IsZero() || d.PipelineHash != "h" || d.Epoch != 7 || d.Seq != 9 || d.Fence != 3 {
			t.Errorf("document %+v, want the least time, hash h, epoch 7, seq 9 and fence 3", d)
		}
		if o := d.OffsetMap(); o["t"][0] != 3 || o["t"][1] != 8 || o["t"][2] != 9 || o["u"][0] != 1 {
			t.Errorf("offsets %v, want the least of both", o)
		}

		// A passed position before the start is left out: the stream does not repeat its events. It may repeat events of the least time.
		want := []Passed{{"0of1", "82000000AA"}, {"0of2", "82000000C8000000012B02"}, {"1of2", "8200000064000000012B02"}}
		if !slices.Equal(d.Passed, want) {
			t.Errorf("passed %+v, want %+v", d.Passed, want)
		}
		// The stream of each new slot may repeat events that either old slot has sent outside of its order.
		if senders := d.Senders(); d.Beside != "8200000090" || len(senders) != 1 || senders[0].EndOffsets["t"][0] != 4 {
			t.Errorf("beside %q and senders %v, want the highest position and 1 sender", d.Beside, senders)
		}

		d.AddSender(record.Sender{ID: int64(20 + i)})
	}

	if got[0].Instance == got[1].Instance || got[0].Senders()[1].ID != 20 || got[2].Senders()[1].ID != 22 {
		t.Error("two slots share an instance or a sender")
	}
}

// TestN27_AMergedDocumentListsTheCollectionsThatWereRead: a slot without a key of a collection does not list it. If the slots had different
// configurations, one of them may never have read a collection of the other.
func TestN27_AMergedDocumentListsTheCollectionsThatWereRead(t *testing.T) {
	t.Parallel()
	collection := func(name string, readUpTo uint32) Collection {
		return Collection{NS: "shop." + name, UUID: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: []byte(fmt.Sprintf("%-16s", name))}, ReadUpTo: bson.Timestamp{T: readUpTo}}
	}
	for _, c := range []struct {
		hashes     [2]string
		hash, want string
	}{
		{[2]string{"h", "h"}, "h", "[{shop.both 0} {shop.first 0} {shop.left 7} {shop.second 0}]"},
		{[2]string{"h", "old"}, "", "[{shop.both 0} {shop.left 7}]"},
	} {
		old := []Document{
			{ID: "w/0of2", ClusterTime: bson.Timestamp{T: 9}, PipelineHash: c.hashes[0], Collections: []Collection{collection("both", 0), collection("first", 0), collection("left", 8)}},
			{ID: "w/1of2", ClusterTime: bson.Timestamp{T: 9}, PipelineHash: c.hashes[1], Collections: []Collection{collection("left", 7), collection("second", 0), collection("both", 0)}},
		}
		merged := Merge([]string{"w/0of1"}, old, nil, func(Document) string { return "" })[0]

		var got []string
		for _, collection := range merged.Collections {
			got = append(got, fmt.Sprintf("{%s %d}", collection.NS, collection.ReadUpTo.T))
		}
		slices.Sort(got)
		if fmt.Sprint(got) != c.want || merged.PipelineHash != c.hash {
			t.Errorf("%v: %v with the hash %q, want %s with %q", c.hashes, got, merged.PipelineHash, c.want, c.hash)
		}
	}
}

// Only the holder of all leases of a paused watcher can replace its documents. No other process can acquire
// a paused watcher.
func TestN28_ReplaceIsFenced(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	first := mustAcquire(t, newLease(t, longConfig(coll, "a")))
	if err := first.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := Pause(t.Context(), coll, slotID, "ann"); err != nil {
		t.Fatal(err)
	}

	cfg := longConfig(coll, "operator")
	cfg.AcquirePaused = true
	h := mustAcquire(t, newLease(t, cfg))
	replace := func(old Document) error {
		s, err := coll.Database().Client().StartSession()
		if err != nil {
			t.Fatal(err)
		}
		defer s.EndSession(t.Context())
		_, err = s.WithTransaction(t.Context(), func(tx context.Context) (any, error) {
			own := s.Client().Database(coll.Database().Name()).Collection(coll.Name())
			pos := func(Document) string { return "82" }
			fresh := Merge([]string{"orders/0of2", "orders/1of2"}, []Document{old}, nil, pos)
			return nil, Replace(tx, own, []Document{old}, fresh,
				func(string, []Document) Control { return Control{PauseOrder: PauseOrder{Paused: true}} })
		})
		return err
	}

	stale := h.Document()
	stale.Epoch--
	if err := replace(stale); !errors.Is(err, ErrNotHeld) {
		t.Errorf("Replace by an earlier owner returned %v", err)
	}
	if err := replace(h.Document()); err != nil {
		t.Fatal(err)
	}
	if n, _ := coll.CountDocuments(t.Context(), bson.D{{Key: "control.paused", Value: true}}); n != 2 {
		t.Errorf("%d paused documents", n)
	}
	if _, _, err := Read(t.Context(), coll, slotID); !errors.Is(err, ErrNotFound) {
		t.Errorf("the old document: %v", err)
	}
	if err := h.Release(t.Context(), nil); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("Release of a replaced document returned %v", err)
	}
}

// A lease is attempted only if MayAttempt allows it, and done gets the result.
func TestN28_AdmittedBeforeAnAttempt(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := shortConfig(coll, "a")
	calls, won := 0, make(chan bool, 1)
	cfg.MayAttempt = func(bool) func(bool) {
		if calls++; calls < 5 {
			if n, _ := coll.CountDocuments(t.Context(), bson.D{}); n != 0 {
				t.Error("the lease was attempted, want no attempt")
			}
			return nil
		}
		return func(w bool) { won <- w }
	}

	h := mustAcquire(t, newLease(t, cfg))
	if !<-won || calls != 5 {
		t.Errorf("MayAttempt was called %d times", calls)
	}
	if err := h.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
}

// A missing document is not created again if Absent does not allow it.
func TestN28_AbsentDocumentIsAskedFor(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := shortConfig(coll, "a")
	gone := errors.New("divided otherwise")
	called := make(chan struct{}, 1)
	cfg.MayAttempt = func(bool) func(bool) {
		select {
		case called <- struct{}{}:
		default:
		}
		return nil
	}

	cfg.MayCreate = func(context.Context) error { return gone }
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: slotID}}); err != nil {
		t.Fatal(err)
	}

	ended := make(chan error, 1)
	go func() {
		_, err := newLease(t, cfg).Acquire(t.Context())
		ended <- err
	}()

	<-called
	if _, err := coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: slotID}}); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, gone) {
		t.Errorf("Acquire returned %v", err)
	}
	if n, _ := coll.CountDocuments(t.Context(), bson.D{}); n != 0 {
		t.Error("the document was created, want none")
	}
}

// If a document disappears between the read and the attempt, Absent is called too before it is created.
func TestN28_AnAttemptMakesNoDocumentThatWasThere(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := shortConfig(coll, "a")
	gone := errors.New("divided otherwise")
	cfg.MayCreate = func(context.Context) error { return gone }
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: slotID}}); err != nil {
		t.Fatal(err)
	}

	cfg.MayAttempt = func(bool) func(bool) {
		if _, err := coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: slotID}}); err != nil {
			t.Error(err)
		}
		return func(bool) {}
	}
	if _, err := newLease(t, cfg).Acquire(t.Context()); !errors.Is(err, gone) {
		t.Errorf("Acquire returned %v", err)
	}
	if n, _ := coll.CountDocuments(t.Context(), bson.D{}); n != 0 {
		t.Error("the document was created, want none")
	}
}

// Absent may not see a write before a majority has it. So it is called only for a document that no majority has.
func TestN28_AbsentIsCalledForDocumentsWithoutAMajority(t *testing.T) {
	t.Parallel()
	var majority atomic.Bool
	coll, _ := newCollection(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		level, _ := e.Command.Lookup("readConcern", "level").StringValueOK()
		if e.CommandName == "find" || e.CommandName == "aggregate" {
			majority.Store(level == "majority")
		}
	}}))

	cfg := shortConfig(coll, "a")
	called := false
	cfg.MayCreate = func(context.Context) error {
		called = true
		if !majority.Load() {
			t.Error("the last read was not a majority read")
		}
		return nil
	}
	if err := mustAcquire(t, newLease(t, cfg)).Release(t.Context(), nil); err != nil || !called {
		t.Errorf("Absent was called: %v, error %v", called, err)
	}
}
