package deadletter

import (
	"slices"
	"testing"

	"github.com/outrelay/outrelay/internal/record"
)

// N15: an owner must know the letters of events that the stream repeats. Letters of requeued
// envelopes, and letters of handlers, do not count.
func TestN15_LettersBehindAPosition(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	dead := b.db.Collection(Collection("outbox"))

	listAfter := func(after string) []string {
		t.Helper()
		var list []string
		err := EachLater(t.Context(), dead, after, func(l LaterLetter) error {
			list = append(list, l.ID.StringValue()+" "+l.Pos+" "+l.Topic)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if found, err := HasLater(t.Context(), dead, after); err != nil || found != (len(list) > 0) {
			t.Errorf("HasLater(%s) = %v, %v; EachLater found %d", after, found, err, len(list))
		}
		slices.Sort(list)
		return list
	}

	if list := listAfter("82"); len(list) != 0 {
		t.Errorf("without any letter: got %v, want none", list)
	}
	if n := len(b.owner.Dirty()); n != 0 {
		t.Fatalf("%d dirty collections before the move, want none", n)
	}

	add := func(id, pos, topic string, change func(*Letter)) Letter {
		l := b.add(id)
		l.Pos = pos
		l.Topic = topic
		if change != nil {
			change(&l)
		}
		return l
	}
	b.move(
		add("a", "8201", "", nil),
		add("b", "8202", "t", nil),
		add("c", "8203", "", nil),
		add("nowhere", "", "", func(l *Letter) { l.Partition = record.AnyPartition }),
	)
	if list, want := listAfter("8201"), []string{"b 8202 t", "c 8203 "}; !slices.Equal(list, want) {
		t.Errorf("after 8201: got %q, want %q", list, want)
	}
	if list := listAfter("8203"); len(list) != 0 {
		t.Errorf("after 8203: got %q, want none", list)
	}

	var doc struct{ Dirty []string }
	err := b.db.Collection("watchers").FindOne(t.Context(), map[string]any{}).Decode(&doc)
	if want := []string{b.db.Name() + ".outbox"}; err != nil || !slices.Equal(doc.Dirty, want) {
		t.Errorf("dirty collections: got %v, %v, want %v", doc.Dirty, err, want)
	}
}
