package operate

import (
	"context"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// Status is the current state of a watcher.
type Status struct {
	At     time.Time // by the clock of this process
	Slots  []Slot    // of the watcher; one unless the relay is configured for more
	Nodes  []Node    // processes that run the watcher, owners first
	Counts Counts

	Lag    time.Duration // age of the oldest event of the stream that is neither acknowledged by Kafka nor stored as waiting; −1 if the Lag of a slot is unknown
	Oldest time.Duration // age of the oldest waiting event; 0 if none waits
	Rate   float64       // records per second that Kafka acknowledges
}

// Slot is one slot of the watcher, as its owner last reported it.
type Slot struct {
	Name       string        // <i>of<N>, such as 0of1
	State      string        // such as live, taking-over, unwritable, halted, pausing, paused or no-owner
	Reason     string        // of the state; "" if it needs none
	Owner      string        // the node; "" if there is no owner
	Epoch      int64         // counts the owners
	Paused     bool          // an operator paused it
	Pin        string        // the node that it is pinned to; "" if it is not pinned
	PositionAt time.Time     // everything that was committed before is settled; zero if there is no position
	Lag        time.Duration // −1 if it is unknown, because no owner delivers
}

// Node is a process that runs the watcher.
type Node struct {
	Name           string
	Version        string
	Address        string
	Owns           []string // slots that it owns, as watcher/<i>of<N>
	StartedAt      time.Time
	SeenAt         time.Time // the last heartbeat
	Stale          bool      // the last heartbeat is older than ten seconds
	KafkaReachable bool      // at the last heartbeat
}

// Counts are numbers of events of a watcher. A relay counts every five seconds, or less often if counting takes long. While none counts, or
// after an action of an operator, the call counts.
type Counts struct {
	At time.Time // when they were counted

	Retry     int64 // wait for another attempt after Kafka rejected them
	Blocked   int64 // wait because an earlier event of their key waits
	Parked    int64 // wait because their topic cannot be written
	Queued    int64 // are sent next: due, requeued or replayed
	Scheduled int64 // are in outboxes and not due yet

	DeadOfRelay    int64 // dead letters of the relay that are not requeued
	DeadOfHandlers int64 // dead letters of handlers that are not requeued
}

// Waiting returns the number of events that the relay stores because it could not send them in order.
func (c Counts) Waiting() int64 { return c.Retry + c.Blocked + c.Parked + c.Queued }

// Status returns the current state of the watcher. It reads a few small documents, and the counts.
func (o *Operator) Status(ctx context.Context) (Status, error) {
	const doing = "read the status"
	use, err := o.prepare(ctx)
	if err != nil {
		return Status{}, explain(doing, err)
	}
	view, err := use.Overview(ctx)
	if err != nil {
		return Status{}, explain(doing, err)
	}

	status := Status{
		At: view.At, Lag: secondsOf(view.LagS), Oldest: seconds(view.OldestS), Rate: view.RateS,
		Counts: Counts{
			At: view.CountedAt, Retry: view.Counts.Retry, Blocked: view.Counts.Blocked, Parked: view.Counts.Parked, Queued: view.Counts.Queued,
			Scheduled: view.Counts.Scheduled, DeadOfRelay: view.Counts.Dead, DeadOfHandlers: view.Counts.HandlerDead,
		},
	}
	for i := range view.Slots {
		if slot := &view.Slots[i]; slot.Name == use.Watcher {
			status.Slots = append(status.Slots, newSlot(slot))
		}
	}

	for _, node := range view.Nodes {
		if !slices.Contains(node.Watchers, use.Watcher) {
			continue
		}
		status.Nodes = append(status.Nodes, Node{
			Name: node.Node, Version: node.Version, Address: node.Address, Owns: node.Slots, StartedAt: node.StartedAt, SeenAt: node.SeenAt,
			Stale: node.Stale, KafkaReachable: node.KafkaReachable,
		})
	}
	return status, nil
}

func newSlot(stored *admin.SlotStatus) Slot {
	slot := Slot{
		Name: stored.Slot, State: stored.State, Reason: stored.Reason, Epoch: stored.Epoch, Paused: stored.Paused, Pin: stored.Pin,
		PositionAt: timeOf(stored.PositionAt), Lag: secondsOf(stored.LagS),
	}
	// The document keeps the name of the last owner.
	if stored.Owner != "" {
		slot.Owner = stored.Node
	}
	return slot
}

// secondsOf returns −1 if the figure is unknown.
func secondsOf(number *float64) time.Duration {
	if number == nil {
		return -1
	}
	return seconds(*number)
}

func seconds(number float64) time.Duration { return time.Duration(number * float64(time.Second)) }
