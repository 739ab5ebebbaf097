package app

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/gap"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

// A gap is closed in this order (N22). A crash may interrupt it anywhere.
//
//  1. All events that were read are resolved.
//  2. The gap is saved in the watcher document.
//  3. A stream is opened at the end of the gap, and held.
//  4. The collections are swept up to the end of the gap, and all swept envelopes are resolved.
//  5. One write sets the position to the end of the gap and removes the gap from the document.
//  6. The stream is released.
//
// Until the write of step 5 the position stays before the gap, so that a later owner finds the gap
// and continues with it. If the oplog rolls over a held stream, that shows when the stream is
// released. The next gap then begins where this gap ended.

// reasonBacklog is the reason of the gap with which a first start begins if the stream cannot
// supply the backlog.
const reasonBacklog = "backlog"

// cursorSaveEvery is the interval at which the cursor of a sweep is saved, in intervals of the
// checkpoint.
const cursorSaveEvery = 4

// lostStretch is a part of the stream that has to be swept.
type lostStretch struct {
	lease.Gap
	lower  bson.Timestamp // where the sweep begins
	margin time.Duration  // see term.stampMargin
	saved  time.Time      // when the cursor was last saved
}

// gapPacing delays a gap that follows another gap, if the stream made no progress between them.
type gapPacing struct {
	lastEnd bson.Timestamp // of the previous gap
	backoff *retry.Backoff
}

// waitIfRepeated waits if the position at is still the end of the previous gap. It returns an error
// when ctx ends.
func (r *gapPacing) waitIfRepeated(ctx context.Context, at resume.Position) error {
	if r.backoff == nil {
		r.backoff = retry.Reopen.Start()
	}
	if at.Token.IsZero() && at.ClusterTime == r.lastEnd {
		return r.backoff.Wait(ctx)
	}
	r.backoff.Reset()
	return nil
}

// sweepProgress is the progress of a sweep, for the status.
type sweepProgress struct {
	swept     atomic.Int64
	lastStamp atomic.Uint32 // of the envelope that was delivered last, in seconds
	endStamp  uint32        // of the gap, in seconds
}

// describe returns the progress in words. hindrance may be empty.
func (s *sweepProgress) describe(hindrance string) string {
	text := fmt.Sprintf("the change stream has a gap; %d envelopes swept so far", s.swept.Load())
	if at := s.lastStamp.Load(); at > 0 {
		left := time.Duration(max(int64(s.endStamp)-int64(at), 0)) * time.Second
		text += fmt.Sprintf(", up to %s before its end", left)
	}
	if hindrance != "" {
		text += "; " + hindrance
	}
	return text
}

// openGap resolves all events of the lost stream and saves the gap. It returns where to open the
// next stream.
func (t *term) openGap(ctx context.Context, lost *changestream.GapError) (changestream.Start, error) {
	if err := t.dispatcher.Drain(ctx); err != nil {
		return changestream.Start{}, err
	}
	reached, _ := t.dispatcher.Reached()
	if err := t.gapPacing.waitIfRepeated(ctx, reached); err != nil {
		return changestream.Start{}, err
	}

	// The end of the gap comes before the list of collections: the stream then contains all inserts
	// into a collection that is made in between.
	to, err := t.operationTime(ctx)
	if err != nil {
		return changestream.Start{}, err
	}
	if err := t.listCollections(ctx); err != nil {
		return changestream.Start{}, err
	}
	if err := t.claimNewCollections(ctx, bson.Timestamp{}); err != nil {
		return changestream.Start{}, err
	}

	// A position that is ahead of the server belongs to another history, so its time cannot be
	// used.
	from, _ := reached.Time()
	if lost.Ahead {
		from = bson.Timestamp{}
	}

	// The stream was expected to repeat the exceptions of the previous owner, for their other
	// topics. It no longer can. That has to be known before exceptions are loaded, so a new
	// takeover finds the gap in the document.
	start, err := t.planSweep(ctx, lost.Reason, from, to, lease.Update{Current: true})
	if err == nil && t.pump.Previous != nil {
		err = errGapTooLate
	}
	return start, err
}

// errGapTooLate ends a term that has found a gap after it has loaded exceptions. The next takeover
// finds the gap in the document.
var errGapTooLate = errors.New("the change stream has a gap that contains exceptions")

// planSweep saves the gap, together with u. It returns the end of the gap as the start of the next
// stream.
func (t *term) planSweep(
	ctx context.Context, reason string, from, to bson.Timestamp, u lease.Update,
) (changestream.Start, error) {
	switch {
	case !from.After(to):
	case reason == lease.GapRequested:
		// The operator ordered a sweep from a time in the future.
		from = to
	default:
		// The time belongs to another history.
		from = bson.Timestamp{}
	}

	t.gap = &lostStretch{Gap: lease.Gap{Reason: reason, From: from, To: to, Since: t.slot.relay.clock.now()}}
	u.Gap = &t.gap.Gap
	if err := t.retryFenced(ctx, func() error { return t.held.Save(ctx, u) }); err != nil {
		return changestream.Start{}, err
	}

	t.log.Warn("the change stream has a gap; sweeping the outbox", "reason", reason, "from", from.T, "to", to.T)
	t.appendEvent(ctx, nodes.GapFound, bson.D{
		{Key: "reason", Value: reason},
		{Key: "from", Value: from},
		{Key: "to", Value: to},
	})
	return changestream.Start{At: &to}, nil
}

// resumeGap continues the sweep of an earlier owner, or begins a sweep that an operator has
// ordered. began is a cluster time before the collections were listed.
func (t *term) resumeGap(
	ctx context.Context, doc *lease.Document, u lease.Update, began bson.Timestamp,
) (changestream.Start, error) {
	// An ordered sweep has no end yet.
	if doc.Gap.To.IsZero() {
		if t.from.IsZero() {
			t.from = resume.Position{ClusterTime: began}
			u.Checkpoint.Position = t.from
		}
		u.GapSince = doc.Gap.Since
		return t.planSweep(ctx, doc.Gap.Reason, doc.SweepStart(doc.Gap.From), began, u)
	}

	if t.slot.cfg.LostHistory == resume.HaltLostHistory && doc.Gap.Reason != lease.GapRequested {
		return changestream.Start{}, &HaltError{
			What: "a gap of the change stream is half swept",
			Fix:  "set lost_history: sweep until it is closed",
		}
	}
	t.gap = &lostStretch{Gap: *doc.Gap}
	t.log.Warn("continuing the sweep of an earlier owner", "reason", t.gap.Reason,
		"from", t.gap.From.T, "to", t.gap.To.T, "cursor", t.gap.Cursor.T)
	return changestream.Start{At: &t.gap.To}, nil
}

// hasUnstampedBacklog reports whether a first start has to sweep: for an envelope without a server
// timestamp, no time is known at which a stream would contain its insert.
func (t *term) hasUnstampedBacklog(ctx context.Context, now bson.Timestamp) (found bool, err error) {
	if t.slot.cfg.Start.Now || !t.slot.cfg.Start.At.IsZero() || t.slot.cfg.LostHistory == resume.HaltLostHistory {
		return false, nil
	}

	for _, c := range t.watchedOutboxes() {
		err := t.retryRead(ctx, func(ctx context.Context) (err error) {
			coll := t.slot.relay.mongo.stream.Database(c.DB).Collection(c.Coll)
			found, err = gap.HasUnstamped(ctx, now, coll, c.Part)
			return err
		})
		if err != nil || found {
			return found, err
		}
	}
	return false, nil
}

// findReadUpTo returns, for collections that got a watched name after the position, the time up to
// which they were read before.
func (t *term) findReadUpTo(ctx context.Context) (map[string]bson.Timestamp, error) {
	var claims []outboxes.Registration
	err := t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		claims, err = t.slot.relay.registry.Registrations(ctx, t.slot.cfg.Watcher)
		return err
	})
	if err != nil {
		return nil, err
	}

	// A gap begins at the position, unless an operator has ordered another time.
	position := t.gap.From
	if t.gap.Reason == lease.GapRequested {
		position = t.from.ClusterTime
	}
	return outboxes.ReadUpTo(claims, t.watchedOutboxes(), position, t.gap.From), nil
}

// sweepGap delivers the envelopes of the gap and closes it. It returns when all of them are
// resolved.
func (t *term) sweepGap(ctx context.Context) error {
	g := t.gap
	g.margin = mongodb.Margin(ctx, t.slot.relay.mongo.stream)
	readUpTo, err := t.findReadUpTo(ctx)
	if err != nil {
		return err
	}

	s := &gap.Sweep{
		Client:      t.slot.relay.mongo.stream,
		Collections: t.watchedOutboxes(),
		From:        g.From,
		ReadUpTo:    readUpTo,
		To:          g.To,
		Cursor:      g.Cursor,
		Margin:      g.margin,
		Memory:      int64(t.slot.cfg.Limits.Memory) / 4,
		Skip:        t.pump.SkipSwept(int64(t.slot.cfg.Limits.Memory) / 4),
		Publisher:   (*sweeper)(t),
	}
	g.lower = s.LowerBound()
	t.sweeping.Store(&sweepProgress{endStamp: g.To.T})
	t.dispatcher.Position(resume.Position{ClusterTime: g.lower})

	res, err := s.Run(ctx)
	if err != nil {
		return err
	}
	if err := t.dispatcher.Drain(ctx); err != nil {
		return err
	}
	return t.closeGap(ctx, res)
}

// closeGap sets the position to the end of the gap and removes the gap from the watcher document,
// in one write. All envelopes of the gap are delivered. The stream supplies the events after it.
func (t *term) closeGap(ctx context.Context, res gap.Result) error {
	g := t.gap
	end := resume.Position{ClusterTime: g.To}
	t.dispatcher.Position(end)
	_, _, offsets := t.dispatcher.Snapshot()
	hash := t.slot.scope.PipelineHash()
	identities := t.collectionIdentities()
	u := lease.Update{
		Checkpoint:   lease.Checkpoint{Position: end, Offsets: offsets},
		PipelineHash: &hash,
		Collections:  &identities,
		ClearGap:     true,
		GapSince:     g.Since,
		// The stored position may belong to another history, and so may the positions of earlier
		// slots. All of them have been swept.
		Rewind:      g.From.IsZero(),
		ClearPassed: true,
	}

	// No stream contained the envelopes that the sweep left to the reconciler. Once the gap is gone
	// from the document, a later owner would not look for them (N17).
	if err := t.dirty.markAllNonEmpty(ctx); err != nil {
		return err
	}
	if err := t.retryFenced(ctx, func() error { return t.held.Save(ctx, u) }); err != nil {
		return err
	}

	t.startMu.Lock()
	t.from = end
	t.unsavedDescription = nil
	t.drainedSlots = nil
	t.startMu.Unlock()

	t.gap = nil
	t.gapPacing.lastEnd = g.To
	t.pump.DrainedSlots = nil
	t.sweeping.Store(nil)
	t.slot.state.clearProblems("sweep")

	took := t.slot.relay.clock.now().Sub(g.Since).Round(time.Millisecond)
	t.log.Info("the gap is closed", "reason", g.Reason, "swept", res.Swept, "known", res.Skipped,
		"before_restart", g.Redelivered-res.Swept, "took", took)
	t.appendEvent(ctx, nodes.GapClosed, bson.D{
		{Key: "reason", Value: g.Reason},
		{Key: "from", Value: g.From},
		{Key: "to", Value: g.To},
		{Key: "swept", Value: g.Redelivered},
		{Key: "ms", Value: took.Milliseconds()},
	})
	return nil
}

// saveCursor saves up to where the sweep is acked, together with the stored offsets of the same
// moment.
func (t *term) saveCursor(ctx context.Context) error {
	reached, ok, offsets := t.dispatcher.Snapshot()
	g := t.gap
	at := reached.ClusterTime
	if !ok || !reached.Token.IsZero() || !at.After(g.lower) || !at.After(g.Cursor) {
		return nil
	}

	g.Cursor = at
	return t.held.Save(ctx, lease.Update{
		Checkpoint: lease.Checkpoint{Offsets: offsets},
		Gap:        &g.Gap,
		GapSince:   g.Since,
	})
}

// sweeper delivers the envelopes of a sweep through the pump, like events of the stream.
type sweeper term

var _ gap.Publisher = (*sweeper)(nil)

// Deliver implements gap.Publisher.
func (s *sweeper) Deliver(ctx context.Context, e *outboxes.Envelope) error {
	if err := s.pump.DeliverSwept(ctx, e, outboxes.PosAt(e.TS)); err != nil {
		return err
	}

	s.gap.Redelivered++
	s.slot.metrics.Reconciled.WithLabelValues("swept").Inc()
	p := s.sweeping.Load()
	p.swept.Add(1)
	p.lastStamp.Store(e.TS.T)
	return nil
}

// Reached implements gap.Publisher.
func (s *sweeper) Reached(ctx context.Context, cursor bson.Timestamp) error {
	s.dispatcher.Position(resume.Position{ClusterTime: cursor})
	s.dispatcher.Flush()
	s.slot.state.clearProblems("sweep")

	if now := time.Now(); now.Sub(s.gap.saved) >= cursorSaveEvery*s.slot.cfg.Checkpoint {
		s.gap.saved = now
		return (*term)(s).saveCursor(ctx)
	}
	return nil
}

// Trouble implements gap.Publisher.
func (s *sweeper) Trouble(err error) { s.slot.reportProblem("sweep", err, false) }
