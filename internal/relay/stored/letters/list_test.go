package letters

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
)

// order returns an envelope.
func order(i int, fields ...bson.E) bson.D {
	return append(bson.D{
		{Key: "_id", Value: fmt.Sprintf("id-%06d", (i*7919)%100000)},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: fmt.Sprint(i % 10)},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: "x"},
		{Key: "n", Value: i},
	}, fields...)
}

func at(i int) func(*Letter) { return func(l *Letter) { l.Pos = fmt.Sprintf("82%08X", i) } }

// toValues returns the values as BSON.
func toValues(t *testing.T, values ...any) []bson.RawValue {
	t.Helper()
	out := make([]bson.RawValue, len(values))
	for i, v := range values {
		typ, data, err := bson.MarshalValue(v)
		if err != nil {
			t.Fatal(err)
		}
		out[i] = bson.RawValue{Type: typ, Value: data}
	}
	return out
}

// markRequeued marks a letter as an operator's requeue does.
func (b *bench) markRequeued(id string) {
	b.t.Helper()
	set := bson.D{{Key: "$set", Value: bson.D{{Key: "requeued", Value: Requeue{At: b.now, Actor: "ann", Delivery: 1}}}}}
	if _, err := b.coll.UpdateOne(b.t.Context(), bson.D{{Key: "_id", Value: id}}, set); err != nil {
		b.t.Fatal(err)
	}
}

// maxListed is larger than a test's lists of all letters.
const maxListed = 1000

// list returns up to limit letters after a cursor, and the cursor of the rest.
func (b *bench) list(q Query, limit int, after string) ([]Dead, string) {
	b.t.Helper()
	q.Watcher = "orders"
	list, next, err := List(b.t.Context(), b.coll, q, limit, after)
	if err != nil {
		b.t.Fatal(err)
	}
	return list, next
}

func TestQueriesFindTheNamedLetters(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	named := func(id any, change func(*Letter), fields ...bson.E) Letter {
		doc := append(order(1), fields...)
		doc[0].Value = id
		return b.newLetter(doc, change)
	}
	uid := bson.Binary{Subtype: bson.TypeBinaryUUID, Data: []byte("0123456789abcdef")}
	oid := bson.NewObjectID()
	huge := make([]byte, 2<<10)
	a := named("a", func(l *Letter) { l.Reason, l.Class, l.NS = "topic (x) is gone", record.NotAllowed, "mall.outbox" })
	c := named("c", func(l *Letter) { l.Topic, l.Reason = "payments", "topic [x] is gone" }, bson.E{Key: "key", Value: uid})
	h := named(oid, func(l *Letter) { l.Class, l.Reason = record.AttemptsExhausted, "Topic" })
	large := named("large", func(*Letter) {}, bson.E{Key: "extra", Value: make([]byte, maxInline+1)})
	other := named("a", func(l *Letter) { l.Watcher = "other" })
	wide := named(bson.Binary{Data: huge}, func(*Letter) {})

	// mid is after the first two letters and before the others.
	ids := b.write(a, c)
	mid := b.now.Add(time.Millisecond)
	b.now = b.now.Add(2 * time.Millisecond)
	b.write(h, large, other, wide)
	b.markRequeued(ids[0])

	w := IDText(ShortID(toValues(t, bson.Binary{Data: huge})[0]))
	for name, q := range map[string]struct {
		Query
		want []string
	}{
		"everything":          {Query{}, []string{"a", "c", oid.Hex(), "large", w}},
		"ids":                 {Query{IDs: toValues(t, "a", "large", "nobody")}, []string{"a", "large"}},
		"letters":             {Query{Letters: []string{ids[1], "dead-nobody"}}, []string{"c"}},
		"letters and ids":     {Query{Letters: ids[1:], IDs: toValues(t, "a")}, []string{"a", "c"}},
		"an id of 2 KiB":      {Query{IDs: toValues(t, bson.Binary{Data: huge})}, []string{w}},
		"its digest":          {Query{IDs: ParseIDText(w)}, []string{w}},
		"an outbox":           {Query{NS: "mall.outbox"}, []string{"a"}},
		"an ObjectId as text": {Query{IDs: toValues(t, oid.Hex())}, nil},
		"an ObjectId":         {Query{IDs: toValues(t, oid)}, []string{oid.Hex()}},
		"from":                {Query{From: mid}, []string{oid.Hex(), "large", w}},
		"to":                  {Query{To: mid}, []string{"a", "c"}},
		"topic":               {Query{Topic: "payments"}, []string{"c"}},
		"type":                {Query{Type: "OrderPlaced", Class: record.NotAllowed}, []string{"a"}},
		"another type":        {Query{Type: "Order"}, nil},
		"aggregate type":      {Query{AggregateType: "order", Message: "topic"}, []string{"a", "c"}},
		"key":                 {Query{Key: "30313233-3435-3637-3839-616263646566"}, []string{"c"}},
		"aggregate id as key": {Query{Key: "1"}, []string{"a", oid.Hex(), "large", w}},
		"message":             {Query{Message: "topic ("}, []string{"a"}},
		"requeued":            {Query{RequeueStatus: Requeued}, []string{"a"}},
		"not requeued":        {Query{RequeueStatus: NotRequeued}, []string{"c", oid.Hex(), "large", w}},
		"nothing":             {Query{Class: record.Expired}, nil},
	} {
		list, next := b.list(q.Query, maxListed, "")
		var found []string
		for _, d := range list {
			if d.Envelope != nil || d.Watcher != "orders" {
				t.Errorf("%s: the list contains an envelope or a letter of %s", name, d.Watcher)
			}
			found = append(found, d.IDText())
		}
		slices.Sort(found)
		slices.Sort(q.want)
		q.Watcher = "orders"
		if n, err := Count(t.Context(), b.coll, q.Query); n != int64(len(q.want)) || err != nil {
			t.Errorf("%s: counted %d, %v; want %d", name, n, err, len(q.want))
		}
		if !slices.Equal(found, q.want) || next != "" {
			t.Errorf("%s: got %v, next page %q, want %v", name, found, next, q.want)
		}
	}

	counts, more, err := CountTopics(t.Context(), b.coll, "orders", 5)
	if err != nil || more || counts["payments"] != 1 || counts["outbox.event.order"] != 3 {
		t.Errorf("by topic: %v, %v, %v", counts, more, err)
	}
	if _, more, err = CountTopics(t.Context(), b.coll, "orders", 2); err != nil || !more {
		t.Errorf("by topic with a limit: %v, %v", more, err)
	}
}

// The letters of many outboxes are one list. A page stays valid while letters come and go.
func TestPagesOfManyOutboxesAreStable(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	const outboxes = 300
	var all []Letter
	for i := range 2 * outboxes {
		all = append(all, b.newLetter(order(i), at(i), func(l *Letter) { l.NS = fmt.Sprintf("tenant-%03d.outbox", i%outboxes) }))
	}
	// The letters of one write have the same time.
	b.write(all[:outboxes]...)
	b.now = b.now.Add(time.Millisecond)
	b.write(all[outboxes:]...)

	first, next := b.list(Query{}, maxListed, "")
	if len(first) != len(all) || next != "" {
		t.Fatalf("one page: got %d, want %d", len(first), len(all))
	}

	// Letters that are added between the pages are newer than these.
	b.now = b.now.Add(time.Second)
	var seen []string
	after := ""
	for n := 0; ; n++ {
		got, next := b.list(Query{}, 70, after)
		for _, d := range got {
			seen = append(seen, d.ID)
		}
		if next == "" {
			break
		}
		after = next

		// Between two pages, a letter of the first one is discarded, and a new one is added.
		q := Query{Watcher: "orders", Letters: []string{got[0].ID}}
		if n, err := Discard(t.Context(), b.coll, b.db.Collection("watchers"), q, Discarding{}, nil); err != nil || n != 1 {
			t.Fatal(n, err)
		}
		b.write(b.newLetter(order(1000+n), at(n), func(l *Letter) { l.NS = fmt.Sprintf("tenant-%03d.outbox", n) }))
	}
	var want []string
	for _, d := range first {
		want = append(want, d.ID)
	}
	if !slices.Equal(seen, want) {
		t.Errorf("the pages have %d letters in another order, want the %d of one page", len(seen), len(want))
	}

	for _, invalid := range []string{"x", mustEncode(t, bson.D{{Key: "f", Value: "at"}, {Key: "v", Value: 5}, {Key: "i", Value: "x"}}), mustEncode(t, bson.D{})} {
		if _, _, err := List(t.Context(), b.coll, Query{Watcher: "orders"}, 10, invalid); !errors.Is(err, listing.ErrCursor) {
			t.Errorf("cursor %q: got %v, want %v", invalid, err, listing.ErrCursor)
		}
	}
}

func mustEncode(t *testing.T, place any) string {
	t.Helper()
	text, err := listing.EncodeCursor(place)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestSummary(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	ids := b.write(
		b.newLetter(order(1)),
		b.newLetter(order(2), func(l *Letter) { l.NS = "mall.outbox" }),
		b.newLetter(order(3), func(l *Letter) { l.Class = record.Expired }),
		b.newLetter(order(4), func(l *Letter) { l.Topic = "" }),
		b.newLetter(order(5), func(l *Letter) { l.Watcher = "other" }),
	)
	b.markRequeued(ids[0])

	got, err := Summarize(t.Context(), b.coll, Query{Watcher: "orders"})
	if err != nil || len(got) != 3 {
		t.Fatalf("got %+v, %v, want 3 groups", got, err)
	}
	g := got[0]
	if g.Count != 2 || g.NotRequeued != 1 || !g.First.Equal(b.now) || !g.Last.Equal(b.now) {
		t.Errorf("the counts of the first group: %+v", g)
	}
	if g.Topic != "outbox.event.order" || g.Type != "OrderPlaced" || g.Class != record.Malformed {
		t.Errorf("the first group: %+v", g)
	}
	if len(g.Fingerprint) != 16 || g.Failure == "" || got[1].Fingerprint == g.Fingerprint {
		t.Errorf("the failure of the first group: %+v", g)
	}
	if list, _ := b.list(Query{Watcher: "orders", Fingerprint: g.Fingerprint}, maxListed, ""); len(list) != 2 {
		t.Errorf("%d letters have the fingerprint of the first group, want 2", len(list))
	}
	if got[1].Topic != "" || got[2].Class != record.Expired {
		t.Errorf("the other groups: %+v", got[1:])
	}

	later := Query{Watcher: "orders", From: time.Now().Add(time.Hour)}
	if got, err := Summarize(t.Context(), b.coll, later); err != nil || len(got) != 0 {
		t.Errorf("a time range without letters: got %+v, %v, want none", got, err)
	}
}

// insertMany makes the server create n similar letters, 100 for each second from at on.
func (b *bench) insertMany(n int, at time.Time) {
	b.t.Helper()
	p, err := Prepare(b.newLetter(order(0)))
	if err != nil {
		b.t.Fatal(err)
	}
	p.setTimes(at)
	if _, err := b.db.Collection("seed").InsertOne(b.t.Context(), p.dead.Content); err != nil {
		b.t.Fatal(err)
	}

	op := func(name string, args ...any) bson.D { return bson.D{{Key: name, Value: bson.A(args)}} }
	text := bson.D{{Key: "$toString", Value: "$i"}}
	cur, err := b.db.Collection("seed").Aggregate(b.t.Context(), []bson.D{
		{{Key: "$addFields", Value: bson.D{{Key: "i", Value: op("$range", 0, n)}}}},
		{{Key: "$unwind", Value: "$i"}},
		{{Key: "$addFields", Value: bson.D{
			{Key: "_id", Value: op("$concat", "dead-", text)},
			{Key: "id", Value: op("$concat", "id-", text)},
			{Key: "ns", Value: op("$concat", "tenant-", bson.D{{Key: "$toString", Value: op("$mod", "$i", 1000)}}, ".outbox")},
			{Key: "movedAt", Value: op("$add", at, op("$multiply", 1000, bson.D{{Key: "$floor", Value: op("$divide", "$i", 100)}}))},
			{Key: "key", Value: bson.D{{Key: "$toString", Value: op("$mod", "$i", 10)}}},
			{Key: "class", Value: op("$cond", op("$eq", op("$mod", "$i", 1000), 0), string(record.NotAllowed),
				op("$cond", op("$eq", op("$mod", "$i", 2), 0), string(record.Malformed), string(record.Expired)))},
		}}},
		{{Key: "$unset", Value: "i"}},
		{{Key: "$merge", Value: b.coll.Name()}},
	})
	if err != nil {
		b.t.Fatal(err)
	}
	if err := cur.Close(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// TestQueriesOfManyLettersAreQuick has bounds that a query exceeds if it runs once per letter, or
// reads all letters for each letter of a page. They grow with the time in which this machine reads
// all letters once.
func TestQueriesOfManyLettersAreQuick(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	const n = 100_000
	at := time.UnixMilli(1_700_000_000_000)
	b.insertMany(n, at)

	scanBegan := time.Now()
	if found := b.count(bson.D{{Key: "reason", Value: bson.Regex{Pattern: "."}}}); found != n {
		t.Fatalf("got %d letters, want %d", found, n)
	}
	once := time.Since(scanBegan)

	for name, q := range map[string]Query{
		"everything": {},
		"ids":        {IDs: toValues(t, "id-500", "id-77000")},
		"outbox":     {NS: "tenant-7.outbox"},
		"class":      {Class: record.NotAllowed},
		"key":        {Key: "3"},
		"message":    {Message: "nothing of this"},
		"window":     {From: at.Add(900 * time.Second)},
	} {
		began := time.Now()
		list, _ := b.list(q, maxListed, "")
		if took := time.Since(began); took > 5*time.Second+20*once {
			t.Errorf("%s: %d after %v", name, len(list), took)
		} else {
			t.Logf("%s: %d in %v", name, len(list), took)
		}
	}

	began := time.Now()
	got, err := Summarize(t.Context(), b.coll, Query{Watcher: "orders"})
	if took := time.Since(began); err != nil || len(got) != 3 || took > 10*time.Second+20*once {
		t.Errorf("summary: %v after %v, %v", got, took, err)
	} else {
		t.Logf("summary in %v, all letters read in %v", took, once)
	}
}
