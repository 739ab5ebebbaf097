package ledger

import (
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// failed is the latest failure of an outcome, before it may become AttemptsExhausted.
type failed struct {
	Class  record.Class
	Reason string
}

// Answered returns the outcome of a send of the waiting envelope d, whose targets all have their answers (N17). topics are the
// topics that the envelope waits for.
func (l *Ledger) Answered(d *waiting.Document, topics []string, answers []record.Answer) *Outcome {
	return l.applyAnswers(l.newOutcome(d), topics, answers)
}

// ClaimAnswered returns the outcome of a send of a claimed envelope, whose targets all have their answers. topics are all of them; nil
// stands for those of the answers.
func (l *Ledger) ClaimAnswered(at *ClaimRef, e *waiting.Claimed, topics []string, answers []record.Answer) *Outcome {
	if topics == nil {
		for _, a := range answers {
			topics = append(topics, a.Topic)
		}
	}
	return l.applyAnswers(l.newClaimOutcome(at, e), topics, answers)
}

// ClaimRefused returns the outcome of a claimed envelope that was not sent because it is at fault itself.
func (l *Ledger) ClaimRefused(at *ClaimRef, e *waiting.Claimed, why *record.Refusal) *Outcome {
	return l.applyRefusal(l.newClaimOutcome(at, e), nil, why)
}

// applyAnswers decides o by the answers of the topics.
func (l *Ledger) applyAnswers(o *Outcome, topics []string, answers []record.Answer) *Outcome {
	left := slices.Clone(topics)

	var refusal *record.Refusal
	var refusedBy record.Answer
	var held error
	for _, a := range answers {
		switch {
		case a.Refusal != nil:
			o.Refused = append(o.Refused, a.Topic)
			// A refusal that no further attempt can change decides about the envelope.
			if refusal == nil || a.Refusal.Class.DeadAtOnce() && !refusal.Class.DeadAtOnce() {
				refusal, refusedBy = a.Refusal, a
			}
		case a.Held != nil:
			o.Held = append(o.Held, a.Topic)
			if held == nil || errors.Is(a.Held, record.ErrParked) {
				held = a.Held
			}
		default:
			left = slices.DeleteFunc(left, func(t string) bool { return t == a.Topic })
			o.Sent = append(o.Sent, outboxes.Place{Topic: a.Topic, Partition: a.Partition, Offset: a.Offset})
		}
	}

	switch {
	case len(left) == 0:
		o.End = Sent
	case refusal != nil:
		l.decideRefused(o, left, refusal, refusedBy)
	default:
		// No attempt is counted.
		o.End, o.Topics, o.Reason = Waiting, left, waiting.Blocked
		if errors.Is(held, record.ErrParked) {
			o.Reason = waiting.Parked
		}
	}
	return o
}

// newOutcome returns an outcome of the waiting envelope d. Its delivery is recorded as configured, whoever has sent it.
func (l *Ledger) newOutcome(d *waiting.Document) *Outcome {
	recorded := l.config.Recording == RecordMark || l.config.Recording == RecordDelete
	return &Outcome{Doc: d, Partition: record.AnyPartition, Recorded: recorded}
}

// newClaimOutcome returns an outcome of a claimed envelope. Only a mark records its delivery: the claim has taken it out of its outbox
// otherwise.
func (l *Ledger) newClaimOutcome(at *ClaimRef, e *waiting.Claimed) *Outcome {
	return &Outcome{
		Claim: at, NS: e.NS, Raw: e.Raw, Pos: e.Pos, Key: e.Key, Partition: record.AnyPartition,
		Recorded: l.config.Recording == RecordMark,
	}
}

// Refused returns the outcome of a waiting envelope that was not sent because it is at fault itself.
func (l *Ledger) Refused(d *waiting.Document, topics []string, why *record.Refusal) *Outcome {
	return l.applyRefusal(l.newOutcome(d), topics, why)
}

// applyRefusal decides o by the refusal of the whole envelope.
func (l *Ledger) applyRefusal(o *Outcome, topics []string, why *record.Refusal) *Outcome {
	o.Refused = topics
	if why.Class == record.Dropped || why.Class == record.Expired && l.config.DropExpired {
		o.End, o.Refusal = Dropped, *why
		return o
	}
	l.decideRefused(o, topics, why, record.Answer{Partition: record.AnyPartition})
	return o
}

// decideRefused decides between a further attempt and the dead letters.
func (l *Ledger) decideRefused(o *Outcome, left []string, why *record.Refusal, by record.Answer) {
	o.Refusal, o.Topic, o.Partition = *why, by.Topic, by.Partition
	o.failure = failed{why.Class, why.Reason}

	// If other targets still wait, the envelope waits with them: a dead letter would not be sent to them.
	// The first attempt of an envelope that is not stored yet is counted when it is.
	exhausted := o.Doc != nil && int(o.Doc.Attempts)+1 >= l.config.MaxAttempts
	if len(left) != len(o.Refused) || !why.Class.DeadAtOnce() && !exhausted {
		o.End, o.Topics, o.Reason = Retrying, left, waiting.Retry
		return
	}

	o.End = Dead
	if why.Class.DeadAtOnce() {
		return
	}
	attempts := o.Doc.Attempts
	o.Refusal = record.Refusal{
		Class:  record.AttemptsExhausted,
		Reason: fmt.Sprintf("%d attempts failed, the last one with: %s", attempts+1, why.Reason),
	}
	if attempts == 0 {
		o.Refusal.Reason = onlyAttemptText + why.Reason
	}
}
