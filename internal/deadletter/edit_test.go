package deadletter

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/keyhash"
	"github.com/outrelay/outrelay/internal/mongodb"
)

func (b *bench) edit(id ID, e Edit) (int32, error) {
	return b.newDesk().EditAndRequeue(b.t.Context(), id, e, Options{})
}

func TestEditAndRequeue(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.insertValid("x", bson.E{Key: "contenttype", Value: 5})
	l.Raw = bytes.Clone(l.Raw)
	b.move(l)
	id := b.id(l, 0)
	set := func(name string, v any) bson.D { return bson.D{{Key: name, Value: v}} }
	payload := bson.Binary{Subtype: 0x80, Data: []byte("new")}

	// Edits that are refused.
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
	var refused *RefusedError
	_, err = b.edit(id, Edit{Set: set("payload", payload)})
	if !errors.As(err, &refused) || !strings.Contains(err.Error(), "contenttype") {
		t.Errorf("edit that leaves the envelope malformed: got %v, want a refusal", err)
	}
	reserved := Edit{Set: set("headers", bson.D{{Key: "id", Value: "x"}}), Unset: []string{"contenttype"}}
	if _, err := b.edit(id, reserved); !errors.As(err, &refused) {
		t.Errorf("edit with a reserved header: got %v, want a refusal", err)
	}
	if b.findStored("x") != nil || b.open(id).Replayed != nil {
		t.Fatal("a refused edit has changed the outbox or the letter")
	}

	dryRun := Edit{Set: set("key", "k"), Unset: []string{"contenttype"}}
	delivery, err := b.newDesk().EditAndRequeue(t.Context(), id, dryRun, Options{DryRun: true})
	if err != nil || delivery != 1 || b.findStored("x") != nil {
		t.Errorf("dry run: got %d, %v, want 1 and no envelope", delivery, err)
	}

	// An edit that succeeds.
	fields := bson.D{{Key: "payload", Value: payload}, {Key: "key", Value: "k"}, {Key: "topic", Value: "t"}}
	delivery, err = b.edit(id, Edit{Set: fields, Unset: []string{"contenttype"}})
	if err != nil || delivery != 1 {
		t.Fatalf("edit: got %d, %v, want 1", delivery, err)
	}
	raw := b.findStored("x")
	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
	if string(v.Payload) != "new" || string(v.Key) != "k" || string(v.Topic) != "t" || v.ContentType != nil {
		t.Errorf("the edited fields: %s", raw)
	}
	if v.Slot != keyhash.Slot([]byte("k")) || string(v.State) != "retry" || v.Delivery != 1 || raw.Lookup("pos").StringValue() != "8265" {
		t.Errorf("the fields of the relay: %s", raw)
	}
	if sub, _ := raw.Lookup("payload").Binary(); sub != 0x80 {
		t.Errorf("the payload's subtype: got %x, want 80", sub)
	}

	d := b.open(id)
	if d.Replayed == nil || strings.Join(d.Replayed.Edited, " ") != "contenttype key payload topic" {
		t.Errorf("the requeue on the letter: %+v", d.Replayed)
	}
	if d.Version() != 1 || !bytes.Equal(d.Envelope, l.Raw) {
		t.Errorf("the letter: got version %d, want 1 and the unchanged envelope: %+v", d.Version(), d)
	}

	// A letter can be requeued once.
	for _, version := range []int32{0, 1} {
		if _, err := b.edit(id, Edit{Version: version, Set: set("type", "again")}); !isReplayed(err) {
			t.Errorf("second edit, from version %d: got %v, want that it is requeued already", version, err)
		}
	}
	missing := ID{NS: b.ns(), ID: toValues(t, "nobody")[0]}
	if _, err := b.edit(missing, Edit{Set: set("type", "a")}); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("edit of a letter that does not exist: got %v, want %v", err, mongodb.ErrNotFound)
	}
}

func TestALetterWithoutABodyGetsOneByAnEdit(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	bare := b.newLetter(bson.D{{Key: "_id", Value: "bare"}})
	twice := b.newLetter(bson.D{{Key: "_id", Value: "twice"}, {Key: "type", Value: 1}, {Key: "type", Value: 2}})
	b.move(bare, twice)

	whole := bson.D{
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "9"},
		{Key: "type", Value: "T"},
		{Key: "payload", Value: bson.D{{Key: "a", Value: 1}}},
		{Key: "headers", Value: bson.D{{Key: "h", Value: "v"}}},
	}
	for _, letter := range []Letter{bare, twice} {
		if _, err := b.edit(b.id(letter, 0), Edit{Set: whole}); err != nil {
			t.Fatal(err)
		}

		raw := b.findStored(b.id(letter, 0).Text())
		var v envelope.View
		if err := envelope.Parse(raw, &v); err != nil {
			t.Errorf("%s: %v", raw, err)
		}
		if string(v.OrderingKey()) != "9" || string(v.Type) != "T" || v.Slot != keyhash.Slot([]byte("9")) ||
			v.PayloadType != byte(bson.TypeEmbeddedDocument) {
			t.Errorf("the edited envelope: %s", raw)
		}
	}
}

func TestOfTwoEditsOfOneVersionOneIsRefused(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.insertValid("x")
	b.move(l)

	errs := make(chan error)
	for _, typ := range []string{"A", "B", "C"} {
		go func() {
			_, err := b.edit(b.id(l, 0), Edit{Set: bson.D{{Key: "type", Value: typ}}})
			errs <- err
		}()
	}

	succeeded := 0
	for range 3 {
		if err := <-errs; err == nil {
			succeeded++
		} else if !isReplayed(err) && !isConflict(err) {
			t.Errorf("a concurrent edit: got %v, want that it is requeued already, or a conflict", err)
		}
	}
	if succeeded != 1 || readDelivery(b.findStored("x")) != 1 {
		t.Errorf("%d edits succeeded, want 1", succeeded)
	}
}

func isConflict(err error) bool { return errors.Is(err, ErrOtherVersion) }

func isReplayed(err error) bool { return errors.Is(err, ErrReplayed) }
