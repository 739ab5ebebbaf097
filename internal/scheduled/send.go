package scheduled

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/waiting"
)

const (
	claimReply   = 4 << 20 // wanted bytes of a reply
	claimUnknown = 100     // documents of a reply while their size is unknown
	claimTimeout = time.Minute
)

// publishClaimed publishes claimed envelopes until ctx ends or the outlet fails.
func (s *Scheduled) publishClaimed(ctx context.Context) error {
	for {
		select {
		case groups := <-s.claimedGroups:
			for _, g := range groups {
				if err := s.sendGroup(ctx, g); err != nil {
					return err
				}
				s.Outlet.Flush()
			}

		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// outletError marks an error of the outlet, after which nothing can be sent.
type outletError struct{ error }

// sendGroup reads the claimed envelopes of a group and publishes them. It retries failed reads until
// they succeed, because nothing else sends a claimed envelope.
func (s *Scheduled) sendGroup(ctx context.Context, g *claimGroup) error {
	unread := make(map[string]timer, len(g.timers))
	for _, e := range g.timers {
		unread[mongodb.ValueKey(e.id)] = e
	}

	left := g.have
	backoff := retry.Reopen.Start()
	var at bson.Timestamp
	for left > 0 {
		n, err := s.readAndPublish(ctx, g, unread, at)
		left -= n
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if out := (outletError{}); errors.As(err, &out) {
			return out.error
		}

		// An envelope that is missing after a read at the cluster time was removed by hand.
		if err == nil && (left <= 0 || !at.IsZero()) {
			break
		}

		// The claims are committed, but a majority read may not show them at once (N22).
		if err == nil {
			at, err = mongodb.ClusterTime(ctx, s.Client)
		}
		if err != nil {
			s.OnRetry(err)
			if backoff.Wait(ctx) != nil {
				return context.Cause(ctx)
			}
		}
	}

	for _, e := range unread {
		s.releaseUnclaimed(e)
	}
	return nil
}

// readAndPublish reads the envelopes of unread that have the claim, publishes them and removes them
// from unread. It returns their number.
func (s *Scheduled) readAndPublish(
	parent context.Context, g *claimGroup, unread map[string]timer, at bson.Timestamp,
) (int64, error) {
	ctx, cancel := context.WithTimeout(parent, claimTimeout)
	defer cancel()

	batch := claimUnknown
	if g.collection.envelopeSize > 0 {
		batch = max(1, min(maxClaim, claimReply/g.collection.envelopeSize))
	}
	due := claimGroup{coll: g.coll}
	for _, e := range unread {
		due.ids = append(due.ids, e.id)
	}

	// The deadline is for the read alone. Publish may block for longer, while the outlet has no room.
	var n, size int64
	_, err := readClaimed(ctx, due, s.claim, at, int32(batch), func(raw bson.Raw) error {
		id := raw.Lookup("_id")
		e, ok := unread[mongodb.ValueKey(id)]
		if !ok {
			return nil
		}

		if err := s.publishEnvelope(parent, g.collection, e, raw); err != nil {
			return err
		}
		delete(unread, mongodb.ValueKey(id))
		n++
		size += int64(len(raw))
		return nil
	})
	if n > 0 {
		g.collection.envelopeSize = int(size / n)
	}
	return n, err
}

// publishEnvelope publishes one envelope, or passes it to the Finisher if the envelope is at fault.
func (s *Scheduled) publishEnvelope(ctx context.Context, c *scheduledCollection, e timer, raw bson.Raw) error {
	d := &waiting.Delivery{NS: c.ns, ID: e.id, Claim: s.claim.Token, Done: func(waiting.Fate) { s.endTimer(e) }}

	// Publish refuses an envelope that cannot be parsed.
	if s.Mapping.Parse(raw, &s.view) == nil {
		d.Number, d.Key = s.view.Delivery, string(s.view.OrderingKey())
	}

	due, _ := raw.Lookup("dueAt").DateTimeOK()
	s.envelope = outboxes.Envelope{DB: c.db, Coll: c.name, TS: outboxes.Stamp(raw), Raw: raw}
	crash.At("before-scheduled-publish")
	err := s.Outlet.Publish(ctx, &s.envelope, nil, func(p record.Published) {
		crash.At("after-scheduled-publish")
		s.reportLateness(due, p)
		s.Finisher.Answered(d, p)
	})
	if err == nil {
		return nil
	}

	var refusal *record.Refusal
	if errors.As(err, &refusal) {
		s.Finisher.Refused(d, refusal)
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return outletError{err}
}

// reportLateness calls OnSent with the time since due, if every target has the envelope.
func (s *Scheduled) reportLateness(due int64, p record.Published) {
	for _, a := range p.Answers {
		if a.Offset < 0 {
			return
		}
	}
	s.OnSent(s.Now().Sub(time.UnixMilli(due)))
}
