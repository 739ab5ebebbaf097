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

// spent is a scheduled envelope that each target has; what bears another claim than this owner's does not come here.
type spent struct {
	ns     string
	id     bson.RawValue
	flight uint64
	ticket record.Ticket
	number int32
}

// spentList holds them in pieces that one transaction takes each: to grow, it copies nothing.
type spentList [][]spent

func (l *spentList) add(s spent) {
	if n := len(*l); n == 0 || len((*l)[n-1]) == store.MaxExceptions {
		*l = append(*l, make([]spent, 0, store.MaxExceptions))
	}
	last := &(*l)[len(*l)-1]
	*last = append(*last, s)
}

func (l *spentList) take() (first []spent) {
	first = (*l)[0]
	(*l)[0] = nil
	if *l = (*l)[1:]; len(*l) == 0 {
		*l = nil
	}
	return first
}

// timetable is what a Finisher knows of scheduled envelopes.
type timetable interface {
	// behind reports whether such are due that could be claimed now.
	behind() bool
	// token is the claim of this owner.
	token() string
	// landed says that these flights are over, whatever became of them.
	landed(flights []uint64)
}

// patience is how long removing gives way at the most: a collection that cannot be claimed must not hold it up for ever.
const patience = 2 * time.Second

// done reports whether nothing but the removal is left of a delivery.
func (f *Finisher) done(d *Delivery, answers []record.Answer) bool {
	if d.Claim == "" || f.table == nil || d.Claim != f.table.token() || d.Done != nil || d.Pending != nil || f.c.Recording == "mark" {
		return false
	}
	return !slices.ContainsFunc(answers, func(a record.Answer) bool { return a.Refused != nil || a.Held != nil })
}

// tidying reports whether the next that are to be written are such as were sent, and should wait because others are due.
func (f *Finisher) tidying() (next, wait bool) {
	f.mu.Lock()
	next = len(f.queue) == 0 && len(f.spent) > 0
	since := f.waiting
	f.mu.Unlock()
	if !next || f.table == nil || !f.table.behind() {
		since = time.Time{}
	} else if since.IsZero() {
		since, wait = time.Now(), true
	} else if wait = time.Since(since) < patience; !wait {
		since = time.Time{}
	}
	f.mu.Lock()
	f.waiting = since
	f.mu.Unlock()
	return next, wait
}

// unspent makes ordinary deliveries of the next that are to be removed. f.mu is held.
func (f *Finisher) unspent() []*answered {
	list, claim := f.spent.take(), f.table.token()
	batch := make([]*answered, len(list))
	for i, s := range list {
		d := &Delivery{NS: s.ns, ID: s.id, Claim: claim, Number: s.number, Flight: s.flight}
		batch[i] = &answered{Delivery: d, ticket: s.ticket, settle: true, fate: Fate{End: Finished}}
		batch[i].outcome = batch[i].result(store.FateSent)
		batch[i].outcome.Delete = true
	}
	return batch
}
