package kafka

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/record"
)

// openDoors is a Holder that holds nothing, for a sink in which nothing goes wrong.
type openDoors struct {
	asked int
	found []int64
}

func (d *openDoors) Closed(*record.Record, bool) error { d.asked++; return nil }
func (*openDoors) Withdrawn(list []record.Withdrawn)   { panic(list) }
func (d *openDoors) Found(_ record.TopicPartition, offset int64) {
	d.found = append(d.found, offset)
}
func (*openDoors) Pressed() (record.Ticket, bool, bool) { return 0, false, false }
func (*openDoors) Ready(topic string)                   { panic(topic) }

// exception is a record that is held, under the ticket that its event has in the stream.
type exception struct {
	ticket record.Ticket
	rec    record.Record
}

// desk is the Holder of a test and the reconciler behind it: what is given back or turned away is held, later records of
// its keys with it, until release sends all of it again in the order of the stream.
type desk struct {
	tb testing.TB
	u  setUp
	r  *rig

	mu      sync.Mutex
	sent    map[record.Ticket]record.Record
	held    []exception
	gates   map[string]int  // by key
	again   map[string]bool // keys of which a delivery by the side was given back since release began
	calls   [][]record.Withdrawn
	found   map[record.TopicPartition]int64
	ready   []string
	pressed func() (low record.Ticket, stream, side bool)
	changed chan struct{}
}

func newDesk(tb testing.TB) *desk {
	return &desk{
		tb: tb, sent: map[record.Ticket]record.Record{}, gates: map[string]int{}, again: map[string]bool{}, found: map[record.TopicPartition]int64{},
		changed: make(chan struct{}),
	}
}

// sit opens a sink with a desk.
func sit(tb testing.TB, u setUp) *desk {
	tb.Helper()
	d := newDesk(tb)
	u.holder = d
	if u.cfg.ParkAfter == 0 {
		u.cfg.ParkAfter = 100 * time.Millisecond
	}
	if u.txid == "" {
		u.txid = "outrelay.test." + stacktest.Name(tb)
	}
	d.r = open(tb, u)
	u.acks, u.claims, u.noRun = d.r.acks, d.r.claims, true
	d.u = u
	return d
}

// follow opens the next sink behind one that has ended, as the next term does: what was given back and stands in the topics
// is acked there, and what has had no answer comes once more by the stream.
func (d *desk) follow() {
	d.tb.Helper()
	next := d.r.next
	d.r = open(d.tb, d.u)
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
			d.hold(t)
			delete(d.sent, t)
		} else {
			again = append(again, t)
		}
	}
	d.r.acks.mu.Unlock()
	d.mu.Unlock()
	for _, x := range d.take() {
		size := d.r.Size(&x.rec)
		d.r.acks.mu.Lock()
		d.r.acks.bytes += size
		d.r.acks.mu.Unlock()
		found := d.r.Take(&x.rec, x.ticket|record.Side)
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

func (d *desk) Closed(rec *record.Record, side bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if key := gateOf(rec); !side && d.gates[key] > 0 || side && d.again[key] {
		return record.ErrBlocked
	}
	return nil
}

// hold is what the dispatcher does when it decides that an envelope becomes an exception. The lock is held.
func (d *desk) hold(t record.Ticket) {
	x := exception{t &^ record.Side, d.sent[t]}
	d.held = append(d.held, x)
	d.gates[gateOf(&x.rec)]++
	d.change()
}

func (d *desk) change() {
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *desk) Withdrawn(list []record.Withdrawn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	bytes := 0
	var dead []record.Withdrawn
	for i := range list {
		w := &list[i]
		rec, ok := d.sent[w.Ticket]
		if !ok {
			d.tb.Errorf("ticket %d was given back and never queued", w.Ticket)
			continue
		}
		if string(w.ID) != string(rec.Headers[0].Value) || w.Topic != rec.Topic || string(w.Key) != string(rec.Key) || (w.Key == nil) != (rec.Key == nil) {
			d.tb.Errorf("ticket %d was given back as %+v", w.Ticket, w)
		}
		if (w.Why == nil) == (w.Held == nil) {
			d.tb.Errorf("ticket %d: %v and %v", w.Ticket, w.Why, w.Held)
		}
		if w.Why != nil && w.Why.Class.DeadAtOnce() {
			dead = append(dead, *w)
			continue
		}
		bytes += w.Bytes
		if w.Ticket.IsSide() {
			d.again[gateOf(&rec)] = true
		}
		d.hold(w.Ticket)
		delete(d.sent, w.Ticket)
	}
	if d.r.acks.Withdrawn(dead); len(dead) < len(list) {
		d.calls = append(d.calls, list)
	}
	d.r.acks.mu.Lock()
	d.r.acks.bytes -= bytes
	d.r.acks.mu.Unlock()
}

func (d *desk) Found(tp record.TopicPartition, offset int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.found[tp] = offset
	d.change()
}

func (d *desk) Pressed() (low record.Ticket, stream, side bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pressed == nil {
		return 0, false, false
	}
	return d.pressed()
}

func (d *desk) Ready(topic string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ready = append(d.ready, topic)
	d.change()
}

// until waits for a condition of the desk, which is locked while ok looks at it.
func (d *desk) until(what string, ok func() bool) {
	d.tb.Helper()
	deadline := time.NewTimer(patient)
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
			d.tb.Fatalf("%s: not in time (%d held, %+v)", what, held, d.r.State())
		}
	}
}

// offer gives a record to the sink, as the dispatcher or the reconciler does, and keeps the books.
func (d *desk) offer(rec record.Record, t record.Ticket) error {
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

// send is an event of the stream: queued, or held.
func (d *desk) send(rec record.Record) (t record.Ticket, err error) {
	d.tb.Helper()
	t = d.r.next
	d.r.next++
	return t, d.deliver(rec, t)
}

func (d *desk) deliver(rec record.Record, t record.Ticket) error {
	d.tb.Helper()
	err := d.offer(rec, t)
	switch {
	case err == nil:
	case errors.Is(err, ErrReopen), errors.Is(err, ErrBroken): // it comes again
		d.mu.Lock()
		d.sent[t] = rec
		d.mu.Unlock()
		d.r.acks.mu.Lock()
		d.r.acks.bytes += d.r.Size(&rec)
		d.r.acks.mu.Unlock()
	case errors.Is(err, record.ErrParked), errors.Is(err, record.ErrBlocked):
		d.mu.Lock()
		d.sent[t] = rec
		d.hold(t)
		delete(d.sent, t)
		d.mu.Unlock()
	default:
		d.tb.Fatal(err)
	}
	return err
}

// take hands out what is held, in the order of the stream.
func (d *desk) take() []exception {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.held
	d.held = nil
	clear(d.again)
	slices.SortFunc(list, func(a, b exception) int { return cmp.Compare(a.ticket, b.ticket) })
	return list
}

// release sends what is held again, in the order of the stream, and opens the gates. It fails if a target is still parked.
func (d *desk) release() {
	d.tb.Helper()
	d.try()
	if n := d.count(); n > 0 {
		d.tb.Fatalf("%d records cannot be released", n)
	}
}

// try is release where a target may be parked, or park again meanwhile.
func (d *desk) try() {
	stop := map[string]bool{}
	for _, x := range d.take() {
		key := gateOf(&x.rec)
		err := record.ErrBlocked
		if !stop[key] {
			err = d.offer(x.rec, x.ticket|record.Side)
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

// answered waits until n events are acked or refused, on whichever way.
func (d *desk) answered(n int) {
	d.tb.Helper()
	d.r.acks.resolved(n)
}

// held is how many records are held.
func (d *desk) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.held)
}

// given lists the tickets of all calls of Withdrawn, in their order.
func (d *desk) given() (tickets []record.Ticket) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, list := range d.calls {
		for _, w := range list {
			tickets = append(tickets, w.Ticket)
		}
	}
	return tickets
}

// parked reports whether the sink says that a target is parked, and how much waits for it.
func (d *desk) parked(topic string, partition int32) (n int, ok bool) {
	for _, b := range d.r.State() {
		if b.Topic == topic && b.Partition == partition {
			return b.Count, b.Parked
		}
	}
	return 0, false
}
