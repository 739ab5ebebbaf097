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

// decide is N17 for deliveries outside of the stream's order.
func (f *Finisher) decide(a *answered, answers []record.Answer) {
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
		a.outcome = a.result(store.FateSent)
		a.outcome.Delete = f.c.Recording == "delete" || a.Claim != "" && f.c.Recording != "mark"
	case why != nil:
		f.refused(a, why, left, a.fate.Refused, by)
	default:
		a.waits(left, held)
		f.place(a)
	}
	if a.outcome != nil && f.c.Recording == "mark" {
		a.outcome.Sent = a.acked
	}
}

// refused decides between a further attempt and the dead letters. Where other targets wait, the envelope does, too: a letter
// would take it away from them.
func (f *Finisher) refused(a *answered, why *record.Refusal, left, refused []string, by record.Answer) {
	failure := &store.ExceptionError{Class: why.Class, Reason: why.Reason, Topic: by.Topic}
	a.fate.Left, a.fate.Refused, a.fate.Class = left, refused, why.Class
	exhausted := int(a.Attempts)+1 >= f.c.MaxAttempts
	if len(left) == len(refused) && (why.Class.DeadAtOnce() || exhausted) {
		a.fate.End = Dead
		a.letter = &letter{class: why.Class, reason: why.Reason, topic: by.Topic, partition: by.Partition, failure: failure}
		if !why.Class.DeadAtOnce() {
			a.fate.Class = record.AttemptsExhausted
			a.letter.class = record.AttemptsExhausted
			a.letter.reason = fmt.Sprintf("%d attempts failed, the last one with: %s", a.Attempts+1, why.Reason)
			if a.Attempts == 0 {
				a.letter.reason = OnlyAttempt + why.Reason
			}
		}
		return
	}
	a.fate.End = Retrying
	a.outcome = a.result(store.FateFailed)
	a.outcome.Pending, a.outcome.Error, a.outcome.Node = left, failure, f.c.Node
	a.outcome.Attempts, a.outcome.Delay = a.Attempts, f.c.Retry.Delay(int(a.Attempts))
	f.place(a)
}

// waits puts the delivery back to what it was, without the targets that have it. No attempt is spent.
func (a *answered) waits(left []string, held error) {
	a.fate.End, a.fate.Left = Waiting, left
	switch {
	case a.Claim != "":
		a.outcome = a.result(store.FateHeld)
		a.outcome.State = "blocked"
		if errors.Is(held, record.ErrParked) {
			a.outcome.State = "parked"
		}
	case len(a.acked) > 0:
		a.outcome = a.result(store.FateNarrowed)
	default:
		return // as it stands on the document
	}
	a.outcome.Pending = left
}

func (a *answered) result(fate store.Fate) *store.Outcome {
	return &store.Outcome{Fate: fate, NS: a.NS, ID: a.ID, Delivery: a.Number, Claim: a.Claim, Key: a.Key, Pos: a.Pos}
}

// place gives a scheduled envelope that becomes an exception its position and the seal.
func (f *Finisher) place(a *answered) {
	if a.outcome == nil || a.Claim == "" {
		return
	}
	a.outcome.Seal = f.c.Seal
	if a.outcome.Pos != "" {
		return
	}
	f.mu.Lock()
	f.seq++
	n := f.seq
	f.mu.Unlock()
	a.outcome.Pos = store.PosAt(bson.Timestamp{T: uint32(f.c.Now().Unix()), I: n})
}
