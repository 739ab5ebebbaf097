package model

import (
	"context"
	"errors"
	"slices"
	"strconv"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// claim is a document of the collection of claims.
type claim struct{ waiting.Claim }

// scheduled models the claims of a term (N19), in the steps of package scheduled.
type scheduled struct {
	w      *world
	term   *term
	held   []*held
	copied []*spec // with the undo switch copiedClaims: to be removed from their outboxes
}

// held is a claimed envelope that was not sent yet.
type held struct {
	waiting.Claimed
	flight *flight
	index  int32
}

// flight is a claim whose envelopes do not all have outcomes.
type flight struct {
	id      string
	left    int
	tickets []record.Ticket
}

// claimDue takes envelopes that are due within a second out of their outboxes, in one fenced transaction.
func (s *scheduled) claimDue() {
	w := s.w
	if s.term.dead {
		return
	}
	// With the undo switch, the removal is a second transaction.
	if len(s.copied) > 0 {
		for _, spec := range s.copied {
			delete(w.outboxes[spec.ns], spec.id)
		}
		s.copied = nil
		return
	}
	if !w.isFenced(s.term) {
		s.term.die("has lost its lease")
		return
	}

	c := &claim{}
	c.ID = "claim" + strconv.Itoa(len(w.trace))
	for _, spec := range w.stream {
		if spec.due == 0 || spec.due > w.clockMS()+1000 || w.outboxes[spec.ns][spec.id] != spec {
			continue
		}
		c.Envelopes = append(c.Envelopes, waiting.Claimed{NS: spec.ns, Raw: spec.raw, Key: spec.key, Pos: outboxes.PosAt(spec.clusterTime)})
		if w.undo == copiedClaims {
			s.copied = append(s.copied, spec)
		} else {
			delete(w.outboxes[spec.ns], spec.id)
		}
		w.logf("%s claims %s", s.term, spec)
	}
	if len(c.Envelopes) == 0 {
		return
	}
	if w.undo != unsavedClaims {
		w.claims = append(w.claims, c)
	}
	if w.rand.IntN(20) == 0 {
		s.term.die("dies after its claim")
		return
	}
	s.hold(c, nil)
}

// hold keeps the envelopes of a claim that are not done and not in without.
func (s *scheduled) hold(c *claim, without []int32) {
	f := &flight{id: c.ID}
	for i := range c.Envelopes {
		if !c.IsDone(i) && !slices.Contains(without, int32(i)) {
			s.held = append(s.held, &held{c.Envelopes[i], f, int32(i)})
			f.left++
		}
	}
}

// recover takes over the claims of earlier owners, and returns how many envelopes were sent already.
func (s *scheduled) recover() (finished int) {
	ctx := context.Background()
	for _, c := range slices.Clone(s.w.claims) {
		var outcomes []*ledger.Outcome
		var without []int32
		left := 0
		for i := range c.Envelopes {
			if c.IsDone(i) {
				continue
			}
			claimed := &c.Envelopes[i]
			out := outboxes.NewEnvelope(claimed.NS, claimed.Raw)
			out.Pos = claimed.Pos
			hits, all := s.term.outlet.FindHits(&out)
			if len(hits) == 0 || s.w.undo == claimsUnread {
				left++
				continue
			}
			at := &ledger.ClaimRef{ID: c.ID, Index: int32(i), Leaves: true}
			outcomes = append(outcomes, s.term.ledger.DecideClaim(at, claimed, all, hits))
			without = append(without, int32(i))
		}
		if left == 0 {
			outcomes = append(outcomes, &ledger.Outcome{Claim: &ledger.ClaimRef{ID: c.ID, Ends: true}})
		}
		if s.term.ledger.Store(ctx, outcomes) != nil {
			return finished
		}
		finished += len(without)
		s.hold(c, without)
	}

	return finished
}

// sendDue sends the claimed envelopes that are due.
func (s *scheduled) sendDue() {
	for _, h := range slices.Clone(s.held) {
		due, _ := h.Raw.Lookup("dueAt").DateTimeOK()
		if s.term.dead || due > s.w.clockMS() {
			continue
		}
		s.held = slices.DeleteFunc(s.held, func(other *held) bool { return other == h })
		out := outboxes.NewEnvelope(h.NS, h.Raw)
		out.Pos, out.Unordered = h.Pos, true
		err := s.term.outlet.Publish(context.Background(), &out, nil, func(published record.Published) { s.report(h, published) })

		var rejected *record.Rejection
		if errors.As(err, &rejected) {
			s.store(h, s.term.ledger.ClaimRejected(h.ref(), &h.Claimed, rejected), 0)
		} else if err != nil {
			s.term.die("ends: " + err.Error())
		}
	}
}

func (h *held) ref() *ledger.ClaimRef { return &ledger.ClaimRef{ID: h.flight.id, Index: h.index} }

func (s *scheduled) report(h *held, published record.Published) {
	if !slices.ContainsFunc(published.Results, func(a record.Result) bool { return a.Rejection != nil || a.Held != nil }) {
		s.landEnvelope(h, published.Ticket)
		return
	}
	s.store(h, s.term.ledger.DecideClaim(h.ref(), &h.Claimed, nil, published.Results), published.Ticket)
}

func (s *scheduled) store(h *held, outcome *ledger.Outcome, ticket record.Ticket) {
	outcome.Stored = func(*ledger.Outcome) { s.landEnvelope(h, ticket) }
	s.term.ledger.Add(outcome)
}

// landEnvelope ends the flight of an envelope. After the last one, the claim is removed, and then the offsets are released (N8).
func (s *scheduled) landEnvelope(h *held, ticket record.Ticket) {
	f := h.flight
	if ticket != 0 {
		f.tickets = append(f.tickets, ticket)
	}
	if s.w.undo == settleEarly && ticket != 0 {
		s.term.dispatcher.Settle([]record.Ticket{ticket})
	}
	f.left--
	if f.left == 0 {
		s.term.ledger.Add(&ledger.Outcome{Claim: &ledger.ClaimRef{ID: f.id, Ends: true}, Stored: func(*ledger.Outcome) {
			if len(f.tickets) > 0 {
				s.term.dispatcher.Settle(f.tickets)
			}
		}})
	}
}
