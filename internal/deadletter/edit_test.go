package deadletter

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

func (b *bench) edit(id ID, e Edit) (int32, error) {
	return b.desk().EditAndRequeue(b.t.Context(), id, e, Options{})
}

func TestEditAndRequeue(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.good("x", bson.E{Key: "contenttype", Value: 5})
	l.Raw = bytes.Clone(l.Raw)
	b.move(l)
	id := b.id(l, 0)
	set := func(name string, v any) bson.D { return bson.D{{Key: name, Value: v}} }
	payload := bson.Binary{Subtype: 0x80, Data: []byte("new")}

	if _, err := b.edit(id, Edit{Version: 3, Set: set("payload", payload)}); !errors.Is(err, ErrConflict) || !strings.Contains(err.Error(), "show it again") {
		t.Errorf("another version: %v", err)
	}
	for name, e := range map[string]Edit{
		"nothing": {}, "its id": {Set: set("_id", "y")}, "its state": {Set: set("state", "parked")}, "a field twice": {Set: set("type", "a"), Unset: []string{"type"}},
	} {
		if _, err := b.edit(id, e); err == nil {
			t.Errorf("an edit of %s was taken", name)
		}
	}
	var refused *RefusedError
	if _, err := b.edit(id, Edit{Set: set("payload", payload)}); !errors.As(err, &refused) || !strings.Contains(err.Error(), "contenttype") {
		t.Errorf("still malformed: %v", err)
	}
	if _, err := b.edit(id, Edit{Set: set("headers", bson.D{{Key: "id", Value: "x"}}), Unset: []string{"contenttype"}}); !errors.As(err, &refused) {
		t.Errorf("a reserved header: %v", err)
	}
	if b.stored("x") != nil || b.open(id).Replayed != nil {
		t.Fatal("a refused edit left something")
	}
	dry, err := b.desk().EditAndRequeue(t.Context(), id, Edit{Set: set("key", "k"), Unset: []string{"contenttype"}}, Options{DryRun: true})
	if err != nil || dry != 1 || b.stored("x") != nil {
		t.Errorf("dry run: %d, %v", dry, err)
	}
	got, err := b.edit(id, Edit{Set: bson.D{{Key: "payload", Value: payload}, {Key: "key", Value: "k"}, {Key: "topic", Value: "t"}}, Unset: []string{"contenttype"}})
	if err != nil || got != 1 {
		t.Fatalf("%d, %v", got, err)
	}
	raw := b.stored("x")
	var v event.View
	if err := event.Parse(raw, &v); err != nil || string(v.Payload) != "new" || string(v.Key) != "k" || string(v.Topic) != "t" || v.Slot != event.Slot([]byte("k")) || v.ContentType != nil ||
		string(v.State) != "retry" || v.Delivery != 1 || string(v.Pos) != "8265" {
		t.Errorf("%s, %v", raw, err)
	}
	if sub, _ := raw.Lookup("payload").Binary(); sub != 0x80 {
		t.Errorf("the payload's subtype is %x", sub)
	}
	d := b.open(id)
	if d.Replayed == nil || strings.Join(d.Replayed.Edited, " ") != "contenttype key payload topic" || d.Version != 1 || !bytes.Equal(d.Envelope, l.Raw) {
		t.Errorf("the letter: %+v", d)
	}
	for _, version := range []int32{0, 1} {
		if _, err := b.edit(id, Edit{Version: version, Set: set("type", "again")}); !errors.Is(err, ErrReplayed) {
			t.Errorf("once more from version %d: %v", version, err)
		}
	}
	if _, err := b.edit(ID{NS: b.ns(), ID: ids(t, "nobody")[0]}, Edit{Set: set("type", "a")}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("nobody's letter: %v", err)
	}
}

func TestALetterWithoutABodyGetsOneByAnEdit(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.letter(bson.D{{Key: "_id", Value: "bare"}})
	twice := b.letter(bson.D{{Key: "_id", Value: "twice"}, {Key: "type", Value: 1}, {Key: "type", Value: 2}})
	b.move(l, twice)
	whole := bson.D{
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "9"},
		{Key: "type", Value: "T"},
		{Key: "payload", Value: bson.D{{Key: "a", Value: 1}}},
		{Key: "headers", Value: bson.D{{Key: "h", Value: "v"}}},
	}
	for _, letter := range []Letter{l, twice} {
		if _, err := b.edit(b.id(letter, 0), Edit{Set: whole}); err != nil {
			t.Fatal(err)
		}
		raw := b.stored(b.id(letter, 0).Text())
		var v event.View
		if err := event.Parse(raw, &v); err != nil || string(v.OrderingKey()) != "9" || string(v.Type) != "T" || v.PayloadType != byte(bson.TypeEmbeddedDocument) || v.Slot != event.Slot([]byte("9")) {
			t.Errorf("%s, %v", raw, err)
		}
	}
}

func TestOfTwoEditsOfOneVersionOneIsRefused(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.good("x")
	b.move(l)
	errs := make(chan error)
	for _, typ := range []string{"A", "B", "C"} {
		go func() {
			_, err := b.edit(b.id(l, 0), Edit{Set: bson.D{{Key: "type", Value: typ}}})
			errs <- err
		}()
	}
	won := 0
	for range 3 {
		if err := <-errs; err == nil {
			won++
		} else if !errors.Is(err, ErrReplayed) && !errors.Is(err, ErrConflict) {
			t.Error(err)
		}
	}
	if won != 1 || readDelivery(b.stored("x")) != 1 {
		t.Errorf("%d edits were taken", won)
	}
}
