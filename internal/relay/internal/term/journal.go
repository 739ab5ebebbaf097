package term

import (
	"context"
	"log/slog"
	"maps"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// journal appends the entries of a term to the audit log. Its methods do not wait for the server,
// except for appendEvent and announceReleased.
type journal struct {
	events       *nodes.AuditLog
	held         *lease.Held
	slot         slot.Range
	log          *slog.Logger
	inBackground func(func(context.Context))

	fence fenceEvents // events of the fence that are not stored yet

	// Used only by the monitor.
	parkedTopics map[string]bool // topics that are parked
	lapsedPin    string          // the dead node of a pin, once that is in the audit log
}

// appendEvent appends an entry to the audit log. It waits at most two seconds. A failure is only
// logged.
func (j *journal) appendEvent(ctx context.Context, kind nodes.Kind, fields bson.D) {
	fields = append(fields, bson.E{Key: "epoch", Value: j.held.Document().Epoch})
	if !j.slot.Whole() {
		fields = append(fields, bson.E{Key: "slot", Value: j.slot.String()})
	}
	j.events.AppendOrWarn(ctx, j.log, kind, fields)
}

// appendInBackground appends an entry in the background.
func (j *journal) appendInBackground(kind nodes.Kind, fields bson.D) {
	j.inBackground(func(ctx context.Context) { j.appendEvent(ctx, kind, fields) })
}

// announceParked appends to the audit log which topics were parked since the last call, and which
// are no longer parked.
func (j *journal) announceParked(unwritable []sink.Unwritable) {
	flowing := maps.Clone(j.parkedTopics)
	parked := map[string]bool{}
	for _, b := range unwritable {
		if !b.Parked {
			continue
		}
		if !j.parkedTopics[b.Topic] && !parked[b.Topic] {
			j.appendInBackground(nodes.TopicParked, bson.D{{Key: "topic", Value: b.Topic}, {Key: "reason", Value: b.Reason()}})
		}
		parked[b.Topic] = true
		delete(flowing, b.Topic)
	}

	for topic := range flowing {
		j.appendInBackground(nodes.TopicUnparked, bson.D{{Key: "topic", Value: topic}})
	}
	j.parkedTopics = parked
}

// announcePinLapsed appends to the audit log that this owner ignores a pin, once for each time
// that the pinned node stops its heartbeats.
func (j *journal) announcePinLapsed() {
	pin := j.held.LapsedPin()

	// Without a lapsed pin, the node is alive again, or the pin was removed. A removal has its own
	// entry.
	if pin != j.lapsedPin && pin != "" {
		j.appendInBackground(nodes.PinLapsed, bson.D{
			{Key: "pinned_to", Value: pin},
			{Key: "reason", Value: "that node sends no heartbeat"},
		})
	}
	j.lapsedPin = pin
}

// announceReleased appends to the audit log that the lease was released, and why the term ended.
func (j *journal) announceReleased(work context.Context, why error) {
	reason := "the process stops"
	if why != nil {
		reason = why.Error()
	}
	j.appendEvent(work, nodes.Released, bson.D{{Key: "reason", Value: reason}})
}

// recordFenceEvent appends an event of the fence to the audit log, in the background.
func (j *journal) recordFenceEvent(event fence.Event) {
	if !j.fence.addEvent(event) {
		return
	}

	j.inBackground(func(ctx context.Context) {
		j.fence.writeEach(func(event fence.Event, n int) {
			kind := nodes.Kind("kafka_" + event.Kind)
			j.appendEvent(ctx, kind, bson.D{
				{Key: "topic", Value: event.Topic},
				{Key: "text", Value: event.Text},
				{Key: "count", Value: n},
			})
		})
	})
}

// fenceEvents collects events of the fence while earlier events are written. A cluster that was
// recreated causes one event for each of its partitions.
type fenceEvents struct {
	mu      sync.Mutex
	waiting map[fence.EventKind]countedEvent
	writing bool // writeEach runs
}

// countedEvent is the first of several events of a kind, and their number.
type countedEvent struct {
	first fence.Event
	n     int
}

// addEvent adds an event. It reports whether the caller has to call writeEach.
func (f *fenceEvents) addEvent(event fence.Event) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.waiting == nil {
		f.waiting = map[fence.EventKind]countedEvent{}
	}
	countedEvent, more := f.waiting[event.Kind]
	if !more {
		countedEvent.first = event
	}
	countedEvent.n++
	f.waiting[event.Kind] = countedEvent

	first := !f.writing
	f.writing = true
	return first
}

// writeEach calls write once for each kind of waiting events. It repeats that until no events wait.
func (f *fenceEvents) writeEach(write func(first fence.Event, n int)) {
	for {
		f.mu.Lock()
		list := f.waiting
		f.waiting = nil
		// Under the same lock as the empty list, so that an event which is added now starts the next
		// writer.
		f.writing = len(list) > 0
		f.mu.Unlock()
		if len(list) == 0 {
			return
		}

		for _, g := range list {
			write(g.first, g.n)
		}
	}
}
