package waiting

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// The id of a document depends on everything that distinguishes two waiting envelopes, and on nothing that a repetition changes.
func TestDocumentsOfTwoEnvelopesHaveTwoIDs(t *testing.T) {
	t.Parallel()
	base := newEntry(t, 7, "k")
	for name, change := range map[string]func(*Entry){
		"watcher":              func(e *Entry) { e.Watcher = "orders2" },
		"outbox":               func(e *Entry) { e.NS = "shop.outbox2" },
		"watcher and outbox":   func(e *Entry) { e.Watcher, e.NS = "order", "sshop.outbox" },
		"type of the id":       func(e *Entry) { e.Raw = marshal(t, bson.D{{Key: "_id", Value: int64(7)}}) },
		"text that looks like": func(e *Entry) { e.Raw = marshal(t, bson.D{{Key: "_id", Value: "7"}}) },
		"position":             func(e *Entry) { e.Pos = "82000008" },
		"delivery":             func(e *Entry) { e.Delivery = 1 },
		"topics":               func(e *Entry) { e.Pending = []string{"a", "b"} },
	} {
		e := base
		change(&e)
		if e.DocumentID() == base.DocumentID() {
			t.Errorf("another %s has the same id", name)
		}
	}

	same := base
	same.Key, same.Reason, same.Origin, same.NextAt, same.Attempts, same.Number, same.Redelivered = "x", Retry, OriginSweep, time.Now(), 3, "-01", true
	same.Raw = marshal(t, bson.D{{Key: "_id", Value: int32(7)}, {Key: "payload", Value: "another"}})
	if same.DocumentID() != base.DocumentID() {
		t.Error("a repetition has another id")
	}
	two := base
	two.Pending = []string{"b", "a"}
	other := base
	other.Pending = []string{"a", "b"}
	if two.DocumentID() != other.DocumentID() {
		t.Error("the order of the topics makes another id")
	}
}

func TestN16_EnterIsIdempotentAndKeepsTheEnvelope(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	huge := strings.Repeat("x", 3000)
	raw := marshal(t, bson.D{
		{Key: "_id", Value: bson.D{{Key: "$gt", Value: huge}}},
		{Key: "$set", Value: bson.D{{Key: "a.b", Value: "$x"}}},
		{Key: "", Value: int32(1)},
		{Key: "twice", Value: 1},
		{Key: "twice", Value: 2},
	})
	e := newEntry(t, 7, "$key", at(time.Hour), func(e *Entry) {
		e.Raw, e.Pending, e.Delivery, e.ReplayOf, e.Redelivered, e.Attempts = raw, []string{"b", "a"}, 3, "run", true, 2
		e.Error = &record.Attempt{Class: record.RecordRejected, Reason: "$bad \xff" + huge, Topic: "$topic", At: time.Now(), Node: "n"}
	})
	enter(t, coll, e)
	// Somebody has changed the document since.
	if _, err := coll.UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "attempts", Value: 0}}}}); err != nil {
		t.Fatal(err)
	}
	e.Reason, e.Attempts = Parked, 9
	enter(t, coll, e)

	var docs []bson.Raw
	cur, err := coll.Find(t.Context(), bson.D{})
	if err == nil {
		err = cur.All(t.Context(), &docs)
	}
	if err != nil || len(docs) != 1 {
		t.Fatalf("%d documents, %v", len(docs), err)
	}
	d := ReadDocument(docs[0])
	if !bytes.Equal(d.Envelope, raw) || d.Size != len(raw) {
		t.Errorf("the envelope is %s", d.Envelope)
	}
	if d.DocumentID != e.DocumentID() || d.NS != "shop.outbox" || !d.ID.Equal(raw.Lookup("_id")) || d.Delivery != 3 || d.Key != "$key" || d.Pos != e.Pos ||
		!slices.Equal(d.Pending, []string{"a", "b"}) || d.Reason != Retry || d.Origin != OriginStream || d.Attempts != 0 || !d.Redelivered || d.ReplayOf != "run" ||
		d.NextAt != e.NextAt.UnixMilli() {
		t.Errorf("%+v", d)
	}

	if len(d.History) != 1 || d.Error == nil || *d.Error != d.History[0] || d.Error.Topic != "$topic" || len(d.Error.Reason) > 2100 {
		t.Errorf("%+v, %d in the history", d.Error, len(d.History))
	}

	// The entry describes the document as the sender reads it, without its failures.
	d.Error, d.History = nil, nil
	e.Reason, e.Attempts = Retry, 0
	want := e.Document()
	slices.Sort(want.Pending)
	if fmt.Sprintf("%+v", want) != fmt.Sprintf("%+v", d) {
		t.Errorf("the entry promises\n%+v, stored is\n%+v", want, d)
	}
}

// A list is stored by one insert, whatever part of it exists already, or appears twice in it. An upsert of each entry costs twice as much.
func TestAListIsStoredByOneInsert(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	var list []Entry
	for i := range 20 {
		list = append(list, newEntry(t, i, "k"))
	}
	enter(t, coll, list[5:8]...)
	if err := coll.Database().RunCommand(t.Context(), bson.D{{Key: "profile", Value: 2}}).Err(); err != nil {
		t.Fatal(err)
	}
	enter(t, coll, append(list, list[3])...)
	enter(t, coll, list...)

	if n := count(t, coll, bson.D{}); n != 20 {
		t.Errorf("%d envelopes wait, want 20", n)
	}
	profile := coll.Database().Collection("system.profile")
	for op, want := range map[string]int64{"insert": 1, "update": 0} {
		if n := count(t, profile, bson.D{{Key: "op", Value: op}}); n != want {
			t.Errorf("%d statements %s, want %d", n, op, want)
		}
	}
}

// Garbage in the store is read as missing fields, and without a panic.
func TestADocumentOfAnyFormIsRead(t *testing.T) {
	t.Parallel()
	e := newEntry(t, 7, "k")
	doc := marshal(t, bson.D{
		{Key: "_id", Value: "x"},
		{Key: "ns", Value: 1},
		{Key: "topics", Value: bson.A{"a"}},
		{Key: "nextAt", Value: "x"},
		{Key: "attempts", Value: "x"},
		{Key: "delivery", Value: int64(1) << 40},
		{Key: "sent", Value: "x"},
		{Key: "envelope", Value: e.Raw},
	})
	if d := ReadDocument(doc); d.NS != "" || d.Pending != nil || d.NextAt != 0 || d.Attempts != 0 || d.Sent != nil || !bytes.Equal(d.Envelope, e.Raw) {
		t.Errorf("%+v", d)
	}

	for i := range doc {
		ReadDocument(doc[:i])
		changed := bytes.Clone(doc)
		changed[i] ^= 0xff
		ReadDocument(changed)
	}
}

// The largest key and envelope that fit a document can wait, although the key is in an index.
func TestALongKeyCanWait(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	key := strings.Repeat("k", 7<<20)
	long := newEntry(t, 1, key, func(e *Entry) { e.Raw = marshal(t, bson.D{{Key: "_id", Value: int32(1)}, {Key: "key", Value: key}}) })
	enter(t, coll, long, newEntry(t, 2, "k"))
	n := 0
	readAll(t, &Scan{Store: storeOf(coll)}, 1, func(*Document) { n++ })

	if n != 2 {
		t.Errorf("%d of 2 are read", n)
	}
	if _, err := WriteChanges(t.Context(), coll, nil, [][IDSize]byte{long.DocumentID()}); err != nil {
		t.Error(err)
	}
	if n := count(t, coll, bson.D{}); n != 1 {
		t.Errorf("%d are left", n)
	}
}

func TestChangesAreIdempotent(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	list := []Entry{
		newEntry(t, 1, "k", at(0), func(e *Entry) { e.Attempts = 1 }), newEntry(t, 2, "k", at(0), func(e *Entry) { e.Attempts = 1 }),
		newEntry(t, 3, "k", func(e *Entry) { e.Pending = []string{"a", "b"} }), newEntry(t, 4, "k"), newEntry(t, 5, "k"),
	}
	enter(t, coll, list...)
	id := func(n int) [IDSize]byte { return list[n-1].DocumentID() }
	failure := &record.Attempt{Class: record.RecordRejected, Reason: "no", Topic: "a", At: time.UnixMilli(5), Node: "n"}
	next := time.UnixMilli(99)
	changes := []*Change{
		{DocumentID: id(1), Reason: Retry, Pending: []string{"a"}, Failure: failure, Attempts: 1, NextAt: next},
		{DocumentID: id(2), Reason: Parked, Attempts: 1},
		{DocumentID: id(3), Reason: Blocked, Pending: []string{"b"}},
		// An operator has reset it.
		{DocumentID: id(5), Reason: Retry, Pending: []string{"b"}, Failure: failure, Attempts: 7, NextAt: next},
		{DocumentID: [IDSize]byte{9}, Reason: Parked},
	}

	for round := range 2 {
		if complete, err := WriteChanges(t.Context(), coll, changes, [][IDSize]byte{id(4)}); err != nil || complete {
			t.Errorf("round %d: complete %t, %v", round, complete, err)
		}
	}
	if d := find(t, coll, 1); d["attempts"] != int32(2) || len(d["history"].(bson.A)) != 1 || d["nextAt"].(bson.DateTime) != 99 || d["reason"] != "retry" || d["error"] == nil {
		t.Errorf("a failed attempt: %v", d)
	}
	// It is found when its topic is free again, and keeps its attempts.
	if d := find(t, coll, 2); d["attempts"] != int32(1) || d["nextAt"] != nil || d["reason"] != "parked" {
		t.Errorf("a parked one: %v", d)
	}
	if d := find(t, coll, 3); d["topics"] != "b" || d["reason"] != "blocked" {
		t.Errorf("one of two topics: %v", d)
	}
	if d := find(t, coll, 5); d["attempts"] != int32(0) || d["history"] != nil || d["topics"] != "b" {
		t.Errorf("a reset one: %v", d)
	}
	found, err := FindExisting(t.Context(), coll, [][IDSize]byte{id(1), id(4), {9}})
	if err != nil || len(found) != 1 || !found[id(1)] {
		t.Errorf("existing are %v, %v", found, err)
	}
}

// Only the latest failures are kept, so that a document stays small.
func TestTheHistoryIsBounded(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	e := newEntry(t, 1, "k", at(0))
	enter(t, coll, e)

	for n := range record.KeptAttempts + 5 {
		c := &Change{
			DocumentID: e.DocumentID(), Reason: Retry, Attempts: int32(n), NextAt: time.Now(),
			Failure: &record.Attempt{Class: record.RecordRejected, Reason: fmt.Sprint(n, strings.Repeat("x", 1<<16)), At: time.Now()},
		}
		if _, err := WriteChanges(t.Context(), coll, []*Change{c}, nil); err != nil {
			t.Fatal(err)
		}
	}
	d := find(t, coll, 1)
	h := d["history"].(bson.A)
	if last := h[len(h)-1].(bson.D)[1].Value.(string); len(h) != record.KeptAttempts || !strings.HasPrefix(last, fmt.Sprint(record.KeptAttempts+4)) || len(last) > 3000 {
		t.Errorf("%d failures, the last one with %d bytes", len(h), len(last))
	}
}

// Failed envelopes are listed, counted and made due, while others stay as they are.
func TestFailedOnesAreListedAndReset(t *testing.T) {
	t.Parallel()
	coll := newColl(t)
	var list []Entry
	for i := range 130 {
		list = append(list, newEntry(t, i, fmt.Sprintf("k%03d", i), at(time.Hour), func(e *Entry) {
			e.Attempts = 3
			e.Pos = fmt.Sprintf("82%08X00000000", 1000+i)
			e.Error = &record.Attempt{Class: record.RecordRejected, Reason: "no", At: time.Now()}
		}))
	}
	list = append(list, newEntry(t, 200, "parked", func(e *Entry) { e.Attempts = 1 }), newEntry(t, 201, "audit", at(time.Hour), func(e *Entry) { e.Watcher, e.Attempts = "audit", 1 }))
	enter(t, coll, list...)

	q := Query{Watcher: "orders", Failed: true}
	var keys []string
	after := ""
	for {
		page, next, err := List(t.Context(), coll, q, []string{"payload"}, 40, after)
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range page {
			keys = append(keys, item.Key)
			if item.Attempts != 3 || item.Error == nil || len(item.History) != 1 || !slices.Equal(item.Pending, []string{"a"}) {
				t.Fatalf("%+v", item)
			}
			if _, err := item.Envelope.LookupErr("payload"); err == nil {
				t.Fatal("a page has payloads")
			}
		}
		if after = next; after == "" {
			break
		}
	}
	if len(keys) != 130 || !slices.IsSorted(keys) {
		t.Errorf("%d are listed, in order: %t", len(keys), slices.IsSorted(keys))
	}

	counts, err := CountGroups(t.Context(), coll, Query{Watcher: "orders"})
	if err != nil || len(counts) != 2 || counts[0] != (Count{"shop.outbox", Parked, "a", 1, time.Unix(0x82000200>>8, 0)}) && counts[0].N != 1 || counts[1].N != 130 || !counts[1].Oldest.Equal(time.Unix(1000, 0)) {
		t.Errorf("counts: %+v, %v", counts, err)
	}

	one := q
	one.IDs = []bson.RawValue{list[0].Raw.Lookup("_id"), list[130].Raw.Lookup("_id"), list[131].Raw.Lookup("_id")}
	if n, err := RetryFailed(t.Context(), coll, one, true); err != nil || n != 1 {
		t.Errorf("%d are reset, %v", n, err)
	}
	one.IDs = one.IDs[1:]
	one.IDs[0] = list[1].Raw.Lookup("_id")
	if n, err := RetryFailed(t.Context(), coll, one, false); err != nil || n != 1 {
		t.Errorf("%d are hurried, %v", n, err)
	}
	if d := find(t, coll, 0); d["attempts"] != int32(0) || d["error"] != nil || d["nextAt"].(bson.DateTime).Time().After(time.Now().Add(time.Minute)) {
		t.Errorf("reset: %v", d)
	}
	if d := find(t, coll, 1); d["attempts"] != int32(3) || d["error"] == nil || d["nextAt"].(bson.DateTime).Time().After(time.Now().Add(time.Minute)) {
		t.Errorf("hurried: %v", d)
	}
	if d := find(t, coll, 201); !d["nextAt"].(bson.DateTime).Time().After(time.Now()) {
		t.Errorf("another watcher's: %v", d)
	}
	if due, err := storeOf(coll).DueKeys(t.Context(), time.Now(), nil, 10); err != nil || len(due) != 2 {
		t.Errorf("due: %v, %v", due, err)
	}
	if due, err := storeOf(coll).DueKeys(t.Context(), time.Now(), []string{"a"}, 10); err != nil || len(due) != 0 {
		t.Errorf("due for a parked topic: %v, %v", due, err)
	}
}
