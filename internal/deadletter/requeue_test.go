package deadletter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

func (b *bench) ns() string { return b.db.Name() + ".outbox" }

func (b *bench) desk() Desk { return NewDesk(b.db, "orders", "ann") }

// good is an envelope that Parse takes, with what an insert leaves.
func (b *bench) good(id any, fields ...bson.E) Letter {
	b.t.Helper()
	return b.add(id, append(bson.D{
		{Key: "aggregateid", Value: "7"},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: bson.Binary{Data: []byte{1, 0, 2}}},
		{Key: "ts", Value: bson.Timestamp{T: 5, I: 6}},
		{Key: "slot", Value: event.Slot([]byte("7"))},
	}, fields...)...)
}

func (b *bench) requeue(q Query, o Options) Outcome {
	b.t.Helper()
	got, err := b.desk().Requeue(b.t.Context(), b.ns(), q, o, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return got
}

func (b *bench) stored(id any) bson.Raw {
	b.t.Helper()
	raw, err := store.Majority(b.db.Collection("outbox")).FindOne(b.t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return raw
}

func (b *bench) open(id ID) Dead {
	b.t.Helper()
	d, err := Open(b.t.Context(), b.db, id)
	if err != nil {
		b.t.Fatal(err)
	}
	return d
}

func ids(t *testing.T, values ...any) []bson.RawValue {
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

func TestN18_ARequeueIsTheNextDeliveryOfTheSameEnvelope(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	oid := bson.NewObjectID()
	l := b.good(oid, bson.E{Key: "state", Value: "retry"}, bson.E{Key: "attempts", Value: int32(9)}, bson.E{Key: "delivery", Value: int32(2)},
		bson.E{Key: "lastError", Value: bson.D{}}, bson.E{Key: "history", Value: bson.A{}}, bson.E{Key: "pending", Value: bson.A{"a"}},
		bson.E{Key: "origin", Value: "stream"}, bson.E{Key: "dueAt", Value: time.UnixMilli(77)}, bson.E{Key: "claim", Value: bson.D{}},
		bson.E{Key: "own", Value: "kept"})
	l.Class, l.Reason = record.AttemptsExhausted, "10 attempts"
	b.move(l)
	before := time.Now()
	if got := b.requeue(Query{IDs: ids(t, oid)}, Options{}); got.Requeued != 1 || got.Refused != 0 {
		t.Fatalf("%+v", got)
	}
	raw := b.stored(oid)
	var doc struct {
		State, Pos, Key, Origin, Own string
		ReplayOf                     string `bson:"replayOf"`
		Payload                      bson.Binary
		Attempts, Delivery, Slot     int32
		NextAt                       time.Time `bson:"nextAt"`
		ScheduledFor                 time.Time `bson:"scheduledFor"`
		TS                           bson.Timestamp
	}
	if err := bson.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	if doc.State != "retry" || doc.Pos != "8265" || doc.Key != "7" || doc.Origin != "requeue" || doc.Own != "kept" || doc.Attempts != 0 ||
		doc.Delivery != 3 || doc.Slot != event.Slot([]byte("7")) || !bytes.Equal(doc.Payload.Data, []byte{1, 0, 2}) || doc.ScheduledFor.UnixMilli() != 77 ||
		doc.ReplayOf != "dead:"+b.ns()+"/"+oid.Hex()+"/2" {
		t.Errorf("%s", raw)
	}
	if doc.TS.T < uint32(before.Add(-time.Minute).Unix()) || doc.NextAt.Sub(before).Abs() > time.Minute {
		t.Errorf("ts %v, nextAt %v: not the server's now", doc.TS, doc.NextAt)
	}
	for _, gone := range []string{"lastError", "history", "pending", "dueAt", "claim", "only", "sentAt"} {
		if v, err := raw.LookupErr(gone); err == nil {
			t.Errorf("%s is left: %s", gone, v)
		}
	}
	var v event.View
	if err := event.Parse(raw, &v); err != nil || string(v.OrderingKey()) != "7" || v.Delivery != 3 {
		t.Errorf("%v", err)
	}
	d := b.open(b.id(l, 2))
	if d.Replayed == nil || d.Replayed.Actor != "ann" || d.Replayed.Delivery != 3 || d.Replayed.At.Sub(before).Abs() > time.Minute || d.Replayed.Run == "" ||
		d.Version != 1 || !bytes.Equal(d.Envelope, l.Raw) {
		t.Errorf("the letter: %+v", d)
	}
	// It is an exception of a collection that a take-over has to ask.
	var w struct{ Dirty []string }
	if err := b.db.Collection("watchers").FindOne(t.Context(), bson.D{}).Decode(&w); err != nil || len(w.Dirty) != 1 || w.Dirty[0] != b.ns() {
		t.Errorf("dirty %v, %v", w.Dirty, err)
	}
	// It dies again: a letter of its own, which knows where it comes from.
	b.move(Letter{NS: l.NS, Raw: raw, Class: record.AttemptsExhausted, Reason: "again", Partition: record.AnyPartition, Source: l.Source})
	if d := b.open(b.id(l, 3)); d.ReplayOf != doc.ReplayOf || d.Replayed != nil || d.Key != "7" || d.Type != "OrderPlaced" || d.AggregateType != "order" {
		t.Errorf("the second letter: %+v", d)
	}
}

func TestN18_ALetterOfAHandlerIsForItAlone(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.good("h")
	l.Class, l.Source, l.Pos = record.Handler, Source{Kind: FromHandler, Group: "billing", Handler: "invoice"}, ""
	b.move(l)
	// What a handler refused is in the outbox still, delivered: here twice, the second time by a replay.
	b.good("h", bson.E{Key: "delivery", Value: int32(1)})
	if got := b.requeue(Query{SourceKind: FromHandler}, Options{}); got.Requeued != 1 {
		t.Fatalf("%+v", got)
	}
	raw := b.stored("h")
	if only := stringField(raw, "only"); only != "billing/invoice" || readDelivery(raw) != 2 || stringField(raw, "pos") != store.PosAt(bson.Timestamp{T: 5, I: 6}) {
		t.Errorf("%s", raw)
	}
}

func TestARequeueRefusesWhatCannotBeDelivered(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	past, future := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	expired := b.good("expired", bson.E{Key: "expiresAt", Value: past})
	b.move(b.letter(bson.D{{Key: "_id", Value: "bare"}}), b.add("malformed"), expired, b.good("good", bson.E{Key: "expiresAt", Value: future}),
		b.good("waits"), b.good("another"), b.good("sent"))
	b.good("waits", bson.E{Key: "state", Value: "parked"})
	b.good("another")
	b.good("sent", bson.E{Key: "sentAt", Value: past}, bson.E{Key: "delivery", Value: int32(4)})
	for _, dry := range []bool{true, false} {
		got := b.requeue(Query{All: true}, Options{DryRun: dry})
		if got.Requeued != 2 || got.Refused != 5 || len(got.Why) != 5 {
			t.Fatalf("dry %v: %+v", dry, got)
		}
		for _, why := range got.Why {
			want := map[string]string{
				"bare": "only its id is left", "malformed": "aggregateid", "expired": "it has expired", "waits": "a delivery of it that goes on", "another": "another envelope of the same id",
			}[why.ID.Text()]
			if want == "" || !strings.Contains(why.Error(), want) {
				t.Errorf("%v, want %q", why, want)
			}
			if d := b.open(why.ID); d.Replayed != nil {
				t.Errorf("%s is marked as replayed", why.ID)
			}
		}
		if marked := b.open(b.id(b.letter(bson.D{{Key: "_id", Value: "good"}}), 0)).Replayed != nil; marked == dry {
			t.Errorf("dry %v: replayed %v", dry, marked)
		}
	}
	if raw := b.stored("sent"); readDelivery(raw) != 5 || stringField(raw, "state") != "retry" {
		t.Errorf("what had been sent: %s", raw)
	}
	if stringField(b.stored("waits"), "state") != "parked" || stringField(b.stored("another"), "state") != "" {
		t.Error("what the outbox held was overwritten")
	}
	if got := b.requeue(Query{IDs: ids(t, "expired")}, Options{Late: true}); got.Requeued != 1 {
		t.Errorf("%+v", got)
	}
	if _, err := b.stored("expired").LookupErr("expiresAt"); err == nil {
		t.Error("it would expire again")
	}
	if _, err := b.desk().Requeue(t.Context(), b.ns(), Query{}, Options{}, nil); !errors.Is(err, ErrEmptyQuery) {
		t.Errorf("an empty query: %v", err)
	}
}

// fill moves n letters, in the order of the stream.
func (b *bench) fill(n int, envelope func(i int) bson.D) {
	b.t.Helper()
	letters := []Letter{}
	for i := range n {
		l := b.letter(envelope(i))
		l.Pos = fmt.Sprintf("82%08X", i)
		letters = append(letters, l)
	}
	b.move(letters...)
}

func order(i int) bson.D {
	return bson.D{
		{Key: "_id", Value: fmt.Sprintf("id-%06d", (i*7919)%100000)},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: fmt.Sprint(i % 10)},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: "x"},
		{Key: "n", Value: i},
	}
}

func TestARequeueConvergesAfterACrashInTheMiddle(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	const n = 3000
	b.fill(n, order)
	ctx, cancel := context.WithCancel(t.Context())
	got, err := b.desk().Requeue(ctx, b.ns(), Query{All: true}, Options{}, func(Outcome) { cancel() })
	first := got.Requeued
	if err == nil || first != initialPartSize || b.count("outbox") != first {
		t.Fatalf("after the first part: %+v, %v, %d in the outbox", got, err, b.count("outbox"))
	}
	// In the order of the stream: what comes later is not there before what comes earlier.
	last, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{{Key: "n", Value: bson.D{{Key: "$gte", Value: first}}}})
	if err != nil || last != 0 {
		t.Errorf("%d of a later part are there, %v", last, err)
	}
	// Some of them are sent and gone already.
	if _, err := b.db.Collection("outbox").DeleteMany(t.Context(), bson.D{{Key: "n", Value: bson.D{{Key: "$lt", Value: 100}}}}); err != nil {
		t.Fatal(err)
	}
	if got := b.requeue(Query{All: true}, Options{}); got.Requeued != n-first || got.Refused != 0 {
		t.Errorf("again: %+v", got)
	}
	if got := b.requeue(Query{All: true}, Options{}); got.Requeued != 0 || got.Refused != 0 {
		t.Errorf("once more: %+v", got)
	}
	if c := b.count("outbox"); c != n-100 {
		t.Errorf("%d in the outbox, want each of the rest once: %d", c, n-100)
	}
	other, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{{Key: "delivery", Value: bson.D{{Key: "$ne", Value: int32(1)}}}})
	if err != nil || other != 0 {
		t.Errorf("%d are not delivery 1, %v", other, err)
	}
	if c, err := Count(t.Context(), b.db.Client(), []string{b.ns()}, Query{Stand: Requeued}); err != nil || c != n {
		t.Errorf("%d letters are marked, %v", c, err)
	}
}

func TestTwoRequeuesAtOnceDeliverOnce(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.fill(400, order)
	type end struct {
		got Outcome
		err error
	}
	ends := make(chan end)
	for range 2 {
		go func() {
			got, err := b.desk().Requeue(t.Context(), b.ns(), Query{All: true}, Options{}, nil)
			ends <- end{got, err}
		}()
	}
	var sum int64
	for range 2 {
		e := <-ends
		if e.err != nil {
			t.Error(e.err)
		}
		sum += e.got.Requeued
	}
	if sum != 400 || b.count("outbox") != 400 {
		t.Errorf("%d requeued, %d in the outbox", sum, b.count("outbox"))
	}
}

func TestN03_ARequeueLetsTheOwnerRenew(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.fill(2000, order)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.owner.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	if got := b.requeue(Query{All: true}, Options{}); got.Requeued != 2000 {
		t.Errorf("%+v", got)
	}
	// Where it was over before a renewal was due, the owner must be able to do it afterwards.
	var w struct{ Fence, Seq int64 }
	deadline := time.After(time.Minute)
	for w.Seq < 3 {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-deadline:
			t.Fatalf("the owner does not renew: %+v", w)
		}
		if err := b.db.Collection("watchers").FindOne(t.Context(), bson.D{}).Decode(&w); err != nil {
			t.Fatal(err)
		}
	}
	if !b.owner.Valid() || b.owner.Context().Err() != nil || w.Fence < 2 {
		t.Errorf("the owner lost its lease: %+v", w)
	}
}

func TestTwoDeliveriesOfOneIDAreNotRequeuedAtOnce(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	first := b.good("x")
	b.move(first)
	second := b.good("x", bson.E{Key: "delivery", Value: int32(1)})
	b.move(second)
	if got := b.requeue(Query{Key: "7"}, Options{}); got.Requeued != 1 || got.Refused != 1 {
		t.Errorf("%+v", got)
	}
	if b.open(b.id(first, 0)).Replayed == nil || b.open(b.id(second, 1)).Replayed != nil {
		t.Error("the wrong one went")
	}
}

func TestN20_ALargeLetterComesBackWhole(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	body := bytes.Repeat([]byte{7}, 15<<20+100)
	l := b.good("large", bson.E{Key: "extra", Value: bson.Binary{Data: body}})
	if r := b.move(l); r.Chunked != 1 {
		t.Fatalf("%+v", r)
	}
	if got := b.requeue(Query{IDs: ids(t, "large")}, Options{}); got.Requeued != 1 {
		t.Fatalf("%+v", got)
	}
	if _, data := b.stored("large").Lookup("extra").Binary(); !bytes.Equal(data, body) {
		t.Error("its body is another")
	}
	// Discarding takes the chunks along.
	if n, err := b.desk().Discard(t.Context(), b.ns(), Query{Stand: Requeued, Type: "OrderPlaced"}, nil); err != nil || n != 1 || b.count("outbox_dead") != 0 {
		t.Errorf("%d, %v, %d documents are left", n, err, b.count("outbox_dead"))
	}
}
