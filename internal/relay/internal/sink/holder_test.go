package sink

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// openHolder is a Holder that holds nothing, for a sink that gives nothing back.
type openHolder struct {
	checks int // calls of Closed
}

func (d *openHolder) CheckGate(*record.Record, bool) error      { d.checks++; return nil }
func (*openHolder) Withdrawn(list []record.Withdrawn)           { panic(list) }
func (*openHolder) MemoryPressure() (record.Ticket, bool, bool) { return 0, false, false }
func (*openHolder) Ready(topic string)                          { panic(topic) }
func (*openHolder) HoldOffsets()                                {}

// heldRecord is a record that is held, under the ticket that its event has in the stream.
type heldRecord struct {
	ticket record.Ticket
	rec    record.Record
}

// testHolder is the Holder of a test, together with its reconciler. It holds records that were
// given back or turned away, and later records of their keys. release sends all of them again, in
// the order of the stream.
type testHolder struct {
	tb testing.TB
	u  sinkOptions
	r  *testSink

	mu   sync.Mutex
	sent map[record.Ticket]record.Record

	offsetHolds int // calls of HoldOffsets
	held        []heldRecord
	gates       map[string]int  // by key
	again       map[string]bool // keys with a side delivery that was given back since release began
	calls       [][]record.Withdrawn
	ready       []string
	pressed     func() (low record.Ticket, stream, side bool)
	changed     chan struct{}
}

func newTestHolder(tb testing.TB) *testHolder {
	return &testHolder{
		tb:      tb,
		sent:    map[record.Ticket]record.Record{},
		gates:   map[string]int{},
		again:   map[string]bool{},
		changed: make(chan struct{}),
	}
}

// openWithHolder opens a sink with a new testHolder.
func openWithHolder(tb testing.TB, u sinkOptions) *testHolder {
	tb.Helper()
	d := newTestHolder(tb)
	u.holder = d
	if u.cfg.ParkAfter == 0 {
		u.cfg.ParkAfter = 100 * time.Millisecond
	}
	if u.txid == "" {
		u.txid = "outrelay.test." + stacktest.Name(tb)
	}

	d.r = openSink(tb, u)
	u.acks, u.claims, u.noRun = d.r.acks, d.r.claims, true
	d.u = u
	return d
}

// openNext opens the next sink after the last one has ended, as the next term does. Records that
// were given back and are in the topics are acked. Records without an outcome are sent again, as
// the stream would.
func (d *testHolder) openNext() {
	d.tb.Helper()
	next := d.r.next
	d.r = openSink(d.tb, d.u)
	d.r.next = next

	var again []record.Ticket
	d.mu.Lock()
	d.r.acks.mu.Lock()
	for t, rec := range d.sent {
		if _, ok := d.r.acks.acked[t]; ok {
			continue
		}
		d.r.acks.bytes -= d.r.Size(&rec)
		if t.IsSide() {
			d.holdLocked(t)
			delete(d.sent, t)
		} else {
			again = append(again, t)
		}
	}
	d.r.acks.mu.Unlock()
	d.mu.Unlock()

	for _, x := range d.takeHeld() {
		size := d.r.Size(&x.rec)
		d.r.acks.mu.Lock()
		d.r.acks.bytes += size
		d.r.acks.mu.Unlock()

		at, offset, found := d.r.FindHit(&x.rec)
		if found {
			d.r.acks.Acked(at, offset, []record.Ticket{x.ticket | record.Side}, size)
		}
		d.mu.Lock()
		if found {
			d.gates[gateOf(&x.rec)]--
		} else {
			d.held = append(d.held, x)
		}
		d.mu.Unlock()
		if !found {
			d.r.acks.mu.Lock()
			d.r.acks.bytes -= size
			d.r.acks.mu.Unlock()
		}
	}

	slices.Sort(again)
	for _, t := range again {
		_ = d.deliver(d.sent[t], t)
	}
	d.r.run(d.tb)
	d.r.Flush()
}

func gateOf(rec *record.Record) string {
	gate := rec.Topic + "/" + string(rec.Key)
	for _, h := range rec.Headers {
		if string(h.Key) == "outrelay-ns" {
			gate += "/" + string(h.Value)
		}
	}
	return gate
}

func (d *testHolder) CheckGate(rec *record.Record, side bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if key := gateOf(rec); !side && d.gates[key] > 0 || side && d.again[key] {
		return record.ErrBlocked
	}
	return nil
}

// holdLocked holds the record of t, as the dispatcher does.
func (d *testHolder) holdLocked(t record.Ticket) {
	x := heldRecord{t &^ record.Side, d.sent[t]}
	d.held = append(d.held, x)
	d.gates[gateOf(&x.rec)]++
	d.signalLocked()
}

// signalLocked wakes waitUntil.
func (d *testHolder) signalLocked() {
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *testHolder) Withdrawn(list []record.Withdrawn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	bytes := 0
	var dead []record.Withdrawn
	for i := range list {
		w := &list[i]
		rec, ok := d.sent[w.Ticket]
		if !ok {
			d.tb.Errorf("ticket %d was given back, but never queued", w.Ticket)
			continue
		}

		sameKey := string(w.Key) == string(rec.Key) && (w.Key == nil) == (rec.Key == nil)
		if string(w.ID) != string(rec.Headers[0].Value) || w.Topic != rec.Topic || !sameKey {
			d.tb.Errorf("ticket %d was given back as %+v", w.Ticket, w)
		}
		if (w.Rejection == nil) == (w.Held == nil) {
			d.tb.Errorf("ticket %d: rejection %v and error %v, want one of them", w.Ticket, w.Rejection, w.Held)
		}
		if w.Rejection != nil && w.Rejection.Class.DeadAtOnce() {
			dead = append(dead, *w)
			continue
		}

		bytes += w.Bytes
		if w.Ticket.IsSide() {
			d.again[gateOf(&rec)] = true
		}
		d.holdLocked(w.Ticket)
		delete(d.sent, w.Ticket)
	}

	if d.r.acks.Withdrawn(dead); len(dead) < len(list) {
		d.calls = append(d.calls, list)
	}
	d.r.acks.mu.Lock()
	d.r.acks.bytes -= bytes
	d.r.acks.mu.Unlock()
}

func (d *testHolder) MemoryPressure() (low record.Ticket, stream, side bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pressed == nil {
		return 0, false, false
	}
	return d.pressed()
}

func (d *testHolder) HoldOffsets() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.offsetHolds++
}

func (d *testHolder) Ready(topic string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ready = append(d.ready, topic)
	d.signalLocked()
}

// waitUntil waits until ok returns true. It calls ok with the lock of the holder.
func (d *testHolder) waitUntil(condition string, ok func() bool) {
	d.tb.Helper()
	deadline := time.NewTimer(testTimeout)
	defer deadline.Stop()
	for {
		d.mu.Lock()
		done, changed, held := ok(), d.changed, len(d.held)
		d.mu.Unlock()
		if done {
			return
		}

		select {
		case <-changed:
		case <-deadline.C:
			d.tb.Fatalf("%s: not within %s (%d held, %+v)", condition, testTimeout, held, d.r.State())
		}
	}
}

// sendCounted sends a record, as the dispatcher or the reconciler does, and counts its memory.
func (d *testHolder) sendCounted(rec record.Record, t record.Ticket) error {
	size := d.r.Size(&rec)
	d.mu.Lock()
	d.sent[t] = rec
	d.mu.Unlock()
	d.r.acks.mu.Lock()
	d.r.acks.bytes += size
	d.r.acks.mu.Unlock()

	err := d.r.Send(&rec, t)
	if err != nil {
		d.mu.Lock()
		delete(d.sent, t)
		d.mu.Unlock()
		d.r.acks.mu.Lock()
		d.r.acks.bytes -= size
		d.r.acks.mu.Unlock()
	}
	return err
}

// send sends a record as the next event of the stream. It is queued or held.
func (d *testHolder) send(rec record.Record) (t record.Ticket, err error) {
	d.tb.Helper()
	t = d.r.next
	d.r.next++
	return t, d.deliver(rec, t)
}

// deliver sends an event of the stream, and holds it if the sink does not take it.
func (d *testHolder) deliver(rec record.Record, t record.Ticket) error {
	d.tb.Helper()
	err := d.sendCounted(rec, t)
	switch {
	case err == nil:

	// The next sink gets it again.
	case errors.Is(err, ErrReopen), errors.Is(err, ErrBroken):
		d.mu.Lock()
		d.sent[t] = rec
		d.mu.Unlock()
		d.r.acks.mu.Lock()
		d.r.acks.bytes += d.r.Size(&rec)
		d.r.acks.mu.Unlock()

	case errors.Is(err, record.ErrParked), errors.Is(err, record.ErrBlocked):
		d.mu.Lock()
		d.sent[t] = rec
		d.holdLocked(t)
		delete(d.sent, t)
		d.mu.Unlock()

	default:
		d.tb.Fatal(err)
	}
	return err
}

// takeHeld removes all held records and returns them, in the order of the stream.
func (d *testHolder) takeHeld() []heldRecord {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.held
	d.held = nil
	clear(d.again)
	slices.SortFunc(list, func(a, b heldRecord) int { return cmp.Compare(a.ticket, b.ticket) })
	return list
}

// release sends the held records again, in the order of the stream, and opens the gates. The test
// fails if a target is still parked.
func (d *testHolder) release() {
	d.tb.Helper()
	d.tryRelease()
	if n := d.heldCount(); n > 0 {
		d.tb.Fatalf("%d records cannot be released", n)
	}
}

// tryRelease is release for targets that may be parked, or may be parked again in the meantime.
func (d *testHolder) tryRelease() {
	stop := map[string]bool{}
	for _, x := range d.takeHeld() {
		key := gateOf(&x.rec)
		err := record.ErrBlocked
		if !stop[key] {
			err = d.sendCounted(x.rec, x.ticket|record.Side)
		}
		d.mu.Lock()
		if err == nil {
			d.gates[key]--
		} else {
			stop[key] = true
			d.held = append(d.held, x)
		}
		d.mu.Unlock()
	}

	d.r.Flush()
}

// waitResolved waits until n events are acked or rejected, by any sink.
func (d *testHolder) waitResolved(n int) {
	d.tb.Helper()
	d.r.acks.waitResolved(n)
}

// heldCount returns the number of held records.
func (d *testHolder) heldCount() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.held)
}

// withdrawnTickets returns the tickets of all calls of Withdrawn, in order.
func (d *testHolder) withdrawnTickets() (tickets []record.Ticket) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, list := range d.calls {
		for _, w := range list {
			tickets = append(tickets, w.Ticket)
		}
	}
	return tickets
}

// parkedCount returns the number of records that wait for a target, and whether it is parked, as
// State reports.
func (d *testHolder) parkedCount(topic string, partition int32) (n int, ok bool) {
	for _, b := range d.r.State() {
		if b.Topic == topic && b.Partition == partition {
			return b.Records, b.Parked
		}
	}
	return 0, false
}
