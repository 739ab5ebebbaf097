package pipeline

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
)

// Sent is an envelope whose delivery is recorded on its document. The configuration requires
// it, or the envelope has no timestamp of the server, so that only its document can show
// that it was sent.
type Sent struct {
	NS      string
	ID      bson.RawValue
	TS      bson.Timestamp
	Answers []record.Answer // one for each target

	ticket record.Ticket
	void   bool // a target became an exception, which is recorded separately
}

// Recorder stores deliveries.
type Recorder interface {
	// Sent stores batch, fenced. When it returns nil, the batch is majority-committed (N3). The batch is valid during the call.
	Sent(ctx context.Context, batch []*Sent) error
}

// queueDeliveries queues resolved envelopes for RunRecorder. A void envelope is not recorded:
// its ticket is resolved at once.
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

	d.deliveries.add(list...)
}

// RunRecorder records deliveries until ctx ends, and then returns nil. It resolves their
// tickets after that, so a checkpoint never passes a delivery that is still to be recorded. It
// returns the error that the retry policy considers final.
func (d *Dispatcher) RunRecorder(ctx context.Context) error {
	return d.deliveries.run(ctx, nil, func(batch []*Sent) error {
		err := d.cfg.Retry(ctx, func() error { return d.cfg.Recorder.Sent(ctx, batch) })
		if err != nil {
			return err
		}
		for _, s := range batch {
			d.tracker.Resolve(s.ticket)
		}

		// Deliver may be waiting for room in the window. The bytes were released by the acks.
		d.budget.wakeWaiters()
		return nil
	})
}
