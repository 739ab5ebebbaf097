package purge

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

const (
	// maxIdle bounds the time between two checks of a collection without envelopes to remove, unless
	// the interval is longer.
	maxIdle = time.Minute

	// candidatesPause is the time for positions to pass the candidates that a pass has read.
	candidatesPause = 2 * time.Second

	// recordEvery is the least progress of a purge, in the time of the purged ids, that is worth a
	// write.
	recordEvery = time.Hour

	// maxRetryPause bounds the time between two attempts to purge a collection that cannot be purged.
	maxRetryPause = 10 * time.Minute

	// maxFailing bounds the failing collections that OnFailing gets. The log has all failing collections.
	maxFailing = 20

	// maxTurn bounds the turn of one collection, so that a backlog does not delay the other collections.
	maxTurn = 5 * time.Second
)

// Config is the configuration of a Purger. Slot, Retention, Rate and Margin may be zero.
type Config struct {
	Client      *mongo.Client
	State       state.Database           // with the registry and the watcher documents
	Watcher     string                   // its name, as in the registry
	Collections func() []outboxes.Outbox // returns the collections that the watcher reads now
	Slot        int                      // of the owner; only slot 0 purges
	Retention   time.Duration            // 0 keeps everything, and Run only waits
	Interval    time.Duration            // between two passes
	Rate        int                      // envelopes per second; 0 means no limit
	Batch       int                      // maximum of envelopes in one statement
	Valid       func() bool              // whether work may be done now (N2)
	Margin      time.Duration            // replaces the server's (see mongodb.Margin); below 0 means none; for tests
	OnPurged    func(n int)              // called after each statement that removed envelopes
	// OnFailing is called with a collection whose purge fails, or with the watcher if no collection is purged, and the cause. An
	// empty cause means that the failure has ended. nil means that no call is needed.
	OnFailing func(object, cause string)
	Log       *slog.Logger
}

// Purger removes delivered envelopes from the collections of one watcher. The owner of the watcher runs it.
type Purger struct {
	config Config

	pace        pace
	margin      time.Duration
	turn        time.Duration
	idle        map[[16]byte]idleTime
	candidates  map[[16]byte]*Candidates
	recorded    map[[16]byte]bson.Timestamp // the last recorded time up to which a collection is purged
	loggedHolds map[[16]byte]HeldError
	failing     map[[16]byte]failure // the zero id is that of the watcher
}

// failure is the last error of a collection that could not be purged, or of the watcher.
type failure struct {
	object, cause string
	reported      bool
}

// idleTime is how long the purge skips a collection that has no envelopes to remove or cannot be purged.
type idleTime struct {
	until time.Time
	next  time.Duration
}

// Run purges until ctx ends, and returns the cause of ctx. An error of the server is logged and ends the pass, but
// not Run.
func (p *Purger) Run(ctx context.Context) error {
	if p.config.Slot != 0 || p.config.Retention <= 0 {
		<-ctx.Done()
		return context.Cause(ctx)
	}

	for {
		p.runPass(ctx)
		if err := retry.Sleep(ctx, p.pause()); err != nil {
			return err
		}
	}
}

// pause returns the time until the next pass. It is shorter while a collection has more envelopes without a stamp
// than one pass may read: positions usually pass these within a second.
func (p *Purger) pause() time.Duration {
	for _, c := range p.candidates {
		if c.isFull() {
			return min(candidatesPause, p.config.Interval)
		}
	}
	return p.config.Interval
}

// New returns a Purger. It does no I/O before Run.
func New(cfg Config) *Purger {
	return &Purger{
		config:      cfg,
		pace:        pace{limit: cfg.Rate, batch: cfg.Batch},
		margin:      cfg.Margin,
		turn:        maxTurn,
		idle:        map[[16]byte]idleTime{},
		candidates:  map[[16]byte]*Candidates{},
		recorded:    map[[16]byte]bson.Timestamp{},
		loggedHolds: map[[16]byte]HeldError{},
		failing:     map[[16]byte]failure{},
	}
}

// runPass purges all collections once and logs the result.
func (p *Purger) runPass(ctx context.Context) {
	started := time.Now()
	n, err := p.purgeCollections(ctx)
	if n > 0 {
		took := time.Since(started).Round(time.Millisecond)
		p.config.Log.Debug("purged delivered envelopes", "count", n, "seconds", took.Seconds())
	}
	if ctx.Err() == nil {
		p.noteResult([16]byte{}, p.config.Watcher, err)
	}
}

// noteResult reports and logs that the purge of a collection fails with another error than before, or no longer fails.
func (p *Purger) noteResult(uuid [16]byte, object string, err error) {
	last, failed := p.failing[uuid]
	// A rename may have changed the object.
	if failed && (err == nil || last.object != object) {
		p.config.Log.Info("the purge continues", "object", last.object)
		p.forgetFailure(uuid)
		last = failure{}
	}
	if err == nil {
		return
	}

	next := failure{object: object, cause: err.Error(), reported: last.reported}
	if next.cause != last.cause {
		p.config.Log.Warn("cannot purge; delivered envelopes stay, and no event is lost", "object", object, "error", err)
	}
	if p.config.OnFailing != nil && (next.reported || p.countReported() < maxFailing) {
		next.reported = true
		p.config.OnFailing(object, next.cause)
	}
	p.failing[uuid] = next
}

// forgetFailure ends the failure of a collection, or of the watcher.
func (p *Purger) forgetFailure(uuid [16]byte) {
	if last := p.failing[uuid]; last.reported {
		p.config.OnFailing(last.object, "")
	}
	delete(p.failing, uuid)
}

// countReported returns how many failures are reported.
func (p *Purger) countReported() (n int) {
	for _, one := range p.failing {
		if one.reported {
			n++
		}
	}
	return n
}

var (
	// errSuspended ends a pass: the lease is past its local deadline (N2).
	errSuspended = errors.New("the lease is suspended")
	// errTurn ends the turn of a collection that has more envelopes to remove.
	errTurn = errors.New("the turn of the collection has ended")
)

// unpurged is a collection that a pass has not finished.
type unpurged struct {
	outboxes.Outbox
	after bson.Timestamp // the stamp up to which the pass has removed its envelopes
}

// purgeCollections removes the delivered envelopes of all collections, in turns, and returns their number. An error of one
// collection does not stop the others: the error that it returns concerns all of them.
func (p *Purger) purgeCollections(ctx context.Context) (total int64, err error) {
	// Read once: after a change of the server's parameter, the operator restarts the server or waits for the
	// transactions to end.
	if p.margin == 0 {
		margin, err := mongodb.AskMargin(ctx, p.config.Client)
		if err != nil {
			return 0, err
		}
		p.margin = margin
	}

	now := time.Now()
	p.pace.startPass(now)
	cuts := NewCuts(p.config.State, max(p.margin, p.config.Retention))
	collections := p.config.Collections()
	p.forgetUnwatched(collections)
	var pending []*unpurged
	for _, o := range collections {
		if !p.idle[o.UUID].until.After(now) {
			pending = append(pending, &unpurged{Outbox: o})
		}
	}

	// The collections take turns, so that a large one does not delay the others.
	for len(pending) > 0 {
		var unfinished []*unpurged
		for _, o := range pending {
			n, err := p.purgeCollection(ctx, o, cuts)
			total += n

			held, unread := new(HeldError), new(unreadError)
			switch {
			case errors.As(err, &held):
				p.noteResult(o.UUID, o.NS(), nil)
				p.logHold(ctx, o.Outbox, held)
			case errors.Is(err, errTurn):
				unfinished = append(unfinished, o)
			case errors.Is(err, errSuspended):
				// A later pass continues.
				return total, nil
			case errors.As(err, &unread), err != nil && ctx.Err() != nil:
				return total, err
			case err != nil:
				p.noteResult(o.UUID, o.NS(), err)
				p.delayNextLook(o.Outbox, maxRetryPause)
			default:
				delete(p.loggedHolds, o.UUID)
				p.noteResult(o.UUID, o.NS(), nil)
				p.scheduleNextLook(o.Outbox, n)
			}
		}
		pending = unfinished
	}
	return total, nil
}

// forgetUnwatched forgets the collections that are not watched any more, and divides the limit of ids between the others.
func (p *Purger) forgetUnwatched(watched []outboxes.Outbox) {
	isWatched := map[[16]byte]bool{}
	for _, o := range watched {
		isWatched[o.UUID] = true
	}

	for uuid := range p.candidates {
		if !isWatched[uuid] {
			p.forgetFailure(uuid)
			delete(p.candidates, uuid)
			delete(p.idle, uuid)
			delete(p.recorded, uuid)
			delete(p.loggedHolds, uuid)
		}
	}

	for _, o := range watched {
		if p.candidates[o.UUID] == nil {
			p.candidates[o.UUID] = &Candidates{}
		}
		p.candidates[o.UUID].Limit = max(maxCandidates/len(watched), p.config.Batch)
	}
}

// scheduleNextLook doubles the idle time of a collection without envelopes to remove, so that a thousand
// quiet tenants cost little.
func (p *Purger) scheduleNextLook(outbox outboxes.Outbox, removed int64) {
	if removed > 0 || p.candidates[outbox.UUID].Len() > 0 {
		delete(p.idle, outbox.UUID)
		return
	}

	p.delayNextLook(outbox, maxIdle)
}

// delayNextLook doubles the time for which a collection is skipped, up to most.
func (p *Purger) delayNextLook(outbox outboxes.Outbox, most time.Duration) {
	idle := p.idle[outbox.UUID]
	idle.next = min(max(2*idle.next, p.config.Interval), max(most, p.config.Interval))
	// The skip ends half an interval earlier, because a tick may come a little early.
	idle.until = time.Now().Add(idle.next - p.config.Interval/2)
	p.idle[outbox.UUID] = idle
}

// logHold logs why a collection is not purged, once per reason.
func (p *Purger) logHold(ctx context.Context, outbox outboxes.Outbox, held *HeldError) {
	if p.loggedHolds[outbox.UUID] == *held {
		return
	}
	p.loggedHolds[outbox.UUID] = *held

	level := slog.LevelWarn
	normal := []Block{HoldNoPosition, HoldGap, HoldUnread, HoldDivided}
	if slices.Contains(normal, held.Hold) {
		level = slog.LevelInfo
	}
	p.config.Log.Log(ctx, level, held.Error(), "collection", outbox.NS(), "reason", string(held.Hold))
}

// purgeCollection removes the envelopes of one collection up to the cut, batch by batch. If the turn ends before
// that, the error is errTurn.
func (p *Purger) purgeCollection(ctx context.Context, collection *unpurged, cuts *Cuts) (int64, error) {
	outbox := collection.Outbox
	started := time.Now()
	n, err := Loop{
		Coll:       mongodb.Database(p.config.Client, outbox.DB).Collection(outbox.Coll),
		Candidates: p.candidates[outbox.UUID],
		Size:       p.pace.batchSize,

		Cut: func(ctx context.Context) (Cut, error) {
			// N2: no statement is sent while the lease is suspended.
			if !p.config.Valid() {
				return Cut{}, errSuspended
			}
			return cuts.Of(ctx, outbox)
		},

		Step: func(ctx context.Context, n int64) error {
			if n > 0 {
				p.config.OnPurged(int(n))
			}
			crash.At("mid-purge")

			return p.pace.waitForRate(ctx, n, time.Now())
		},

		After: &collection.after,
		Yield: func() error {
			if time.Since(started) < p.turn {
				return nil
			}
			return errTurn
		},
	}.Run(ctx)
	if err == nil {
		err = p.recordPurgedIDs(ctx, outbox)
	}
	return n, err
}

// recordPurgedIDs records up to which time in their ids the envelopes without a stamp are removed. After lost history, a sweep
// then delivers envelopes with earlier times, because they were inserted since.
func (p *Purger) recordPurgedIDs(ctx context.Context, outbox outboxes.Outbox) error {
	at := p.candidates[outbox.UUID].drained
	if before := p.recorded[outbox.UUID]; time.Duration(int64(at.T)-int64(before.T))*time.Second < recordEvery {
		return nil
	}

	err := outboxes.NewRegistry(p.config.State.Collection("collections")).SetPurgedIDs(ctx, outbox.UUID, p.config.Watcher, at)
	if err == nil {
		p.recorded[outbox.UUID] = at
	}
	return err
}
