package scheduled

import (
	"container/heap"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

const (
	// maxClaimedBytes bounds the claimed envelopes in memory that have no outcome. One claim more may be added.
	maxClaimedBytes = 2 * mongodb.MaxBytes
	sendFlush       = 64 // envelopes between two flushes
)

// Outlet publishes envelopes outside of the order of the stream, as that of package reconciler.
type Outlet interface {
	Publish(ctx context.Context, e *outboxes.Envelope, topics []string, answer func(record.Published)) error
	Settle(tickets []record.Ticket)
	TopicsWithHits() []string
	FindHits(e *outboxes.Envelope, topics []string) (hits []record.Answer, all []string)
	Flush()
}

// flight is a claim whose envelopes do not all have outcomes.
type flight struct {
	id string

	mu      sync.Mutex
	left    int // envelopes without an outcome
	tickets []record.Ticket
}

func newFlight(id string, envelopes int) *flight { return &flight{id: id, left: envelopes} }

// land records the outcome of one envelope, and its ticket unless it is 0. It reports whether it was the last one.
func (f *flight) land(ticket record.Ticket) (last bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ticket != 0 {
		f.tickets = append(f.tickets, ticket)
	}
	f.left--
	return f.left == 0
}

// sendClaimed sends claimed envelopes at their due times, until ctx ends or the outlet fails.
func (s *Scheduled) sendClaimed(ctx context.Context) error {
	var held claimedHeap
	held.addClaimed(s.recovered)
	s.recovered = nil
	wait := time.NewTimer(maxIdle)
	defer wait.Stop()

	for {
		if err := s.sendDue(ctx, &held); err != nil {
			return err
		}
		if len(held) > 0 {
			wait.Reset(time.Until(held[0].sendAt))
		}

		// A claim may bring an envelope that is due earlier than the others.
		select {
		case list := <-s.claimed:
			held.addClaimed(list)
		case <-wait.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// sendDue sends the envelopes of held that are due.
func (s *Scheduled) sendDue(ctx context.Context, held *claimedHeap) error {
	sent := 0
	for len(*held) > 0 && !time.Now().Before((*held)[0].sendAt) {
		envelope := heap.Pop(held).(*dueEnvelope)
		crash.At("before-scheduled-publish")
		if err := s.sendEnvelope(ctx, envelope); err != nil {
			return err
		}
		if sent++; sent%sendFlush == 0 {
			s.Outlet.Flush()
		}
	}
	if sent > 0 {
		s.Outlet.Flush()
	}
	return nil
}

// sendEnvelope sends an envelope that is due. It does not wait for others of its key: a scheduled envelope has no place in their order.
// An error means that the outlet cannot publish at all.
func (s *Scheduled) sendEnvelope(ctx context.Context, dueEnvelope *dueEnvelope) error {
	at := &ledger.ClaimRef{ID: dueEnvelope.claim.id, Index: dueEnvelope.index}
	claimed := dueEnvelope.envelope
	var view envelope.View
	if err := s.Mapping.Parse(claimed.Raw, &view); err != nil {
		s.storeOutcome(dueEnvelope, s.Ledger.ClaimRefused(at, claimed, record.RefusalOf(err)), 0)
		return nil
	}

	out := outletEnvelope(claimed)
	out.TS = view.TS
	err := s.Outlet.Publish(ctx, &out, nil, func(published record.Published) {
		crash.At("after-scheduled-publish")
		outcome := s.Ledger.ClaimAnswered(at, claimed, nil, published.Answers)
		outcome.Stamp = view.TS
		if outcome.End == ledger.Sent {
			s.OnSent(s.Now().Sub(time.UnixMilli(dueEnvelope.due)))
		}
		if outcome.End == ledger.Sent && !outcome.Recorded {
			s.Ledger.NoteSent(outcome)
			s.landEnvelope(dueEnvelope, published.Ticket)
			return
		}
		s.storeOutcome(dueEnvelope, outcome, published.Ticket)
	})

	var refused *record.Refusal
	if errors.As(err, &refused) {
		s.storeOutcome(dueEnvelope, s.Ledger.ClaimRefused(at, claimed, refused), 0)
		return nil
	}
	return err
}

// outletEnvelope returns a claimed envelope for the outlet.
func outletEnvelope(claimed *waiting.Claimed) outboxes.Envelope {
	db, coll, _ := strings.Cut(claimed.NS, ".")
	return outboxes.Envelope{DB: []byte(db), Coll: []byte(coll), Raw: claimed.Raw}
}

// storeOutcome passes an outcome to the ledger.
func (s *Scheduled) storeOutcome(envelope *dueEnvelope, outcome *ledger.Outcome, ticket record.Ticket) {
	outcome.Stored = func(*ledger.Outcome) { s.landEnvelope(envelope, ticket) }
	s.Ledger.Add(outcome)
}

// landEnvelope ends the flight of an envelope whose outcome needs no further write. After the last one of its claim, the claim is removed, and
// only then are the offsets of its records released: the next owner looks for the records of every claim that exists.
func (s *Scheduled) landEnvelope(envelope *dueEnvelope, ticket record.Ticket) {
	s.bytes.Add(-int64(envelope.envelope.Size()))
	envelope.envelope.Raw = nil
	s.endTimer(envelope.timer)

	flight := envelope.claim
	if !flight.land(ticket) {
		return
	}
	s.Ledger.Add(&ledger.Outcome{Claim: &ledger.ClaimRef{ID: flight.id, Ends: true}, Stored: func(*ledger.Outcome) {
		if len(flight.tickets) > 0 {
			s.Outlet.Settle(flight.tickets)
		}
	}})
}

// claimedHeap holds claimed envelopes, ordered by their due times.
type claimedHeap []*dueEnvelope

func (h *claimedHeap) addClaimed(list []dueEnvelope) {
	for i := range list {
		heap.Push(h, &list[i])
	}
}

func (h claimedHeap) Len() int           { return len(h) }
func (h claimedHeap) Less(i, j int) bool { return h[i].sendAt.Before(h[j].sendAt) }
func (h claimedHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *claimedHeap) Push(pushed any)   { *h = append(*h, pushed.(*dueEnvelope)) }

func (h *claimedHeap) Pop() any {
	old := *h
	envelope := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return envelope
}
