package check

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// newCommitted returns a checker of three events of one key and one of another key, all committed, without
// deliveries.
func newCommitted(o Options) *Checker {
	c := New(o)
	for i, key := range []string{"a", "a", "a", "b"} {
		id := fmt.Sprint(i + 1)
		c.Begin(Event{ID: id, Key: key, Value: []byte("v" + id)})
		c.Committed(t0, id)
	}
	return c
}

func rec(id, key string, offset int64) Delivery {
	return Delivery{ID: id, Key: key, Topic: "t", Partition: int(key[0]) % 2, Offset: offset, Value: []byte("v" + id)}
}

func TestCheckerFindsPlantedViolations(t *testing.T) {
	t.Parallel()
	one, two, three, other := rec("1", "a", 0), rec("2", "a", 1), rec("3", "a", 2), rec("4", "b", 0)
	altered, strayed, nobody := two, three, rec("9", "a", 3)
	altered.Value = []byte("else")
	strayed.Partition++
	wrongKey := two
	wrongKey.Key = "b"

	for name, c := range map[string]struct {
		records []Delivery
		want    Report
		words   string
	}{
		"all is well": {[]Delivery{one, other, two, three}, Report{Delivered: 4}, ""},
		"loss":        {[]Delivery{one, three, other}, Report{Delivered: 3, Waiting: 1, Overtaken: 1}, "1 lost"},
		"waiting":     {[]Delivery{one, two, other}, Report{Delivered: 3, Waiting: 1}, "1 lost"},
		"duplicate":   {[]Delivery{one, two, one, three, other}, Report{Delivered: 4, Duplicates: 1}, "1 duplicate"},
		"reorder":     {[]Delivery{one, three, two, other}, Report{Delivered: 4, OutOfOrder: 1}, "1 out of order"},
		"phantom":     {[]Delivery{one, two, nobody, three, other}, Report{Delivered: 4, Phantoms: 1}, "1 phantom"},
		"altered":     {[]Delivery{one, altered, three, other}, Report{Delivered: 4, Altered: 1}, "1 altered"},
		"other key":   {[]Delivery{one, wrongKey, three, other}, Report{Delivered: 4, Altered: 1}, "1 altered"},
		"strayed":     {[]Delivery{one, two, strayed, other}, Report{Delivered: 4, Strayed: 1}, "1 in another partition"},
	} {
		check := newCommitted(Options{})
		for _, d := range c.records {
			check.Delivered(d)
		}

		got := check.Report()
		err := got.Err()
		if (err == nil) != (c.words == "") || err != nil && !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v", name, err)
		}

		if broken := got.Duplicates + got.OutOfOrder + got.Phantoms + got.Strayed + got.Altered; broken != len(got.Examples) {
			t.Errorf("%s: examples %q", name, got.Examples)
		}

		c.want.Committed, c.want.Records = 4, len(c.records)
		got.Examples, got.Oldest = nil, time.Time{}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, c.want)
		}
	}
}

// Records of other writers are counted. They break no promise, and the promises for the own events stay.
func TestRecordsOfOtherWritersAreNoPhantoms(t *testing.T) {
	t.Parallel()
	c := newCommitted(Options{Others: true})
	for _, d := range []Delivery{rec("theirs", "a", 0), rec("1", "a", 1), rec("theirs", "a", 2), rec("2", "a", 3), rec("3", "a", 4), rec("4", "b", 0)} {
		want := First
		if d.ID == "theirs" {
			want = Foreign
		}
		if got := c.Delivered(d); got != want {
			t.Errorf("event %s at %d: %d, want %d", d.ID, d.Offset, got, want)
		}
	}
	if r := c.Report(); r.Foreign != 2 || r.Phantoms != 0 || r.Delivered != 4 || r.Err() != nil {
		t.Errorf("%+v: %v", r, r.Err())
	}

	if kind := c.Delivered(rec("1", "a", 5)); kind != Duplicate {
		t.Errorf("a second record of an own event: %d", kind)
	}
	if r := c.Report(); r.Err() == nil {
		t.Error("a duplicate next to records of other writers is no error")
	}
}

func TestRecordsOfUncommittedTransactions(t *testing.T) {
	t.Parallel()
	c := New(Options{})

	for _, id := range []string{"gone", "late", "maybe", "never", "good"} {
		c.Begin(Event{ID: id, Key: "k"})
	}
	deliver := func(id string) DeliveryKind { return c.Delivered(Delivery{ID: id, Key: "k", Topic: "t"}) }

	c.Aborted("gone")
	if deliver("gone") != Phantom {
		t.Error("an aborted event is no phantom")
	}

	// The relay may be faster than the acknowledgement of the transaction.
	if deliver("late") != First {
		t.Error("an event before its acknowledgement is rejected")
	}
	c.Aborted("late")

	c.Unknown("maybe", "never")
	if deliver("maybe") != First || deliver("maybe") != Duplicate {
		t.Error("an event of unknown fate is not followed")
	}

	c.Committed(t0, "good")
	if got, want := c.Missing(), []Missing{{"good", "k", ""}}; !slices.Equal(got, want) {
		t.Errorf("missing %v, want %v", got, want)
	}
	if r := c.Report(); r.Waiting != 1 || !r.Oldest.Equal(t0) {
		t.Errorf("%+v", r)
	}

	deliver("good")
	r := c.Report()
	if r.Phantoms != 2 || r.Duplicates != 1 || r.Waiting != 0 || r.Delivered != 1 || r.Unknown != 2 || r.Aborted != 2 {
		t.Errorf("%+v", r)
	}
}

func TestWriterThatContradictsItself(t *testing.T) {
	t.Parallel()
	c := New(Options{})
	c.Committed(t0, "x")
	c.Begin(Event{ID: "x", Key: "k"})
	c.Begin(Event{ID: "x", Key: "k"})
	if r := c.Report(); len(r.Examples) != 2 {
		t.Errorf("%q", r.Examples)
	}
}

func TestFanOut(t *testing.T) {
	t.Parallel()
	c := New(Options{})
	for _, id := range []string{"1", "2"} {
		c.Begin(Event{ID: id, Key: "k", Topics: []string{"orders", "audit"}})
		c.Committed(t0, id)
	}

	deliver := func(id, topic string) DeliveryKind { return c.Delivered(Delivery{ID: id, Key: "k", Topic: topic}) }
	deliver("1", "orders")
	if r := c.Report(); r.Delivered != 0 || r.Waiting != 2 {
		t.Errorf("%+v", r)
	}
	deliver("2", "audit")
	if r := c.Report(); r.Overtaken != 1 || r.OutOfOrder != 0 {
		t.Errorf("%+v", r)
	}
	if deliver("1", "audit") != Disordered || deliver("2", "orders") != First || deliver("2", "other") != Phantom || deliver("1", "audit") != Duplicate {
		t.Error("topics are mixed up")
	}
	if r := c.Report(); r.OutOfOrder != 1 || r.Delivered != 2 || r.Waiting != 0 {
		t.Errorf("%+v", r)
	}
}

func TestCheckerForgetsFinishedEvents(t *testing.T) {
	t.Parallel()
	now := t0
	c := New(Options{Forget: time.Minute, Now: func() time.Time { return now }})
	for i := range 1000 {
		id := fmt.Sprint(i)
		c.Begin(Event{ID: id, Key: "k"})
		if i%10 == 0 {
			c.Aborted(id)
		} else {
			c.Committed(now, id)
			if i != 501 { // which waits
				c.Delivered(Delivery{ID: id, Key: "k", Topic: "t"})
			}
		}
		now = now.Add(time.Second)
	}

	if n := len(c.events); n > 63 || n < 60 {
		t.Errorf("%d events are kept", n)
	}
	if c.Delivered(Delivery{ID: "999", Key: "k", Topic: "t"}) != Duplicate || c.Delivered(Delivery{ID: "1", Key: "k", Topic: "t"}) != Phantom {
		t.Error("the checker remembers the wrong events")
	}
	if r := c.Report(); r.Waiting != 1 || r.Overtaken != 1 {
		t.Errorf("%+v", r)
	}
}

// Any history of deliveries is judged as a plain recount of it says.
func TestCheckerAgreesWithARecount(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		keys := rapid.SliceOfN(rapid.IntRange(0, 2), 1, 12).Draw(t, "keys")
		c := New(Options{})
		for i, k := range keys {
			c.Begin(Event{ID: fmt.Sprint(i), Key: fmt.Sprint(k)})
			c.Committed(t0, fmt.Sprint(i))
		}

		var want Report
		want.Committed = len(keys)

		// The recount follows each delivery with two maps.
		seen, last := map[int]bool{}, map[int]int{}
		for _, i := range rapid.SliceOfN(rapid.IntRange(0, len(keys)), 0, 24).Draw(t, "records") {
			key := -1
			if i < len(keys) {
				key = keys[i]
			}
			c.Delivered(Delivery{ID: fmt.Sprint(i), Key: fmt.Sprint(key), Topic: "t"})
			want.Records++
			switch {
			case i == len(keys):
				want.Phantoms++
			case seen[i]:
				want.Duplicates++
			default:
				if before, ok := last[key]; ok && before > i {
					want.OutOfOrder++
				} else {
					last[key] = i
				}
				seen[i] = true
			}
		}

		want.Delivered, want.Waiting = len(seen), len(keys)-len(seen)

		// An event was overtaken if it is missing and a later one of its key arrived.
		for i, k := range keys {
			if l, ok := last[k]; ok && !seen[i] && l > i {
				want.Overtaken++
			}
		}

		got := c.Report()
		got.Examples, got.Oldest = nil, time.Time{}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("\n got %+v\nwant %+v", got, want)
		}
	})
}

// A repetition that is marked as redelivered is no duplicate. An unmarked repetition is a
// duplicate, also after a marked one.
func TestFlaggedRepetitionsAreAllowed(t *testing.T) {
	t.Parallel()
	c := newCommitted(Options{})
	for i, want := range []DeliveryKind{First, Repeated, Duplicate} {
		d := rec("1", "a", int64(i))
		d.Flagged = i == 1
		if got := c.Delivered(d); got != want {
			t.Errorf("record %d is %d, want %d", i, got, want)
		}
	}
	if r := c.Report(); r.Repeated != 1 || r.Flagged != 1 || r.Duplicates != 1 {
		t.Errorf("%+v", r)
	}
}

// Events that were begun before a collection was dropped may arrive, in their places. Later events must arrive.
func TestExcusedEventsMayArrive(t *testing.T) {
	t.Parallel()

	c := New(Options{})
	for _, id := range []string{"1", "2", "3", "4"} {
		c.Begin(Event{ID: id, Key: "a", Value: []byte("v" + id)})
	}

	c.Committed(t0, "1", "2")
	c.Delivered(rec("1", "a", 0))
	c.Delivered(rec("3", "a", 1))
	c.Excuse()
	c.Committed(t0, "3", "4")

	// An excused event counts as committed only once it arrives.
	if r := c.Report(); r.Committed != 2 || r.Delivered != 2 || r.Excused != 2 || r.Waiting != 0 || r.Err() != nil {
		t.Errorf("%+v", r)
	}

	c.Delivered(rec("4", "a", 2))
	c.Begin(Event{ID: "5", Key: "a", Value: []byte("v5")})
	c.Committed(t0, "5")
	r := c.Report()
	if r.Committed != 4 || r.Delivered != 3 || r.Excused != 1 || r.Waiting != 1 || r.Err() == nil {
		t.Errorf("%+v", r)
	}

	if committed, delivered := c.Progress(); committed != 4 || delivered != 3 {
		t.Errorf("%d committed, %d delivered", committed, delivered)
	}

	c.Delivered(rec("2", "a", 3))
	if r := c.Report(); r.OutOfOrder != 1 || r.Excused != 0 {
		t.Errorf("an excused event has a place in the order, too: %+v", r)
	}
}
