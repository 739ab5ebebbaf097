package deadletter

import (
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/resume"
)

// N15: an owner needs the letters of events that the stream repeats. Letters of requeued envelopes,
// and letters of handlers, do not count.
func TestN15_LettersBehindAPosition(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	dead := b.db.Collection(Collection("outbox"))

	// No letter of this test is moved after this time.
	seconds := uint32(1<<32 - 1)
	listAfter := func(data string) []string {
		t.Helper()
		// Without a time, letters of swept envelopes would count.
		token, err := bson.Marshal(bson.D{{Key: "_data", Value: data}})
		if err != nil {
			t.Fatal(err)
		}
		after := resume.Position{Token: token, ClusterTime: bson.Timestamp{T: seconds}}
		var list []string
		err = EachLater(t.Context(), dead, after, func(l LaterLetter) error {
			list = append(list, l.ID.StringValue()+" "+l.Pos+" "+l.Topic)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if found, err := HasLater(t.Context(), dead, after); err != nil || found != (len(list) > 0) {
			t.Errorf("HasLater(%s) = %v, %v; EachLater found %d", data, found, err, len(list))
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
		l := b.insertLetter(id)
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

	// The position of a swept envelope is made of its stamp. The time of the letter shows whether a
	// stream from the position may contain the envelope.
	stamped, within := outboxes.PosAt(bson.Timestamp{T: 7, I: 1}), outboxes.PosWithin("8201", bson.Timestamp{T: 7, I: 1})
	numbered := outboxes.PosNumbered(outboxes.PosAt(bson.Timestamp{}), bson.Timestamp{T: 9}, 1)
	b.move(add("s", stamped, "t", nil), add("u", outboxes.PosAt(bson.Timestamp{}), "", nil), add("n", numbered, "", nil), add("r", within, "", nil))
	if list := listAfter("8203"); len(list) != 0 {
		t.Errorf("swept, before the position: got %q, want none", list)
	}
	seconds = uint32(time.Now().Unix())
	if list, want := listAfter("8203"), []string{"n " + numbered + " ", "s " + stamped + " t", "u " + outboxes.PosAt(bson.Timestamp{}) + " "}; !slices.Equal(list, want) {
		t.Errorf("swept, after the position: got %q, want %q", list, want)
	}

	var doc struct{ Dirty []string }
	err := b.state.Collection("watchers").FindOne(t.Context(), map[string]any{}).Decode(&doc)
	if want := []string{b.db.Name() + ".outbox"}; err != nil || !slices.Equal(doc.Dirty, want) {
		t.Errorf("dirty collections: got %v, %v, want %v", doc.Dirty, err, want)
	}
}
