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

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/keyhash"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/record"
)

func (b *bench) ns() string { return b.db.Name() + ".outbox" }

func (b *bench) newDesk() Desk { return NewDesk(b.state, "orders", "ann") }

// insertValid inserts an envelope that envelope.Parse accepts, with the fields that an insert sets, and
// returns its letter.
func (b *bench) insertValid(id any, fields ...bson.E) Letter {
	b.t.Helper()
	return b.insertLetter(id, append(bson.D{
		{Key: "aggregateid", Value: "7"},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: bson.Binary{Data: []byte{1, 0, 2}}},
		{Key: "ts", Value: bson.Timestamp{T: 5, I: 6}},
		{Key: "slot", Value: keyhash.Slot([]byte("7"))},
	}, fields...)...)
}

func (b *bench) requeue(q Query, o Options) Outcome {
	b.t.Helper()
	outcome, err := b.newDesk().Requeue(b.t.Context(), b.ns(), q, o, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return outcome
}

// findStored returns an envelope of the outbox, or nil.
func (b *bench) findStored(id any) bson.Raw {
	b.t.Helper()
	outbox := mongodb.Majority(b.db.Collection("outbox"))
	raw, err := outbox.FindOne(b.t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
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

func TestN18_ARequeueIsTheNextDeliveryOfTheSameEnvelope(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	oid := bson.NewObjectID()
	l := b.insertValid(oid,
		bson.E{Key: "state", Value: "retry"},
		bson.E{Key: "attempts", Value: int32(9)},
		bson.E{Key: "delivery", Value: int32(2)},
		bson.E{Key: "lastError", Value: bson.D{}},
		bson.E{Key: "history", Value: bson.A{}},
		bson.E{Key: "pending", Value: bson.A{"a"}},
		bson.E{Key: "origin", Value: "stream"},
		bson.E{Key: "dueAt", Value: time.UnixMilli(77)},
		bson.E{Key: "claim", Value: bson.D{}},
		bson.E{Key: "own", Value: "kept"})
	l.Class = record.AttemptsExhausted
	l.Reason = "10 attempts"
	b.move(l)

	before := time.Now()
	if got := b.requeue(Query{IDs: toValues(t, oid)}, Options{}); got.Requeued != 1 || got.Refused != 0 {
		t.Fatalf("requeue: got %+v, want 1 requeued", got)
	}

	// The envelope in the outbox.
	raw := b.findStored(oid)
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
	if doc.State != "retry" || doc.Pos != "8265" || doc.Origin != "requeue" || doc.Attempts != 0 || doc.Delivery != 3 ||
		doc.ReplayOf != "dead:"+b.ns()+"/"+oid.Hex()+"/2" {
		t.Errorf("the fields of the new delivery: %s", raw)
	}
	if doc.Key != "7" || doc.Own != "kept" || doc.Slot != keyhash.Slot([]byte("7")) ||
		!bytes.Equal(doc.Payload.Data, []byte{1, 0, 2}) || doc.ScheduledFor.UnixMilli() != 77 {
		t.Errorf("the kept fields: %s", raw)
	}
	if doc.TS.T < uint32(before.Add(-time.Minute).Unix()) || doc.NextAt.Sub(before).Abs() > time.Minute {
		t.Errorf("ts %v and nextAt %v are not the server time", doc.TS, doc.NextAt)
	}
	for _, dropped := range []string{"lastError", "history", "pending", "dueAt", "claim", "sentAt"} {
		if v, err := raw.LookupErr(dropped); err == nil {
			t.Errorf("field %s is left: %s", dropped, v)
		}
	}
	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil || string(v.OrderingKey()) != "7" || v.Delivery != 3 {
		t.Errorf("the parsed envelope: key %s, delivery %d, %v", v.OrderingKey(), v.Delivery, err)
	}

	// The letter.
	d := b.open(b.id(l, 2))
	if d.Replayed == nil || d.Replayed.Actor != "ann" || d.Replayed.Delivery != 3 || d.Replayed.Run == "" ||
		d.Replayed.At.Sub(before).Abs() > time.Minute {
		t.Errorf("the requeue on the letter: %+v", d.Replayed)
	}
	if d.Version() != 1 || !bytes.Equal(d.Envelope, l.Raw) {
		t.Errorf("the letter: got version %d, want 1 and the unchanged envelope: %+v", d.Version(), d)
	}

	// The envelope is an exception, so a takeover has to read its collection.
	var w struct{ Dirty []string }
	err := b.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Decode(&w)
	if err != nil || len(w.Dirty) != 1 || w.Dirty[0] != b.ns() {
		t.Errorf("dirty collections: got %v, %v, want %s", w.Dirty, err, b.ns())
	}

	// The new delivery dies too, and gets its own letter with a reference to the first.
	b.move(Letter{
		NS:        l.NS,
		Raw:       raw,
		Class:     record.AttemptsExhausted,
		Reason:    "again",
		Partition: record.AnyPartition,
		Source:    l.Source,
	})
	d = b.open(b.id(l, 3))
	if d.ReplayOf != doc.ReplayOf || d.Replayed != nil || d.Key != "7" || d.Type != "OrderPlaced" || d.AggregateType != "order" {
		t.Errorf("the second letter: %+v", d)
	}
}

func TestARequeueRefusesUndeliverableLetters(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	past, future := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	b.move(
		b.newLetter(bson.D{{Key: "_id", Value: "bare"}}),
		b.insertLetter("malformed"),
		b.insertValid("expired", bson.E{Key: "expiresAt", Value: past}),
		b.insertValid("good", bson.E{Key: "expiresAt", Value: future}),
		b.insertValid("waits"),
		b.insertValid("another"),
		b.insertValid("sent"),
	)
	b.insertValid("waits", bson.E{Key: "state", Value: "parked"})
	b.insertValid("another")
	b.insertValid("sent", bson.E{Key: "sentAt", Value: past}, bson.E{Key: "delivery", Value: int32(4)})

	reasons := map[string]string{
		"bare":      "only its id is left",
		"malformed": "aggregateid",
		"expired":   "it has expired",
		"waits":     "a delivery of it that goes on",
		"another":   "another envelope of the same id",
	}
	for _, dryRun := range []bool{true, false} {
		got := b.requeue(Query{All: true}, Options{DryRun: dryRun})
		if got.Requeued != 2 || got.Refused != 5 || len(got.Why) != 5 {
			t.Fatalf("dry run %v: got %+v, want 2 requeued and 5 refused", dryRun, got)
		}
		for _, why := range got.Why {
			want := reasons[why.ID.Text()]
			if want == "" || !strings.Contains(why.Error(), want) {
				t.Errorf("the reason of %s: got %v, want %q", why.ID, why, want)
			}
			if d := b.open(why.ID); d.Replayed != nil {
				t.Errorf("%s is refused and marked as requeued", why.ID)
			}
		}

		goodID := b.id(b.newLetter(bson.D{{Key: "_id", Value: "good"}}), 0)
		if marked := b.open(goodID).Replayed != nil; marked == dryRun {
			t.Errorf("dry run %v: the letter is marked as requeued: %v", dryRun, marked)
		}
	}
	if raw := b.findStored("sent"); readDelivery(raw) != 5 || stringField(raw, "state") != "retry" {
		t.Errorf("a sent envelope, requeued: %s", raw)
	}
	if stringField(b.findStored("waits"), "state") != "parked" || stringField(b.findStored("another"), "state") != "" {
		t.Error("an envelope in the outbox was overwritten")
	}

	if got := b.requeue(Query{IDs: toValues(t, "expired")}, Options{IgnoreExpiry: true}); got.Requeued != 1 {
		t.Errorf("an expired envelope: got %+v, want 1 requeued", got)
	}
	if _, err := b.findStored("expired").LookupErr("expiresAt"); err == nil {
		t.Error("the requeued envelope would expire again")
	}
	if _, err := b.newDesk().Requeue(t.Context(), b.ns(), Query{}, Options{}, nil); !errors.Is(err, ErrEmptyQuery) {
		t.Errorf("an empty query: got %v, want %v", err, ErrEmptyQuery)
	}
}

// fill moves n letters, in the order of the stream.
func (b *bench) fill(n int, envelope func(i int) bson.D) {
	b.t.Helper()
	letters := []Letter{}
	for i := range n {
		l := b.newLetter(envelope(i))
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
	outbox := b.db.Collection("outbox")

	// The requeue is interrupted after its first part.
	ctx, cancel := context.WithCancel(t.Context())
	got, err := b.newDesk().Requeue(ctx, b.ns(), Query{All: true}, Options{}, func(Outcome) { cancel() })
	first := got.Requeued
	if err == nil || first != requeueAtOnce || b.countDocuments("outbox") != first {
		t.Fatalf("after the first part: got %+v, %v, %d in the outbox, want %d and an error",
			got, err, b.countDocuments("outbox"), requeueAtOnce)
	}

	// Parts follow the order of the stream, so no envelope of a later part is in the outbox.
	ofLaterPart := bson.D{{Key: "n", Value: bson.D{{Key: "$gte", Value: first}}}}
	later, err := outbox.CountDocuments(t.Context(), ofLaterPart)
	if err != nil || later != 0 {
		t.Errorf("envelopes of a later part: got %d, %v, want none", later, err)
	}

	// Some of the first part are sent and purged before the second call.
	if _, err := outbox.DeleteMany(t.Context(), bson.D{{Key: "n", Value: bson.D{{Key: "$lt", Value: 100}}}}); err != nil {
		t.Fatal(err)
	}
	if got := b.requeue(Query{All: true}, Options{}); got.Requeued != n-first || got.Refused != 0 {
		t.Errorf("the second call: got %+v, want %d requeued", got, n-first)
	}
	if got := b.requeue(Query{All: true}, Options{}); got.Requeued != 0 || got.Refused != 0 {
		t.Errorf("the third call: got %+v, want none", got)
	}

	if c := b.countDocuments("outbox"); c != n-100 {
		t.Errorf("%d envelopes in the outbox, want each of the remaining %d once", c, n-100)
	}
	otherDelivery := bson.D{{Key: "delivery", Value: bson.D{{Key: "$ne", Value: int32(1)}}}}
	if c, err := outbox.CountDocuments(t.Context(), otherDelivery); err != nil || c != 0 {
		t.Errorf("envelopes with another delivery than 1: got %d, %v, want none", c, err)
	}
	c, err := Count(t.Context(), b.db.Client(), []string{b.ns()}, Query{RequeueStatus: Requeued})
	if err != nil || c != n {
		t.Errorf("requeued letters: got %d, %v, want %d", c, err, n)
	}
}

func TestTwoRequeuesAtOnceDeliverOnce(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.fill(400, order)

	type result struct {
		outcome Outcome
		err     error
	}
	results := make(chan result)
	for range 2 {
		go func() {
			outcome, err := b.newDesk().Requeue(t.Context(), b.ns(), Query{All: true}, Options{}, nil)
			results <- result{outcome, err}
		}()
	}
	var sum int64
	for range 2 {
		r := <-results
		if r.err != nil {
			t.Error(r.err)
		}
		sum += r.outcome.Requeued
	}
	if sum != 400 || b.countDocuments("outbox") != 400 {
		t.Errorf("got %d requeued and %d in the outbox, want 400", sum, b.countDocuments("outbox"))
	}
}

func TestN03_ARequeueLetsTheOwnerRenew(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.fill(2000, order)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.owner.Run(ctx) }()
	defer func() {
		cancel()
		<-ended
	}()

	if got := b.requeue(Query{All: true}, Options{}); got.Requeued != 2000 {
		t.Errorf("got %+v, want 2000 requeued", got)
	}

	// The requeue may end before a renewal is due. Then the owner must be able to renew afterwards.
	var w struct{ Fence, Seq int64 }
	stacktest.Eventually(t, "the owner renews", func() bool {
		if err := b.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Decode(&w); err != nil {
			t.Fatal(err)
		}
		return w.Seq >= 3
	})
	if !b.owner.Valid() || b.owner.Context().Err() != nil || w.Fence < 2 {
		t.Errorf("the owner lost its lease: %+v", w)
	}
}

func TestTwoDeliveriesOfOneIDAreNotRequeuedAtOnce(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	first := b.insertValid("x")
	b.move(first)
	second := b.insertValid("x", bson.E{Key: "delivery", Value: int32(1)})
	b.move(second)

	if got := b.requeue(Query{Key: "7"}, Options{}); got.Requeued != 1 || got.Refused != 1 {
		t.Errorf("got %+v, want 1 requeued and 1 refused", got)
	}
	if b.open(b.id(first, 0)).Replayed == nil || b.open(b.id(second, 1)).Replayed != nil {
		t.Error("the second delivery was requeued, want the first")
	}
}

func TestN20_ALargeLetterComesBackWhole(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	body := bytes.Repeat([]byte{7}, 15<<20+100)
	l := b.insertValid("large", bson.E{Key: "extra", Value: bson.Binary{Data: body}})
	if r := b.move(l); r.Chunked != 1 {
		t.Fatalf("move: got %+v, want 1 chunked", r)
	}

	if got := b.requeue(Query{IDs: toValues(t, "large")}, Options{}); got.Requeued != 1 {
		t.Fatalf("requeue: got %+v, want 1 requeued", got)
	}
	if _, data := b.findStored("large").Lookup("extra").Binary(); !bytes.Equal(data, body) {
		t.Errorf("the requeued envelope has another body of %d bytes, want %d", len(data), len(body))
	}

	// A discard removes the chunks too.
	n, err := b.newDesk().Discard(t.Context(), b.ns(), Query{RequeueStatus: Requeued, Type: "OrderPlaced"}, nil)
	if left := b.countDocuments("outbox_dead"); err != nil || n != 1 || left != 0 {
		t.Errorf("discard: got %d, %v, %d documents left, want 1 and none left", n, err, left)
	}
}
