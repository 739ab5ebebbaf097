package letters

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
)

func TestTwoEventsOfOneIDLeaveTwoLetters(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	doc := func(payload string) bson.D {
		return bson.D{{Key: "_id", Value: "order-7"}, {Key: "payload", Value: payload}}
	}
	first := b.newLetter(doc("first"))
	second := b.newLetter(doc("second"), func(l *Letter) { l.Pos = "8266" })
	// A write is repeated if its response was lost.
	ids := b.write(first, second)
	b.now = b.now.Add(time.Second)
	b.write(second, first, second)

	if n := b.count(bson.D{}); n != 2 {
		t.Fatalf("%d letters, want 2", n)
	}
	for i, want := range []string{"first", "second"} {
		d := b.open(ids[i])
		if got := d.Envelope.Lookup("payload").StringValue(); got != want || d.IDText() != "order-7" || !d.MovedAt.Equal(b.now.Add(-time.Second)) {
			t.Errorf("letter %d of %s at %v: %q, want %q of order-7", i, d.IDText(), d.MovedAt, got, want)
		}
		if !IsID(d.ID) || IsID(d.IDText()) {
			t.Errorf("IsID is wrong about %s or %s", d.ID, d.IDText())
		}
	}
}

// What distinguishes two letters: everything else is a repetition of one failure.
func TestLettersAreDistinguished(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	doc := bson.D{{Key: "_id", Value: int32(7)}}
	same := b.newLetter(doc, func(l *Letter) { l.Reason = "another"; l.Class = record.Expired })
	others := []Letter{
		b.newLetter(doc),
		b.newLetter(bson.D{{Key: "_id", Value: "7"}}),
		b.newLetter(bson.D{{Key: "_id", Value: int64(7)}}),
		b.newLetter(doc, func(l *Letter) { l.Topic = "t2" }),
		b.newLetter(doc, func(l *Letter) { l.Topic = "" }),
		b.newLetter(doc, func(l *Letter) { l.Delivery = 1 }),
		b.newLetter(doc, func(l *Letter) { l.Pos = "8266" }),
		b.newLetter(doc, func(l *Letter) { l.Watcher = "other" }),
		b.newLetter(doc, func(l *Letter) { l.NS = "shop.outbox2" }),
	}
	b.write(append(others, same)...)

	if n := b.count(bson.D{}); n != int64(len(others)) {
		t.Errorf("%d letters, want %d", n, len(others))
	}
	if d := b.open(b.write(same)[0]); d.Reason != "type is missing" {
		t.Errorf("a repetition changed the letter: %+v", d)
	}
}

// N20: a letter holds every envelope that MongoDB holds, also one with a huge id, which its position contains as well.
func TestN20_LettersOfHugeEnvelopes(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	huge := strings.Repeat("i", 5<<20)
	deep := bson.D{{Key: "end", Value: 1}}
	for range 170 {
		deep = bson.D{{Key: "a", Value: deep}}
	}

	for name, doc := range map[string]bson.D{
		"id of 5 MB":    {{Key: "_id", Value: huge}, {Key: "type", Value: "Placed"}},
		"body of 16 MB": {{Key: "_id", Value: "large"}, {Key: "payload", Value: make([]byte, 16<<20-100)}},
		"both":          {{Key: "_id", Value: strings.Repeat("j", 6<<20)}, {Key: "payload", Value: make([]byte, 9<<20)}},
		"key of 9 MB":   {{Key: "_id", Value: "key"}, {Key: "aggregateid", Value: strings.Repeat("k", 9<<20)}, {Key: "replayOf", Value: strings.Repeat("r", 5<<20)}},
		"deep":          {{Key: "_id", Value: "deep"}, {Key: "payload", Value: deep}},
	} {
		l := b.newLetter(doc, func(l *Letter) {
			l.Pos = "8265" + strings.Repeat("69", 5<<20)
			l.ReplayOf, l.Key = strings.Repeat("p", 5<<20), strings.Repeat("q", 5<<20)
			l.Reason, l.Topic = strings.Repeat("r", 5<<20), strings.Repeat("t", 5<<20)
		})
		id := b.write(l)[0]
		if d := b.open(id); !bytes.Equal(d.Envelope, l.Raw) || d.Size != len(l.Raw) {
			t.Errorf("%s: the letter holds %d bytes, want %d", name, len(d.Envelope), len(l.Raw))
		}

		var found []Mark
		err := Known(t.Context(), b.coll, "orders", "shop.outbox", []bson.RawValue{bson.Raw(l.Raw).Lookup("_id")}, func(m Mark) error {
			m.ID = mongodb.CloneValue(m.ID)
			found = append(found, m)
			return nil
		})
		if err != nil || len(found) != 1 || found[0].Pos != ShortPos(l.Pos) || !found[0].ID.Equal(ShortID(bson.Raw(l.Raw).Lookup("_id"))) {
			t.Errorf("%s: known as %d letters, %v", name, len(found), err)
		}
	}
}

// Bytes that are no envelope at all are kept as well.
func TestALetterOfBytesThatAreNoEnvelope(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	noID, err := bson.Marshal(bson.D{{Key: "type", Value: "Placed"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, raw := range [][]byte{noID, []byte("no BSON"), {5, 0, 0, 0, 0}} {
		l := b.newLetter(bson.D{}, func(l *Letter) { l.Raw = raw })
		if d := b.open(b.write(l)[0]); !bytes.Equal(d.Envelope, raw) || d.EnvelopeID.Type != 0 {
			t.Errorf("of %q: %q with id %v", raw, d.Envelope, d.EnvelopeID)
		}
	}
	for _, wrong := range []func(l *Letter){
		func(l *Letter) { l.NS = "outbox" },
		func(l *Letter) { l.Watcher = "" },
		func(l *Letter) { l.Class = "" },
	} {
		if _, err := Prepare(b.newLetter(bson.D{{Key: "_id", Value: 1}}, wrong)); err == nil {
			t.Error("a letter without what it needs was prepared")
		}
	}
}

// If MongoDB rejects a letter, the id and the reason are stored.
func TestALetterThatMongoDBRejects(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	rule := bson.D{{Key: "collMod", Value: b.coll.Name()}, {Key: "validator", Value: bson.D{{Key: "envelope.payload", Value: nil}}}}
	if err := b.db.RunCommand(t.Context(), rule).Err(); err != nil {
		t.Fatal(err)
	}
	bad := b.newLetter(bson.D{{Key: "_id", Value: "bad"}, {Key: "ts", Value: bson.Timestamp{T: 5}}, {Key: "payload", Value: "secret"}})
	good, err := Prepare(b.newLetter(bson.D{{Key: "_id", Value: "good"}}))
	if err != nil {
		t.Fatal(err)
	}
	p, err := Prepare(bad)
	if err != nil {
		t.Fatal(err)
	}

	err = b.store(good, p)
	var bulk mongo.BulkWriteException
	if !errors.As(err, &bulk) || len(bulk.WriteErrors) != 1 || bulk.WriteErrors[0].Index != 1 {
		t.Fatalf("got %v, want a write error of the second letter", err)
	}
	if err := b.store(good, Minimal(bad, err)); err != nil {
		t.Fatal(err)
	}

	d := b.open(p.ID())
	want := "MongoDB rejects the dead letter (code 121), so the envelope is not stored; type is missing"
	if d.Reason != want || d.IDText() != "bad" || d.Topic != bad.Topic || d.Stamp.T != 5 || d.Pos != bad.Pos {
		t.Errorf("got %+v", d)
	}
	if elems, err := d.Envelope.Elements(); err != nil || len(elems) != 1 {
		t.Errorf("the envelope is %v, want only its id", d.Envelope)
	}
}

func TestLettersExpire(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	large := bson.D{{Key: "_id", Value: "large"}, {Key: "payload", Value: make([]byte, maxInline)}}
	kept := b.write(b.newLetter(large), b.newLetter(large, func(l *Letter) { l.Delivery, l.Expire = 1, time.Hour }))
	if d := b.open(kept[0]); d.ExpireAt != nil {
		t.Errorf("expires at %v, want never", d.ExpireAt)
	}
	if d := b.open(kept[1]); d.ExpireAt == nil || !d.ExpireAt.Equal(b.now.Add(time.Hour)) {
		t.Errorf("expires at %v, want an hour after %v", d.ExpireAt, b.now)
	}

	// The chunks of a letter expire after it.
	var chunk struct{ ExpireAt time.Time }
	for n := range 4 {
		if err := b.coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: chunkID(kept[1], n)}}).Decode(&chunk); err != nil {
			t.Fatal(err)
		}
		if !chunk.ExpireAt.After(b.now.Add(time.Hour + chunkGrace/2)) {
			t.Errorf("chunk %d expires at %v", n, chunk.ExpireAt)
		}
	}
	if n := b.count(bson.D{{Key: "expireAt", Value: bson.D{{Key: "$exists", Value: true}}}}); n != 5 {
		t.Errorf("%d documents expire, want a letter and its 4 chunks", n)
	}
}
