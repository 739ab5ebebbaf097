package reconcile

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	claimReply   = 4 << 20 // bytes that a reply should have
	claimUnknown = 100     // documents of a reply, while nothing is known of their size
	claimTimeout = time.Minute
)

// publishClaimed sends what is claimed, until ctx ends or there is no way out.
func (s *Scheduled) publishClaimed(ctx context.Context) error {
	for {
		select {
		case groups := <-s.claimedGroups:
			for i := range groups {
				if err := s.sendGroup(ctx, &groups[i]); err != nil {
					return err
				}
				s.Outlet.Flush()
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// outletError marks an error of the outlet: nothing can be sent any more.
type outletError struct{ error }

// sendGroup reads the claimed envelopes of a group and publishes them. What it cannot read it reads again: it is claimed,
// and nobody else will send it.
func (s *Scheduled) sendGroup(ctx context.Context, g *claimGroup) error {
	waiting := make(map[string]timer, len(g.timers))
	for _, e := range g.timers {
		waiting[idKey(e.id)] = e
	}
	left := g.claimedCount
	back := retry.Reopen.Start()
	var at bson.Timestamp
	for left > 0 {
		n, err := s.readAndPublish(ctx, g, waiting, at)
		left -= n
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if out := (outletError{}); errors.As(err, &out) {
			return out.error
		}
		if err == nil && (left <= 0 || !at.IsZero()) {
			break // what is still missing was removed by hand
		}
		if err == nil {
			// The claims are committed, and a majority read may still not show them at once (N22).
			at, err = store.ClusterTime(ctx, s.Client)
		}
		if err != nil {
			s.reportTrouble(err)
			if back.Wait(ctx) != nil {
				return context.Cause(ctx)
			}
		}
	}
	for _, e := range waiting {
		s.releaseUnclaimed(e)
	}
	return nil
}

// readAndPublish publishes those of waiting that bear the claim, and takes them off it.
func (s *Scheduled) readAndPublish(over context.Context, g *claimGroup, waiting map[string]timer, at bson.Timestamp) (int64, error) {
	ctx, cancel := context.WithTimeout(over, claimTimeout)
	defer cancel()
	batch := claimUnknown
	if g.collection.envelopeSize > 0 {
		batch = max(1, min(store.MaxClaim, claimReply/g.collection.envelopeSize))
	}
	due := store.Due{Coll: g.collection.coll, IDs: make([]bson.RawValue, 0, len(waiting))}
	for _, e := range waiting {
		due.IDs = append(due.IDs, e.id)
	}
	var n, size int64
	_, err := store.ReadClaimed(ctx, due, s.claim, at, int32(batch), func(raw bson.Raw) error {
		id := raw.Lookup("_id")
		e, ok := waiting[idKey(id)]
		if !ok {
			return nil
		}
		if err := s.publishEnvelope(over, g.collection, e, raw); err != nil {
			return err
		}
		delete(waiting, idKey(id))
		n++
		size += int64(len(raw))
		return nil
	})
	if n > 0 {
		g.collection.envelopeSize = int(size / n)
	}
	return n, err
}

// publishEnvelope publishes one envelope, or hands it to the Finisher as it is at fault itself.
func (s *Scheduled) publishEnvelope(ctx context.Context, c *scheduledCollection, e timer, raw bson.Raw) error {
	d := &Delivery{NS: c.ns, ID: e.id, Claim: s.claim.Token, Flight: e.key}
	if event.Parse(raw, &s.view) == nil { // else Publish refuses it
		d.Number, d.Key = s.view.Delivery, string(s.view.OrderingKey())
	}
	due, _ := raw.Lookup("dueAt").DateTimeOK()
	s.envelope = Envelope{DB: c.db, Coll: c.name, TS: Stamp(raw), Raw: raw}
	crash.At("before-scheduled-publish")
	err := s.Outlet.Publish(ctx, &s.envelope, nil, func(p record.Published) {
		crash.At("after-scheduled-publish")
		s.reportLateness(due, p)
		s.Finisher.Answered(d, p)
	})
	var why *record.Refusal
	switch {
	case err == nil:
		return nil
	case errors.As(err, &why):
		s.Finisher.Refused(d, why)
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return outletError{err}
}

// reportLateness tells how late an envelope was, if it was sent.
func (s *Scheduled) reportLateness(due int64, p record.Published) {
	if s.Late == nil {
		return
	}
	for _, a := range p.Answers {
		if a.Offset < 0 {
			return
		}
	}
	s.Late(s.Now().Sub(time.UnixMilli(due)))
}
