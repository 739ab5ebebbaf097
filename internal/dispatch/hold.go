package dispatch

import (
	"errors"
	"sync"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/watermark"
	"github.com/outrelay/outrelay/pkg/event"
)

var _ record.Holder = (*Dispatcher)(nil)

// replays owns the holds of a replay; those above are one for each call of Found.
const replays watermark.Hold = 0

// replay is the stretch of a term in which the stream brings what an earlier owner may have sent.
type replay struct {
	mu   sync.Mutex
	on   bool
	held bool
}

// BeginReplay says that records which the stream has not brought yet may stand in the topics already. Where all of them went
// there in the stream's order, nothing that is acked meanwhile can stand above one of them. Where something was delivered
// beside the stream, it can, and would move the stored offset past it: so all stored offsets stay where they are until
// EndReplay (N8), from now on if beside says that an earlier owner did so, else from the first such delivery on.
func (d *Dispatcher) BeginReplay(beside bool) {
	d.replay.mu.Lock()
	defer d.replay.mu.Unlock()
	d.replay.on = true
	if beside {
		d.replay.held = true
		d.tracker.HoldAll(replays)
	}
}

// EndReplay says that the stream has passed the time of the take-over.
func (d *Dispatcher) EndReplay() {
	d.replay.mu.Lock()
	defer d.replay.mu.Unlock()
	if d.replay.on = false; d.replay.held {
		d.replay.held = false
		d.tracker.UnholdAll(replays)
	}
}

// stay keeps the stored offsets during a replay.
func (d *Dispatcher) stay() {
	d.replay.mu.Lock()
	defer d.replay.mu.Unlock()
	if d.replay.on && !d.replay.held {
		d.replay.held = true
		d.tracker.HoldAll(replays)
	}
}

// Closed implements record.Holder.
func (d *Dispatcher) Closed(rec *record.Record, side bool) error { return d.gates.closed(rec, side) }

// Found implements record.Holder. Each has a hold of its own: the sink may tell of a partition again while what was found
// before is still being written down.
func (d *Dispatcher) Found(tp record.TopicPartition, offset int64) {
	by := replays + watermark.Hold(d.found.Add(1))
	d.tracker.Hold(tp, by, offset)
	_, begun := d.tracker.Window() // some of these may be turned away already, and not written down yet
	ready := func() bool { low, _ := d.tracker.Window(); return low >= begun }
	d.cfg.Found(ready, func() { d.tracker.Unhold(tp, by) })
}

// Pressed implements record.Holder: more than three quarters count as most.
func (d *Dispatcher) Pressed() (low record.Ticket, stream, side bool) {
	low, next := d.tracker.Window()
	most := func(used, of int64) bool { return 4*used > 3*of }
	stream = most(int64(next-low), d.maxTickets.Load()) || most(d.budget.inUse(), d.budget.bound()) || d.budget.blocked()
	return low, stream, most(d.spare.inUse(), d.spare.bound()) || d.spare.blocked()
}

// Ready implements record.Holder.
func (d *Dispatcher) Ready(topic string) { d.cfg.Ready(topic) }

// Withdrawn implements record.Holder: the gates close before anything later of these keys can be sent. Nothing waits for a record
// that is dead.
func (d *Dispatcher) Withdrawn(list []record.Withdrawn) {
	for i := range list {
		w := &list[i]
		dead := w.Why != nil && w.Why.Class.DeadAtOnce()
		if w.Ticket.IsSide() {
			if !dead {
				d.gates.stop(string(w.NS), w.Topic, string(w.Key)) // what follows of the key must not overtake it
			}
			d.answer(w.Ticket, record.Answer{Topic: w.Topic, Partition: record.AnyPartition, Offset: -1, Refused: w.Why, Held: w.Held})
			continue
		}
		e := Exception{
			ID: w.ID, StringID: w.StringID, NSHash: w.NS, Topic: w.Topic, ticket: w.Ticket, targets: 1, bytes: int64(w.Bytes),
		}
		if w.Why != nil {
			e.Why = *w.Why
		}
		if dead {
			d.except(e)
			continue
		}
		e.Pending, e.Key = []string{w.Topic}, string(w.Key)
		switch {
		case w.Why != nil:
			e.State = event.StateRetry
		case errors.Is(w.Held, record.ErrParked):
			e.State = event.StateParked
		default:
			e.State = event.StateBlocked
		}
		d.except(e, Gate{string(w.NS), w.Topic, string(w.Key)})
	}
}

// Gate counts an exception of an earlier owner; ns is the value of the header `outrelay-ns`, empty where records carry none.
func (d *Dispatcher) Gate(ns, topic, key string) { d.gates.add(ns, topic, key, 1) }

// ForgetGates opens every gate, for a load from the beginning. Nothing may be on its way meanwhile.
func (d *Dispatcher) ForgetGates() { d.gates.forget() }

// Besides is how many deliveries outside of the stream's order have no answer yet.
func (d *Dispatcher) Besides() int { return int(d.besides.Load()) }

// Open takes one off a gate: an exception of the stream was sent to topic and that is written down, or it is dead.
func (d *Dispatcher) Open(ns, topic, key string) { d.gates.add(ns, topic, key, -1) }

// Resume lets deliveries outside of the stream's order of a key go on, after all of it that came back has been dealt with.
func (d *Dispatcher) Resume(ns, topic, key string) { d.gates.resume(ns, topic, key) }

// Gated is how many exceptions the gates count, over all topics.
func (d *Dispatcher) Gated() int {
	d.gates.mu.Lock()
	defer d.gates.mu.Unlock()
	return d.gates.total
}

// hold makes an exception of an envelope some of whose targets have to wait.
func (d *Dispatcher) hold(it *Item, held []int, state string, t record.Ticket) {
	rec := &it.Records[held[0]]
	ns := string(rec.Header(record.HeaderNamespace))
	e := it.exception(record.Refusal{}, t, 0)
	e.State, e.Key, e.targets = state, string(rec.Key), len(held)
	gates := make([]Gate, len(held))
	for k, i := range held {
		e.Pending = append(e.Pending, it.Records[i].Topic)
		e.bytes += int64(d.sink.Size(&it.Records[i]))
		gates[k] = Gate{ns, it.Records[i].Topic, e.Key}
	}
	d.except(e, gates...)
}
