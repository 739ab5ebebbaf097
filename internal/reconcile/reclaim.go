package reconcile

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// found is a call of Found.
type found struct {
	ready func() bool
	let   func()
}

// late is what Found has told of and what is not written down of it yet.
type late struct {
	lets []func()
	left map[store.Outbox][]bson.RawValue // stand in a partition and were on their way, or somebody else's, when they were looked at
}

// Found says that a partition which could not be read at the take-over has been read, and that its stored offset waits (N8).
// What stands there of the envelopes that are not the stream's to send is finished without being sent, whether its turn has
// come or not; let is called, from the goroutine of Run, when a successor finds all of it written down, or held by
// deliveries of its own. If Run ends before, it is not called. It is looked for as soon as ready reports that the exceptions of
// before are written. Found does not block.
//
// An envelope that is on its way just then takes its record from what was found by itself, and is looked at again when it
// has landed. So is a scheduled one, which belongs to Scheduled until it is finished or an exception. Nothing that matters
// is missed: what an earlier owner has sent beside the stream had a state or a claim before this term began, and keeps one
// of them until it is finished.
func (x *Exceptions) Found(ready func() bool, let func()) {
	x.init()
	x.mu.Lock()
	x.found = append(x.found, found{ready, let})
	x.mu.Unlock()
	poke(x.wake)
}

// reclaim does what Found asks for. What it could not take is looked at again at each poll.
func (x *Exceptions) reclaim(ctx context.Context, colls []store.Outbox, due bool) error {
	var fresh, waiting []found
	x.mu.Lock()
	for _, f := range x.found {
		if f.ready() {
			fresh = append(fresh, f)
		} else {
			waiting = append(waiting, f)
		}
	}
	x.found = waiting
	x.mu.Unlock()
	if len(fresh) == 0 && (!due || len(x.late.lets) == 0) {
		return nil
	}
	left, n, err := x.reclaimAll(ctx, colls, len(fresh) > 0)
	if err != nil {
		x.mu.Lock()
		x.found = append(fresh, x.found...)
		x.mu.Unlock()
		return err
	}
	if n > 0 {
		x.Log.Info("an earlier owner had sent envelopes to partitions that were read late", "envelopes", n)
	}
	x.late.left = left
	for _, f := range fresh {
		x.late.lets = append(x.late.lets, f.let)
	}
	if len(left) > 0 {
		return nil
	}
	for _, let := range x.late.lets {
		let()
	}
	x.late = late{}
	return nil
}

// reclaimAll looks at everything that may have been sent, or at what was left of it the last time.
func (x *Exceptions) reclaimAll(ctx context.Context, colls []store.Outbox, all bool) (left map[store.Outbox][]bson.RawValue, taken int, err error) {
	left = map[store.Outbox][]bson.RawValue{}
	if x.Standing == nil || x.Take == nil {
		return left, 0, nil
	}
	x.mu.Lock()
	clear(x.landed) // what lands from here on may still be shown as it was before
	x.mu.Unlock()
	for _, c := range colls {
		coll := x.Client.Database(c.DB).Collection(c.Coll)
		p := reading{db: []byte(c.DB), co: []byte(c.Coll)}
		one := func(raw bson.Raw) error {
			took, wait, err := x.reclaimOne(ctx, &p, c.NS(), raw)
			if took {
				taken++
			}
			if wait {
				left[c] = append(left[c], keep(raw.Lookup("_id")))
			}
			return err
		}
		if all {
			err = store.EachTaken(ctx, coll, c.Part, x.Now().Add(lookahead), one)
		} else {
			for ids := range slices.Chunk(x.late.left[c], recoverAtOnce) {
				if err = store.EachOf(ctx, coll, ids, one); err != nil {
					break
				}
			}
		}
		if err != nil {
			return nil, taken, err
		}
	}
	return left, taken, nil
}

// reclaimOne finishes an envelope for the topics in which it stands, or says that it has to be looked at again.
func (x *Exceptions) reclaimOne(ctx context.Context, p *reading, ns string, raw bson.Raw) (took, wait bool, err error) {
	if event.Parse(raw, &p.view) != nil {
		return false, false, nil // it was never sent
	}
	claim, _ := raw.Lookup("claim", "token").StringValueOK()
	state := string(p.view.State)
	if !store.SameDelivery(raw, "", p.view.Delivery) && (state != "" || claim == "") {
		return false, false, nil // finished, or not taken by anybody
	}
	it := x.item(p, ns, raw, nil)
	e := Envelope{DB: p.db, Coll: p.co, Raw: raw}
	hits := x.Standing(&e, it.pending)
	if len(hits) == 0 {
		return false, false, nil
	}
	if state == "" || slices.ContainsFunc(hits, func(h Hit) bool { return x.Compacted != nil && x.Compacted(h.Topic) }) {
		return false, true, nil // a compacted topic's finds it in its turn, behind the earlier ones of its key (N10)
	}
	if err := x.await(ctx, p); err != nil {
		return false, false, err
	}
	topics := make([]string, len(hits))
	for i := range hits {
		topics[i] = hits[i].Topic
	}
	if it.pending == nil {
		it.pending = hits[0].Targets
	}
	f := &flight{ref: keyRef{it.ref.orderKey, keep(it.ref.stored)}, topics: topics, alone: true, partial: len(topics) < len(it.pending)}
	if !x.depart(it.flyID, f) {
		return false, true, nil
	}
	d := x.delivery(p, it, f)
	if !x.Take(&e, topics, func(a record.Published) { x.Finisher.Answered(d, a) }) {
		x.forget(it.flyID, f)
		return false, true, nil
	}
	return true, false, nil
}

// depart notes an envelope as in flight, so that nothing else publishes it, unless it is, or has landed since it was read.
func (x *Exceptions) depart(id string, f *flight) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, landed := x.landed[id]
	if landed || x.flying[id] != nil {
		return false
	}
	x.take(id, f)
	return true
}
