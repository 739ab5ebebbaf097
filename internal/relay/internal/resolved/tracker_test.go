package resolved

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/record"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func tp(p int32) record.TopicPartition { return record.TopicPartition{Topic: "t", Partition: p} }

func TestReachedIsContiguous(t *testing.T) {
	t.Parallel()
	w := New[string](nil)
	if _, ok := w.Reached(); ok {
		t.Fatal("a tracker without a position has reached one")
	}

	w.Position("start")
	a, b := w.Begin(10, 1, 0), w.Begin(20, 1, 0)
	w.Position("two")
	c := w.Begin(30, 2, 0)
	w.Position("three")
	w.Acked(tp(0), 0, []record.Ticket{b})
	if p, _ := w.Reached(); p != "start" {
		t.Fatalf("reached %q while the first event is unresolved", p)
	}
	if ms, ok := w.OldestCommitMS(); !ok || ms != 10 {
		t.Fatalf("oldest %d %v, want 10", ms, ok)
	}

	w.Acked(tp(1), 0, []record.Ticket{a})
	if p, _ := w.Reached(); p != "two" {
		t.Fatalf("reached %q, want two", p)
	}

	w.Acked(tp(1), 1, []record.Ticket{c})
	if p, _ := w.Reached(); p != "two" {
		t.Fatalf("reached %q with one of two targets acked", p)
	}

	w.Resolve(c)
	if p, _ := w.Reached(); p != "three" || w.Unresolved() != 0 {
		t.Fatalf("reached %q with %d unresolved, want three and none", p, w.Unresolved())
	}

	w.Position("idle")
	if p, _ := w.Reached(); p != "idle" {
		t.Fatalf("an idle position is reached at once, got %q", p)
	}
}

func TestN08_StoredOffsetIsTheFirstRecordAboveThePosition(t *testing.T) {
	t.Parallel()
	w := New[int](nil)
	w.Restore(tp(0), 100)
	w.Restore(tp(1), 50)
	a, b, c := w.Begin(0, 1, 0), w.Begin(0, 1, 0), w.Begin(0, 1, 0)
	w.Position(1)
	// The record is acked, but it is above the resolved position, so it holds its offset.
	w.Acked(tp(1), 50, []record.Ticket{b})
	want := map[string][]int64{"t": {100, 50}}
	if _, _, got := w.Snapshot(); !cmp.Equal(got, want) {
		t.Fatal(cmp.Diff(want, got))
	}

	w.Acked(tp(0), 100, []record.Ticket{a, c})
	want = map[string][]int64{"t": {102, 51}}
	if _, _, got := w.Snapshot(); !cmp.Equal(got, want) {
		t.Fatal(cmp.Diff(want, got))
	}

	d := w.Begin(0, 1, 0)
	e := w.Begin(0, 1, 0)
	w.Acked(tp(0), 200, []record.Ticket{e}) // sent after something foreign
	w.Acked(tp(0), 103, nil)
	w.Idle(tp(1), 70)
	want = map[string][]int64{"t": {200, 70}}
	if _, _, got := w.Snapshot(); !cmp.Equal(got, want) {
		t.Fatal(cmp.Diff(want, got))
	}

	w.Resolve(d)
	// Everything is resolved, but no position after e was given: it would be read again, so it still holds its offset.
	if _, _, got := w.Snapshot(); !cmp.Equal(got, want) {
		t.Fatal(cmp.Diff(want, got))
	}

	w.Position(2)
	want = map[string][]int64{"t": {201, 70}}
	if _, _, got := w.Snapshot(); !cmp.Equal(got, want) {
		t.Fatal(cmp.Diff(want, got))
	}
}

// TestTrackerModel compares the tracker with a list of all events, for random orders of the results.
func TestTrackerModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		type ev struct{ left int }
		type rec struct {
			ticket record.Ticket
			off    int64
		}

		w := New[int](nil)
		var evs []*ev
		var pos [][2]int // events before it, position
		sent := map[int32][]record.Ticket{}
		acked := map[int32][]rec{}
		base := map[int32]int64{}
		var open []record.Ticket

		for p := range int32(3) {
			w.Restore(tp(p), 0)
		}

		steps := rapid.IntRange(1, 300).Draw(t, "steps")
		for n := range steps {
			switch rapid.IntRange(0, 5).Draw(t, "op") {
			case 0, 1:
				targets := rapid.IntRange(0, 3).Draw(t, "targets")
				k := w.Begin(int64(n), targets, 0)
				evs = append(evs, &ev{targets})
				for range targets {
					p := int32(rapid.IntRange(0, 2).Draw(t, "partition"))
					sent[p] = append(sent[p], k)
				}
			case 2:
				w.Position(n)
				pos = append(pos, [2]int{len(evs), n})
			case 3:
				p := int32(rapid.IntRange(0, 2).Draw(t, "acked partition"))
				if len(sent[p]) == 0 {
					continue
				}
				count := rapid.IntRange(1, len(sent[p])).Draw(t, "count")
				batch := slices.Clone(sent[p][:count])
				sent[p] = sent[p][count:]
				for i, k := range batch {
					if !k.IsSide() {
						evs[k].left--
					}
					acked[p] = append(acked[p], rec{k, base[p] + int64(i)})
				}
				w.Acked(tp(p), base[p], batch)
				base[p] += int64(count)
			case 4:
				p := int32(rapid.IntRange(0, 2).Draw(t, "side partition"))
				k := w.BeginSide()
				sent[p] = append(sent[p], k)
				open = append(open, k)
			case 5:
				if len(open) > 0 {
					i := rapid.IntRange(0, len(open)-1).Draw(t, "settled")
					w.Settle(open[i : i+1])
					open = slices.Delete(open, i, i+1)
				}
			}

			low := 0
			for low < len(evs) && evs[low].left == 0 {
				low++
			}
			want, has, below := 0, false, 0

			for _, q := range pos {
				if q[0] <= low {
					below, want, has = q[0], q[1], true
				}
			}

			got, ok, offs := w.Snapshot()
			if ok != has || got != want {
				t.Fatalf("reached %d %v, want %d %v", got, ok, want, has)
			}

			for p := range int32(3) {
				first := base[p]
				for _, r := range acked[p] {
					if r.ticket.IsSide() && slices.Contains(open, r.ticket) || !r.ticket.IsSide() && int(r.ticket) >= below {
						first = min(first, r.off)
					}
				}
				if offs["t"][p] != first {
					t.Fatalf("offset of %d is %d, want %d", p, offs["t"][p], first)
				}
			}

			if w.Unresolved() != len(evs)-low {
				t.Fatalf("%d unresolved, want %d", w.Unresolved(), len(evs)-low)
			}
		}
	})
}

func TestN08_AHeldOffsetStays(t *testing.T) {
	t.Parallel()
	w := New[int](nil)

	w.Restore(tp(0), 7)
	w.HoldAllOffsets()
	w.Acked(tp(0), 10, []record.Ticket{w.Begin(0, 1, 0)})
	w.Position(1)
	w.Idle(tp(0), 20)

	if _, _, offs := w.Snapshot(); offs["t"][0] != 7 {
		t.Fatalf("the stored offset is %d while 7 is held", offs["t"][0])
	}

	w.ReleaseAllOffsets()
	if _, _, offs := w.Snapshot(); offs["t"][0] != 20 {
		t.Fatalf("the stored offset is %d after the hold, want 20", offs["t"][0])
	}
}

func TestMarksAreBounded(t *testing.T) {
	t.Parallel()
	w := New[int](nil)
	var ks []record.Ticket
	for i := range 3 * maxMarks {
		ks = append(ks, w.Begin(0, 1, 0))
		w.Position(i)
	}
	if len(w.marks) > maxMarks {
		t.Fatalf("%d marks are kept, want at most %d", len(w.marks), maxMarks)
	}

	w.Acked(tp(0), 0, ks)
	if p, _ := w.Reached(); p != 3*maxMarks-1 {
		t.Fatalf("reached %d at the end, want the last position", p)
	}
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	w := New[int](nil)
	buf := make([]record.Ticket, 1)
	w.Position(0)

	off := int64(0)
	got := testing.AllocsPerRun(2000, func() {
		buf[0] = w.Begin(0, 1, 0)
		w.Position(1)
		w.Acked(tp(0), off, buf)
		off++
		w.pruneLocked(w.partitions[tp(0)])
	})

	if got > 0 {
		t.Fatalf("%.2f allocations per event, want none", got)
	}
}

// The offsets of 60,000 partitions are read four times a second. They are rebuilt only after a change.
func TestOffsetsAreRebuiltAfterAChangeAlone(t *testing.T) {
	w := New[int](nil)
	for p := range int32(1000) {
		w.Restore(tp(p), 5)
	}

	w.Position(1)
	w.Snapshot()
	if n := testing.AllocsPerRun(100, func() {
		w.Idle(tp(3), 5)
		w.Snapshot()
	}); n > 0 {
		t.Errorf("%v allocations though nothing has changed", n)
	}

	want := int64(5)
	expect := func(what string, at int64) {
		t.Helper()
		want = at
		if _, _, offsets := w.Snapshot(); offsets["t"][3] != want {
			t.Errorf("%s: offset %d, want %d", what, offsets["t"][3], want)
		}
	}

	w.Idle(tp(3), 7)
	expect("an idle partition", 7)
	k := w.Begin(0, 1, 0)
	w.Acked(tp(3), 7, []record.Ticket{k})
	expect("acked above the resolved position", 7)
	w.Position(2)
	expect("passed by the resolved position", 8)
	w.HoldAllOffsets()
	w.Idle(tp(3), 9)
	expect("held", 8)
	w.ReleaseAllOffsets()
	expect("not held any more", 9)
	side := w.BeginSide()
	w.Acked(tp(3), 9, []record.Ticket{side})
	expect("an ack that is not of the stream", 9)
	w.Settle([]record.Ticket{side})
	expect("settled", 10)
	w.HoldAllOffsets()
	w.Idle(tp(3), 20)
	expect("all held", 10)
	w.ReleaseAllOffsets()
	expect("none held", 20)
	w.Restore(tp(3), 1)
	expect("restored", 1)
}
