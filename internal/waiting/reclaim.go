package waiting

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

// lateRead holds the arguments of a call of ReclaimLate.
type lateRead struct {
	ready   func() bool
	release func()
}

// lateWork is the unfinished part of earlier calls of ReclaimLate.
type lateWork struct {
	releases []func()
	// left are envelopes with a record in the partition that could not be finished yet: they were in
	// flight, or Scheduled had them.
	left map[outboxes.Outbox][]bson.RawValue
}

// ReclaimLate is called when a partition that could not be read at the takeover has been read. The stored
// offset of the partition waits until release is called (N8).
//
// Run finishes the waiting and scheduled envelopes whose records are in the partition, without
// sending them and whether or not it is their turn. It starts when ready reports that the earlier
// exceptions are written. It then calls release, from its own goroutine, when a successor would find
// all of them written, or held by deliveries in flight. If Run ends before, release is not called.
// ReclaimLate does not block.
//
// The sink itself finds the record of an envelope that is in flight at that time. Such an envelope is
// looked at again when its delivery has ended. The same holds for a scheduled envelope, which belongs
// to Scheduled until it is finished or becomes an exception. No envelope is missed: all envelopes that
// the previous owner sent outside of the stream had a state or a claim before this term began, and
// keep one of them until they are finished.
func (x *Exceptions) ReclaimLate(ready func() bool, release func()) {
	x.mu.Lock()
	x.lateReads = append(x.lateReads, lateRead{ready, release})
	x.mu.Unlock()

	retry.Signal(x.wake)
}

// reclaimLateHits does the work of ReclaimLate. Envelopes that it could not finish are looked at again
// at each poll, which due announces.
func (x *Exceptions) reclaimLateHits(ctx context.Context, collections []outboxes.Outbox, due bool) error {
	var fresh, waiting []lateRead
	x.mu.Lock()
	for _, f := range x.lateReads {
		if f.ready() {
			fresh = append(fresh, f)
		} else {
			waiting = append(waiting, f)
		}
	}
	x.lateReads = waiting
	x.mu.Unlock()

	if len(fresh) == 0 && (!due || len(x.late.releases) == 0) {
		return nil
	}

	left, n, err := x.reclaimCollections(ctx, collections, len(fresh) > 0)
	if err != nil {
		x.mu.Lock()
		x.lateReads = append(fresh, x.lateReads...)
		x.mu.Unlock()
		return err
	}
	if n > 0 {
		x.config.Log.Info("found records of an earlier owner in partitions that were read late", "envelopes", n)
	}

	x.late.left = left
	for _, f := range fresh {
		x.late.releases = append(x.late.releases, f.release)
	}
	if len(left) > 0 {
		return nil
	}

	for _, release := range x.late.releases {
		release()
	}
	x.late = lateWork{}
	return nil
}

// reclaimCollections finishes envelopes whose records were found. If all is set, it reads every
// envelope that an earlier owner may have sent, and otherwise only x.late.left. It returns the
// envelopes that could not be taken, and the number of those that were.
func (x *Exceptions) reclaimCollections(
	ctx context.Context, collections []outboxes.Outbox, all bool,
) (left map[outboxes.Outbox][]bson.RawValue, taken int, err error) {
	left = map[outboxes.Outbox][]bson.RawValue{}
	if x.config.FindRecords == nil || x.config.AckIfFound == nil {
		return left, 0, nil
	}

	// The reads may show an envelope whose outcome is written from now on as it was before.
	x.mu.Lock()
	clear(x.landedIDs)
	x.mu.Unlock()

	for _, c := range collections {
		coll := x.config.Client.Database(c.DB).Collection(c.Coll)
		p := scanPass{db: []byte(c.DB), coll: []byte(c.Coll)}
		reclaim := func(raw bson.Raw) error {
			took, wait, err := x.reclaimEnvelope(ctx, &p, c.NS(), raw)
			if took {
				taken++
			}
			if wait {
				left[c] = append(left[c], mongodb.CloneValue(raw.Lookup("_id")))
			}
			return err
		}

		if all {
			err = EachTaken(ctx, coll, c.Part, x.config.Now().Add(Lookahead), reclaim)
		} else {
			for ids := range slices.Chunk(x.late.left[c], recoverAtOnce) {
				err = EachOf(ctx, coll, ids, reclaim)
				if err != nil {
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

// reclaimEnvelope finishes an envelope for the topics in which its record was found, and then reports
// took. It reports wait if the envelope has to be looked at again.
func (x *Exceptions) reclaimEnvelope(
	ctx context.Context, p *scanPass, ns string, raw bson.Raw,
) (took, wait bool, err error) {
	// A malformed envelope was never sent.
	if x.config.Mapping.Parse(raw, &p.view) != nil {
		return false, false, nil
	}

	// The envelope is finished, or has neither a state nor a claim.
	claim, _ := raw.Lookup("claim", "token").StringValueOK()
	state := string(p.view.State)
	if !SameDelivery(raw, "", p.view.Delivery) && (state != "" || claim == "") {
		return false, false, nil
	}

	it := x.newCandidate(p, ns, raw, nil)
	e := outboxes.Envelope{DB: p.db, Coll: p.coll, Raw: raw}
	hits := x.config.FindRecords(&e, it.pending)
	if len(hits) == 0 {
		return false, false, nil
	}

	// The record in a compacted topic is found when the envelope's turn comes, after the earlier
	// envelopes of its key (N10).
	compacted := slices.ContainsFunc(hits, func(h Hit) bool { return x.config.Compacted(h.Topic) })
	if state == "" || compacted {
		return false, true, nil
	}

	if err := x.awaitRoom(ctx, p); err != nil {
		return false, false, err
	}

	topics := make([]string, len(hits))
	for i := range hits {
		topics[i] = hits[i].Topic
	}
	if it.pending == nil {
		it.pending = hits[0].Targets
	}
	f := &flight{
		ref:     keyRef{it.ref.orderKey, mongodb.CloneValue(it.ref.stored)},
		topics:  topics,
		alone:   true,
		partial: len(topics) < len(it.pending),
	}
	if !x.trackUnlessSeen(it.flightID, f) {
		return false, true, nil
	}

	d := x.newDelivery(p, it, f)
	if !x.config.AckIfFound(&e, topics, func(a record.Published) { x.config.Finisher.Answered(d, a) }) {
		x.undoFlight(it.flightID, f)
		return false, true, nil
	}
	return true, false, nil
}

// trackUnlessSeen adds f to the publications in flight, so that nothing else publishes the envelope.
// It returns false if the envelope is in flight already, or has landed since it was read.
func (x *Exceptions) trackUnlessSeen(id string, f *flight) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, landed := x.landedIDs[id]
	if landed || x.inFlight[id] != nil {
		return false
	}
	x.trackLocked(id, f)
	return true
}
