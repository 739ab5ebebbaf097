package scheduled

import (
	"context"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Recover takes over the claims of earlier owners. It finishes those envelopes whose records were found in the topics (N8), and Run sends the
// others at their due times. Call it at a takeover, after the read-back and before Run: after it has returned without an error, the offsets
// of the read-back may be released. It returns the number of envelopes that it finished in some of their topics. The memory is bounded
// by the envelopes that the earlier owner had in flight.
func (s *Scheduled) Recover(ctx context.Context) (finished int, err error) {
	// An earlier call may have failed.
	s.recovered = nil
	s.bytes.Store(0)
	mayHaveHits := len(s.Outlet.TopicsWithHits()) > 0

	var outcomes, ends []*ledger.Outcome
	err = waiting.EachClaim(ctx, s.Claims, s.WatcherID, func(claim *waiting.Claim) error {
		flight := newFlight(claim.ID, 0)
		for i := range claim.Envelopes {
			if claim.IsDone(i) {
				continue
			}
			if mayHaveHits {
				if outcome := s.findSent(claim, i); outcome != nil {
					outcomes = append(outcomes, outcome)
					continue
				}
			}
			flight.left++
			s.recovered = append(s.recovered, s.recoverEnvelope(claim, i, flight))
		}
		if flight.left == 0 {
			ends = append(ends, &ledger.Outcome{Claim: &ledger.ClaimRef{ID: claim.ID, Ends: true}})
		}
		return nil
	})
	if err != nil {
		return 0, err
	}

	finished = len(outcomes)
	if err := s.Ledger.Store(ctx, append(outcomes, ends...)); err != nil {
		return 0, fmt.Errorf("finishing scheduled envelopes that an earlier owner sent: %w", err)
	}
	return finished, nil
}

// findSent returns the outcome of an envelope of which an earlier owner has sent records, or nil. The envelope leaves its claim, because
// the records are not looked for again.
func (s *Scheduled) findSent(claim *waiting.Claim, index int) *ledger.Outcome {
	claimed := &claim.Envelopes[index]
	out := outletEnvelope(claimed)
	hits, all := s.Outlet.FindHits(&out, nil)
	if len(hits) == 0 {
		return nil
	}

	outcome := s.Ledger.ClaimAnswered(&ledger.ClaimRef{ID: claim.ID, Index: int32(index), Leaves: true}, claimed, all, hits)
	var view envelope.View
	if s.Mapping.Parse(claimed.Raw, &view) == nil {
		outcome.Stamp = view.TS
	}
	return outcome
}

// recoverEnvelope returns an envelope of a claim that has no outcome.
func (s *Scheduled) recoverEnvelope(claim *waiting.Claim, index int, flight *flight) dueEnvelope {
	claimed := &claim.Envelopes[index]
	s.bytes.Add(int64(claimed.Size()))
	due, _ := claimed.Raw.Lookup("dueAt").DateTimeOK()
	sendAt := time.Now().Add(time.UnixMilli(due).Sub(s.Now()))
	return dueEnvelope{due: due, sendAt: sendAt, envelope: claimed, claim: flight, index: int32(index)}
}
