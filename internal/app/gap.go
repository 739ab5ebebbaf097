package app

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/reconcile"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/resume"
)

// The order of a gap (N22), which a crash may interrupt anywhere: everything read is resolved; the stretch is written into
// the watcher document; a stream is opened at its end and held; the collections are swept up to there; what was swept is
// resolved; the document gets the end of the stretch as its position and loses the gap, in one write; the stream is
// released. Until that write the position stays before the stretch, and a successor finds the gap and goes on with it. A
// held stream that falls off the oplog in turn shows when it is released: then the next stretch begins where this one
// ended.

// reasonBacklog is the reason of the gap with which a first start finds what no stream could bring.
const reasonBacklog = "backlog"

// saveEvery is how often the place of a sweep is written down, in intervals of the checkpoint.
const saveEvery = 4

// gap is a stretch that is to be swept.
type gap struct {
	lease.Gap
	lower  bson.Timestamp // where the sweep begins
	margin time.Duration
	saved  time.Time
}

// rounds slows down gaps that follow each other without a sign of life of the stream between them.
type rounds struct {
	end     bson.Timestamp // of the stretch before
	backoff *retry.Backoff
}

func (r *rounds) pause(ctx context.Context, at resume.Position) error {
	if r.backoff == nil {
		r.backoff = retry.Reopen.Start()
	}
	if at.Token.IsZero() && at.ClusterTime == r.end {
		return r.backoff.Wait(ctx)
	}
	r.backoff.Reset()
	return nil
}

// sweeping is what the status tells of a sweep.
type sweeping struct {
	swept atomic.Int64
	at    atomic.Uint32 // seconds of the stamp that was handed on last
	to    uint32
}

func (s *sweeping) text(hindrance string) string {
	words := fmt.Sprintf("the change stream lost a stretch; %d envelopes swept so far", s.swept.Load())
	if at := s.at.Load(); at > 0 {
		words += fmt.Sprintf(", up to %s before its end", time.Duration(max(int64(s.to)-int64(at), 0))*time.Second)
	}
	if hindrance != "" {
		words += "; " + hindrance
	}
	return words
}

// openGap ends what the lost stream began and writes the gap down. The stream is to be opened at the place returned.
func (t *term) openGap(ctx context.Context, why *changestream.GapError) (changestream.Start, error) {
	if err := t.disp.Drain(ctx); err != nil {
		return changestream.Start{}, err
	}
	reached, _ := t.disp.Reached()
	if err := t.rounds.pause(ctx, reached); err != nil {
		return changestream.Start{}, err
	}
	// The end of the stretch comes before the list of collections: one that is made meanwhile is the stream's to bring.
	to, err := t.operationTime(ctx)
	if err != nil {
		return changestream.Start{}, err
	}
	if err := t.listCollections(ctx); err != nil {
		return changestream.Start{}, err
	}
	if err := t.claimNew(ctx, bson.Timestamp{}); err != nil {
		return changestream.Start{}, err
	}
	from, _ := reached.Time()
	if why.Ahead {
		from = bson.Timestamp{} // a time of another history says nothing about this one
	}
	start, err := t.planSweep(ctx, why.Reason, from, to, lease.Update{Current: true})
	if err == nil && t.pump.owned != nil {
		// What an earlier owner made exceptions of was to come by the stream once more, for its other topics. That it does
		// not any more has to be known before anything is loaded: the next take-over finds the gap in the document.
		err = errAnew
	}
	return start, err
}

// errAnew ends a term that has found a gap too late.
var errAnew = errors.New("the stretch behind the position is lost, and envelopes of it wait")

// planSweep writes the gap down, together with u.
func (t *term) planSweep(ctx context.Context, reason string, from, to bson.Timestamp, u lease.Update) (changestream.Start, error) {
	switch {
	case !from.After(to):
	case reason == lease.GapOrdered:
		from = to // it was of the future when it was ordered
	default:
		from = bson.Timestamp{} // of another history
	}
	t.gap = &gap{Gap: lease.Gap{Reason: reason, From: from, To: to, Since: t.clock.now()}}
	u.Gap = &t.gap.Gap
	if err := t.retryFenced(ctx, func() error { return t.held.Save(ctx, u) }); err != nil {
		return changestream.Start{}, err
	}
	t.log.Warn("sweeping the outbox for what the change stream cannot bring", "reason", reason, "from", from.T, "to", to.T)
	t.announce(ctx, store.GapFound, bson.D{{Key: "reason", Value: reason}, {Key: "from", Value: from}, {Key: "to", Value: to}})
	return changestream.Start{At: &to}, nil
}

// resumeGap goes on with the sweep of an earlier owner, or begins the one that an operator has ordered.
func (t *term) resumeGap(ctx context.Context, doc *lease.Document, u lease.Update, began bson.Timestamp) (changestream.Start, error) {
	if doc.Gap.To.IsZero() {
		if t.from.IsZero() {
			t.from = resume.Position{ClusterTime: began}
			u.Checkpoint.Position = t.from
		}
		u.GapSince = doc.Gap.Since
		return t.planSweep(ctx, doc.Gap.Reason, doc.SweepFrom(doc.Gap.From), began, u)
	}
	if t.cfg.LostHistory == resume.HaltLostHistory && doc.Gap.Reason != lease.GapOrdered {
		return changestream.Start{}, &HaltError{What: "a gap of the change stream is half swept", Fix: "set lost_history: sweep until it is closed"}
	}
	t.gap = &gap{Gap: *doc.Gap}
	t.log.Warn("going on with the sweep of an earlier owner", "reason", t.gap.Reason, "from", t.gap.From.T, "to", t.gap.To.T, "cursor", t.gap.Cursor.T)
	return changestream.Start{At: &t.gap.To}, nil
}

// unstampedBacklog reports whether a first start has to sweep: what carries no stamp of the server, no time can be found for
// at which a stream would bring it.
func (t *term) unstampedBacklog(ctx context.Context, now bson.Timestamp) (found bool, err error) {
	if t.cfg.Start.Now || !t.cfg.Start.At.IsZero() || t.cfg.LostHistory == resume.HaltLostHistory {
		return false, nil
	}
	for _, c := range t.outboxes() {
		if err := t.untilRead(ctx, func(ctx context.Context) (err error) {
			found, err = reconcile.AnyUnstamped(ctx, now, t.mongo.stream.Database(c.DB).Collection(c.Coll), c.Part)
			return err
		}); err != nil || found {
			return found, err
		}
	}
	return false, nil
}

// readUpTo tells, of the collections that got a watched name behind the position, up to where they were read before.
func (t *term) readUpTo(ctx context.Context) (map[string]bson.Timestamp, error) {
	var claims []store.Claim
	if err := t.untilDone(ctx, "mongodb", func(ctx context.Context) (err error) {
		claims, err = t.registry.Claims(ctx, t.cfg.Watcher)
		return err
	}); err != nil {
		return nil, err
	}
	position := t.gap.From // which is the position, unless an operator has said otherwise
	if t.gap.Reason == lease.GapOrdered {
		position = t.from.ClusterTime
	}
	return store.ReadUpTo(claims, t.outboxes(), position, t.gap.From), nil
}

// sweep delivers what the gap holds and closes it.
func (t *term) sweep(ctx context.Context) error {
	g := t.gap
	g.margin = store.Margin(ctx, t.mongo.stream)
	if t.pump.skip == nil {
		t.pump.skip = reconcile.NewSkip(int64(t.cfg.Limits.Memory) / 4)
	}
	appeared, err := t.readUpTo(ctx)
	if err != nil {
		return err
	}
	s := &reconcile.Sweep{
		Client: t.mongo.stream, Collections: t.outboxes(), From: g.From, ReadUpTo: appeared, To: g.To, Cursor: g.Cursor, Margin: g.margin,
		Memory: int64(t.cfg.Limits.Memory) / 4, Skip: t.pump.skip, Publisher: (*sweeper)(t),
	}
	g.lower = s.Lower()
	t.sweeping.Store(&sweeping{to: g.To.T})
	t.disp.Position(resume.Position{ClusterTime: g.lower})
	res, err := s.Run(ctx)
	if err != nil {
		return err
	}
	if err := t.disp.Drain(ctx); err != nil {
		return err
	}
	return t.closeGap(ctx, res)
}

// closeGap moves the position to the end of the stretch: all before it is delivered, the rest comes from the stream.
func (t *term) closeGap(ctx context.Context, res reconcile.Result) error {
	g := t.gap
	end := resume.Position{ClusterTime: g.To}
	t.disp.Position(end)
	_, _, offsets := t.disp.Snapshot()
	hash, identities := t.scope.PipelineHash(), t.identities()
	u := lease.Update{
		Checkpoint:   lease.Checkpoint{Position: end, Offsets: offsets},
		PipelineHash: &hash, Collections: &identities, ClearGap: true, GapSince: g.Since,
		Rewind:      g.From.IsZero(), // the stored position may be one of another history
		ClearPassed: true,            // and so may be those of earlier slots; all of them have been swept
	}
	// N17: what the sweep leaves out, no stream has told of; with the gap gone from the document no successor would look.
	if err := t.dirty.find(ctx); err != nil {
		return err
	}
	if err := t.retryFenced(ctx, func() error { return t.held.Save(ctx, u) }); err != nil {
		return err
	}

	t.startMu.Lock()
	t.from, t.fresh, t.passed = end, nil, nil
	t.startMu.Unlock()
	t.gap, t.rounds.end, t.pump.passed = nil, g.To, nil
	t.sweeping.Store(nil)
	t.state.clear("sweep")
	took := t.clock.now().Sub(g.Since).Round(time.Millisecond)
	t.log.Info("the gap is closed", "reason", g.Reason, "swept", res.Swept, "known", res.Skipped, "before_restart", g.Redelivered-res.Swept, "took", took)
	t.announce(ctx, store.GapClosed, bson.D{
		{Key: "reason", Value: g.Reason},
		{Key: "from", Value: g.From},
		{Key: "to", Value: g.To},
		{Key: "swept", Value: g.Redelivered},
		{Key: "ms", Value: took.Milliseconds()},
	})
	return nil
}

// saveCursor writes down how far the sweep is acked, with the stored offsets of the same moment.
func (t *term) saveCursor(ctx context.Context) error {
	reached, ok, offsets := t.disp.Snapshot()
	g := t.gap
	at := reached.ClusterTime
	if !ok || !reached.Token.IsZero() || !at.After(g.lower) || !at.After(g.Cursor) {
		return nil
	}
	g.Cursor = at
	return t.held.Save(ctx, lease.Update{Checkpoint: lease.Checkpoint{Offsets: offsets}, Gap: &g.Gap, GapSince: g.Since})
}

// sweeper publishes what a sweep finds, by the way of stream events.
type sweeper term

var _ reconcile.Publisher = (*sweeper)(nil)

// Deliver implements reconcile.Publisher.
func (s *sweeper) Deliver(ctx context.Context, e *reconcile.Envelope) error {
	err := s.pump.swept(ctx, e, store.PosAt(e.TS))
	if err == nil {
		s.gap.Redelivered++
		s.metrics.Reconciled.WithLabelValues("swept").Inc()
		p := s.sweeping.Load()
		p.swept.Add(1)
		p.at.Store(e.TS.T)
	}
	return err
}

// Reached implements reconcile.Publisher.
func (s *sweeper) Reached(ctx context.Context, cursor bson.Timestamp) error {
	s.disp.Position(resume.Position{ClusterTime: cursor})
	s.disp.Flush()
	s.state.clear("sweep")
	if now := time.Now(); now.Sub(s.gap.saved) >= saveEvery*s.cfg.Checkpoint {
		s.gap.saved = now
		return (*term)(s).saveCursor(ctx)
	}
	return nil
}

// Trouble implements reconcile.Publisher.
func (s *sweeper) Trouble(err error) { s.report("sweep", err, false) }

// swept delivers an envelope that a sweep found, flagged: nobody knows whether it was sent before the read-back's reach. pos is
// where it stands if it has to wait (N15).
func (p *pump) swept(ctx context.Context, e *reconcile.Envelope, pos string) error {
	now := p.now().UnixMilli()
	p.ev = changestream.Event{
		Op: changestream.Insert, Document: e.Raw, HasDocument: true, DB: e.DB, Coll: e.Coll,
		ClusterTime: e.TS, WallMS: now, // N12: the record's time is that of its sending
		Data: []byte(pos),
	}
	commit := now
	if !e.TS.IsZero() {
		commit = int64(e.TS.T) * 1000
	}
	p.meta.Redelivered = true
	defer func() { p.meta.Redelivered = false }()
	if p.count++; p.count%flushEvery == 0 {
		p.disp.Flush()
	}
	return p.hand(ctx, commit)
}

// wasSwept judges an event of the stream behind a sweep: it reports one that the sweep has sent, and flags one that it may
// have sent.
func (p *pump) wasSwept() bool {
	p.meta.Redelivered = false
	if p.skip.Over(p.ev.ClusterTime) {
		p.skip = nil
		return false
	}
	known, doubtful := p.skip.Swept(p.ev.DB, p.ev.Coll, p.ev.IDType, p.ev.ID, p.ev.Document)
	p.meta.Redelivered = doubtful
	return known
}
