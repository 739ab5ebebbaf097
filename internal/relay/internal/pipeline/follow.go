package pipeline

import (
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Follower observes the outcome of the records of one envelope, for a trace or a sample of it. Each record
// is reported once, unless the term ends first. The sink's loops call the methods, under the
// sink's lock or that of the followers, and may call them concurrently for different records. The
// methods must not block, and must not call the dispatcher or the sink.
type Follower interface {
	// Acked reports that the record for the topic of tp is in that partition at offset.
	Acked(tp record.TopicPartition, offset int64)

	// NotSent reports that the record is not sent now, with the state in which its envelope waits. If topic is empty, the report
	// concerns all records that are left.
	NotSent(topic, state string)

	// Rejected is NotSent of a record that was rejected, with the class of its rejection.
	Rejected(topic, class string)
}

// group reports to several followers.
type group []Follower

// Acked implements Follower.
func (g group) Acked(tp record.TopicPartition, offset int64) {
	for _, f := range g {
		f.Acked(tp, offset)
	}
}

// NotSent implements Follower.
func (g group) NotSent(topic, state string) {
	for _, f := range g {
		f.NotSent(topic, state)
	}
}

// Rejected implements Follower.
func (g group) Rejected(topic, class string) {
	for _, f := range g {
		f.Rejected(topic, class)
	}
}

// followers tracks the few envelopes above the resolved position that have a Follower, or whose
// delivery is to be recorded.
type followers struct {
	count    atomic.Int64 // length of byTicket; an ack costs one load while it is 0
	mu       sync.Mutex
	byTicket map[record.Ticket]trackedEnvelope
}

// trackedEnvelope is one entry of followers.
type trackedEnvelope struct {
	follower    Follower  // nil if the envelope is neither traced nor sampled
	sent        *Delivery // nil if its delivery is not recorded
	targetsLeft int
}

// trackEnvelope adds the envelope of item if it has a Follower or its delivery is to be recorded.
func (f *followers) trackEnvelope(ticket record.Ticket, item *Item) {
	if item.Follow == nil && item.Sent == nil || len(item.Records) == 0 {
		return
	}

	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byTicket == nil {
		f.byTicket = map[record.Ticket]trackedEnvelope{}
	}
	f.byTicket[ticket] = trackedEnvelope{item.Follow, item.Sent, len(item.Records)}
	f.count.Add(1)
}

// countResolvedLocked counts n targets of ticket as resolved. It returns the entry of ticket, and whether
// these were its last targets. The entry is empty if ticket is not tracked.
func (f *followers) countResolvedLocked(ticket record.Ticket, n int) (envelope trackedEnvelope, last bool) {
	envelope, found := f.byTicket[ticket]
	if !found {
		return envelope, false
	}

	envelope.targetsLeft -= n
	if envelope.targetsLeft > 0 {
		f.byTicket[ticket] = envelope
		return envelope, false
	}

	delete(f.byTicket, ticket)
	f.count.Add(-1)
	return envelope, true
}

// notifyAcked reports the records that were acked in tp to their followers. It returns the
// envelopes whose targets are all resolved and whose delivery is to be recorded. It returns
// nil, at the cost of one load, while nothing is tracked.
func (f *followers) notifyAcked(tp record.TopicPartition, base int64, tickets []record.Ticket) (resolved []*Delivery) {
	if f.count.Load() == 0 {
		return nil
	}

	// One lock for the batch: nearly all of its tickets are not tracked.
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, t := range tickets {
		offset := base + int64(i)
		envelope, last := f.countResolvedLocked(t, 1)
		if envelope.sent != nil {
			place := outboxes.Place{Topic: tp.Topic, Partition: tp.Partition, Offset: offset}
			envelope.sent.Outcome.Sent = append(envelope.sent.Outcome.Sent, place)
			if last {
				resolved = append(resolved, envelope.sent)
			}
		}
		if envelope.follower != nil {
			envelope.follower.Acked(tp, offset)
		}
	}
	return resolved
}

// notifyLeft reports the records of outcome, which are not sent now, to their follower, and notes that their delivery is not complete. It returns the envelope if these were its last targets and its delivery was
// to be recorded.
func (f *followers) notifyLeft(outcome *ledger.Outcome, unsent unsent) (resolved []*Delivery) {
	if f.count.Load() == 0 {
		return nil
	}

	f.mu.Lock()
	tracked, last := f.countResolvedLocked(unsent.ticket, unsent.targets)
	if tracked.sent != nil {
		if outcome.End == ledger.Dead {
			tracked.sent.Outcome.DeadTargets = true
		} else {
			tracked.sent.Outcome.Partial = true
		}
		if last {
			resolved = []*Delivery{tracked.sent}
		}
	}
	f.mu.Unlock()

	// The follower is called without the lock.
	if tracked.follower == nil {
		return resolved
	}

	report := func(topic string) { tracked.follower.NotSent(topic, string(outcome.Reason)) }
	if class := outcome.Rejection.Class; class != "" {
		report = func(topic string) { tracked.follower.Rejected(topic, string(class)) }
	}
	if len(outcome.Topics) == 0 {
		report(outcome.Topic)
	}
	for _, topic := range outcome.Topics {
		report(topic)
	}
	return resolved
}
