package reconcile

import (
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
)

// A scheduled envelope that was sent has done its service: what is left is to remove it. That costs more than all before it,
// and nobody waits for it, so it is put off while others are due. There may be many by then, and each is kept small.

// removal is a scheduled envelope that each target has; what bears another claim than this owner's does not come here.
type removal struct {
	ns     string
	id     bson.RawValue
	flight uint64
	ticket record.Ticket
	number int32
}

// removalQueue holds them in pieces that one transaction takes each: to grow, it copies nothing.
type removalQueue [][]removal

func (l *removalQueue) appendRemoval(s removal) {
	if n := len(*l); n == 0 || len((*l)[n-1]) == store.MaxExceptions {
		*l = append(*l, make([]removal, 0, store.MaxExceptions))
	}
	last := &(*l)[len(*l)-1]
	*last = append(*last, s)
}

func (l *removalQueue) takeChunk() (first []removal) {
	first = (*l)[0]
	(*l)[0] = nil
	if *l = (*l)[1:]; len(*l) == 0 {
		*l = nil
	}
	return first
}

// dueSource is what a Finisher knows of scheduled envelopes.
type dueSource interface {
	// hasClaimable reports whether such are due that could be claimed now.
	hasClaimable() bool
	// claimToken is the claim of this owner.
	claimToken() string
	// endFlights says that these flights are over, whatever became of them.
	endFlights(flights []uint64)
}

// maxRemovalWait is how long removing gives way at the most: a collection that cannot be claimed must not hold it up for ever.
const maxRemovalWait = 2 * time.Second

// onlyRemovalLeft reports whether nothing but the removal is left of a delivery.
func (f *Finisher) onlyRemovalLeft(d *Delivery, answers []record.Answer) bool {
	if d.Claim == "" || f.scheduled == nil || d.Claim != f.scheduled.claimToken() || d.Done != nil || d.Pending != nil || f.config.Recording == "mark" {
		return false
	}
	return !slices.ContainsFunc(answers, func(a record.Answer) bool { return a.Refused != nil || a.Held != nil })
}

// checkRemovals reports whether the next that are to be written are such as were sent, and should wait because others are due.
func (f *Finisher) checkRemovals() (next, wait bool) {
	f.mu.Lock()
	next = len(f.queue) == 0 && len(f.removals) > 0
	since := f.yieldingSince
	f.mu.Unlock()
	if !next || f.scheduled == nil || !f.scheduled.hasClaimable() {
		since = time.Time{}
	} else if since.IsZero() {
		since, wait = time.Now(), true
	} else if wait = time.Since(since) < maxRemovalWait; !wait {
		since = time.Time{}
	}
	f.mu.Lock()
	f.yieldingSince = since
	f.mu.Unlock()
	return next, wait
}

// nextRemovalsLocked makes ordinary deliveries of the next that are to be removed. f.mu is held.
func (f *Finisher) nextRemovalsLocked() []*decision {
	list, claim := f.removals.takeChunk(), f.scheduled.claimToken()
	batch := make([]*decision, len(list))
	for i, s := range list {
		d := &Delivery{NS: s.ns, ID: s.id, Claim: claim, Number: s.number, Flight: s.flight}
		batch[i] = &decision{Delivery: d, ticket: s.ticket, hasTicket: true, fate: Fate{End: Finished}}
		batch[i].outcome = batch[i].newOutcome(store.FateSent)
		batch[i].outcome.Delete = true
	}
	return batch
}
