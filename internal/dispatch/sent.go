package dispatch

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
)

// Sent is a delivered envelope whose delivery is written down on it: because that is asked for, or because it has no stamp
// of the server, so that only its own document can tell that it was sent.
type Sent struct {
	NS      string
	ID      bson.RawValue
	TS      bson.Timestamp
	Answers []record.Answer // one for each target

	ticket record.Ticket
	void   bool // it became an exception, which is written down in its own way
}

// Recorder writes deliveries down: fenced, and majority-committed when it returns nil (N3).
type Recorder interface {
	Sent(ctx context.Context, batch []*Sent) error
}

// queueDeliveries queues what was delivered for RunRecorder.
func (d *Dispatcher) queueDeliveries(list []*Sent) {
	if len(list) == 0 {
		return
	}
	for _, s := range list {
		if s.void {
			d.tracker.Resolve(s.ticket)
		}
	}
	list = slices.DeleteFunc(list, func(s *Sent) bool { return s.void })
	d.sentMu.Lock()
	d.deliveries = append(d.deliveries, list...)
	d.sentMu.Unlock()
	select {
	case d.deliveryWake <- struct{}{}:
	default:
	}
}

// RunRecorder writes deliveries down until ctx ends, and resolves their tickets after that: the checkpoint that passes a
// delivery which is to be written down is later than its record.
func (d *Dispatcher) RunRecorder(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.deliveryWake:
		}
		for batch := d.nextDeliveries(); len(batch) > 0; batch = d.nextDeliveries() {
			if err := d.cfg.Retry(ctx, func() error { return d.cfg.Recorder.Sent(ctx, batch) }); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
			for _, s := range batch {
				d.tracker.Resolve(s.ticket)
			}
			d.budget.wakeWaiters()
		}
	}
}

func (d *Dispatcher) nextDeliveries() []*Sent {
	d.sentMu.Lock()
	defer d.sentMu.Unlock()
	n := min(len(d.deliveries), maxExceptions)
	batch := d.deliveries[:n:n]
	if d.deliveries = d.deliveries[n:]; len(d.deliveries) == 0 {
		d.deliveries = nil
	}
	return batch
}
