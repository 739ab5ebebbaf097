package waiting

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/slot"
)

// owner runs transactions as a lease does, but for the fence.
type owner struct {
	client *mongo.Client
	dirty  []string
	n      int
	twice  bool // runs each function a second time after its commit, as after an unknown outcome
}

func (o *owner) Fenced(ctx context.Context, dirty []string, fn func(context.Context) error) error {
	o.n++
	o.dirty = append(o.dirty, dirty...)
	runs := 1
	if o.twice {
		runs = 2
	}

	for range runs {
		if err := o.client.UseSession(ctx, func(ctx context.Context) error {
			_, err := mongo.SessionFromContext(ctx).WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, fn(ctx) })
			return err
		}); err != nil {
			return err
		}
	}

	return nil
}

func exceptionOutbox(t *testing.T) (*mongo.Collection, *owner) {
	t.Helper()
	client := stacktest.Client(t)
	coll := mongodb.Majority(stacktest.Database(t, client).Collection("outbox"))
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	return coll, &owner{client: client, twice: true}
}

func marshal(t *testing.T, d bson.D) bson.Raw {
	t.Helper()
	raw, err := bson.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func findDocument(t *testing.T, coll *mongo.Collection, id any) bson.M {
	t.Helper()
	var m bson.M
	if err := coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Decode(&m); err != nil {
		t.Fatal(id, err)
	}
	return m
}

func TestN16_AnExceptionIsTheWholeEnvelopeOfTheStream(t *testing.T) {
	t.Parallel()
	coll, o := exceptionOutbox(t)
	payload := bson.D{{Key: "$inc", Value: "$key"}, {Key: "a.b", Value: bson.Binary{Data: []byte{0, 255}}}}
	// The envelope was inserted and deleted in one transaction.
	gone := Exception{
		NS: mongodb.Namespace(coll), Raw: marshal(t, bson.D{{Key: "_id", Value: "gone"}, {Key: "ts", Value: bson.Timestamp{T: 5, I: 5}}, {Key: "payload", Value: payload}}),
		State: "retry", Pos: "8265", Pending: []string{"$topic"}, Key: "$k", Attempts: 1, Delay: time.Hour, Node: "$n",
		Error: &ExceptionError{Class: record.RecordRefused, Reason: "$bad \xff", Topic: "$topic"},
	}

	own := gone
	own.Raw, own.State = marshal(t, bson.D{{Key: "_id", Value: "own"}, {Key: "key", Value: int64(7)}}), "parked"
	own.Key = "7"
	done := gone
	done.Raw = marshal(t, bson.D{{Key: "_id", Value: "done"}})
	if _, err := coll.InsertMany(t.Context(), []any{
		bson.D{{Key: "_id", Value: "own"}, {Key: "key", Value: int64(7)}},
		bson.D{{Key: "_id", Value: "done"}, {Key: "state", Value: "parked"}, {Key: "delivery", Value: int32(2)}},
	}); err != nil {
		t.Fatal(err)
	}
	if err := WriteExceptions(t.Context(), o, []Exception{gone, own, done}, nil); err != nil {
		t.Fatal(err)
	}

	d := findDocument(t, coll, "gone")
	at := d["nextAt"].(bson.DateTime).Time()
	if d["state"] != "retry" || d["pos"] != "8265" || d["key"] != "$k" || d["attempts"] != int32(1) || d["origin"] != "stream" || fmt.Sprint(d["pending"]) != "[$topic]" ||
		time.Until(at) < 59*time.Minute || time.Until(at) > 61*time.Minute || d["ts"].(bson.Timestamp).T < 1_600_000_000 {
		t.Errorf("exception: %v", d)
	}
	if fmt.Sprint(d["payload"]) != fmt.Sprint(payload) {
		t.Errorf("payload: %v", d["payload"])
	}
	if d["firstTs"] != (bson.Timestamp{T: 5, I: 5}) {
		t.Errorf("the first timestamp: %v", d["firstTs"])
	}
	if _, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "gone"}}, sentUpdate(nil)); err != nil {
		t.Fatal(err)
	}
	if sent := findDocument(t, coll, "gone"); sent["firstTs"] != (bson.Timestamp{T: 5, I: 5}) || sent["ts"].(bson.Timestamp).T < 1_600_000_000 || sent["state"] != nil {
		t.Errorf("the first timestamp of a sent envelope: %v", sent["firstTs"])
	}
	history, _ := d["history"].(bson.A)
	if last := d["lastError"].(bson.D); len(history) != 1 || last[0].Value != "record_refused" || last[1].Value != "$bad \uFFFD" {
		t.Errorf("errors: %v, %v", d["lastError"], history)
	}
	// The key is stored as a text, so that it has one order with equal keys that are texts.
	if d := findDocument(t, coll, "own"); d["key"] != "7" || d["nextAt"] != nil {
		t.Errorf("an envelope with its own key: %v", d)
	}
	if d := findDocument(t, coll, "done"); d["state"] != "parked" || d["delivery"] != int32(2) || d["pos"] != nil {
		t.Errorf("an exception was overwritten: %v", d)
	}
	if !slices.Equal(o.dirty, []string{mongodb.Namespace(coll)}) {
		t.Errorf("dirty: %v", o.dirty)
	}
}

func TestN03_ExceptionsAreWrittenInBoundedTransactions(t *testing.T) {
	t.Parallel()
	coll, o := exceptionOutbox(t)
	o.twice = false
	var list []Exception
	for i := range 2100 {
		list = append(list, Exception{NS: mongodb.Namespace(coll), Raw: marshal(t, bson.D{{Key: "_id", Value: i}}), State: "parked", Pos: "82", Pending: []string{"a"}, Key: "k"})
	}
	if err := WriteExceptions(t.Context(), o, list, nil); err != nil || o.n != 3 {
		t.Errorf("%d transactions, %v", o.n, err)
	}

	o.n, list = 0, list[:0]
	for i := range 3 {
		list = append(list, Exception{NS: mongodb.Namespace(coll), Raw: marshal(t, bson.D{{Key: "_id", Value: fmt.Sprint(i)}, {Key: "payload", Value: make([]byte, 5<<20)}}), State: "parked"})
	}
	if err := WriteExceptions(t.Context(), o, list, nil); err != nil || o.n != 3 {
		t.Errorf("%d transactions of 15 MiB, %v", o.n, err)
	}
	if n, _ := coll.CountDocuments(t.Context(), bson.D{{Key: "state", Value: "parked"}}); n != 2103 {
		t.Errorf("%d exceptions", n)
	}
}

func TestFatesAreIdempotentAndChangeOnlyPublishedEnvelopes(t *testing.T) {
	t.Parallel()
	coll, o := exceptionOutbox(t)
	begun := uint32(time.Now().Add(-time.Minute).Unix())
	old := bson.E{Key: "ts", Value: bson.Timestamp{T: 1000, I: 1}}
	ex := func(id string, more ...bson.E) bson.D {
		return append(bson.D{{Key: "_id", Value: id}, old, {Key: "state", Value: "parked"}, {Key: "pos", Value: "82"}}, more...)
	}

	due := func(id string) bson.D {
		return bson.D{{Key: "_id", Value: id}, old, {Key: "dueAt", Value: time.UnixMilli(9)}, {Key: "claim", Value: bson.D{{Key: "token", Value: "t"}}}}
	}
	if _, err := coll.InsertMany(t.Context(), []any{
		ex("failed", bson.E{Key: "attempts", Value: int32(2)}), ex("other", bson.E{Key: "delivery", Value: int32(1)}),
		bson.D{{Key: "_id", Value: "plain"}},
		due("due"), due("due failed"), due("due held"), due("stolen"), ex("sent"), ex("dropped"),
	}); err != nil {
		t.Fatal(err)
	}

	out := func(id string, end End, claim string) *decision {
		typ, val, _ := bson.MarshalValue(id)
		return &decision{
			Delivery: &Delivery{NS: mongodb.Namespace(coll), ID: bson.RawValue{Type: typ, Value: val}, Claim: claim, Pos: "8277", Key: "k"},
			fate:     Fate{End: end}, changed: true, removed: end == Dropped, heldState: "blocked", left: []string{"a"},
			failure: &ExceptionError{Class: record.RecordRefused, Reason: "r", Topic: "a"},
		}
	}

	f := NewFinisher(FinisherConfig{Retry: retry.Policy{Base: time.Hour, Cap: time.Hour}, Recording: "watermark"})
	list := []*decision{
		out("failed", Retrying, ""), out("other", Finished, ""), out("plain", Finished, ""), out("due", Finished, "t"), out("due failed", Retrying, "t"),
		out("due held", Waiting, "t"), out("stolen", Finished, "u"), out("sent", Finished, ""), out("dropped", Dropped, ""), out("gone", Retrying, ""),
	}

	list[0].Attempts = 2
	var matched []int64
	err := o.Fenced(t.Context(), nil, func(tx context.Context) error {
		n, err := f.writeFates(tx, list)
		// Skip an attempt that has to be repeated.
		if err == nil {
			matched = append(matched, n)
		}
		return err
	})
	if err != nil || matched[0] != 6 {
		t.Fatalf("matched %v, %v", matched, err)
	}
	if d := findDocument(t, coll, "failed"); d["attempts"] != int32(3) || len(d["history"].(bson.A)) != 1 || d["state"] != "retry" {
		t.Errorf("an attempt was spent twice: %v", d)
	}

	for _, id := range []string{"other", "plain", "stolen"} {
		if d := findDocument(t, coll, id); d["sentAt"] != nil {
			t.Errorf("%s was not ours: %v", id, d)
		}
	}
	if d := findDocument(t, coll, "due"); d["sentAt"] == nil || d["dueAt"] != nil || d["claim"] != nil || d["scheduledFor"] != bson.DateTime(9) {
		t.Errorf("due: %v", d)
	}
	// Its retention counts from the delivery.
	for _, id := range []string{"due", "sent"} {
		if d := findDocument(t, coll, id); d["ts"] == nil || d["ts"].(bson.Timestamp).T < begun {
			t.Errorf("%s: %v, want a stamp of the delivery", id, d)
		}
	}

	for id, state := range map[string]string{"due failed": "retry", "due held": "blocked"} {
		d := findDocument(t, coll, id)
		if d["state"] != state || d["origin"] != "scheduled" || d["pos"] != "8277" || d["key"] != "k" || d["dueAt"] != nil || d["claim"] != nil {
			t.Errorf("%s: %v", id, d)
		}
	}
	if n, _ := coll.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: bson.A{"dropped", "gone"}}}}}); n != 0 {
		t.Error("a dropped one is there, or one that was gone is there again")
	}

	raw, err := removeException(marshal(t, ex("x", bson.E{Key: "dueAt", Value: time.UnixMilli(9)}, bson.E{Key: "payload", Value: "p"})))
	if want := marshal(t, bson.D{{Key: "_id", Value: "x"}, old, {Key: "scheduledFor", Value: time.UnixMilli(9)}, {Key: "payload", Value: "p"}}); err != nil || raw.String() != want.String() {
		t.Errorf("%s, %v", raw, err)
	}
}

// TestN15_AScanIsInTheOrderOfTheIndex reads pages of every size, with keys of several types, many documents of one position, and changes between the pages.
func TestN15_AScanIsInTheOrderOfTheIndex(t *testing.T) {
	t.Parallel()
	coll, _ := exceptionOutbox(t)
	var docs []any
	states := []string{"retry", "blocked", "parked"}
	for i := range 120 {
		d := bson.D{{Key: "_id", Value: i}, {Key: "state", Value: states[i%3]}, {Key: "pending", Value: bson.A{[]string{"a", "b"}[i%2]}}}
		switch i % 8 {
		case 0:
			d = append(d, bson.E{Key: "key", Value: int32(i % 5)})
		case 1: // no key
		case 2:
			d = append(d, bson.E{Key: "key", Value: bson.ObjectID{byte(i)}})
		case 3:
			d = append(d, bson.E{Key: "key", Value: "$key"}, bson.E{Key: "pos", Value: "82"})
		default:
			d = append(d, bson.E{Key: "key", Value: fmt.Sprint("k", i%3)}, bson.E{Key: "pos", Value: fmt.Sprintf("82%02d", i*7%100)})
		}
		docs = append(docs, d)
	}

	docs = append(docs, bson.D{{Key: "_id", Value: "healthy"}}, bson.D{{Key: "_id", Value: "due"}, {Key: "dueAt", Value: time.Now()}})
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	for _, limit := range []int{1, 2, 7, 50, 120, 500} {
		seen := map[int32]bool{}
		places := map[string]string{}
		order := []string{}
		readAll(t, &ExceptionScan{Coll: coll}, limit, func(raw bson.Raw) {
			id := raw.Lookup("_id").Int32()
			if seen[id] {
				t.Errorf("limit %d: %d twice", limit, id)
			}
			seen[id] = true
			key, pos := raw.Lookup("key").String(), ""
			if s, ok := raw.Lookup("pos").StringValueOK(); ok {
				pos = s
			}
			if last, again := places[key]; again && (pos < last || order[len(order)-1] != key) {
				t.Errorf("limit %d: %s of key %s after %s, key %s", limit, pos, key, last, order[len(order)-1])
			}
			places[key] = pos
			order = append(order, key)
		})
		if len(seen) != 120 {
			t.Errorf("limit %d: %d of 120", limit, len(seen))
		}
	}

	n := 0
	readAll(t, &ExceptionScan{Coll: coll, Skip: []string{"a"}, Keys: keysOf(t, "k0", "k1")}, 3, func(raw bson.Raw) {
		n++
		if key := raw.Lookup("key").StringValue(); key == "k2" || raw.Lookup("_id").Int32()%2 == 0 {
			t.Errorf("%s was not requested", raw)
		}
	})

	readAll(t, &ExceptionScan{Coll: coll, Skip: []string{"a"}}, 3, func(bson.Raw) { n++ })
	if n != 20+60 {
		t.Errorf("%d with filters", n)
	}
}

func keysOf(t *testing.T, keys ...string) (list []bson.RawValue) {
	t.Helper()
	for _, k := range keys {
		typ, val, err := bson.MarshalValue(k)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, bson.RawValue{Type: typ, Value: val})
	}
	return list
}

func readAll(t *testing.T, s *ExceptionScan, limit int, take func(bson.Raw)) {
	t.Helper()
	for more := true; more; {
		var err error
		if more, err = s.Page(t.Context(), limit, func(raw bson.Raw) error { take(raw); return nil }); err != nil {
			t.Fatal(err)
		}
	}
}

// TestExceptionQueriesUseTheIndexes looks at the plans: none may read documents that it does not return, nor sort, but for
// that of several keys, which sorts entries of the index.
func TestExceptionQueriesUseTheIndexes(t *testing.T) {
	t.Parallel()
	coll, _ := exceptionOutbox(t)
	var docs []any
	for i := range 3000 {
		docs = append(docs, bson.D{
			{Key: "_id", Value: i},
			{Key: "state", Value: []string{"retry", "blocked", "parked"}[i%3]},
			{Key: "key", Value: fmt.Sprint("k", i%50)},
			{Key: "pos", Value: fmt.Sprintf("82%05d", i)},
			{Key: "pending", Value: bson.A{"a"}},
			{Key: "nextAt", Value: time.Now().Add(time.Hour)},
		})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	at := &ExceptionScan{Coll: coll}
	at.notePlace(marshal(t, bson.D{{Key: "_id", Value: 1}, {Key: "key", Value: "k20"}, {Key: "pos", Value: "8201000"}}))
	beyond := *at
	beyond.rest = false
	sort := beyond.sortOrder()
	for name, q := range map[string]struct {
		filter, sort bson.D
		most         int64
	}{
		"first":  {(&ExceptionScan{Coll: coll}).buildFilter(), sort, 120},
		"keys":   {(&ExceptionScan{Coll: coll, Keys: keysOf(t, "k3", "k4")}).buildFilter(), sort, 130},
		"rest":   {at.buildFilter(), at.sortOrder(), 130},
		"beyond": {beyond.buildFilter(), sort, 120},
		"due":    {dueFilter(time.Now(), nil), bson.D{{Key: "nextAt", Value: 1}}, 5},
	} {
		raw, err := coll.Database().RunCommand(t.Context(), bson.D{{Key: "explain", Value: bson.D{
			{Key: "find", Value: coll.Name()}, {Key: "filter", Value: q.filter}, {Key: "sort", Value: q.sort}, {Key: "limit", Value: 100},
		}}, {Key: "verbosity", Value: "executionStats"}}).Raw()
		if err != nil {
			t.Fatal(err)
		}
		plan := raw.Lookup("queryPlanner", "winningPlan").String()
		keys, _ := raw.Lookup("executionStats", "totalKeysExamined").AsInt64OK()
		examined, _ := raw.Lookup("executionStats", "totalDocsExamined").AsInt64OK()
		if name != "keys" && strings.Contains(plan, `"SORT"`) || strings.Contains(plan, "COLLSCAN") || keys > q.most || examined > q.most {
			var tidy any
			_ = json.Unmarshal([]byte(plan), &tidy)
			t.Errorf("%s: %d keys and %d documents examined: %v", name, keys, examined, tidy)
		}
	}
}

func TestFailedOnesAreListedAndReset(t *testing.T) {
	t.Parallel()
	coll, o := exceptionOutbox(t)
	now := time.Now()
	var docs []any
	for i := range 130 {
		docs = append(docs, bson.D{
			{Key: "_id", Value: i},
			{Key: "state", Value: "retry"},
			{Key: "attempts", Value: int32(3)},
			{Key: "nextAt", Value: now.Add(time.Hour)},
			{Key: "pos", Value: outboxes.PosAt(bson.Timestamp{T: uint32(1000 + i)})},
			{Key: "pending", Value: bson.A{"a"}},
			{Key: "lastError", Value: bson.D{{Key: "class", Value: "record_refused"}, {Key: "at", Value: now.Add(time.Duration(i) * time.Second)}}},
		})
	}

	docs = append(docs, bson.D{{Key: "_id", Value: "parked"}, {Key: "state", Value: "parked"}, {Key: "attempts", Value: int32(1)}},
		bson.D{{Key: "_id", Value: "due"}, {Key: "dueAt", Value: now}})
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	list, err := ListFailed(t.Context(), coll, nil, 1000)
	if err != nil || len(list) != 100 || list[0].ID.Int32() != 129 || list[99].ID.Int32() != 30 || list[0].LastError.Class != "record_refused" || list[0].Attempts != 3 {
		t.Fatalf("%d, %v, %+v", len(list), err, list[:1])
	}

	counts, err := CountExceptions(t.Context(), coll, slot.Range{})
	if err != nil || len(counts) != 3 || counts[1] != (ExceptionCount{"retry", "a", 130, time.Unix(1000, 0)}) || counts[2].State != "scheduled" || counts[2].N != 1 {
		t.Errorf("counts: %+v, %v", counts, err)
	}

	parked, _ := bson.Marshal(bson.D{{Key: "", Value: "parked"}})
	ids := []bson.RawValue{list[0].ID, list[1].ID, bson.Raw(parked).Lookup("")}
	var n, hurried int64
	err = o.Fenced(t.Context(), nil, func(tx context.Context) (err error) {
		if n, err = ResetFailed(tx, coll, ids[:1]); err == nil {
			hurried, err = HurryFailed(tx, coll, ids[1:])
		}
		return err
	})
	if err != nil || n > 1 || hurried != 1 {
		t.Fatalf("%d, %d, %v", n, hurried, err)
	}
	if d := findDocument(t, coll, 129); d["attempts"] != int32(0) || d["lastError"] != nil || d["nextAt"].(bson.DateTime).Time().After(time.Now()) {
		t.Errorf("reset: %v", d)
	}
	if d := findDocument(t, coll, 128); d["attempts"] != int32(3) || d["nextAt"].(bson.DateTime).Time().After(time.Now()) {
		t.Errorf("hurried: %v", d)
	}
	if keys, err := DueRetries(t.Context(), coll, time.Now(), nil, 10, slot.Range{}); err != nil || len(keys) != 2 {
		t.Errorf("due: %v, %v", keys, err)
	}
	if keys, err := DueRetries(t.Context(), coll, time.Now(), []string{"a"}, 10, slot.Range{}); err != nil || len(keys) != 0 {
		t.Errorf("due for a parked topic: %v, %v", keys, err)
	}
	if still, err := outboxes.StillDirty(t.Context(), coll, slot.Range{}); err != nil || !still {
		t.Errorf("still dirty: %v, %v", still, err)
	}
	if _, err := coll.DeleteMany(t.Context(), bson.D{{Key: "state", Value: bson.D{{Key: "$exists", Value: true}}}}); err != nil {
		t.Fatal(err)
	}

	for _, want := range []bool{true, false} { // one is scheduled
		if still, err := outboxes.StillDirty(t.Context(), coll, slot.Range{}); err != nil || still != want {
			t.Errorf("still dirty: %v, %v", still, err)
		}
		if _, err := coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: "due"}}); err != nil {
			t.Fatal(err)
		}
	}
}

// A service can store a document with operators, or a regular expression, as a key. A scan finds such exceptions by their keys
// and goes on behind them; the server never takes a key for an operator.
func TestAKeyIsNoOperator(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	odd := bson.A{
		bson.D{{Key: "$bogus", Value: 1}}, bson.D{{Key: "$gt", Value: ""}}, bson.D{{Key: "$where", Value: "sleep(1000)"}}, bson.Regex{Pattern: ".*"}, "plain", bson.Null{}, int64(7),
	}

	var keys []bson.RawValue
	for i, key := range odd {
		for j := range 3 {
			if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: fmt.Sprint(i, "-", j)}, {Key: "state", Value: "parked"}, {Key: "pos", Value: fmt.Sprint(82 + j)}, {Key: "key", Value: key}}); err != nil {
				t.Fatal(err)
			}
		}
		kind, value, err := bson.MarshalValue(key)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, bson.RawValue{Type: kind, Value: value})
	}

	count := func(s *ExceptionScan) (n int) {
		readAll(t, s, 2, func(bson.Raw) { n++ })
		return n
	}
	if n := count(&ExceptionScan{Coll: coll}); n != 3*len(odd) {
		t.Errorf("a scan of everything has %d of %d", n, 3*len(odd))
	}

	for i := range keys {
		if n := count(&ExceptionScan{Coll: coll, Keys: keys[i : i+1]}); n != 3 {
			t.Errorf("key %v: %d of 3", odd[i], n)
		}
	}
	if n := count(&ExceptionScan{Coll: coll, Keys: keys}); n != 3*len(odd) {
		t.Errorf("a scan of all keys has %d of %d", n, 3*len(odd))
	}
}
