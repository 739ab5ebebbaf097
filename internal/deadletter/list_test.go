package deadletter

import (
	"errors"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/record"
)

func TestQueriesFindTheNamedLetters(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	uid := bson.Binary{Subtype: bson.TypeBinaryUUID, Data: []byte("0123456789abcdef")}
	a := b.insertValid("a")
	a.Reason = "topic (x) is gone"
	a.Class = record.NotAllowed
	c := b.insertValid("c", bson.E{Key: "key", Value: uid})
	c.Topic = "payments"
	c.Reason = "topic [x] is gone"
	h := b.insertValid(bson.NewObjectID())
	h.Class = record.AttemptsExhausted
	h.Reason = "Topic"
	large := b.insertValid("large", bson.E{Key: "extra", Value: make([]byte, 15<<20+1)})

	// mid is after the first two letters and before the others.
	b.move(a, c)
	mid := b.open(b.id(c, 0)).MovedAt.Add(time.Millisecond)
	b.waitUntilAfter(mid)
	b.move(h, large)
	b.requeue(Query{IDs: toValues(t, "a")}, Options{})

	for name, q := range map[string]struct {
		Query
		want []string
	}{
		"everything":          {Query{}, []string{"a", "c", h.id().Text(), "large"}},
		"ids":                 {Query{IDs: toValues(t, "a", "large", "nobody")}, []string{"a", "large"}},
		"an id and its type":  {Query{IDs: toValues(t, h.id().Text())}, nil},
		"topic":               {Query{Topic: "payments"}, []string{"c"}},
		"type, also in parts": {Query{Type: "OrderPlaced", From: mid}, []string{h.id().Text(), "large"}},
		"aggregate type":      {Query{AggregateType: "order", To: mid}, []string{"a", "c"}},
		"key":                 {Query{Key: "30313233-3435-3637-3839-616263646566"}, []string{"c"}},
		"class":               {Query{Class: record.AttemptsExhausted}, []string{h.id().Text()}},
		"message is escaped":  {Query{Message: "topic ("}, []string{"a"}},
		"message is exact":    {Query{Message: "topic"}, []string{"a", "c"}},
		"message is a prefix": {Query{Message: "is gone"}, nil},
		"message no pattern":  {Query{Message: ".*"}, nil},
		"from":                {Query{From: mid}, []string{h.id().Text(), "large"}},
		"replayable":          {Query{RequeueStatus: Replayable, To: mid}, []string{"c"}},
		"replayed":            {Query{RequeueStatus: Requeued}, []string{"a"}},
	} {
		got, err := List(t.Context(), b.db.Client(), []string{b.ns()}, q.Query, Page{})
		if err != nil {
			t.Fatal(err)
		}
		var found []string
		for _, d := range got.Letters {
			found = append(found, d.ID.Text())
			if d.Envelope != nil {
				t.Errorf("%s: the list contains envelopes", name)
			}
		}

		slices.Sort(found)
		slices.Sort(q.want)
		if !slices.Equal(found, q.want) || got.Total != int64(len(q.want)) || got.Next != "" {
			t.Errorf("%s: got %v of %d, next page %q, want %v", name, found, got.Total, got.Next, q.want)
		}
	}
}

// waitUntilAfter blocks until letters that are moved now are later than at.
func (b *bench) waitUntilAfter(at time.Time) {
	b.t.Helper()
	for now := at; !now.After(at.Add(time.Millisecond)); {
		var err error
		if now, err = mongodb.ServerTime(b.t.Context(), b.db.Client()); err != nil {
			b.t.Fatal(err)
		}
	}
}

// id returns the id of the letter of a first delivery.
func (l Letter) id() ID { return ID{NS: l.NS, ID: bson.Raw(l.Raw).Lookup("_id")} }

func TestPagesAreStable(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	other := b.db.Name() + ".another"
	var all []Letter
	for i := range 25 {
		l := b.newLetter(order(i))
		if i%3 == 0 {
			l.NS = other
		}
		all = append(all, l)
	}

	// The letters of one move have the same time.
	b.move(all[:15]...)
	b.move(all[15:]...)
	namespaces := []string{b.ns(), other, b.db.Name() + ".empty"}
	first, err := List(t.Context(), b.db.Client(), namespaces, Query{}, Page{})
	if err != nil || len(first.Letters) != 25 || first.Total != 25 || first.Next != "" {
		t.Fatalf("one page: got %d of %d, %v, want 25 of 25", len(first.Letters), first.Total, err)
	}

	// Letters that are added between the pages are newer than these.
	b.waitUntilAfter(first.Letters[0].MovedAt)
	var seen []ID
	page := Page{Limit: 4}
	for n := 0; ; n++ {
		got, err := List(t.Context(), b.db.Client(), namespaces, Query{}, page)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range got.Letters {
			seen = append(seen, d.ID)
		}
		if got.Next == "" {
			break
		}
		page.After = got.Next

		// Between two pages, a letter of the first one is discarded, and a new one is added.
		shown := got.Letters[0].ID
		if _, err := b.newDesk().Discard(t.Context(), shown.NS, Query{IDs: []bson.RawValue{shown.ID}}, nil); err != nil {
			t.Fatal(err)
		}
		b.move(b.newLetter(order(1000 + n)))
	}

	if len(seen) != 25 {
		t.Fatalf("%d letters on the pages, want 25", len(seen))
	}
	for i, d := range first.Letters {
		if seen[i].String() != d.ID.String() {
			t.Errorf("letter %d is %s, want %s", i, seen[i], d.ID)
		}
	}

	_, err = List(t.Context(), b.db.Client(), namespaces, Query{}, Page{After: "x"})
	if !errors.Is(err, mongodb.ErrCursor) {
		t.Errorf("an invalid cursor: got %v, want %v", err, mongodb.ErrCursor)
	}
	if _, err := List(t.Context(), b.db.Client(), []string{"outbox"}, Query{}, Page{}); err == nil {
		t.Error("a namespace without a database: got no error")
	}
}

func TestSummary(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	other := b.db.Name() + ".another"
	x, y, z, w := b.newLetter(order(1)), b.newLetter(order(2)), b.newLetter(order(3)), b.newLetter(order(4))
	y.NS = other
	z.Class = record.Expired
	w.Topic = ""
	b.move(x, y)
	b.move(z, w)
	b.requeue(Query{IDs: toValues(t, "id-007919")}, Options{})

	got, err := Summarize(t.Context(), b.db.Client(), []string{b.ns(), other}, Query{})
	if err != nil || len(got) != 3 {
		t.Fatalf("got %+v, %v, want 3 groups", got, err)
	}
	g := got[0]
	if g.Count != 2 || g.Replayable != 1 || g.First.IsZero() || g.Last.Before(g.First) {
		t.Errorf("the counts of the first group: %+v", g)
	}
	if g.Topic != "outbox.event.order" || g.Type != "OrderPlaced" || g.Class != record.Malformed {
		t.Errorf("the first group: %+v", g)
	}
	if got[1].Topic != "" || got[2].Class != record.Expired {
		t.Errorf("the other groups: %+v", got[1:])
	}

	later := Query{From: time.Now().Add(time.Hour)}
	if got, err := Summarize(t.Context(), b.db.Client(), []string{b.ns()}, later); err != nil || len(got) != 0 {
		t.Errorf("a time range without letters: got %+v, %v, want none", got, err)
	}
}

// insertMany makes the server create n similar letters, 100 for each second from at on.
func (b *bench) insertMany(n int, at time.Time) {
	b.t.Helper()
	p, err := prepareLetter(b.newLetter(order(0)))
	if err != nil {
		b.t.Fatal(err)
	}
	p.setTimes(at)
	if _, err := b.db.Collection("seed").InsertOne(b.t.Context(), p.dead.Content); err != nil {
		b.t.Fatal(err)
	}

	op := func(name string, args ...any) bson.D { return bson.D{{Key: name, Value: bson.A(args)}} }
	cur, err := b.db.Collection("seed").Aggregate(b.t.Context(), []bson.D{
		{{Key: "$addFields", Value: bson.D{{Key: "i", Value: op("$range", 0, n)}}}},
		{{Key: "$unwind", Value: "$i"}},
		{{Key: "$addFields", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "ns", Value: b.ns()}, {Key: "id", Value: op("$concat", "id-", bson.D{{Key: "$toString", Value: "$i"}})}, {Key: "delivery", Value: int32(0)}}},
			{Key: "movedAt", Value: op("$add", at, op("$multiply", 1000, bson.D{{Key: "$floor", Value: op("$divide", "$i", 100)}}))},
			{Key: "key", Value: bson.D{{Key: "$toString", Value: op("$mod", "$i", 10)}}},
			{Key: "class", Value: op("$cond", op("$eq", op("$mod", "$i", 1000), 0), string(record.NotAllowed),
				op("$cond", op("$eq", op("$mod", "$i", 2), 0), string(record.Malformed), string(record.Expired)))},
		}}},
		{{Key: "$unset", Value: "i"}},
		{{Key: "$out", Value: "outbox_dead"}},
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
	b.createIndexes("outbox_dead")

	scanBegan := time.Now()
	anyReason := bson.D{{Key: "reason", Value: bson.Regex{Pattern: "."}}}
	found, err := b.db.Collection("outbox_dead").CountDocuments(t.Context(), anyReason)
	if err != nil || found != n {
		t.Fatalf("got %d letters, %v, want %d", found, err, n)
	}
	once := time.Since(scanBegan)

	for name, q := range map[string]Query{
		"everything": {},
		"ids":        {IDs: toValues(t, "id-500", "id-77000")},
		"class":      {Class: record.NotAllowed},
		"key":        {Key: "3"},
		"message":    {Message: "nothing of this"},
		"window":     {From: at.Add(900 * time.Second)},
	} {
		began := time.Now()
		got, err := List(t.Context(), b.db.Client(), []string{b.ns()}, q, Page{})
		if took := time.Since(began); err != nil || took > 5*time.Second+20*once {
			t.Errorf("%s: %d of %d after %v, %v", name, len(got.Letters), got.Total, took, err)
		} else {
			t.Logf("%s: %d of %d in %v", name, len(got.Letters), got.Total, took)
		}
	}

	began := time.Now()
	got, err := Summarize(t.Context(), b.db.Client(), []string{b.ns()}, Query{})
	if took := time.Since(began); err != nil || len(got) != 3 || took > 10*time.Second+20*once {
		t.Errorf("summary: %v after %v, %v", got, took, err)
	} else {
		t.Logf("summary in %v, all letters read in %v", took, once)
	}
}
