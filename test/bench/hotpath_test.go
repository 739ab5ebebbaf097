package bench

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/tracing"
	"github.com/outrelay/outrelay/pkg/event"
)

// path is the path of one event between the response of MongoDB and the encoded bytes for Kafka, without the
// servers.
type path struct {
	router  *routing.Router
	filler  *routing.Filler
	ev      changes.Event
	view    envelope.View
	meta    routing.Meta
	targets []routing.Target
	rec     record.Record
	recs    [1]record.Record
	chunks  batch.Chunks
	builder batch.Builder
	sealed  int
	tap     *tracing.Tap // turned off: reads the headers and creates no spans
}

const maxBatch = 1<<20 - 1024

func newEventPath(tb testing.TB, preset string, rules ...routing.Rule) *path {
	tb.Helper()
	router, err := routing.New(routing.Config{Rules: rules})
	if err != nil {
		tb.Fatal(err)
	}
	p, err := routing.NewPreset(routing.PresetConfig{Name: preset})
	if err != nil {
		tb.Fatal(err)
	}
	h := &path{router: router, filler: p.Filler(), tap: tracing.NewTap(nil, nil, time.Now)}
	h.builder.Reset(&h.chunks)
	return h
}

// processEvent processes one change event up to the batch.
func (h *path) processEvent(raw []byte) error {
	if err := changes.Parse(raw, &h.ev); err != nil {
		return err
	}
	if err := envelope.Parse(h.ev.Document, &h.view); err != nil {
		return err
	}

	targets, err := h.router.Route(&h.view, &h.meta, h.targets[:0])
	h.targets = targets
	if err != nil {
		return err
	}

	h.meta.DB, h.meta.Coll, h.meta.ClusterTime, h.meta.CommitMS = h.ev.DB, h.ev.Coll, h.ev.ClusterTime, h.ev.WallMS
	for i, t := range targets {
		if i == 0 {
			if err := h.filler.Fill(&h.view, &h.meta, t, &h.rec); err != nil {
				return err
			}
		}

		h.rec.Topic, h.rec.Partition = t.Topic, t.Partition
		h.recs[0] = h.rec
		if h.tap.Begin(h.recs[:], h.ev.DB, h.ev.Coll, h.ev.WallMS) != nil {
			return errors.New("a delivery is followed although there is no follower")
		}
		if h.builder.Len()+batch.Size(&h.rec) > maxBatch {
			if err := h.builder.Seal(batch.None(), batch.Producer{}, 0); err != nil {
				return err
			}
			h.builder.Reset(&h.chunks)
			h.sealed++
		}

		h.builder.Append(&h.rec)
	}
	return nil
}

// newInsertEvent returns an insert as a change stream event.
func newInsertEvent(tb testing.TB, i int, e event.Event) []byte {
	tb.Helper()
	doc, err := e.MarshalBSON()
	if err != nil {
		tb.Fatal(err)
	}

	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	raw, err := bson.Marshal(bson.D{
		{Key: "_id", Value: bson.D{{Key: "_data", Value: fmt.Sprintf("8266A1B2C3%08X2B022C0100296E5A1004", i)}}},
		{Key: "operationType", Value: "insert"},
		{Key: "clusterTime", Value: bson.Timestamp{T: uint32(now.Unix()), I: uint32(i + 1)}},
		{Key: "collectionUUID", Value: bson.Binary{Subtype: 4, Data: bytes.Repeat([]byte{7}, 16)}},
		{Key: "wallTime", Value: now},
		{Key: "fullDocument", Value: bson.Raw(doc)},
		{Key: "ns", Value: bson.D{{Key: "db", Value: "shop"}, {Key: "coll", Value: "outbox"}}},
		{Key: "documentKey", Value: bson.D{{Key: "_id", Value: bson.Raw(doc).Lookup("_id")}}},
	})
	if err != nil {
		tb.Fatal(err)
	}
	return raw
}

// variants are the forms of events that are common enough to need a fast path.
func eventVariants() []struct {
	name, preset string
	rules        []routing.Rule
	make         func(i int) event.Event
} {
	kb := bytes.Repeat([]byte("0123456789abcdef"), 64)
	key := func(i int) string { return fmt.Sprintf("o-%d", i%1000) }
	document := bson.D{
		{Key: "order", Value: "o-17"},
		{Key: "total", Value: 1299},
		{Key: "paid", Value: true},
		{Key: "lines", Value: bson.A{bson.D{{Key: "sku", Value: "A-1"}, {Key: "count", Value: 2}}, bson.D{{Key: "sku", Value: "B-7"}, {Key: "count", Value: 1}}}},
	}

	fanOut := []routing.Rule{{AggregateType: "order", To: []string{"orders", "audit"}}}
	return []struct {
		name, preset string
		rules        []routing.Rule
		make         func(i int) event.Event
	}{
		{"bytes", routing.Debezium, nil, func(i int) event.Event {
			return event.New(event.Aggregate{Type: "order", ID: key(i)}, "OrderPlaced", event.Bytes("", kb))
		}},
		{"document", routing.Typed, nil, func(i int) event.Event {
			return event.New(event.Aggregate{Type: "order", ID: key(i)}, "OrderPlaced", event.Document(document))
		}},
		{"headers", routing.Debezium, nil, func(i int) event.Event {
			return event.New(event.Aggregate{Type: "order", ID: key(i)}, "OrderPlaced", event.Bytes("", kb), event.WithHeader("traceparent", []byte("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")), event.WithHeader("tenant", []byte("t1")))
		}},
		{"cloudevents", routing.CloudEvents, nil, func(i int) event.Event {
			return event.New(event.Aggregate{Type: "order", ID: key(i)}, "OrderPlaced", event.Bytes("", kb))
		}},
		{"plain", routing.Plain, nil, func(i int) event.Event {
			return event.New(event.Aggregate{Type: "order", ID: key(i)}, "OrderPlaced", event.Bytes("", kb))
		}},
		{"fanout", routing.Debezium, fanOut, func(i int) event.Event {
			return event.New(event.Aggregate{Type: "order", ID: key(i)}, "OrderPlaced", event.Bytes("", kb))
		}},
	}
}

const prepared = 2000

// TestHotPathAllocations checks that the path needs at most half an allocation per event.
func TestHotPathAllocations(t *testing.T) {
	for _, v := range eventVariants() {
		t.Run(v.name, func(t *testing.T) {
			h := newEventPath(t, v.preset, v.rules...)
			var docs [][]byte
			for i := range prepared {
				docs = append(docs, newInsertEvent(t, i, v.make(i)))
			}

			per := testing.AllocsPerRun(5, func() {
				for _, raw := range docs {
					if err := h.processEvent(raw); err != nil {
						t.Fatal(err)
					}
				}
			}) / prepared
			if per > 0.5 {
				t.Errorf("%.2f allocations per event, want at most 0.5", per)
			}
			if h.builder.Count() == 0 || bytes.Contains(docs[0], []byte("0123456789abcdef")) && h.sealed == 0 {
				t.Error("no record was encoded")
			}
		})
	}
}

// BenchmarkHotPath measures the CPU time of an event between the response of MongoDB and the encoded bytes.
func BenchmarkHotPath(b *testing.B) {
	for _, v := range eventVariants() {
		b.Run(v.name, func(b *testing.B) {
			h := newEventPath(b, v.preset, v.rules...)
			var docs [][]byte
			for i := range prepared {
				docs = append(docs, newInsertEvent(b, i, v.make(i)))
			}

			b.SetBytes(int64(len(docs[0])))
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				if err := h.processEvent(docs[i%prepared]); err != nil {
					b.Fatal(err)
				}
				i++
			}
		})
	}
}
