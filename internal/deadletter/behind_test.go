package deadletter

import (
	"slices"
	"testing"

	"github.com/outrelay/outrelay/internal/record"
)

// N15: what the stream brings once more is told by its place; what was requeued, and what a handler gave up, is none of it.
func TestN15_LettersBehindAPosition(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	dead := b.db.Collection(Collection("outbox"))
	var got []string
	look := func(after string) []string {
		t.Helper()
		got = got[:0]
		if err := EachBehind(t.Context(), dead, after, func(l Behind) error {
			got = append(got, l.ID.StringValue()+" "+l.Pos+" "+l.Topic)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if any, err := AnyBehind(t.Context(), dead, after); err != nil || any != (len(got) > 0) {
			t.Errorf("any behind %s: %v, %v; there are %d", after, any, err, len(got))
		}
		slices.Sort(got)
		return got
	}
	if l := look("82"); len(l) != 0 {
		t.Errorf("without any letter: %v", l)
	}
	if n := len(b.owner.Dirty()); n != 0 {
		t.Fatal(n)
	}
	at := func(id, pos, topic string, change func(*Letter)) Letter {
		l := b.add(id)
		if l.Pos, l.Topic = pos, topic; change != nil {
			change(&l)
		}
		return l
	}
	b.move(
		at("a", "8201", "", nil), at("b", "8202", "t", nil), at("c", "8203", "", nil),
		at("handled", "8204", "", func(l *Letter) { l.Source.Kind = FromHandler }),
		at("nowhere", "", "", func(l *Letter) { l.Partition = record.AnyPartition }),
	)
	if l := look("8201"); !slices.Equal(l, []string{"b 8202 t", "c 8203 "}) {
		t.Errorf("%q", l)
	}
	if l := look("8203"); len(l) != 0 {
		t.Errorf("%q", l)
	}
	var doc struct{ Dirty []string }
	if err := b.db.Collection("watchers").FindOne(t.Context(), map[string]any{}).Decode(&doc); err != nil || !slices.Equal(doc.Dirty, []string{b.db.Name() + ".outbox"}) {
		t.Errorf("a successor would not look: %v, %v", doc.Dirty, err)
	}
}
