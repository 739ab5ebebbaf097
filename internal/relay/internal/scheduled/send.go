package scheduled

import (
	"context"
	"errors"
	"slices"
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
	Publish(ctx context.Context, e *outboxes.Envelope, topics []string, report func(record.Published)) error
	Settle(tickets []record.Ticket)
	TopicsWithHits() []string
	FindHits(e *outboxes.Envelope) (hits []record.Result, all []string)
	Flush()
}

// outgoing is the envelope that is published. It keeps the parts of its namespace for the next one.
type outgoing struct {
	ns       string
	envelope outboxes.Envelope
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
	s.held.hold(list)
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
	if envelope.rejection != nil {
		s.storeOutcome(envelope, s.Ledger.ClaimRejected(envelope.claimRef(), &envelope.Claimed, envelope.rejection), 0)
		return nil
	}

	if s.out.ns != envelope.NS {
		s.out.ns, s.out.envelope = envelope.NS, outboxes.NewEnvelope(envelope.NS, nil)
		s.out.envelope.Unordered = true
	}
	s.out.envelope.Raw, s.out.envelope.TS, s.out.envelope.Pos = envelope.Raw, envelope.stamp, envelope.Pos
	err := s.Outlet.Publish(ctx, &s.out.envelope, nil, func(published record.Published) { s.finishEnvelope(envelope, published) })

	var rejected *record.Rejection
	if errors.As(err, &rejected) {
		s.storeOutcome(envelope, s.Ledger.ClaimRejected(envelope.claimRef(), &envelope.Claimed, rejected), 0)
		return nil
	}
	return err
}

// finishEnvelope ends the send of an envelope whose targets all have their results.
func (s *Scheduled) finishEnvelope(envelope *dueEnvelope, published record.Published) {
	crash.At("after-scheduled-publish")
	isSent := !slices.ContainsFunc(published.Results, func(result record.Result) bool { return result.Rejection != nil || result.Held != nil })
	if isSent {
		s.OnSent(s.Now().Sub(time.UnixMilli(envelope.due)))
	}
	// Nearly every envelope ends here.
	if isSent && !s.Ledger.RecordsClaims() {
		s.Ledger.CountSent()
		s.landEnvelope(envelope, published.Ticket)
		return
	}

	outcome := s.Ledger.DecideClaim(envelope.claimRef(), &envelope.Claimed, nil, published.Results)
	outcome.Stamp = envelope.stamp
	s.storeOutcome(envelope, outcome, published.Ticket)
}

// claimRef returns the place of the envelope in its claim.
func (e *dueEnvelope) claimRef() *ledger.ClaimRef {
	return &ledger.ClaimRef{ID: e.flight.id, Index: e.index}
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
