package pipeline

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// One slot has all memory of a process. Two slots have a half each, and together never more than all of it: memory that
// the first uses beyond its half keeps the second waiting until it is acked.
func TestN13_SlotsShareTheMemoryOfTheirProcess(t *testing.T) {
	t.Parallel()
	// The share of the streams is 600.
	pool := NewPool(800, 4000)
	one, _, _ := newTestDispatcher(t, Config{Pool: pool})
	two, _, _ := newTestDispatcher(t, Config{Pool: pool})
	deliver := func(d *Dispatcher, n int) <-chan error {
		t.Helper()
		done := make(chan error, 1)
		go func() {
			for range n {
				if err := d.Deliver(t.Context(), itemOfSize("a", 100)); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
		return done
	}
	in := func(done <-chan error) {
		t.Helper()
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(30 * time.Second):
			t.Fatal("a delivery that fits waits")
		}
	}
	waits := func(done <-chan error, d *Dispatcher) {
		t.Helper()
		for began := time.Now(); !d.Waiting(); {
			select {
			case <-done:
				t.Fatal("a delivery that does not fit does not wait")
			case <-time.After(time.Millisecond):
			}
			if time.Since(began) > 30*time.Second {
				t.Fatal("no delivery waits")
			}
		}
	}
	limits := func(d *Dispatcher, bytes, tickets int64) {
		t.Helper()
		if b, n := d.Limits(); b != bytes || n != tickets {
			t.Errorf("%d bytes and %d tickets, want %d and %d", b, n, bytes, tickets)
		}
	}
	acked := func(d *Dispatcher, ticket int) {
		d.Acked(record.TopicPartition{Topic: "a"}, int64(ticket), []record.Ticket{record.Ticket(ticket)}, 100)
	}

	one.Start(positionAt(1))
	limits(one, 800, 4000)
	// The first stream uses the whole share.
	in(deliver(one, 6))

	two.Start(positionAt(1))
	limits(one, 400, 2000)
	limits(two, 400, 2000)
	// One event may always pass.
	in(deliver(two, 1))
	second := deliver(two, 1)
	// The event waits although the share of its stream has room.
	waits(second, two)
	for ticket := range 2 {
		acked(one, ticket)
	}
	// Now one uses 400, and two uses 200.
	in(second)
	more := deliver(one, 1)
	// Stream one is above its half.
	waits(more, one)
	third := deliver(two, 1)
	// The whole share is in use.
	waits(third, two)
	acked(one, 2)
	// Now each uses 300.
	in(third)
	waits(more, one)

	two.LeavePool()
	limits(one, 800, 4000)
	in(more)
	in(deliver(one, 2))
	// One uses 600 again, because the bytes that two still holds do not count.
	waits(deliver(one, 1), one)
	// These bytes change nothing when two releases them.
	acked(two, 0)
	if _, n := one.Unresolved(); n != 600 {
		t.Errorf("%d bytes in use, want 600", n)
	}
	if used := pool.stream.used.Load(); used != 600 {
		t.Errorf("%d bytes of the pool in use, want 600", used)
	}
	acked(one, 3)
}

// The reconciler's quarter is divided as the stream's share is, and everybody has some tickets.
func TestN13_ManySlotsHaveAFewTicketsEach(t *testing.T) {
	t.Parallel()
	pool := NewPool(80<<20, 2000)
	var all []*Dispatcher
	for range 4 {
		d, _, _ := newTestDispatcher(t, Config{Pool: pool})
		d.Start(positionAt(1))
		all = append(all, d)
	}

	for _, d := range all {
		if b, n := d.Limits(); b != 20<<20 || n != minTickets || d.sideBudget.currentShare() != 5<<20 {
			t.Errorf("%d bytes, %d tickets, %d bytes of the reconciler", b, n, d.sideBudget.currentShare())
		}
	}

	for _, d := range all[1:] {
		d.LeavePool()
		// A second call changes nothing.
		d.LeavePool()
	}
	if b, n := all[0].Limits(); b != 80<<20 || n != 2000 {
		t.Errorf("alone %d bytes and %d tickets", b, n)
	}
}
