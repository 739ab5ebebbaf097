package purge

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// nullable are the optional fields of an envelope, and names that only services use.
var nullable = []string{
	"key", "expiresAt", "slot", "dueAt", "scheduledFor", "state", "pos", "pending", "attempts", "nextAt", "history", "origin",
	"claim", "redelivered", "delivery", "replayOf", "sentAt", "sent",
}

// A document that has a field as null is not scheduled, and is purged like one without it.
func TestN16_ANullFieldIsAnAbsentOne(t *testing.T) {
	t.Parallel()
	coll := newOutbox(t)
	old := bson.Timestamp{T: 100, I: 1}
	var docs []any
	add := func(id string, value any, fields ...string) {
		doc := bson.D{{Key: "_id", Value: id}, {Key: "aggregateid", Value: "a"}, {Key: "ts", Value: old}}
		for _, f := range fields {
			doc = append(doc, bson.E{Key: f, Value: value})
		}
		docs = append(docs, doc)
	}
	add("none", nil)
	for _, f := range nullable {
		add(f, nil, f)
		// The relay reads none of the others for a purge.
		if f != "dueAt" {
			add(f+" of the service", "retry", f)
		}
	}
	add("all", nil, nullable...)
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	if found, err := outboxes.HasScheduled(t.Context(), coll, slot.Range{}); err != nil || found {
		t.Errorf("the collection has scheduled envelopes: %v, %v", found, err)
	}
	if n, _, err := outboxes.CountDue(t.Context(), coll, slot.Range{}, 100); err != nil || n != 0 {
		t.Errorf("%d scheduled envelopes, %v", n, err)
	}
	if p, err := PurgeBatch(t.Context(), coll, bson.Timestamp{}, Cut{Before: bson.Timestamp{T: 200}}, 1000); err != nil || p.Deleted != int64(len(docs)) {
		t.Errorf("%d of %d purged, %v", p.Deleted, len(docs), err)
	}
}

// N25: the purge keeps an envelope with any due time, also one that is no date: the stream has not sent it.
func TestN25_AnEnvelopeWithADueTimeIsKept(t *testing.T) {
	t.Parallel()
	coll := newOutbox(t)
	for i, due := range []any{time.Now().Add(-time.Hour), time.Now().Add(time.Hour), "soon", 5, bson.A{time.Now()}, bson.D{}} {
		doc := bson.D{{Key: "_id", Value: i}, {Key: "ts", Value: bson.Timestamp{T: 100}}, {Key: "dueAt", Value: due}}
		if _, err := coll.InsertOne(t.Context(), doc); err != nil {
			t.Fatal(err)
		}
	}
	if p, err := PurgeBatch(t.Context(), coll, bson.Timestamp{}, Cut{Before: bson.Timestamp{T: 200}}, 1000); err != nil || p.Deleted != 0 {
		t.Errorf("%d purged, %v", p.Deleted, err)
	}
}

// The ordering key of an envelope with an empty key is its aggregate's id: waiting envelopes of that aggregate stand in one order.
func TestN15_AnEmptyKeyIsStoredAsTheOrderingKey(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("waiting")
	for i, key := range []any{"", nil, int32(7)} {
		raw := marshal(t, bson.D{{Key: "_id", Value: i}, {Key: "key", Value: key}})
		entry := waiting.Entry{Watcher: "w", NS: "a.outbox", Raw: raw, Reason: waiting.Parked, Pos: "82", Pending: []string{"t"}, Key: "ordering"}
		if err := waiting.Enter(t.Context(), coll, []waiting.Entry{entry}); err != nil {
			t.Fatal(err)
		}
		doc, err := coll.FindOne(t.Context(), bson.D{{Key: "id", Value: i}}).Raw()
		if err != nil || doc.Lookup("key").StringValue() != "ordering" || !doc.Lookup("envelope", "key").Equal(raw.Lookup("key")) {
			t.Errorf("a waiting envelope whose key is %v: %s, %v", key, doc, err)
		}
	}
}
