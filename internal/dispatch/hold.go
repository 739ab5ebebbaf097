package dispatch

import (
	"errors"
	"sync"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/watermark"
	"github.com/outrelay/outrelay/pkg/event"
)

var _ record.Holder = (*Dispatcher)(nil)

// replayHold owns the holds of a replay; those above are one for each call of Found.
const replayHold watermark.OffsetHold = 0

// replayWindow is the stretch of a term in which the stream brings what an earlier owner may have sent.
type replayWindow struct {
	mu          sync.Mutex
	active      bool
	offsetsHeld bool
}

// BeginReplay says that records which the stream has not brought yet may stand in the topics already. Where all of them went
// there in the stream's order, nothing that is acked meanwhile can stand above one of them. Where something was delivered
// beside the stream, it can, and would move the stored offset past it: so all stored offsets stay where they are until
// EndReplay (N8), from now on if beside says that an earlier owner did so, else from the first such delivery on.
func (d *Dispatcher) BeginReplay(beside bool) {
	d.replay.mu.Lock()
	defer d.replay.mu.Unlock()
	d.replay.active = true
	if beside {
		d.replay.offsetsHeld = true
		d.tracker.HoldAllOffsets(replayHold)
	}
}

// EndReplay says that the stream has passed the time of the take-over.
func (d *Dispatcher) EndReplay() {
	d.replay.mu.Lock()
	defer d.replay.mu.Unlock()
	if d.replay.active = false; d.replay.offsetsHeld {
		d.replay.offsetsHeld = false
		d.tracker.ReleaseAllOffsets(replayHold)
	}
}

// holdOffsetsInReplay keeps the stored offsets during a replay.
func (d *Dispatcher) holdOffsetsInReplay() {
	d.replay.mu.Lock()
	defer d.replay.mu.Unlock()
	if d.replay.active && !d.replay.offsetsHeld {
		d.replay.offsetsHeld = true
		d.tracker.HoldAllOffsets(replayHold)
	}
}

// Closed implements record.Holder.
func (d *Dispatcher) Closed(rec *record.Record, side bool) error { return d.gates.checkGate(rec, side) }

// Found implements record.Holder. Each has a hold of its own: the sink may tell of a partition again while what was found
// before is still being written down.
func (d *Dispatcher) Found(tp record.TopicPartition, offset int64) {
	by := replayHold + watermark.OffsetHold(d.foundCalls.Add(1))
	d.tracker.HoldOffset(tp, by, offset)
	_, begun := d.tracker.Window() // some of these may be turned away already, and not written down yet
	ready := func() bool { low, _ := d.tracker.Window(); return low >= begun }
	d.cfg.Found(ready, func() { d.tracker.ReleaseOffset(tp, by) })
}

// Pressed implements record.Holder: more than three quarters count as most.
func (d *Dispatcher) Pressed() (low record.Ticket, stream, side bool) {
	low, next := d.tracker.Window()
	most := func(used, of int64) bool { return 4*used > 3*of }
	stream = most(int64(next-low), d.maxTickets.Load()) || most(d.budget.inUse(), d.budget.currentShare()) || d.budget.hasWaiters()
	return low, stream, most(d.sideBudget.inUse(), d.sideBudget.currentShare()) || d.sideBudget.hasWaiters()
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
				d.gates.stopKey(string(w.NS), w.Topic, string(w.Key)) // what follows of the key must not overtake it
			}
			d.resolveSideTarget(w.Ticket, record.Answer{Topic: w.Topic, Partition: record.AnyPartition, Offset: -1, Refused: w.Why, Held: w.Held})
			continue
		}
		e := Exception{
			ID: w.ID, StringID: w.StringID, NSHash: w.NS, Topic: w.Topic, ticket: w.Ticket, targets: 1, bytes: int64(w.Bytes),
		}
		if w.Why != nil {
			e.Why = *w.Why
		}
		if dead {
			d.queueException(e)
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
		d.queueException(e, Gate{string(w.NS), w.Topic, string(w.Key)})
	}
}

// Gate counts an exception of an earlier owner; ns is the value of the header `outrelay-ns`, empty where records carry none.
func (d *Dispatcher) Gate(ns, topic, key string) { d.gates.changeWaiting(ns, topic, key, 1) }

// ForgetGates opens every gate, for a load from the beginning. Nothing may be on its way meanwhile.
func (d *Dispatcher) ForgetGates() { d.gates.openAll() }

// Besides is how many deliveries outside of the stream's order have no answer yet.
func (d *Dispatcher) Besides() int { return int(d.sidesInFlight.Load()) }

// Open takes one off a gate: an exception of the stream was sent to topic and that is written down, or it is dead.
func (d *Dispatcher) Open(ns, topic, key string) { d.gates.changeWaiting(ns, topic, key, -1) }

// Resume lets deliveries outside of the stream's order of a key go on, after all of it that came back has been dealt with.
func (d *Dispatcher) Resume(ns, topic, key string) { d.gates.resumeKey(ns, topic, key) }

// Gated is how many exceptions the gates count, over all topics.
func (d *Dispatcher) Gated() int {
	d.gates.mu.Lock()
	defer d.gates.mu.Unlock()
	return d.gates.waiting
}

// holdTargets makes an exception of an envelope some of whose targets have to wait.
func (d *Dispatcher) holdTargets(it *Item, held []int, state string, t record.Ticket) {
	rec := &it.Records[held[0]]
	ns := string(rec.Header(record.HeaderNamespace))
	e := it.newException(record.Refusal{}, t, 0)
	e.State, e.Key, e.targets = state, string(rec.Key), len(held)
	gates := make([]Gate, len(held))
	for k, i := range held {
		e.Pending = append(e.Pending, it.Records[i].Topic)
		e.bytes += int64(d.sink.Size(&it.Records[i]))
		gates[k] = Gate{ns, it.Records[i].Topic, e.Key}
	}
	d.queueException(e, gates...)
}
