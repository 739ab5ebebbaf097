package reconcile

import (
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
)

// OnlyAttempt begins the reason of a letter where one attempt is all that is allowed.
const OnlyAttempt = "the only attempt failed with: "

// decideFate is N17 for deliveries outside of the stream's order.
func (f *Finisher) decideFate(a *decision, answers []record.Answer) {
	left := slices.Clone(a.Pending)
	if a.Pending == nil {
		for _, x := range answers {
			left = append(left, x.Topic)
		}
	}
	var why *record.Refusal
	var by record.Answer
	var held error
	for _, x := range answers {
		switch {
		case x.Refused != nil:
			a.fate.Refused = append(a.fate.Refused, x.Topic)
			if why == nil || x.Refused.Class.DeadAtOnce() && !why.Class.DeadAtOnce() {
				why, by = x.Refused, x
			}
		case x.Held != nil:
			a.fate.Held = append(a.fate.Held, x.Topic)
			if held == nil || errors.Is(x.Held, record.ErrParked) {
				held = x.Held
			}
		default:
			left = slices.DeleteFunc(left, func(t string) bool { return t == x.Topic })
			a.acked = append(a.acked, store.SentTo{Topic: x.Topic, Partition: x.Partition, Offset: x.Offset})
		}
	}
	switch {
	case len(left) == 0:
		a.fate.End = Finished
		a.outcome = a.newOutcome(store.FateSent)
		a.outcome.Delete = f.config.Recording == "delete" || a.Claim != "" && f.config.Recording != "mark"
	case why != nil:
		f.decideRefused(a, why, left, a.fate.Refused, by)
	default:
		a.decideWaiting(left, held)
		f.setPosition(a)
	}
	if a.outcome != nil && f.config.Recording == "mark" {
		a.outcome.Sent = a.acked
	}
}

// decideRefused decides between a further attempt and the dead letters. Where other targets wait, the envelope does, too: a letter
// would take it away from them.
func (f *Finisher) decideRefused(a *decision, why *record.Refusal, left, refused []string, by record.Answer) {
	failure := &store.ExceptionError{Class: why.Class, Reason: why.Reason, Topic: by.Topic}
	a.fate.Left, a.fate.Refused, a.fate.Class = left, refused, why.Class
	exhausted := int(a.Attempts)+1 >= f.config.MaxAttempts
	if len(left) == len(refused) && (why.Class.DeadAtOnce() || exhausted) {
		a.fate.End = Dead
		a.dead = &deadReason{class: why.Class, reason: why.Reason, topic: by.Topic, partition: by.Partition, failure: failure}
		if !why.Class.DeadAtOnce() {
			a.fate.Class = record.AttemptsExhausted
			a.dead.class = record.AttemptsExhausted
			a.dead.reason = fmt.Sprintf("%d attempts failed, the last one with: %s", a.Attempts+1, why.Reason)
			if a.Attempts == 0 {
				a.dead.reason = OnlyAttempt + why.Reason
			}
		}
		return
	}
	a.fate.End = Retrying
	a.outcome = a.newOutcome(store.FateFailed)
	a.outcome.Pending, a.outcome.Error, a.outcome.Node = left, failure, f.config.Node
	a.outcome.Attempts, a.outcome.Delay = a.Attempts, f.config.Retry.Delay(int(a.Attempts))
	f.setPosition(a)
}

// decideWaiting puts the delivery back to what it was, without the targets that have it. No attempt is spent.
func (a *decision) decideWaiting(left []string, held error) {
	a.fate.End, a.fate.Left = Waiting, left
	switch {
	case a.Claim != "":
		a.outcome = a.newOutcome(store.FateHeld)
		a.outcome.State = "blocked"
		if errors.Is(held, record.ErrParked) {
			a.outcome.State = "parked"
		}
	case len(a.acked) > 0:
		a.outcome = a.newOutcome(store.FateNarrowed)
	default:
		return // as it stands on the document
	}
	a.outcome.Pending = left
}

func (a *decision) newOutcome(fate store.Fate) *store.Outcome {
	return &store.Outcome{Fate: fate, NS: a.NS, ID: a.ID, Delivery: a.Number, Claim: a.Claim, Key: a.Key, Pos: a.Pos}
}

// setPosition gives a scheduled envelope that becomes an exception its position and the seal.
func (f *Finisher) setPosition(a *decision) {
	if a.outcome == nil || a.Claim == "" {
		return
	}
	a.outcome.Seal = f.config.Seal
	if a.outcome.Pos != "" {
		return
	}
	f.mu.Lock()
	f.seq++
	n := f.seq
	f.mu.Unlock()
	a.outcome.Pos = store.PosAt(bson.Timestamp{T: uint32(f.config.Now().Unix()), I: n})
}
