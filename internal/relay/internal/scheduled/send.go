package scheduled

import (
	"context"
	"errors"
	"time"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// sendFlush is the number of envelopes between two flushes.
const sendFlush = 64

// Outlet publishes envelopes outside of the order of the stream, as that of package reconciler.
type Outlet interface {
	Publish(ctx context.Context, e *outboxes.Envelope, topics []string, answer func(record.Published)) error
	Settle(tickets []record.Ticket)
	TopicsWithHits() []string
	FindHits(e *outboxes.Envelope, topics []string) (hits []record.Answer, all []string)
	Flush()
}

// holdFlight keeps the envelopes of a claim until they are due.
func (s *Scheduled) holdFlight(flight *flight) {
	if len(flight.envelopes) == 0 {
		return
	}
	bytes := 0
	list := make([]*dueEnvelope, len(flight.envelopes))
	for i := range flight.envelopes {
		list[i] = &flight.envelopes[i]
		list[i].flight = flight
		bytes += list[i].Size()
	}
	flight.left = len(list)
	s.count.Add(int64(len(list)))
	s.bytes.Add(int64(bytes))
	s.held.add(list)
}

// sendClaimed sends claimed envelopes at their due times, until ctx ends or the outlet fails.
func (s *Scheduled) sendClaimed(ctx context.Context) error {
	wait := time.NewTimer(maxIdle)
	defer wait.Stop()

	for ctx.Err() == nil {
		list, next := s.held.takeDue(time.Now(), sendFlush)
		for _, e := range list {
			crash.At("before-scheduled-publish")
			if err := s.sendEnvelope(ctx, e); err != nil {
				return err
			}
		}
		if len(list) > 0 {
			s.Outlet.Flush()
			continue
		}

		wait.Reset(time.Until(next))
		// A claim may bring an envelope that is due earlier than the others.
		select {
		case <-s.held.wake:
		case <-wait.C:
		case <-ctx.Done():
		}
	}
	return context.Cause(ctx)
}

// sendEnvelope sends an envelope that is due. It does not wait for others of its key: a scheduled envelope has no place in their order.
// An error means that the outlet cannot publish at all.
func (s *Scheduled) sendEnvelope(ctx context.Context, envelope *dueEnvelope) error {
	at := &ledger.ClaimRef{ID: envelope.flight.id, Index: envelope.index}
	if envelope.refusal != nil {
		s.storeOutcome(envelope, s.Ledger.ClaimRefused(at, &envelope.Claimed, envelope.refusal), 0)
		return nil
	}

	out := outboxes.NewEnvelope(envelope.NS, envelope.Raw)
	out.TS = envelope.stamp
	err := s.Outlet.Publish(ctx, &out, nil, func(published record.Published) {
		crash.At("after-scheduled-publish")
		outcome := s.Ledger.ClaimAnswered(at, &envelope.Claimed, nil, published.Answers)
		outcome.Stamp = envelope.stamp
		if outcome.End == ledger.Sent {
			s.OnSent(s.Now().Sub(time.UnixMilli(envelope.due)))
		}
		if outcome.End == ledger.Sent && !outcome.Recorded {
			s.Ledger.NoteSent(outcome)
			s.landEnvelope(envelope, published.Ticket)
			return
		}
		s.storeOutcome(envelope, outcome, published.Ticket)
	})

	var refused *record.Refusal
	if errors.As(err, &refused) {
		s.storeOutcome(envelope, s.Ledger.ClaimRefused(at, &envelope.Claimed, refused), 0)
		return nil
	}
	return err
}

// storeOutcome passes an outcome to the ledger.
func (s *Scheduled) storeOutcome(envelope *dueEnvelope, outcome *ledger.Outcome, ticket record.Ticket) {
	outcome.Stored = func(*ledger.Outcome) { s.landEnvelope(envelope, ticket) }
	s.Ledger.Add(outcome)
}

// landEnvelope ends the flight of an envelope whose outcome needs no further write. After the last one of its claim, the claim is removed, and
// only then are the offsets of its records released: the next owner looks for the records of every claim that exists.
func (s *Scheduled) landEnvelope(envelope *dueEnvelope, ticket record.Ticket) {
	s.bytes.Add(-int64(envelope.Size()))
	envelope.Raw = nil
	s.count.Add(-1)
	retry.Signal(s.room)

	flight := envelope.flight
	if !flight.land(ticket) {
		return
	}
	s.Ledger.Add(&ledger.Outcome{Claim: &ledger.ClaimRef{ID: flight.id, Ends: true}, Stored: func(*ledger.Outcome) {
		if len(flight.tickets) > 0 {
			s.Outlet.Settle(flight.tickets)
		}
	}})
}
