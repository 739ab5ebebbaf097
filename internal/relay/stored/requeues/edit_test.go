package requeues

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
)

func (b *bench) edit(id string, e Edit) (int32, error) {
	return b.newDesk().EditAndRequeue(b.t.Context(), id, e, Options{})
}

func TestEditAndRequeue(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.newLetter(valid("x", bson.E{Key: "contenttype", Value: 5}))
	id := b.write(l)[0]
	set := func(name string, v any) bson.D { return bson.D{{Key: name, Value: v}} }
	payload := bson.Binary{Subtype: 0x80, Data: []byte("new")}

	// Edits that are rejected.
	_, err := b.edit(id, Edit{Version: 3, Set: set("payload", payload)})
	if !isConflict(err) || !strings.Contains(err.Error(), "show it again") {
		t.Errorf("edit of another version: got %v, want a conflict", err)
	}
	for name, e := range map[string]Edit{
		"nothing":       {},
		"its id":        {Set: set("_id", "y")},
		"its state":     {Set: set("state", "parked")},
		"a field twice": {Set: set("type", "a"), Unset: []string{"type"}},
	} {
		if _, err := b.edit(id, e); err == nil {
			t.Errorf("edit of %s: got no error", name)
		}
	}
	var rejected *letters.RejectedError
	_, err = b.edit(id, Edit{Set: set("payload", payload)})
	if !errors.As(err, &rejected) || !strings.Contains(err.Error(), "contenttype") {
		t.Errorf("edit that leaves the envelope malformed: got %v, want a rejection", err)
	}
	reserved := Edit{Set: set("headers", bson.D{{Key: "id", Value: "x"}}), Unset: []string{"contenttype"}}
	if _, err := b.edit(id, reserved); !errors.As(err, &rejected) {
		t.Errorf("edit with a reserved header: got %v, want a rejection", err)
	}
	if len(b.entries(bson.D{})) != 0 || b.open(id).Requeued != nil {
		t.Fatal("a rejected edit has stored an envelope or changed the letter")
	}

	dryRun := Edit{Set: set("key", "k"), Unset: []string{"contenttype"}}
	delivery, err := b.newDesk().EditAndRequeue(t.Context(), id, dryRun, Options{DryRun: true})
	if err != nil || delivery != 1 || len(b.entries(bson.D{})) != 0 {
		t.Errorf("dry run: got %d, %v, want 1 and no envelope", delivery, err)
	}

	// An edit that succeeds.
	fields := bson.D{{Key: "payload", Value: payload}, {Key: "key", Value: "k"}, {Key: "topic", Value: "t"}}
	delivery, err = b.edit(id, Edit{Set: fields, Unset: []string{"contenttype"}})
	if err != nil || delivery != 1 {
		t.Fatalf("edit: got %d, %v, want 1", delivery, err)
	}
	e := b.entries(bson.D{})[0]
	var v envelope.View
	if err := envelope.Parse(e.Envelope, &v); err != nil {
		t.Fatalf("%s: %v", e.Envelope, err)
	}
	if string(v.Payload) != "new" || string(v.Key) != "k" || string(v.Topic) != "t" || v.ContentType != nil {
		t.Errorf("the edited fields: %s", e.Envelope)
	}
	slot := keyhash.Slot([]byte("k"))
	if v.Slot != slot || e.Slot != slot || e.Key != "k" || e.Delivery != 1 || e.Pos != "8265" || e.ReplayOf != id {
		t.Errorf("the place of the entry: %+v", e)
	}
	if sub, _ := e.Envelope.Lookup("payload").Binary(); sub != 0x80 {
		t.Errorf("the payload's subtype: got %x, want 80", sub)
	}

	d := b.open(id)
	if d.Requeued == nil || strings.Join(d.Requeued.Edited, " ") != "contenttype key payload topic" {
		t.Errorf("the requeue on the letter: %+v", d.Requeued)
	}
	if d.Version() != 1 || !bytes.Equal(d.Envelope, l.Raw) {
		t.Errorf("the letter: got version %d, want 1 and the unchanged envelope: %+v", d.Version(), d)
	}

	// A letter can be requeued once.
	for _, version := range []int32{0, 1} {
		if _, err := b.edit(id, Edit{Version: version, Set: set("type", "again")}); !isRequeued(err) {
			t.Errorf("second edit, from version %d: got %v, want that it is requeued already", version, err)
		}
	}
	if _, err := b.edit("dead-nobody", Edit{Set: set("type", "a")}); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("edit of a letter that does not exist: got %v, want %v", err, mongodb.ErrNotFound)
	}
}

func TestALetterWithoutABodyGetsOneByAnEdit(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	ids := b.write(
		b.newLetter(bson.D{{Key: "_id", Value: "bare"}}),
		b.newLetter(bson.D{{Key: "_id", Value: "twice"}, {Key: "type", Value: 1}, {Key: "type", Value: 2}, {Key: "slot", Value: int32(3)}}),
	)
	whole := bson.D{
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "9"},
		{Key: "type", Value: "T"},
		{Key: "payload", Value: bson.D{{Key: "a", Value: 1}}},
		{Key: "headers", Value: bson.D{{Key: "h", Value: "v"}}},
	}
	// An envelope without a slot gets none, and another one gets that of its key.
	for i, slot := range []int32{-1, keyhash.Slot([]byte("9"))} {
		if _, err := b.edit(ids[i], Edit{Set: whole}); err != nil {
			t.Fatal(err)
		}

		d := b.open(ids[i])
		e := b.entries(ofID(d.IDText()))[0]
		var v envelope.View
		if err := envelope.Parse(e.Envelope, &v); err != nil {
			t.Errorf("%s: %v", e.Envelope, err)
		}
		if string(v.OrderingKey()) != "9" || string(v.Type) != "T" || v.Slot != slot || e.Slot != max(slot, 0) ||
			v.PayloadType != byte(bson.TypeEmbeddedDocument) {
			t.Errorf("the edited envelope in slot %d: %s", e.Slot, e.Envelope)
		}
	}
}

func TestOfTwoEditsOfOneVersionOneIsRejected(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	id := b.write(b.newLetter(valid("x")))[0]

	errs := make(chan error)
	for _, typ := range []string{"A", "B", "C"} {
		go func() {
			_, err := b.edit(id, Edit{Set: bson.D{{Key: "type", Value: typ}}})
			errs <- err
		}()
	}

	succeeded := 0
	for range 3 {
		if err := <-errs; err == nil {
			succeeded++
		} else if !isRequeued(err) && !isConflict(err) {
			t.Errorf("a concurrent edit: got %v, want that it is requeued already, or a conflict", err)
		}
	}
	list := b.entries(bson.D{})
	if succeeded != 1 || len(list) != 1 || list[0].Delivery != 1 {
		t.Errorf("%d edits succeeded, and %d wait, want 1", succeeded, len(list))
	}
}

// Two topics have rejected an event. One of its letters is requeued, and the other one is edited while that delivery waits.
func TestAnEditIsNotLostIfTheEventWaits(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	inTopic := func(topic string) func(*letters.Letter) { return func(l *letters.Letter) { l.Topic = topic } }
	ids := b.write(b.newLetter(valid("x"), inTopic("a")), b.newLetter(valid("x"), inTopic("b")))
	b.requeue(letters.Query{Watcher: "orders", Topic: "a"}, Options{})

	edit := Edit{Set: bson.D{{Key: "key", Value: "k"}}}
	_, err := b.edit(ids[1], edit)
	var rejected *letters.RejectedError
	if !errors.As(err, &rejected) || !strings.Contains(err.Error(), "delivery 1") || b.open(ids[1]).Requeued != nil {
		t.Errorf("an edit while the event waits: got %v, want a rejection", err)
	}

	if _, err := b.waiting.DeleteMany(t.Context(), ofID("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.edit(ids[1], edit); err != nil || b.entries(ofID("x"))[0].Key != "k" {
		t.Errorf("an edit afterwards: %v", err)
	}
}

func isConflict(err error) bool { return errors.Is(err, ErrOtherVersion) }

func isRequeued(err error) bool { return errors.Is(err, ErrRequeued) }
