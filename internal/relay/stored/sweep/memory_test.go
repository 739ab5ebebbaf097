package sweep

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// The responses that a sweep holds stay within its memory, for any number of collections and any size of envelopes. The test is not
// parallel, because it measures the heap of the process.
func TestI7_ASweepOfManyLargeOutboxesStaysInItsMemory(t *testing.T) { //nolint:paralleltest // see above
	b := newBundle(t)
	const outboxCount, perOutbox, memory = 40, 12, 4 << 20
	body := bson.E{Key: "payload", Value: bson.Binary{Data: bytes.Repeat([]byte("x"), 200<<10)}}

	var names, want []string
	for i := range outboxCount {
		names = append(names, fmt.Sprintf("o%02d", i))
	}
	for i := range outboxCount * perOutbox {
		id := fmt.Sprintf("e%03d", i)
		b.insert(t.Context(), b.db.Collection(names[i%outboxCount]), id, body)
		want = append(want, id)
	}

	heap := func() int64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	before, most := heap(), int64(0)
	p := &publisher{}
	p.deliver = func(*outboxes.Envelope) error {
		if len(p.ids)%50 == 1 {
			most = max(most, heap()-before)
		}
		return nil
	}
	s := b.newSweep(b.clusterTime(), p, names...)
	s.Memory = memory
	b.run(s)

	if !slices.Equal(p.ids, want) {
		t.Errorf("%d envelopes were swept, or in another order, want %d", len(p.ids), len(want))
	}
	if most > 2*memory {
		t.Errorf("the sweep holds %d MiB, want about %d", most>>20, memory>>20)
	}
}

// A source whose response was released continues with the same document, also between documents of one stamp.
func TestAReleasedSourceRepeatsNothingOfAStamp(t *testing.T) {
	t.Parallel()
	b := newBundle(t)
	var want []string
	for i := range 60 {
		id := fmt.Sprintf("e%02d", i)
		doc := bson.D{{Key: "_id", Value: id}, {Key: "ts", Value: bson.Timestamp{T: uint32(10 + i/20), I: 1}}}
		if _, err := b.newOutbox([]string{"a", "b", "c"}[i%3]).InsertOne(t.Context(), doc); err != nil {
			t.Fatal(err)
		}
		want = append(want, id)
	}

	p := &publisher{}
	s := b.newSweep(bson.Timestamp{T: 100}, p, "a", "b", "c")
	s.Memory = 1
	b.run(s)

	if slices.Sort(p.ids); !slices.Equal(p.ids, want) {
		t.Errorf("swept %q, want each of %d once", p.ids, len(want))
	}
	if !slices.IsSortedFunc(p.stamps, bson.Timestamp.Compare) {
		t.Error("the envelopes are not in the order of their stamps")
	}
}

// At the end of a collection, the sweep looks for the name, and not through all collections of the database.
func TestASweepLooksUpNamesOnly(t *testing.T) {
	t.Parallel()
	scans := 0
	b := newBundle(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if e.CommandName == "listCollections" && e.Command.Lookup("filter", "name").Type == 0 {
			scans++
		}
	}}))
	b.insert(t.Context(), b.newOutbox("o"), "e")

	p := &publisher{}
	s := b.newSweep(b.clusterTime(), p, "o")
	s.Collections[0].UUID = findUUID(t, b, "o")
	b.run(s)
	if p.checkSent(t, "e"); scans != 0 {
		t.Errorf("%d lists of all collections, want none", scans)
	}
}
