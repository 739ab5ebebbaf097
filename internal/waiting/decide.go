package waiting

import (
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// OnlyAttempt is the start of the reason of a dead letter if only one attempt is allowed.
const OnlyAttempt = "the only attempt failed with: "

// decideFate applies N17 to deliveries outside of the order of the stream. It sets the fate of a, and what is
// written about it.
func (f *Finisher) decideFate(a *decision, answers []record.Answer) {
	a.left = slices.Clone(a.Pending)
	if a.Pending == nil {
		for _, x := range answers {
			a.left = append(a.left, x.Topic)
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
			a.left = slices.DeleteFunc(a.left, func(t string) bool { return t == x.Topic })
			a.acked = append(a.acked, outboxes.Place{Topic: x.Topic, Partition: x.Partition, Offset: x.Offset})
		}
	}

	switch {
	case len(a.left) == 0:
		a.fate.End, a.changed = Finished, true
		// The watermark does not show that a scheduled envelope was sent, so with recording by
		// watermark it is removed at once.
		a.removed = f.config.Recording == "delete" || a.Claim != "" && f.config.Recording != "mark"
	case refusal != nil:
		f.decideRefused(a, refusal, refusedBy)
	default:
		// No attempt is counted. The document of an exception is correct already, unless some targets have it.
		a.fate.End, a.changed = Waiting, a.Claim != "" || len(a.acked) > 0
		a.heldState = envelope.StateBlocked
		if errors.Is(held, record.ErrParked) {
			a.heldState = envelope.StateParked
		}
		f.setPosition(a)
	}
}

// decideRefused decides between a further attempt and the dead letters.
func (f *Finisher) decideRefused(a *decision, why *record.Refusal, by record.Answer) {
	a.failure = &ExceptionError{Class: why.Class, Reason: why.Reason, Topic: by.Topic}
	a.fate.Class = why.Class

	// If other targets still wait, the envelope waits with them: a dead letter would not be sent to
	// them.
	exhausted := int(a.Attempts)+1 >= f.config.MaxAttempts
	if len(a.left) != len(a.fate.Refused) || !why.Class.DeadAtOnce() && !exhausted {
		a.fate.End, a.changed = Retrying, true
		f.setPosition(a)
		return
	}

	a.fate.End = Dead
	a.deadReason, a.partition = why.Reason, by.Partition
	if why.Class.DeadAtOnce() {
		return
	}
	a.fate.Class = record.AttemptsExhausted
	a.deadReason = fmt.Sprintf("%d attempts failed, the last one with: %s", a.Attempts+1, why.Reason)
	if a.Attempts == 0 {
		a.deadReason = OnlyAttempt + why.Reason
	}
}

// setPosition sets the position of a scheduled envelope that becomes an exception.
func (f *Finisher) setPosition(a *decision) {
	if a.Claim == "" || a.Pos != "" {
		return
	}

	f.mu.Lock()
	// The counter keeps the order of envelopes that begin to wait in the same second.
	f.seq++
	n := f.seq
	f.mu.Unlock()
	a.Pos = outboxes.PosAt(bson.Timestamp{T: uint32(f.config.Now().Unix()), I: n})
}
