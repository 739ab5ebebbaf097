package fence

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/compress"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func TestN04_FirstStartOnlyTakesTheID(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	o := &owner{id: "tx-" + stacktest.Name(t)}
	out := o.takeAll(t, c)
	if out.Producer.ID < 0 || len(out.Released) != 0 {
		t.Errorf("got %v, released %v", out.Producer, out.Released)
	}
	if len(o.senders) != 1 || o.senders[0].ID != out.Producer.ID || o.senders[0].Epoch != out.Producer.Epoch || o.senders[0].Generation != 0 {
		t.Errorf("senders %+v", o.senders)
	}
}

// Every partition rejects a deposed owner, whether or not the owner used it. The records of the owner are read back.
func TestN04_ZombieIsRejectedEverywhere(t *testing.T) {
	t.Parallel()
	old, c := newClient(t), newClient(t)
	tp := newTopic(t, old, 4)
	o := newOwner(t, tp, 4)
	first := o.takeAll(t, old)
	zombie := first.Producer
	for p := range 2 {
		mustSend(t, old, at(tp, p), encodeBatch(0, zombie, 0, newRecords("a", "b")...))
		mustSend(t, old, at(tp, p), encodeBatch(compress.Lz4, zombie, 2, newRecords("c", "a")...))
	}

	second := o.takeAll(t, c)
	if second.Producer.ID != zombie.ID || second.Producer.Epoch <= zombie.Epoch {
		t.Fatalf("took %v after %v", second.Producer, zombie)
	}

	for p := range 4 {
		checkZombieRejected(t, old, at(tp, p), zombie, 4)
		tail := second.Released[at(tp, p)]
		if tail.From != 0 || tail.Next < 1 {
			t.Errorf("p%d: tail %d to %d", p, tail.From, tail.Next)
		}
		if want := []int{4, 4, 0, 0}[p]; tail.Hits.Len() != want {
			t.Errorf("p%d: %d hits, want %d", p, tail.Hits.Len(), want)
		}
		if p < 2 {
			a := mustIdentify(t, newHeader("id", "a"))
			lo, _ := tail.Hits.Take(a, AnyTime)
			hi, ok := tail.Hits.Take(a, AnyTime)
			if !ok || hi != lo+3 {
				t.Errorf("p%d: a at %d and %d", p, lo, hi)
			}
		}
		mustSend(t, c, at(tp, p), encodeBatch(0, second.Producer, 0, newRecords("n")...))
	}

	// The earlier sender is closed everywhere and still counts in read-backs.
	if len(o.senders) != 2 || len(o.senders[0].Open) != 0 || o.senders[0].ID != zombie.ID {
		t.Errorf("senders %+v", o.senders)
	}

	// Once the stored offsets have passed its records, it is forgotten.
	for p := range 4 {
		o.offsets[tp][p] = second.Released[at(tp, p)].Next
	}

	third := o.takeAll(t, newClient(t))
	if len(o.senders) != 2 || o.senders[0].Epoch != second.Producer.Epoch {
		t.Errorf("senders after another takeover %+v", o.senders)
	}

	for p := range 4 {
		if n := third.Released[at(tp, p)].Hits.Len(); n != 1 {
			t.Errorf("p%d: %d hits of the second owner, want 1", p, n)
		}
	}
}

// The barrier alone is what rejects: without it a new epoch at the coordinator leaves a zombie free to write.
func TestN04_EpochAtTheCoordinatorFencesNothing(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 1)
	tx := "tx-" + tp
	ctx := ctxOf(t, 2*time.Minute)
	old, err := c.Init(ctx, tx, anyEpoch, Patience{})
	if err != nil {
		t.Fatal(err)
	}

	taken, err := c.Init(ctx, tx, anyEpoch, Patience{})
	if err != nil {
		t.Fatal(err)
	}

	mustSend(t, c, at(tp, 0), encodeBatch(0, old, 0, newRecords("late")...))
	if _, _, err := c.Barrier(ctx, tx, old, allOf(tp, 1), Patience{}); !errors.Is(err, ErrFenced) {
		t.Errorf("barrier of the old owner: %v", err)
	}
	if _, err := c.Init(ctx, tx, old, Patience{}); !errors.Is(err, ErrFenced) {
		t.Errorf("conditional re-init of the old owner: %v", err)
	}

	rejected, added, err := c.Barrier(ctx, tx, taken, append(allOf(tp, 1), at(tp, 7), at("no-"+tp, 0)), Patience{})
	if err != nil || !added {
		t.Fatal(added, err)
	}
	if len(rejected) != 2 || !errors.Is(rejected[at(tp, 7)], kafka.UnknownTopicOrPartition) || !errors.Is(rejected[at("no-"+tp, 0)], kafka.UnknownTopicOrPartition) {
		t.Errorf("rejected %v", rejected)
	}
}

// A marker of the same epoch, or one that was not read, releases nothing.
func TestN04_OnlyAReadMarkerAboveReleases(t *testing.T) {
	t.Parallel()
	tp := at("t", 0)
	for name, c := range map[string]struct {
		marks    map[int64]int16
		released bool
	}{
		"none":             {map[int64]int16{}, false},
		"of the epoch":     {map[int64]int16{7: 4, 9: 9}, false},
		"another id alone": {map[int64]int16{8: 9}, false},
		"one of two":       {map[int64]int16{7: 5}, false},
		"both":             {map[int64]int16{7: 5, 9: 1}, true},
	} {
		s := newSession(&Client{}, In{})
		for _, sender := range []record.Sender{{ID: 7, Epoch: 4, Open: []record.TopicPartition{tp}}, {ID: 9, Open: []record.TopicPartition{tp}}, {ID: 10, Epoch: 3}} {
			s.retired = s.retired.withSender(sender)
		}
		tail := newTail(0)
		tail.marks, tail.target, tail.Next = c.marks, 12, 12
		s.held[tp] = &heldPartition{tail: tail}

		if got := s.releaseIfFenced(&reading{TopicPartition: tp, tail: tail}) != nil; got != c.released {
			t.Errorf("%s: released %t, want %t", name, got, c.released)
		}
	}
}

// N7: records of foreign producers are no deliveries of the relay, even if they carry its ids.
func TestN07_ForeignRecordsAreNotHits(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 1)
	o := newOwner(t, tp, 1)
	me := o.takeAll(t, c).Producer
	stranger, err := c.Init(ctxOf(t, 2*time.Minute), "tx-stranger-"+tp, anyEpoch, Patience{})
	if err != nil {
		t.Fatal(err)
	}

	mustSend(t, c, at(tp, 0), encodeBatch(0, stranger, 0, newRecords("x", "y")...))
	mustSend(t, c, at(tp, 0), encodeBatch(0, anonymous, -1, newRecords("x", "y")...))
	want := mustSend(t, c, at(tp, 0), encodeBatch(0, me, 0, newRecords("x")...))
	hits := o.takeAll(t, c).Released[at(tp, 0)].Hits
	if got, ok := hits.Take(mustIdentify(t, newHeader("id", "x")), AnyTime); !ok || got != want || hits.Len() != 0 {
		t.Errorf("x at %d, %t, %d left; want %d alone", got, ok, hits.Len(), want)
	}
}

// N8, N9: an offset that is not in the log is an event; a partition without an entry is read from 0.
func TestN08_OutOfRangeIsAnEvent(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 3)
	o := newOwner(t, tp, 2)
	me := o.takeAll(t, c).Producer
	for p := range 3 {
		mustSend(t, c, at(tp, p), encodeBatch(0, me, 0, newRecords("x", "y")...))
	}

	// The offset of partition 0 is beyond its end, as after a topic was created again. Partition 2 has no entry.
	o.offsets[tp] = []int64{1_000_000, 2}
	out := o.takeAll(t, c)
	if !o.hasEvent(OutOfRange) {
		t.Errorf("no event in %+v", o.events)
	}

	for p, want := range []struct {
		outside bool
		hits    int
		from    int64
	}{{true, 2, 0}, {false, 1, 2}, {false, 2, 0}} {
		tail := out.Released[at(tp, p)]
		if tail.OutOfRange != want.outside || tail.Hits.Len() != want.hits || tail.From != want.from {
			t.Errorf("p%d: out of range %t, %d hits, from %d; want %+v", p, tail.OutOfRange, tail.Hits.Len(), tail.From, want)
		}
	}
}

func TestN08_OffsetBelowTheLogStart(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 1)
	o := newOwner(t, tp, 1)
	me := o.takeAll(t, c).Producer
	for i := range 5 {
		mustSend(t, c, at(tp, 0), encodeBatch(0, me, int32(i), newRecords(newNames("r", 5)[i])...))
	}

	deleteRecords(t, tp, 0, 4)
	out := o.takeAll(t, c)
	tail := out.Released[at(tp, 0)]
	if !tail.OutOfRange || tail.From != 4 || tail.Hits.Len() == 0 || !o.hasEvent(OutOfRange) {
		t.Errorf("tail %+v, events %+v", tail, o.events)
	}
}

// Missing topics are reported and do not delay the others.
func TestN04_MissingTopicIsQuarantined(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp, gone := newTopic(t, c, 1), "gone-"+stacktest.Name(t)
	o := newOwner(t, tp, 1)
	o.takeAll(t, c)
	o.offsets[gone] = []int64{3, 4}
	out := o.take(t, c)
	if !strings.Contains(out.Quarantined[at(gone, 0)].Cause, "does not exist") || out.Quarantined[at(gone, 1)] == healthy || out.Released[at(tp, 0)] == nil {
		t.Fatalf("quarantined %v", out.Quarantined)
	}
	if open := o.senders[0].Open; !slices.Equal(open, allOf(gone, 2)) {
		t.Errorf("the earlier sender is open in %v", open)
	}

	// It is created: the next retry fences and releases it.
	stacktest.CreateTopic(t, gone, 2)
	waitReady(t, c, gone, 2)
	ctx := ctxOf(t, 2*time.Minute)
	released := map[record.TopicPartition]*Tail{}
	stacktest.Eventually(t, "release of the topic", func() bool {
		got, err := out.Session.Retry(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for tp, tail := range got {
			released[tp] = tail
		}
		return len(out.Session.Quarantined()) == 0
	})

	if len(released) != 2 || !released[at(gone, 0)].OutOfRange {
		t.Errorf("released %v", released)
	}
	if o.save(out.Session); len(o.senders[0].Open) != 0 {
		t.Errorf("senders %+v", o.senders)
	}
}

// Two owners race for the id. The loser gets an error, and only the last epoch can write.
func TestN04_RacingOwners(t *testing.T) {
	t.Parallel()
	a, b := newClient(t), newClient(t)
	tp := newTopic(t, a, 3)
	o := newOwner(t, tp, 3)
	o.takeAll(t, a)
	type result struct {
		out *Out
		err error
	}

	results := make(chan result, 2)
	var won []*Out
	var lost []error
	// A coordinator that ends the loser's transaction fences the winner's next epoch, too, now and then: then both take over again.
	for range 5 {
		for _, c := range []*Client{a, b} {
			go func() {
				out, err := c.Take(t.Context(), o.newInput())
				results <- result{out, err}
			}()
		}
		for range 2 {
			switch r := <-results; {
			case r.err == nil:
				won = append(won, r.out)
			case errors.Is(r.err, ErrFenced):
				lost = append(lost, r.err)
			default:
				t.Fatal(r.err)
			}
		}
		if len(won) > 0 {
			break
		}
	}

	if len(won) == 0 {
		t.Fatal("both are fenced each time: ", lost)
	}

	// The next takeover deposes the winner.
	for _, w := range won {
		o.senders = append(o.senders, w.Senders...)
	}

	last := o.takeAll(t, a)
	for p := range 3 {
		for _, w := range won {
			checkZombieRejected(t, b, at(tp, p), w.Producer, 0)
		}
		mustSend(t, a, at(tp, p), encodeBatch(0, last.Producer, 0, newRecords("n")...))
	}
}

// The gate is checked between steps. A suspended owner does nothing, and continues if it still holds the lease.
func TestN04_ClosedGateSuspends(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	tp := newTopic(t, c, 1)
	o := newOwner(t, tp, 1)
	before := o.takeAll(t, c).Producer
	var open atomic.Bool
	requested := make(chan struct{})
	in := o.newInput()
	in.Gate = func() bool {
		select {
		case requested <- struct{}{}:
		default:
		}
		return open.Load()
	}

	done := make(chan *Out, 1)
	go func() {
		out, err := c.Take(ctxOf(t, 2*time.Minute), in)
		if err != nil {
			t.Error(err)
		}
		done <- out
	}()

	for range 3 {
		<-requested
	}

	mustSend(t, c, at(tp, 0), encodeBatch(0, before, 0, newRecords("still mine")...))
	if _, err := c.Init(ctxOf(t, 2*time.Minute), o.id+"#0", before, Patience{}); err != nil {
		t.Errorf("somebody took the id at a closed gate: %v", err)
	}

	open.Store(true)
	if out := <-done; out == nil || out.Released[at(tp, 0)] == nil {
		t.Errorf("out %+v", out)
	}
}

func TestTakeStopsWithItsContext(t *testing.T) {
	t.Parallel()
	c := newClient(t)
	o := newOwner(t, "no-topic-needed", 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("lease lost")

	in := o.newInput()
	calls := 0
	in.Gate = func() bool {
		if calls++; calls == 2 {
			cancel(why)
		}
		return calls < 2
	}

	if _, err := c.Take(ctx, in); !errors.Is(err, why) {
		t.Errorf("Take() = %v, want %v", err, why)
	}
}
