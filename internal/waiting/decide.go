package waiting

import (
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// OnlyAttempt is the start of the reason of a dead letter if only one attempt is allowed.
const OnlyAttempt = "the only attempt failed with: "

// decideFate applies N17 to deliveries outside of the order of the stream. It sets the fate and the
// outcome or the dead letter of a.
func (f *Finisher) decideFate(a *decision, answers []record.Answer) {
	left := slices.Clone(a.Pending)
	if a.Pending == nil {
		for _, x := range answers {
			left = append(left, x.Topic)
		}
	}

	var refusal *record.Refusal
	var refusedBy record.Answer
	var held error
	for _, x := range answers {
		switch {
		case x.Refusal != nil:
			a.fate.Refused = append(a.fate.Refused, x.Topic)
			// A refusal that no further attempt can change decides about the envelope.
			if refusal == nil || x.Refusal.Class.DeadAtOnce() && !refusal.Class.DeadAtOnce() {
				refusal, refusedBy = x.Refusal, x
			}
		case x.Held != nil:
			a.fate.Held = append(a.fate.Held, x.Topic)
			if held == nil || errors.Is(x.Held, record.ErrParked) {
				held = x.Held
			}
		default:
			left = slices.DeleteFunc(left, func(t string) bool { return t == x.Topic })
			a.acked = append(a.acked, SentTo{Topic: x.Topic, Partition: x.Partition, Offset: x.Offset})
		}
	}

	switch {
	case len(left) == 0:
		a.fate.End = Finished
		a.outcome = a.newOutcome(OutcomeSent)
		// The watermark does not show that a scheduled envelope was sent, so with recording by
		// watermark it is removed at once.
		a.outcome.Delete = f.config.Recording == "delete" || a.Claim != "" && f.config.Recording != "mark"
	case refusal != nil:
		f.decideRefused(a, refusal, left, a.fate.Refused, refusedBy)
	default:
		a.decideWaiting(left, held)
		f.setPosition(a)
	}

	if a.outcome != nil && f.config.Recording == "mark" {
		a.outcome.Sent = a.acked
	}
}

// decideRefused decides between a further attempt and the dead letters.
func (f *Finisher) decideRefused(
	a *decision, why *record.Refusal, left, refused []string, by record.Answer,
) {
	failure := &ExceptionError{Class: why.Class, Reason: why.Reason, Topic: by.Topic}
	a.fate.Refused, a.fate.Class = refused, why.Class

	// If other targets still wait, the envelope waits with them: a dead letter would not be sent to
	// them.
	exhausted := int(a.Attempts)+1 >= f.config.MaxAttempts
	if len(left) == len(refused) && (why.Class.DeadAtOnce() || exhausted) {
		a.fate.End = Dead
		a.dead = &deadReason{
			class: why.Class, reason: why.Reason, topic: by.Topic, partition: by.Partition, failure: failure,
		}
		if why.Class.DeadAtOnce() {
			return
		}

		a.fate.Class = record.AttemptsExhausted
		a.dead.class = record.AttemptsExhausted
		a.dead.reason = fmt.Sprintf("%d attempts failed, the last one with: %s", a.Attempts+1, why.Reason)
		if a.Attempts == 0 {
			a.dead.reason = OnlyAttempt + why.Reason
		}
		return
	}

	a.fate.End = Retrying
	a.outcome = a.newOutcome(OutcomeFailed)
	a.outcome.Pending, a.outcome.Error, a.outcome.Node = left, failure, f.config.Node
	a.outcome.Attempts, a.outcome.Delay = a.Attempts, f.config.Retry.Delay(int(a.Attempts))
	f.setPosition(a)
}

// decideWaiting leaves the delivery waiting for the targets in left. It does not count an attempt.
func (a *decision) decideWaiting(left []string, held error) {
	a.fate.End = Waiting

	switch {
	case a.Claim != "":
		a.outcome = a.newOutcome(OutcomeHeld)
		a.outcome.State = "blocked"
		if errors.Is(held, record.ErrParked) {
			a.outcome.State = "parked"
		}
	case len(a.acked) > 0:
		a.outcome = a.newOutcome(OutcomeNarrowed)
	default:
		// The document is correct already.
		return
	}
	a.outcome.Pending = left
}

// newOutcome returns an outcome for the envelope of a.
func (a *decision) newOutcome(fate OutcomeKind) *Outcome {
	return &Outcome{
		Fate: fate, NS: a.NS, ID: a.ID, Delivery: a.Number, Claim: a.Claim, Key: a.Key, Pos: a.Pos,
	}
}

// setPosition sets the position and the seal of a scheduled envelope that becomes an exception.
func (f *Finisher) setPosition(a *decision) {
	if a.outcome == nil || a.Claim == "" {
		return
	}

	a.outcome.Seal = f.config.Seal
	if a.outcome.Pos != "" {
		return
	}

	f.mu.Lock()
	// The counter keeps the order of envelopes that begin to wait in the same second.
	f.seq++
	n := f.seq
	f.mu.Unlock()
	a.outcome.Pos = outboxes.PosAt(bson.Timestamp{T: uint32(f.config.Now().Unix()), I: n})
}
