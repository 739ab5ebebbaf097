package scheduled

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Recover takes over the claims of earlier owners. It finishes those envelopes whose records were found in the topics (N8), and Run sends the
// others at their due times. Call it at a takeover, after the read-back and before Run: after it has returned without an error, the offsets
// of the read-back may be released. It returns the number of envelopes that it finished in some of their topics. The memory is bounded
// by the envelopes that the earlier owner had in flight.
func (s *Scheduled) Recover(ctx context.Context) (finished int, err error) {
	mayHaveHits := len(s.Outlet.TopicsWithHits()) > 0
	var outcomes, ends []*ledger.Outcome
	var flights []*flight
	err = waiting.EachClaim(ctx, s.Claims, s.WatcherID, func(claim *waiting.Claim) error {
		flight := newFlight(claim.ID)
		for i := range claim.Envelopes {
			if claim.IsDone(i) {
				continue
			}
			due := s.newRecovered(claim, i)
			if mayHaveHits {
				if outcome := s.findSent(claim.ID, &due); outcome != nil {
					outcomes = append(outcomes, outcome)
					continue
				}
			}
			flight.envelopes = append(flight.envelopes, due)
		}
		if len(flight.envelopes) == 0 {
			ends = append(ends, &ledger.Outcome{Claim: &ledger.ClaimRef{ID: claim.ID, Ends: true}})
		}
		flights = append(flights, flight)
		return nil
	})
	if err != nil {
		return 0, err
	}

	finished = len(outcomes)
	if err := s.Ledger.Store(ctx, append(outcomes, ends...)); err != nil {
		return 0, fmt.Errorf("finishing scheduled envelopes that an earlier owner sent: %w", err)
	}
	return finished, s.holdRecovered(ctx, flights)
}

// holdRecovered keeps the envelopes of claims of earlier owners until they are due by the clock of the server.
func (s *Scheduled) holdRecovered(ctx context.Context, flights []*flight) error {
	if len(flights) == 0 {
		return nil
	}
	now, err := mongodb.ServerTime(ctx, s.Client)
	if err != nil {
		return fmt.Errorf("reading the clock of the server: %w", err)
	}

	clock := serverClock{now: bson.NewDateTimeFromTime(now), responded: time.Now()}
	for _, f := range flights {
		for i := range f.envelopes {
			f.envelopes[i].sendAt = clock.localTime(bson.DateTime(f.envelopes[i].due))
		}
		s.holdFlight(f)
	}
	return nil
}

// findSent returns the outcome of an envelope of which an earlier owner has sent records, or nil. The envelope leaves its claim, because
// the records are not looked for again.
func (s *Scheduled) findSent(claimID string, envelope *dueEnvelope) *ledger.Outcome {
	out := outboxes.NewEnvelope(envelope.NS, envelope.Raw)
	out.Pos = envelope.Pos
	hits, all := s.Outlet.FindHits(&out)
	if len(hits) == 0 {
		return nil
	}

	at := &ledger.ClaimRef{ID: claimID, Index: envelope.index, Leaves: true}
	outcome := s.Ledger.DecideClaim(at, &envelope.Claimed, all, hits)
	outcome.Stamp = envelope.stamp
	return outcome
}

// newRecovered returns an envelope of a claim that has no outcome. Its time of sending is not set.
func (s *Scheduled) newRecovered(claim *waiting.Claim, index int) dueEnvelope {
	claimed := claim.Envelopes[index]
	due, _ := claimed.Raw.Lookup("dueAt").DateTimeOK()
	_, stamp, rejection := s.readEnvelope(claimed.Raw, new(envelope.View))
	return dueEnvelope{Claimed: claimed, due: due, stamp: stamp, rejection: rejection, index: int32(index)}
}
