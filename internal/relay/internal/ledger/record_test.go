package ledger

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// fill inserts n stamped envelopes, and returns their deliveries in the order of their stamps, each to another offset.
func (b *bench) fill(n int) []*Outcome {
	b.t.Helper()
	docs := make([]any, n)
	for i := range docs {
		docs[i] = bson.D{{Key: "_id", Value: fmt.Sprintf("e%06d", i)}, {Key: "ts", Value: bson.Timestamp{}}, {Key: "payload", Value: strings.Repeat("x", 200)}}
	}
	if _, err := b.outbox.InsertMany(b.t.Context(), docs); err != nil {
		b.t.Fatal(err)
	}

	cur, err := b.outbox.Find(b.t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
	if err != nil {
		b.t.Fatal(err)
	}
	var found []bson.Raw
	if err := cur.All(b.t.Context(), &found); err != nil {
		b.t.Fatal(err)
	}
	list := make([]*Outcome, n)
	for i, raw := range found {
		list[i] = &Outcome{
			End: Sent, Recorded: true, NS: b.ns(), EnvelopeID: mongodb.CloneValue(raw.Lookup("_id")), Stamp: outboxes.Stamp(raw),
			Sent: []outboxes.Place{{Topic: "$orders", Partition: int32(i % 3), Offset: int64(i)}},
		}
	}
	return list
}

func (b *bench) countMarked() int64 {
	return b.count(b.outbox, bson.D{{Key: "sentAt", Value: bson.D{{Key: "$type", Value: "date"}}}})
}

func TestADeliveryIsMarkedWithItsOwnPlaces(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.twice, b.config.Recording = true, RecordMark
	list := b.fill(2*markGroup + 7)
	list[0].Sent = append(list[0].Sent, outboxes.Place{Topic: "audit", Offset: 9})
	list[1].Sent = nil
	b.store(list...)
	// One transaction, which ran twice.
	if b.fences != 2 {
		t.Errorf("%d transactions", b.fences)
	}

	for i, o := range list {
		var got struct {
			SentAt time.Time        `bson:"sentAt"`
			Sent   []outboxes.Place `bson:"sent"`
		}
		if err := b.outbox.FindOne(t.Context(), bson.D{{Key: "_id", Value: o.EnvelopeID}}).Decode(&got); err != nil {
			t.Fatal(err)
		}
		if time.Since(got.SentAt).Abs() > time.Hour || !slices.Equal(got.Sent, o.Sent) {
			t.Fatalf("%d: %+v, want %+v", i, got, o.Sent)
		}
	}
}

// The deliveries of an event to its topics may be recorded one after the other. Only a whole one has a time, and no place is lost.
func TestAMarkGainsThePlacesOfEachPartOfADelivery(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.twice, b.config.Recording = true, RecordMark
	list := b.fill(2)
	// A service has a field of this name.
	if _, err := b.outbox.UpdateMany(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "sent", Value: bson.A{"no place", bson.D{}}}}}}); err != nil {
		t.Fatal(err)
	}
	for _, o := range list {
		o.Partial, o.Sent = true, []outboxes.Place{{Topic: "a", Offset: 1}}
	}
	list[1].Stamp = bson.Timestamp{}

	l := New(b.config)
	b.store(list...)
	if n := b.countMarked(); n != 0 {
		t.Errorf("%d envelopes that wait have a time", n)
	}

	// Two documents of the store have the other topics, and their sender knows only their own places.
	for _, topic := range []string{"b", "c"} {
		d := b.enter(9, func(e *waiting.Entry) { e.Pending = []string{topic} })
		d.ID = list[0].EnvelopeID
		o := l.Decide(d, d.Pending, []record.Result{{Topic: topic, Partition: 2, Offset: 7}})
		o.Stamp = list[0].Stamp
		b.store(o)
	}
	want := []outboxes.Place{{Topic: "a", Offset: 1}, {Topic: "b", Partition: 2, Offset: 7}, {Topic: "c", Partition: 2, Offset: 7}}
	for i, want := range [][]outboxes.Place{want, want[:1]} {
		var got struct {
			Sent []outboxes.Place `bson:"sent"`
		}
		if err := b.outbox.FindOne(t.Context(), bson.D{{Key: "_id", Value: list[i].EnvelopeID}}).Decode(&got); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got.Sent, want) {
			t.Errorf("envelope %d: %+v, want %+v", i, got.Sent, want)
		}
	}
	if n := b.countMarked(); n != 1 {
		t.Errorf("%d envelopes are marked, want 1", n)
	}
}

// N25: an envelope that was replaced by a newer one with its id is not changed. Neither is a scheduled one.
func TestN25_RecordingLeavesNewerEnvelopes(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{RecordMark, RecordDelete} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			b.config.Recording = mode
			list := b.fill(10)
			set := func(o *Outcome, field string, value any) {
				t.Helper()
				if _, err := b.outbox.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: o.EnvelopeID}}, bson.D{{Key: "$set", Value: bson.D{{Key: field, Value: value}}}}); err != nil {
					t.Fatal(err)
				}
			}
			set(list[3], "dueAt", time.Now().Add(time.Hour))
			// The server sets a new stamp.
			if _, err := b.outbox.ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: list[5].EnvelopeID}}, bson.D{{Key: "ts", Value: bson.Timestamp{}}}); err != nil {
				t.Fatal(err)
			}
			// The purge must find this envelope by its id, as if it had no stamp.
			list[7].Stamp = bson.Timestamp{}
			set(list[7], "ts", time.Now())
			// Its document is gone, which is no error.
			if _, err := b.outbox.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: list[9].EnvelopeID}}); err != nil {
				t.Fatal(err)
			}

			b.store(list...)
			want, wantMarked := int64(9), int64(7)
			if mode == RecordDelete {
				want, wantMarked = 2, 0
			}
			if left := b.count(b.outbox, bson.D{}); left != want || b.countMarked() != wantMarked {
				t.Errorf("%d envelopes, %d marked", left, b.countMarked())
			}
			for _, i := range []int{3, 5} {
				if n := b.count(b.outbox, bson.D{{Key: "_id", Value: list[i].EnvelopeID}, {Key: "sentAt", Value: nil}}); n != 1 {
					t.Errorf("envelope %d was changed", i)
				}
			}
			if n := len(b.reported()); n > 0 {
				t.Errorf("errors %v", b.reported())
			}
		})
	}
}

// Only the default recording writes nothing to an outbox.
func TestTheDefaultRecordingWritesNothingToAnOutbox(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	list := b.fill(3)
	for _, o := range list {
		o.Recorded = false
	}
	dead := b.newEnvelope(2)
	dead.End, dead.Rejection = Dead, record.Rejection{Class: record.Malformed, Reason: "no type"}
	waits := b.newEnvelope(1)
	b.store(append(list, waits, dead)...)

	if n := b.count(b.outbox, bson.D{}); n != 3 || b.countMarked() != 0 {
		t.Errorf("%d envelopes, %d marked", n, b.countMarked())
	}
	if n := b.count(b.outbox, bson.D{{Key: "_id", Value: bson.D{{Key: "$nin", Value: bson.A{"e000000", "e000001", "e000002"}}}}}); n != 0 {
		t.Errorf("%d documents were inserted", n)
	}
	for _, coll := range []string{"outbox_dead", "outbox_waiting"} {
		if n := b.count(b.db.Collection(coll), bson.D{}); n != 0 {
			t.Errorf("%s has %d documents", coll, n)
		}
	}
}

// N16: an outbox that rejects the mark of one envelope, or every write, stops neither the others nor the resolved position. The envelope was
// delivered, and no record of it is lost.
func TestN16_AnOutboxThatRejectsMarksStopsNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepare func(b *bench)
		marked  int64
	}{
		"a validator for one envelope": {func(b *bench) {
			b.validate(b.outbox, bson.D{{Key: "$or", Value: bson.A{without("_id", "e000017"), bson.D{{Key: "sentAt", Value: nil}}}}})
		}, 39},
		"a validator for all": {func(b *bench) { b.validate(b.outbox, bson.D{{Key: "sentAt", Value: nil}}) }, 0},
		"a unique index": {func(b *bench) {
			unique := bson.D{
				{Key: "key", Value: bson.D{{Key: "sent.topic", Value: 1}}},
				{Key: "name", Value: "own"},
				{Key: "unique", Value: true},
				{Key: "partialFilterExpression", Value: bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}},
			}
			if err := b.db.RunCommand(b.t.Context(), bson.D{{Key: "createIndexes", Value: "outbox"}, {Key: "indexes", Value: bson.A{unique}}}).Err(); err != nil {
				b.t.Fatal(err)
			}
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			b.config.Recording = RecordMark
			list := b.fill(40)
			c.prepare(b)
			b.store(list...)
			// After a few rejections, deliveries of the outbox are not recorded for a while: each would cost a transaction.
			if n := b.countMarked(); n > c.marked || c.marked == 39 && n < c.marked {
				t.Errorf("%d are marked, want %d", n, c.marked)
			}
			if b.fences > 24 {
				t.Errorf("%d transactions for 40 deliveries", b.fences)
			}
			if n := len(b.reported()); n > 0 {
				t.Errorf("errors %v", b.reported())
			}

			// Others are stored as usual.
			b.store(b.newEnvelope(100))
			if b.waitingOf(100) == nil {
				t.Error("an envelope does not wait")
			}
		})
	}
}

// A view is no outbox of a write, so its deliveries stay unrecorded.
func TestN16_AViewStopsNothing(t *testing.T) {
	t.Parallel()

	for _, mode := range []string{RecordMark, RecordDelete} {
		b := setUp(t)
		b.config.Recording = mode
		list := b.fill(3)
		if err := b.db.CreateView(t.Context(), "view", "outbox", bson.A{}); err != nil {
			t.Fatal(err)
		}
		for _, o := range list {
			o.NS = b.db.Name() + ".view"
		}
		waits := b.newEnvelope(9)
		waits.NS = b.db.Name() + ".view"
		b.store(append(list, waits)...)
		if b.waitingOf(9) == nil || b.countMarked() != 0 || len(b.reported()) > 0 {
			t.Errorf("%s: waits %t, %d marked, errors %v", mode, b.waitingOf(9) != nil, b.countMarked(), b.reported())
		}
	}
}

// An envelope that was sent to its topics one after the other is marked with all places.
func TestAMarkHasThePlacesOfAllTopics(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.twice, b.config.Recording = true, RecordMark
	stream := b.fill(1)[0]
	d := b.enter(0, func(e *waiting.Entry) { e.Pending = []string{"a", "b"} })
	l := New(b.config)
	part := l.Decide(d, []string{"a", "b"}, []record.Result{{Topic: "a", Partition: 1, Offset: 5}, {Topic: "b", Held: record.ErrParked}})
	part.Recorded, part.Stamp = true, stream.Stamp
	b.store(part)
	if b.countMarked() != 0 {
		t.Fatal("an envelope that waits is marked")
	}

	d = b.read(0)
	if !slices.Equal(d.Pending, []string{"b"}) {
		t.Fatalf("it waits for %v", d.Pending)
	}
	rest := l.Decide(d, d.Pending, []record.Result{{Topic: "b", Partition: 2, Offset: 7}})
	rest.Recorded, rest.Stamp = true, stream.Stamp
	b.store(rest)
	var got struct {
		Sent []outboxes.Place `bson:"sent"`
	}
	if err := b.outbox.FindOne(t.Context(), bson.D{}).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if want := []outboxes.Place{{Topic: "a", Partition: 1, Offset: 5}, {Topic: "b", Partition: 2, Offset: 7}}; !slices.Equal(got.Sent, want) {
		t.Errorf("sent %v, want %v", got.Sent, want)
	}
}

// The rest of a claimed envelope that was sent to one topic waits with the place in that topic.
func TestAClaimedEnvelopeWaitsWithThePlacesThatItHas(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.twice, b.config.Recording = true, RecordMark
	b.config.Claims = b.state.Collection(waiting.ClaimsName)
	claimed := b.newEnvelope(1)
	claim := &waiting.Claim{ID: waiting.NewClaimID("orders/0of1"), Envelopes: []waiting.Claimed{{NS: b.ns(), Raw: claimed.Raw}}}
	if err := waiting.InsertClaim(t.Context(), b.config.Claims, claim); err != nil {
		t.Fatal(err)
	}

	b.store(New(b.config).DecideClaim(&ClaimRef{ID: claim.ID}, &waiting.Claimed{NS: b.ns(), Raw: claimed.Raw, Pos: claimed.Pos, Key: "k"}, nil,
		[]record.Result{{Topic: "a", Partition: 1, Offset: 5}, {Topic: "b", Held: record.ErrParked}}))
	d := b.read(1)
	if want := []outboxes.Place{{Topic: "a", Partition: 1, Offset: 5}}; !slices.Equal(d.Pending, []string{"b"}) || !slices.Equal(d.Sent, want) {
		t.Errorf("it waits for %v with the places %v, want %v", d.Pending, d.Sent, want)
	}
}

// A dead envelope is deleted with the others if deliveries are.
func TestADeadEnvelopeIsDeletedWithRecordingDelete(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.config.Recording = RecordDelete
	stream := b.fill(2)
	l := New(b.config)
	o := l.Rejected(b.enter(0), []string{"a"}, &record.Rejection{Class: record.Malformed, Reason: "no type"})
	o.Recorded, o.Stamp = true, stream[0].Stamp
	b.store(o)
	if n := b.count(b.outbox, bson.D{}); n != 1 || len(b.lettersOf(0)) != 1 {
		t.Errorf("%d envelopes are left, %d letters", n, len(b.lettersOf(0)))
	}
}

// The mark of a delivery is in the outbox before its envelope leaves the store: after a crash in between, the next owner finds the
// envelope and marks it again.
func TestADeliveryIsMarkedBeforeItsEnvelopeLeavesTheStore(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.config.Recording = RecordMark
	stream := b.fill(1)[0]
	d := b.enter(0)
	b.judge = func(tx context.Context) error {
		waits, err := b.config.Store.Collection().CountDocuments(tx, bson.D{})
		if err == nil && waits == 0 && b.countMarked() == 0 {
			t.Error("an envelope left the store without its mark")
		}
		return err
	}

	o := New(b.config).Decide(d, []string{"a"}, []record.Result{{Topic: "a", Partition: 1, Offset: 5}})
	o.Stamp = stream.Stamp
	b.store(o)
	if b.countMarked() != 1 {
		t.Error("the delivery is not marked")
	}
}

// N16: a service that holds a delivered envelope in an open transaction delays no outcome: the delivery of this envelope stays unrecorded.
func TestN16_ALockedEnvelopeStopsNothing(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{RecordMark, RecordDelete} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			b.config.Recording = mode
			list := b.fill(40)
			session, err := b.outbox.Database().Client().StartSession()
			if err != nil {
				t.Fatal(err)
			}
			defer session.EndSession(context.WithoutCancel(t.Context()))
			if err := session.StartTransaction(); err != nil {
				t.Fatal(err)
			}
			tx := mongo.NewSessionContext(t.Context(), session)
			if _, err := b.outbox.UpdateByID(tx, "e000017", bson.D{{Key: "$set", Value: bson.D{{Key: "cleaned", Value: true}}}}); err != nil {
				t.Fatal(err)
			}

			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
			defer cancel()
			if _, err := b.tryStore(ctx, New(b.config), append(list, b.newEnvelope(100))...); err != nil {
				t.Fatal(err)
			}
			if b.waitingOf(100) == nil {
				t.Error("an envelope does not wait")
			}
			left := b.count(b.outbox, bson.D{{Key: "sentAt", Value: nil}})
			if left != 1 {
				t.Errorf("%d deliveries are not recorded, want 1", left)
			}
			if err := session.AbortTransaction(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
