package gap

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/internal/watched"
	"github.com/outrelay/outrelay/internal/relay/notices"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/sweep"
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

// ReasonBacklog is the reason of the gap with which a first start begins if the stream cannot
// supply the backlog.
const ReasonBacklog = "backlog"

// cursorSaveEvery is the interval at which the cursor of a sweep is saved, in intervals of the
// checkpoint.
const cursorSaveEvery = 4

// lostStretch is a part of the stream that has to be swept.
type lostStretch struct {
	lease.Gap
	lower  bson.Timestamp // where the sweep begins
	margin time.Duration  // by which timestamps may be older than the commit of their envelopes
	saved  time.Time      // when the cursor was last saved
}

// Plan has the gap that a term has to sweep, and the renames that give positions to swept envelopes. It exists before the stream and
// the sink. The Recovery of the term carries it out.
type Plan struct {
	Config      *config.Config
	Held        *lease.Held
	Calls       *readiness.Calls
	Collections *watched.Collections
	Now         func() time.Time
	Log         *slog.Logger
	AppendEvent func(ctx context.Context, kind nodes.Kind, fields bson.D)

	gap      *lostStretch                  // to be swept before the stream is read
	sweeping atomic.Pointer[sweepProgress] // set while positions are those of a sweep
	renames  sync.Map                      // name of a collection → its latest rename in the term
}

// Recovery continues the stream of a term after it was lost, and delivers the envelopes that no
// stream contains: those of a gap, and those of a collection that was renamed to a watched name.
type Recovery struct {
	*Plan
	Scope      *changes.Scope
	Schedules  *watched.Schedules
	Dispatcher dispatcher
	Swept      deliverer
	Skip       *sweep.Skip // gets the ids of swept envelopes that the following stream may repeat
	Metrics    *metrics.Set
	Checkpoint lease.Source                   // the current checkpoint of the term
	Closed     func(end resume.Position)      // called when the document contains the end of the gap
	Lost       func(lost notices.LostHistory) // called when lost history is swept. It must not block. Nil: not called
	Slot       string                         // of the watcher, for Lost
	// CountWaiting returns how many events Discard would remove now.
	CountWaiting func(ctx context.Context, db, coll, before string) (int64, error)
	// Discard removes the waiting events of a dropped outbox with positions before the drop. It returns the number of removed envelopes, also with
	// an error.
	Discard func(ctx context.Context, db, coll, before string) (int64, error)
	// CountScheduled returns how many scheduled events such an outbox had at the last count. One slot of a watcher reports them.
	CountScheduled func(ctx context.Context, db, coll string) (int64, error)

	reopenedAt resume.Position // where the stream was last reopened by time
	lastEnd    bson.Timestamp  // of the previous gap
	backoff    *retry.Backoff  // between two gaps without progress of the stream
}

// dispatcher sends the swept envelopes and follows their acks.
type dispatcher interface {
	Drain(ctx context.Context) error
	Flush()
	Position(at resume.Position)
	HoldSwept()
	ReleaseSwept()
	Reached() (resume.Position, bool)
	Snapshot() (resume.Position, bool, map[string][]int64)
}

// deliverer delivers the envelopes of a sweep.
type deliverer interface {
	DeliverSwept(ctx context.Context, e *outboxes.Envelope, pos string) error
}

// IsGapOpen reports whether a gap has to be swept before the stream is read.
func (p *Plan) IsGapOpen() bool { return p.gap != nil }

// IsSweeping reports whether positions are those of a sweep. It is safe for concurrent use.
func (p *Plan) IsSweeping() bool { return p.sweeping.Load() != nil }

// DescribeSweep returns the progress of the sweep in words, or "" if there is none. hindrance may
// be empty. It is safe for concurrent use.
func (p *Plan) DescribeSweep(hindrance string) string {
	progress := p.sweeping.Load()
	if progress == nil {
		return ""
	}

	text := fmt.Sprintf("the change stream has a gap; %d envelopes swept so far", progress.swept.Load())
	if at := progress.lastStamp.Load(); at > 0 {
		left := time.Duration(max(int64(progress.endStamp)-int64(at), 0)) * time.Second
		text += fmt.Sprintf(", up to %s before its end", left)
	}

	if hindrance != "" {
		text += "; " + hindrance
	}

	return text
}

// sweepProgress is the progress of a sweep, for the status.
type sweepProgress struct {
	swept     atomic.Int64
	lastStamp atomic.Uint32 // of the envelope that was delivered last, in seconds
	endStamp  uint32        // of the gap, in seconds
}

// openGap resolves all events of the lost stream and saves the gap. It returns where to open the
// next stream.
func (r *Recovery) openGap(ctx context.Context, lost *changes.GapError) (changes.Start, error) {
	if err := r.Dispatcher.Drain(ctx); err != nil {
		return changes.Start{}, err
	}
	reached, _ := r.Dispatcher.Reached()

	// A gap that follows another gap is delayed if the stream has made no progress between them.
	if r.backoff == nil {
		r.backoff = retry.Reopen.Start()
	}
	if !reached.Token.IsZero() || reached.ClusterTime != r.lastEnd {
		r.backoff.Reset()
	} else if err := r.backoff.Wait(ctx); err != nil {
		return changes.Start{}, err
	}

	to, err := r.Collections.ListWithTime(ctx)
	if err != nil {
		return changes.Start{}, err
	}
	if err := r.Collections.ClaimNewCollections(ctx, bson.Timestamp{}); err != nil {
		return changes.Start{}, err
	}

	// A position that is ahead of the server belongs to another history, so its time cannot be
	// used.
	from, _ := reached.Time()
	if lost.Ahead {
		from = bson.Timestamp{}
	}

	return r.PlanSweep(ctx, lost.Reason, from, to, lease.Update{Current: r.Checkpoint})
}

// PlanSweep saves the gap, together with update. It returns the end of the gap as the start of the next
// stream.
func (p *Plan) PlanSweep(
	ctx context.Context, reason string, start, end bson.Timestamp, update lease.Update,
) (changes.Start, error) {
	switch {
	case !start.After(end):
	case reason == lease.GapRequested:
		// The operator ordered a sweep from a time in the future.
		start = end
	default:
		// The time belongs to another history.
		start = bson.Timestamp{}
	}

	p.gap = &lostStretch{Gap: lease.Gap{Reason: reason, From: start, To: end, Since: p.Now()}}
	update.Gap = &p.gap.Gap
	if err := p.Calls.RetryFenced(ctx, func() error { return p.Held.Save(ctx, update) }); err != nil {
		return changes.Start{}, err
	}

	// A first start has no stream to continue: that is no problem. Neither is an order.
	if reason == ReasonBacklog || reason == lease.GapRequested {
		p.Log.Info("sweeping the outbox", "reason", reason, "from", start.T, "to", end.T)
	} else {
		p.Log.Warn("the change stream has a gap; sweeping the outbox", "reason", reason, "from", start.T, "to", end.T)
	}
	p.AppendEvent(ctx, nodes.GapFound, bson.D{
		{Key: "reason", Value: reason},
		{Key: "from", Value: start},
		{Key: "to", Value: end},
	})
	return changes.Start{At: &end}, nil
}

// ResumeGap continues the sweep of an earlier owner, or begins a sweep that an operator has
// ordered. began is a cluster time before the collections were listed. The earlier owner did not sweep the added collections.
func (p *Plan) ResumeGap(
	ctx context.Context, doc *lease.Document, update lease.Update, began bson.Timestamp, added Added,
) (changes.Start, error) {
	if doc.Gap.To.IsZero() {
		update.GapSince = doc.Gap.Since
		return p.PlanSweep(ctx, doc.Gap.Reason, doc.SweepStart(doc.Gap.From), began, update)
	}

	if p.Config.LostHistory == "halt" && doc.Gap.Reason != lease.GapRequested {
		return changes.Start{}, &readiness.HaltError{
			What: "a gap of the change stream is half swept",
			Fix:  "set lost_history: sweep until it is closed",
		}
	}
	p.gap = &lostStretch{Gap: *doc.Gap}
	if len(added.Outboxes) > 0 {
		p.gap.Cursor = bson.Timestamp{}
	}
	p.Log.Info("continuing the sweep of an earlier owner", "reason", p.gap.Reason,
		"from", p.gap.From.T, "to", p.gap.To.T, "cursor", p.gap.Cursor.T)
	return changes.Start{At: &p.gap.To}, nil
}

// HasUnstampedBacklog reports whether a first start has to sweep: for an envelope without a server
// timestamp, no time is known at which a stream would contain its insert.
func (p *Plan) HasUnstampedBacklog(ctx context.Context, now bson.Timestamp) (found bool, err error) {
	if p.Config.Start.Now || !p.Config.Start.At.IsZero() || p.Config.LostHistory == "halt" {
		return false, nil
	}

	for _, c := range p.Collections.WatchedOutboxes() {
		err := p.Calls.RetryRead(ctx, func(ctx context.Context) (err error) {
			coll := mongodb.Database(p.Calls.Client, c.DB).Collection(c.Coll)
			found, err = sweep.HasUnstamped(ctx, now, coll, c.Slot)
			return err
		})
		if err != nil || found {
			return found, err
		}
	}
	return false, nil
}

// findReadUpTo returns, for collections that got a watched name after the position, the time up to
// which they were read before. start is where the term has started.
func (r *Recovery) findReadUpTo(claims []outboxes.Registration, start bson.Timestamp) map[string]bson.Timestamp {
	// A gap begins at the position, unless an operator has ordered another time.
	position := r.gap.From
	if r.gap.Reason == lease.GapRequested {
		position = start
	}
	return outboxes.ReadUpTo(claims, r.Collections.WatchedOutboxes(), position, r.gap.From)
}

// SweepGap delivers the envelopes of the gap and closes it. It returns when all of them are
// resolved. closed is false if there was no gap. start is where the term has started.
func (r *Recovery) SweepGap(ctx context.Context, start resume.Position) (closed bool, err error) {
	stretch := r.gap
	if stretch == nil {
		return false, nil
	}
	stretch.margin = mongodb.Margin(ctx, r.Calls.Client)
	claims, err := r.Collections.Registrations(ctx)
	if err != nil {
		return false, err
	}

	sweep := &sweep.Sweep{
		Client:      r.Calls.Client,
		Collections: r.Collections.WatchedOutboxes(),
		From:        stretch.From,
		ReadUpTo:    r.findReadUpTo(claims, start.ClusterTime),
		Claims:      outboxes.ByUUID(claims),
		OldIDs:      stretch.Reason != lease.GapRequested && r.sweepsOldIDs(),
		To:          stretch.To,
		Cursor:      stretch.Cursor,
		Margin:      stretch.margin,
		Memory:      int64(r.Config.Limits.Memory) / 4,
		Skip:        r.Skip,
		Publisher:   gapPublisher{sweptPublisher{r}},
	}
	stretch.lower = sweep.LowerBound()
	// Before the first position of the sweep: a renewal would save it as the position of the stream
	// (N22).
	r.sweeping.Store(&sweepProgress{endStamp: stretch.To.T})
	r.Dispatcher.HoldSwept()
	r.Dispatcher.Position(resume.Position{ClusterTime: stretch.lower})

	res, err := sweep.Run(ctx)
	if err != nil {
		return false, err
	}
	if err := r.Dispatcher.Drain(ctx); err != nil {
		return false, err
	}
	if err := r.warnOfOldIDs(ctx, sweep); err != nil {
		return false, err
	}
	if err := r.closeGap(ctx, res); err != nil {
		return false, err
	}
	return true, nil
}

// sweepsOldIDs reports whether a sweep that no operator has limited delivers envelopes with ids of any age. The stream cannot
// show any more which of them were inserted in the gap. If the purge removes them one day, all of them have to be delivered
// before. Without a purge, the outbox can contain the events of years, and none of them is lost.
func (r *Recovery) sweepsOldIDs() bool { return r.Config.Retention > 0 }

// warnOfOldIDs logs how to deliver the ids that the sweep has left out, unless an operator has limited the sweep.
func (r *Recovery) warnOfOldIDs(ctx context.Context, sweep *sweep.Sweep) error {
	if sweep.OldIDs || r.gap != nil && r.gap.Reason == lease.GapRequested {
		return nil
	}

	var leavesOut bool
	err := r.Calls.RetryRead(ctx, func(ctx context.Context) (err error) {
		leavesOut, err = sweep.LeavesOut(ctx)
		return err
	})
	if leavesOut {
		r.Log.Warn("the sweep leaves out envelopes without ts whose ids are much older; if such envelopes were inserted since the collection was read, "+
			"deliver them with outrelay recover --from TIME, the time of the oldest such id", "from", sweep.From.T, "to", sweep.To.T)
	}
	return err
}

// closeGap sets the position to the end of the gap and removes the gap from the watcher document,
// in one write. All envelopes of the gap are delivered. The stream supplies the events after it.
func (r *Recovery) closeGap(ctx context.Context, res sweep.Result) error {
	stretch := r.gap
	end := resume.Position{ClusterTime: stretch.To}
	// IsSweeping holds until the write below, so no renewal saves this position before.
	r.Dispatcher.Position(end)
	_, _, offsets := r.Dispatcher.Snapshot()
	hash := r.Scope.PipelineHash()
	identities := r.Collections.CollectionIdentities()
	// The set of swept envelopes is only in the memory of this process. An owner that starts at the end of the gap flags them.
	sweptTo, sweptUntil := r.Skip.Bounds()
	update := lease.Update{
		Swept:        &lease.Swept{To: sweptTo, Until: sweptUntil},
		Checkpoint:   lease.Checkpoint{Position: end, Offsets: offsets},
		PipelineHash: &hash,
		Collections:  &identities,
		ClearGap:     true,
		GapSince:     stretch.Since,
		// The stored position may belong to another history, and so may the positions of earlier
		// slots. All of them have been swept.
		Rewind:      stretch.From.IsZero(),
		ClearPassed: true,
	}
	var lost *lease.LostHistory
	// A first start, and a sweep that an operator has ordered, lose nothing.
	if stretch.Reason != ReasonBacklog && stretch.Reason != lease.GapRequested {
		lost = &lease.LostHistory{
			Reason: stretch.Reason, From: stretch.From, To: stretch.To, Swept: stretch.Redelivered, Repeats: stretch.Repeats,
		}
		update.Incident = &lease.Incident{ID: bson.NewObjectID(), At: r.Now(), Lost: lost}
	}

	// No stream contained the scheduled envelopes of the gap. Once the gap is gone
	// from the document, a later owner would not look for them (N17).
	if err := r.Schedules.NoteExisting(ctx, r.Collections.WatchedOutboxes()); err != nil {
		return err
	}
	if err := r.Calls.RetryFenced(ctx, func() error { return r.Held.Save(ctx, update) }); err != nil {
		return err
	}

	r.Closed(end)
	r.gap = nil
	r.lastEnd = stretch.To
	r.sweeping.Store(nil)
	r.Calls.State.ClearProblems("sweep")

	took := r.Now().Sub(stretch.Since).Round(time.Millisecond)
	r.Log.Info("the gap is closed", "reason", stretch.Reason, "swept", res.Swept, "known", res.Skipped,
		"before_restart", stretch.Redelivered-res.Swept, "took", took)
	if lost != nil && r.Lost != nil {
		r.Lost(newLostNotice(r.Slot, lost))
	}
	r.AppendEvent(ctx, nodes.GapClosed, bson.D{
		{Key: "reason", Value: stretch.Reason},
		{Key: "from", Value: stretch.From},
		{Key: "to", Value: stretch.To},
		{Key: "swept", Value: stretch.Redelivered},
		{Key: "possible_repeats", Value: stretch.Repeats},
		{Key: "ms", Value: took.Milliseconds()},
	})
	return nil
}

func newLostNotice(slot string, lost *lease.LostHistory) notices.LostHistory {
	notice := notices.LostHistory{
		Slot: slot, Reason: lost.Reason, To: time.Unix(int64(lost.To.T), 0).UTC(), Swept: lost.Swept, Repeats: lost.Repeats,
	}
	if !lost.From.IsZero() {
		notice.From = time.Unix(int64(lost.From.T), 0).UTC()
	}
	return notice
}

// SaveCursor saves up to where the sweep is acked, together with the stored offsets of the same
// moment. Without a sweep it does nothing.
func (r *Recovery) SaveCursor(ctx context.Context) error {
	if !r.IsSweeping() {
		return nil
	}
	reached, ok, offsets := r.Dispatcher.Snapshot()
	stretch := r.gap
	at := reached.ClusterTime
	if !ok || !reached.Token.IsZero() || !at.After(stretch.lower) || !at.After(stretch.Cursor) {
		return nil
	}

	stretch.Cursor = at
	return r.Held.Save(ctx, lease.Update{
		Checkpoint: lease.Checkpoint{Offsets: offsets},
		Gap:        &stretch.Gap,
		GapSince:   stretch.Since,
	})
}

// sweptPublisher delivers swept envelopes through the pump, like events of the stream.
type sweptPublisher struct{ *Recovery }

// Trouble implements sweep.Publisher.
func (p sweptPublisher) Trouble(err error) { p.Calls.State.ReportProblem("sweep", err) }

// Reached implements sweep.Publisher.
func (p sweptPublisher) Reached(context.Context, bson.Timestamp) error {
	p.Dispatcher.Flush()
	p.Calls.State.ClearProblems("sweep")
	return nil
}

// gapPublisher delivers the envelopes of a gap.
type gapPublisher struct{ sweptPublisher }

// Deliver implements sweep.Publisher.
func (p gapPublisher) Deliver(ctx context.Context, envelope *outboxes.Envelope) error {
	if err := p.Swept.DeliverSwept(ctx, envelope, outboxes.PosAt(envelope.TS)); err != nil {
		return err
	}

	p.gap.Redelivered++
	// After the position, the read-back has found the events that were sent. Before it, and without a stamp, only the services' inboxes can.
	if !envelope.TS.After(p.gap.From) {
		p.gap.Repeats++
	}
	p.Metrics.Reconciled.WithLabelValues("swept").Inc()
	progress := p.sweeping.Load()
	progress.swept.Add(1)
	progress.lastStamp.Store(envelope.TS.T)
	return nil
}

// Reached implements sweep.Publisher. The position follows the sweep.
func (p gapPublisher) Reached(ctx context.Context, cursor bson.Timestamp) error {
	p.Dispatcher.Position(resume.Position{ClusterTime: cursor})
	// From here on, the resolved position shows which envelopes are resolved: all without a stamp, and the others up to it.
	p.Dispatcher.ReleaseSwept()
	err := p.sweptPublisher.Reached(ctx, cursor)
	if err != nil || time.Since(p.gap.saved) < cursorSaveEvery*p.Config.Lease.Checkpoint {
		return err
	}

	p.gap.saved = time.Now()
	return p.SaveCursor(ctx)
}
