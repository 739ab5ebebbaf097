package waiting

import (
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/record"
)

// A scheduled envelope that was sent only has to be removed. The removal costs more than all earlier
// steps and no other step depends on it, so it yields to envelopes that are due. Many removals may
// queue up by then, so each is kept small.

// removal is a scheduled envelope that each target has, and that has the claim of this owner.
type removal struct {
	ns     string
	id     bson.RawValue
	flight uint64
	ticket record.Ticket
	number int32
}

// removalQueue stores removals in chunks of one transaction each, so that it grows without copying.
type removalQueue [][]removal

// appendRemoval adds s to the last chunk.
func (q *removalQueue) appendRemoval(s removal) {
	n := len(*q)
	if n == 0 || len((*q)[n-1]) == mongodb.MaxDocuments {
		*q = append(*q, make([]removal, 0, mongodb.MaxDocuments))
	}
	last := &(*q)[len(*q)-1]
	*last = append(*last, s)
}

// takeChunk removes the first chunk and returns it. The queue must not be empty.
func (q *removalQueue) takeChunk() (first []removal) {
	first = (*q)[0]
	(*q)[0] = nil
	*q = (*q)[1:]
	if len(*q) == 0 {
		*q = nil
	}
	return first
}

// DueSource is the part of Scheduled that a Finisher uses.
type DueSource interface {
	// HasClaimable reports whether envelopes are due that could be claimed now.
	HasClaimable() bool
	// ClaimToken returns the claim of this owner.
	ClaimToken() string
	// EndFlights ends these flights, with any fate.
	EndFlights(flights []uint64)
}

// maxRemovalWait is the longest time that removals yield. Without it, a collection that cannot be
// claimed would block them permanently.
const maxRemovalWait = 2 * time.Second

// onlyRemovalLeft reports whether a delivery only has to be removed.
func (f *Finisher) onlyRemovalLeft(d *Delivery, answers []record.Answer) bool {
	if d.Claim == "" || f.Scheduled == nil || d.Claim != f.Scheduled.ClaimToken() {
		return false
	}
	if d.Done != nil || d.Pending != nil || f.config.Recording == "mark" {
		return false
	}
	return !slices.ContainsFunc(answers, func(a record.Answer) bool { return a.Refusal != nil || a.Held != nil })
}

// checkRemovals reports whether removals are the next to be written, and whether they have to wait
// because envelopes are due.
func (f *Finisher) checkRemovals() (next, wait bool) {
	f.mu.Lock()
	next = len(f.queue) == 0 && len(f.removals) > 0
	since := f.yieldingSince
	f.mu.Unlock()

	switch {
	case !next || f.Scheduled == nil || !f.Scheduled.HasClaimable():
		since = time.Time{}
	case since.IsZero():
		since, wait = time.Now(), true
	default:
		wait = time.Since(since) < maxRemovalWait
		if !wait {
			// The removals that follow may yield again.
			since = time.Time{}
		}
	}

	f.mu.Lock()
	f.yieldingSince = since
	f.mu.Unlock()
	return next, wait
}

// nextRemovalsLocked returns the next removals as decisions.
func (f *Finisher) nextRemovalsLocked() []*decision {
	list, claim := f.removals.takeChunk(), f.Scheduled.ClaimToken()
	batch := make([]*decision, len(list))
	for i, r := range list {
		d := &Delivery{NS: r.ns, ID: r.id, Claim: claim, Number: r.number, Flight: r.flight}
		batch[i] = &decision{Delivery: d, ticket: r.ticket, hasTicket: true, fate: Fate{End: Finished}}
		batch[i].outcome = batch[i].newOutcome(OutcomeSent)
		batch[i].outcome.Delete = true
	}
	return batch
}
