package pipeline

import (
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// N15: of an event that comes once more, those topics are left out that have rejected it; its id may have come again elsewhere.
func TestN15_StoredEventsAreRecognizedByTheirPosition(t *testing.T) {
	t.Parallel()
	id := func(s string) bson.RawValue {
		_, v, err := bson.MarshalValue(s)
		if err != nil {
			t.Fatal(err)
		}
		return bson.RawValue{Type: bson.TypeString, Value: v}
	}
	o := NewPreviousOwner()
	o.AddDeadLetter(letters.Mark{NS: "d.c", ID: id("all"), Pos: "8201"})
	o.AddDeadLetter(letters.Mark{NS: "d.c", ID: id("one"), Pos: "8202", Topic: "a"})
	for _, c := range []struct {
		ns, id, pos string
		left        int
		dead        bool
	}{
		{"d.c", "all", "8201", 0, true}, {"d.c", "one", "8202", 1, true}, {"d.c", "one", "8203", 2, false}, {"d.x", "one", "8202", 2, false}, {"d.c", "two", "8202", 2, false},
	} {
		topics, dead := o.topicsOf(c.ns, id(c.id), &changes.Event{Pos: []byte(c.pos)})
		rest := dropTopics([]record.Record{{Topic: "a"}, {Topic: "b"}}, topics)
		if len(rest) != c.left || dead != c.dead || c.left == 1 && rest[0].Topic != "b" {
			t.Errorf("%+v: %v, %v", c, rest, dead)
		}
	}

	// A letter of a swept envelope has its stamp instead of the position of its event. An envelope that was committed
	// after the letter was inserted again.
	stamp := bson.Timestamp{T: 7, I: 1}
	moved := time.UnixMilli(5000)
	unstamped := outboxes.PosAt(bson.Timestamp{}) + outboxes.PosNumber(bson.Timestamp{T: 9}, 1)
	o.AddDeadLetter(letters.Mark{NS: "d.c", ID: id("stamped"), Pos: outboxes.PosAt(stamp), Topic: "a", MovedAt: moved})
	o.AddDeadLetter(letters.Mark{NS: "d.c", ID: id("unstamped"), Pos: unstamped, MovedAt: moved})
	for _, c := range []struct {
		id     string
		stamp  bson.Timestamp
		wallMS int64
		left   int
		dead   bool
	}{
		{"stamped", stamp, 5000, 1, true},
		{"stamped", stamp, 5001, 2, false},
		{"stamped", bson.Timestamp{T: 7, I: 2}, 5000, 2, false},
		{"unstamped", bson.Timestamp{}, 4000, 0, true},
		{"unstamped", bson.Timestamp{}, 6000, 2, false},
		{"unstamped", stamp, 4000, 2, false},
	} {
		doc := bson.D{{Key: "ts", Value: c.stamp}}
		if c.stamp.IsZero() {
			doc = bson.D{}
		}
		raw, err := bson.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		ev := changes.Event{Pos: []byte("8204"), WallMS: c.wallMS, Document: raw}
		topics, dead := o.topicsOf("d.c", id(c.id), &ev)
		rest := dropTopics([]record.Record{{Topic: "a"}, {Topic: "b"}}, topics)
		if len(rest) != c.left || dead != c.dead {
			t.Errorf("%+v: %v, %v", c, rest, dead)
		}
	}

	// An envelope waits for one topic, and another one has rejected it: the stream sends it to neither.
	o.AddWaiting("d.c", id("both"), "8205", []string{"b"})
	o.AddDeadLetter(letters.Mark{NS: "d.c", ID: id("both"), Pos: "8205", Topic: "a"})
	o.AddWaiting("d.c", id("unrouted"), "8206", []string{""})
	for _, c := range []struct{ id, pos, left string }{{"both", "8205", "c"}, {"unrouted", "8206", ""}} {
		topics, found := o.topicsOf("d.c", id(c.id), &changes.Event{Pos: []byte(c.pos)})
		left := ""
		for _, r := range dropTopics([]record.Record{{Topic: "a"}, {Topic: "b"}, {Topic: "c"}}, topics) {
			left += r.Topic
		}
		if !found || left != c.left {
			t.Errorf("%s: found %t, left are %q, want %q", c.id, found, left, c.left)
		}
	}

	// A letter stores the digest of a long id, and the beginning of a long position.
	long := strings.Repeat("x", 5000)
	o.AddWaiting("d.c", id(long), long, []string{"a"})
	o.AddDeadLetter(letters.Mark{NS: "d.c", ID: letters.ShortID(id(long)), Pos: letters.ShortPos(long), Topic: "b"})
	topics, found := o.topicsOf("d.c", id(long), &changes.Event{Pos: []byte(long)})
	if slices.Sort(topics); !found || !slices.Equal(topics, []string{"a", "b"}) {
		t.Errorf("an id of 5,000 bytes: %v, %t", topics, found)
	}

	o.Reset()
	if !o.IsEmpty() {
		t.Error("it forgets nothing")
	}
}
