package ledger

import (
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Decide returns the outcome of a send of the waiting envelope document, whose targets all have their results (N17). topics are the
// topics that the envelope waits for.
func (l *Ledger) Decide(document *waiting.Document, topics []string, results []record.Result) *Outcome {
	return l.applyResults(l.newOutcome(document), topics, results)
}

// DecideClaim returns the outcome of a send of a claimed envelope, whose targets all have their results. topics are all of them; nil
// stands for those of the results.
func (l *Ledger) DecideClaim(claim *ClaimRef, claimed *waiting.Claimed, topics []string, results []record.Result) *Outcome {
	if topics == nil {
		for _, a := range results {
			topics = append(topics, a.Topic)
		}
	}
	return l.applyResults(l.newClaimOutcome(claim, claimed), topics, results)
}

// ClaimRejected returns the outcome of a claimed envelope that was not sent because it is at fault itself.
func (l *Ledger) ClaimRejected(claim *ClaimRef, claimed *waiting.Claimed, why *record.Rejection) *Outcome {
	return l.applyRejection(l.newClaimOutcome(claim, claimed), nil, why)
}

// applyResults decides outcome by the results of the topics.
func (l *Ledger) applyResults(outcome *Outcome, topics []string, results []record.Result) *Outcome {
	left := slices.Clone(topics)

	var rejection *record.Rejection
	var rejectedBy record.Result
	var held error
	for _, a := range results {
		switch {
		case a.Rejection != nil:
			outcome.Rejected = append(outcome.Rejected, a)
			// As long as a further attempt may succeed in one of the topics, the envelope does not die.
			if rejection == nil || rejection.Class.DeadAtOnce() && !a.Rejection.Class.DeadAtOnce() {
				rejection, rejectedBy = a.Rejection, a
			}
		case a.Held != nil:
			outcome.Held = append(outcome.Held, a.Topic)
			if held == nil || errors.Is(a.Held, record.ErrParked) {
				held = a.Held
			}
		default:
			left = slices.DeleteFunc(left, func(t string) bool { return t == a.Topic })
			outcome.Sent = append(outcome.Sent, outboxes.Place{Topic: a.Topic, Partition: a.Partition, Offset: a.Offset})
		}
	}

	switch {
	case len(left) == 0:
		outcome.End = Sent
	case rejection != nil:
		l.decideRejected(outcome, left, rejection, rejectedBy)
	default:
		// No attempt is counted.
		outcome.End, outcome.Topics, outcome.Reason = Waiting, left, waiting.Blocked
		if errors.Is(held, record.ErrParked) {
			outcome.Reason = waiting.Parked
		}
	}
	return outcome
}

// newOutcome returns an outcome of the waiting envelope document. Its delivery is recorded as configured.
func (l *Ledger) newOutcome(document *waiting.Document) *Outcome {
	recorded := l.config.Recording == RecordMark || l.config.Recording == RecordDelete
	return &Outcome{Doc: document, Partition: record.AnyPartition, Recorded: recorded}
}

// newClaimOutcome returns an outcome of a claimed envelope. Only a mark records its delivery: the claim has taken it out of its outbox
// otherwise.
func (l *Ledger) newClaimOutcome(claim *ClaimRef, claimed *waiting.Claimed) *Outcome {
	return &Outcome{
		Claim: claim, NS: claimed.NS, Raw: claimed.Raw, Pos: claimed.Pos, Key: claimed.Key, Partition: record.AnyPartition,
		Recorded: l.RecordsClaims(),
	}
}

// Rejected returns the outcome of a waiting envelope that was not sent because it is at fault itself.
func (l *Ledger) Rejected(document *waiting.Document, topics []string, why *record.Rejection) *Outcome {
	return l.applyRejection(l.newOutcome(document), topics, why)
}

// applyRejection decides outcome by the rejection of the whole envelope.
func (l *Ledger) applyRejection(outcome *Outcome, topics []string, why *record.Rejection) *Outcome {
	for _, topic := range topics {
		outcome.Rejected = append(outcome.Rejected, record.Result{Topic: topic, Partition: record.AnyPartition, Rejection: why})
	}
	l.decideRejected(outcome, topics, why, record.Result{Partition: record.AnyPartition})
	return outcome
}

// decideRejected decides between a further attempt and the dead letters.
func (l *Ledger) decideRejected(outcome *Outcome, left []string, why *record.Rejection, result record.Result) {
	outcome.Rejection, outcome.Topic, outcome.Partition, outcome.Topics = *why, result.Topic, result.Partition, left

	// If other targets still wait, the envelope waits with them: a dead letter would not be sent to them. The attempt delays the next one, but
	// does not count for them.
	outcome.uncounted = len(left) != len(outcome.Rejected)
	// The first attempt of an envelope that is not stored yet is counted when it is.
	exhausted := outcome.Doc != nil && outcome.countedBefore()+1 >= l.config.MaxAttempts
	if outcome.uncounted || !why.Class.DeadAtOnce() && !exhausted {
		outcome.End, outcome.Reason = Retrying, waiting.Retry
		return
	}

	isKept := func(rejected record.Result) bool { return !rejected.Rejection.Class.IsDiscarded(l.config.DropExpired) }
	if why.Class.IsDiscarded(l.config.DropExpired) && !slices.ContainsFunc(outcome.Rejected, isKept) {
		outcome.End = Dropped
		return
	}
	outcome.End, outcome.Rejection = Dead, outcome.lastRejection(why)
}

// lastRejection returns why an envelope is dead that a topic rejected with why.
func (o *Outcome) lastRejection(why *record.Rejection) record.Rejection {
	if why.Class.DeadAtOnce() {
		return *why
	}
	last := record.Rejection{Class: record.AttemptsExhausted, Reason: onlyAttemptText + why.Reason}
	if before := o.countedBefore(); before > 0 {
		last.Reason = fmt.Sprintf("%d attempts failed, the last one with: %s", before+1, why.Reason)
	}
	return last
}

// countedBefore returns the attempts that may make the envelope dead, without the present attempt.
func (o *Outcome) countedBefore() int {
	if o.Doc == nil {
		return 0
	}
	return int(o.Doc.Attempts - o.Doc.Uncounted)
}
