package purge

import (
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/waiting"
)

// nullable are the optional fields of an envelope.
var nullable = []string{
	"key", "expiresAt", "slot", "dueAt", "scheduledFor", "state", "pos", "pending", "attempts", "nextAt", "lastError", "history", "origin",
	"claim", "redelivered", "delivery", "replayOf", "sentAt", "sent",
}

// A document that has a field as null becomes the same exception as one without it, keeps no collection dirty, and is purged.
func TestN16_ANullFieldIsAnAbsentOne(t *testing.T) {
	t.Parallel()
	coll, o := exceptionOutbox(t)
	old := bson.Timestamp{T: 100, I: 1}
	var docs []any
	var list []waiting.Exception
	add := func(id string, nulls ...string) {
		doc := bson.D{{Key: "_id", Value: id}, {Key: "aggregateid", Value: "a"}, {Key: "ts", Value: old}}
		for _, f := range nulls {
			doc = append(doc, bson.E{Key: f, Value: nil})
		}
		docs = append(docs, doc)
		list = append(list, waiting.Exception{
			NS: mongodb.Namespace(coll), Raw: marshal(t, doc), State: "retry", Pos: "8265", Pending: []string{"t"}, Key: "a", Attempts: 1, Delay: time.Hour,
			Error: &waiting.ExceptionError{Class: "record_refused", Reason: "r", Topic: "t"},
		})
	}
	add("none")
	for _, f := range nullable {
		add(f, f)
	}
	add("all", nullable...)
	insert := func() {
		t.Helper()
		if _, err := coll.InsertMany(t.Context(), docs); err != nil {
			t.Fatal(err)
		}
	}

	insert()
	if dirty, err := outboxes.StillDirty(t.Context(), coll, slot.Range{}); err != nil || dirty {
		t.Errorf("the collection counts as dirty: %v, %v", dirty, err)
	}
	if p, err := PurgeBatch(t.Context(), coll, bson.Timestamp{}, bson.Timestamp{T: 200}, 1000); err != nil || p.Deleted != int64(len(docs)) {
		t.Errorf("%d of %d purged, %v", p.Deleted, len(docs), err)
	}

	insert()
	if err := waiting.WriteExceptions(t.Context(), o, list, nil); err != nil {
		t.Fatal(err)
	}
	want := findDocument(t, coll, "none")
	for i := range list {
		id := list[i].Raw.Lookup("_id").StringValue()
		got := findDocument(t, coll, id)
		for _, f := range append(nullable, "aggregateid") {
			// These fields contain the time of the write.
			if f == "nextAt" || f == "lastError" || f == "history" {
				if got[f] == nil {
					t.Errorf("%s: no %s", id, f)
				}
				continue
			}
			if fmt.Sprint(got[f]) != fmt.Sprint(want[f]) {
				t.Errorf("%s: %s is %v, want %v", id, f, got[f], want[f])
			}
		}
	}
	if dirty, err := outboxes.StillDirty(t.Context(), coll, slot.Range{}); err != nil || !dirty {
		t.Errorf("exceptions, and the collection counts as clean: %v, %v", dirty, err)
	}
}

// The ordering key of an envelope with an empty key is its aggregate's id: exceptions of that aggregate stand in one order.
func TestN15_AnEmptyKeyIsStoredAsTheOrderingKey(t *testing.T) {
	t.Parallel()
	coll, o := exceptionOutbox(t)
	for i, key := range []any{"", nil, int32(7)} {
		x := waiting.Exception{NS: mongodb.Namespace(coll), Raw: marshal(t, bson.D{{Key: "_id", Value: i}, {Key: "key", Value: key}}), State: "parked", Pos: "82", Pending: []string{"t"}, Key: "ordering"}
		if err := waiting.WriteExceptions(t.Context(), o, []waiting.Exception{x}, nil); err != nil {
			t.Fatal(err)
		}
		if d := findDocument(t, coll, i); d["key"] != "ordering" {
			t.Errorf("the key of an exception whose envelope has %v: %v", key, d["key"])
		}
	}
}
