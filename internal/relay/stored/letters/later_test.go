package letters

import (
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/resume"
)

// N15: an owner needs the letters of events that the stream repeats. Letters of requeued envelopes do not count, nor
// those of other watchers and slots.
func TestN15_LettersAfterAPosition(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.now = time.Now()

	// No letter of this test is moved after this time.
	seconds := uint32(1<<32 - 1)
	part := slot.Range{}
	listAfter := func(data string) []string {
		t.Helper()
		// Without a time, letters of swept envelopes would count.
		token, err := bson.Marshal(bson.D{{Key: "_data", Value: data}})
		if err != nil {
			t.Fatal(err)
		}
		after := resume.Position{Token: token, ClusterTime: bson.Timestamp{T: seconds}}
		var list []string
		err = Later(t.Context(), b.coll, "orders", part, after, func(m Mark) error {
			list = append(list, m.NS+" "+m.ID.StringValue()+" "+m.Pos+" "+m.Topic)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(list)
		return list
	}
	check := func(data string, want ...string) {
		t.Helper()
		if got := listAfter(data); !slices.Equal(got, want) {
			t.Errorf("after %s: got %q, want %q", data, got, want)
		}
	}
	check("82")

	letter := func(id, pos, topic string, change ...func(*Letter)) Letter {
		l := b.newLetter(bson.D{{Key: "_id", Value: id}}, change...)
		l.Pos, l.Topic = pos, topic
		return l
	}
	b.write(
		letter("a", "8201", ""),
		letter("b", "8202", "t"),
		letter("c", "8203", "", func(l *Letter) { l.NS, l.Slot = "mall.outbox", 700 }),
		letter("nowhere", "", ""),
		letter("requeued", "8204", "", func(l *Letter) { l.Delivery = 1 }),
		letter("other", "8204", "", func(l *Letter) { l.Watcher = "other" }),
	)
	check("8201", "mall.outbox c 8203 ", "shop.outbox b 8202 t")
	check("8203")
	part = slot.Range{I: 0, N: 2}
	check("8201", "shop.outbox b 8202 t")
	part = slot.Range{I: 1, N: 2}
	check("8201", "mall.outbox c 8203 ")
	part = slot.Range{}

	// The position of a swept envelope is made of its stamp. The time of the letter shows whether a
	// stream from the position may contain the envelope.
	stamped, within := outboxes.PosAt(bson.Timestamp{T: 7, I: 1}), outboxes.PosWithin("8201", bson.Timestamp{T: 7, I: 1})
	zero := outboxes.PosAt(bson.Timestamp{})
	numbered := zero + outboxes.PosNumber(bson.Timestamp{T: 9}, 1)
	b.write(letter("s", stamped, "t"), letter("u", zero, ""), letter("n", numbered, ""), letter("r", within, ""))
	check("8203")
	seconds = uint32(time.Now().Unix())
	check("8203", "shop.outbox n "+numbered+" ", "shop.outbox s "+stamped+" t", "shop.outbox u "+zero+" ")
}

// A position that contains a huge id compares like the whole one.
func TestShortPositionsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	long := func(begin, digit string) string {
		p := begin
		for len(p) < 3*maxPosBytes {
			p += digit
		}
		return p
	}
	list := []string{"82", long("8265AA00", "0"), "8265AA01", long("8265AA02", "7"), long("8265AA03", "F"), "8265AB"}
	for i, a := range list {
		for j, c := range list {
			if (a < c) != (i < j) || (ShortPos(a) < ShortPos(c)) != (i < j) {
				t.Errorf("positions %d and %d are not in order", i, j)
			}
		}
		if len(ShortPos(a)) > maxPosBytes || ShortPos(a) > a || ShortPos(ShortPos(a)) != ShortPos(a) {
			t.Errorf("position %d of %d bytes is stored as %d bytes", i, len(a), len(ShortPos(a)))
		}
	}
}
