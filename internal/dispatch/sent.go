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
	left   int
	void   bool // it became an exception, which is written down in its own way
}

// Recorder writes deliveries down: fenced, and majority-committed when it returns nil (N3).
type Recorder interface {
	Sent(ctx context.Context, batch []*Sent) error
}

// remember follows a ticket until its envelope is delivered; it has one target more, which stands for the record of it.
func (d *Dispatcher) remember(s *Sent, t record.Ticket, targets int) {
	s.ticket, s.left = t, targets
	d.sentMu.Lock()
	d.sent[t] = s
	d.sentMu.Unlock()
	d.remembered.Add(1)
}

// arrived notes the offsets of remembered envelopes. The list is nil in the usual case that nothing is remembered.
func (d *Dispatcher) arrived(tp record.TopicPartition, base int64, tickets []record.Ticket) []*Sent {
	if d.remembered.Load() == 0 {
		return nil
	}
	var whole []*Sent
	d.sentMu.Lock()
	defer d.sentMu.Unlock()
	for i, t := range tickets {
		if s := d.sent[t]; s != nil {
			s.Answers = append(s.Answers, record.Answer{Topic: tp.Topic, Partition: tp.Partition, Offset: base + int64(i)})
			if s.left--; s.left == 0 {
				delete(d.sent, t)
				whole = append(whole, s)
			}
		}
	}
	return whole
}

// astray notes that n targets of a remembered envelope go another way.
func (d *Dispatcher) astray(t record.Ticket, n int) {
	if d.remembered.Load() == 0 {
		return
	}
	d.sentMu.Lock()
	s := d.sent[t]
	if s != nil {
		s.void = true
		if s.left -= n; s.left == 0 {
			delete(d.sent, t)
		}
	}
	d.sentMu.Unlock()
	if s != nil && s.left == 0 {
		d.note([]*Sent{s})
	}
}

// note queues what was delivered for RunRecorder.
func (d *Dispatcher) note(list []*Sent) {
	if len(list) == 0 {
		return
	}
	d.remembered.Add(-int64(len(list)))
	for _, s := range list {
		if s.void {
			d.tracker.Resolve(s.ticket)
		}
	}
	list = slices.DeleteFunc(list, func(s *Sent) bool { return s.void })
	d.sentMu.Lock()
	d.arrivals = append(d.arrivals, list...)
	d.sentMu.Unlock()
	select {
	case d.record <- struct{}{}:
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
		case <-d.record:
		}
		for batch := d.takeSent(); len(batch) > 0; batch = d.takeSent() {
			if err := d.cfg.Retry(ctx, func() error { return d.cfg.Recorder.Sent(ctx, batch) }); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
			for _, s := range batch {
				d.tracker.Resolve(s.ticket)
			}
			d.budget.wake()
		}
	}
}

func (d *Dispatcher) takeSent() []*Sent {
	d.sentMu.Lock()
	defer d.sentMu.Unlock()
	n := min(len(d.arrivals), maxExceptions)
	batch := d.arrivals[:n:n]
	if d.arrivals = d.arrivals[n:]; len(d.arrivals) == 0 {
		d.arrivals = nil
	}
	return batch
}
