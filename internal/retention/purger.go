package retention

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/store"
)

const (
	maxIdle = time.Minute     // between two looks at a collection with nothing to remove, unless the interval is longer
	maxTurn = 5 * time.Second // of one collection, so that the backlog of one does not keep the others waiting
)

// Purger removes what was delivered from the collections of one watcher, on behalf of its owner. Client, State and
// Collections are needed.
type Purger struct {
	Client      *mongo.Client
	State       *mongo.Database       // with the registry and the watcher documents
	Collections func() []store.Outbox // those that the watcher reads now
	Slot        int                   // of the owner; only slot 0 purges
	Retention   time.Duration         // 0 keeps everything, and Run only waits
	Interval    time.Duration         // between two passes. Defaults to 10 s
	Rate        int                   // envelopes a second; 0 is no limit
	Batch       int                   // envelopes in one statement at the most. Defaults to 500
	Valid       func() bool           // whether work may be done now (N2). Defaults to always
	Margin      time.Duration         // overrides the server's (see store.Margin), below 0 with none; for tests
	Purged      func(n int)           // called after each statement that removed some. Defaults to nothing
	Log         *slog.Logger          // defaults to slog.Default

	pace        pace
	margin      time.Duration
	turn        time.Duration
	idle        map[[16]byte]idleTime
	loggedHolds map[[16]byte]store.HeldError
}

// idleTime is how long a collection with nothing to remove is left alone.
type idleTime struct {
	until time.Time
	next  time.Duration
}

// Run purges until ctx ends, and returns its cause. Faults of the server are logged and end a pass, not the Purger.
func (p *Purger) Run(ctx context.Context) error {
	p.setDefaults()
	if p.Slot != 0 || p.Retention <= 0 {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	tick := time.NewTicker(p.Interval)
	defer tick.Stop()
	for {
		p.runPass(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (p *Purger) setDefaults() {
	if p.Interval <= 0 {
		p.Interval = 10 * time.Second
	}
	if p.Batch <= 0 {
		p.Batch = 500
	}
	if p.Valid == nil {
		p.Valid = func() bool { return true }
	}
	if p.Purged == nil {
		p.Purged = func(int) {}
	}
	if p.Log == nil {
		p.Log = slog.Default()
	}
	p.pace = pace{limit: p.Rate, batch: p.Batch}
	p.margin, p.turn = p.Margin, maxTurn
	p.idle = make(map[[16]byte]idleTime)
	p.loggedHolds = make(map[[16]byte]store.HeldError)
}

// runPass is one pass over all collections, logged once.
func (p *Purger) runPass(ctx context.Context) {
	begun := time.Now()
	n, err := p.purgeCollections(ctx)
	if n > 0 {
		p.Log.Debug("delivered envelopes purged", "count", n, "seconds", time.Since(begun).Round(time.Millisecond).Seconds())
	}
	if err != nil && ctx.Err() == nil {
		p.Log.Warn("the purge waits; nothing is lost meanwhile, the outbox grows", "again_in", p.Interval, "error", err)
	}
}

var (
	// errSuspended ends a pass: the lease is past its local deadline (N2).
	errSuspended = errors.New("the lease is not confirmed")
	// errTurn ends the turn of a collection that has more.
	errTurn = errors.New("it is the next collection's turn")
)

func (p *Purger) purgeCollections(ctx context.Context) (total int64, err error) {
	if p.margin == 0 {
		// Not asked again: who changes a server's parameter restarts it, or waits for those transactions to end.
		m, err := store.AskMargin(ctx, p.Client)
		if err != nil {
			return 0, err
		}
		p.margin = m
	}
	now := time.Now()
	p.pace.startPass(now)
	cuts := store.NewCuts(p.State, max(p.margin, p.Retention))
	pending := slices.DeleteFunc(slices.Clone(p.Collections()), func(o store.Outbox) bool { return p.idle[o.UUID].until.After(now) })
	for len(pending) > 0 {
		var again []store.Outbox
		for _, o := range pending {
			n, err := p.purgeCollection(ctx, o, cuts)
			total += n
			switch held := new(store.HeldError); {
			case errors.As(err, &held):
				p.logHold(ctx, o, held)
			case errors.Is(err, errTurn):
				again = append(again, o)
			case errors.Is(err, errSuspended):
				return total, nil // a later pass goes on
			case err != nil:
				return total, err
			default:
				delete(p.loggedHolds, o.UUID)
				p.scheduleNextLook(o, n)
			}
		}
		pending = again
	}
	return total, nil
}

// scheduleNextLook doubles the time until a collection with nothing to remove is looked at again, so that a thousand quiet tenants
// cost little.
func (p *Purger) scheduleNextLook(o store.Outbox, removed int64) {
	if removed > 0 {
		delete(p.idle, o.UUID)
		return
	}
	r := p.idle[o.UUID]
	r.next = min(max(2*r.next, p.Interval), max(maxIdle, p.Interval))
	// Less a little: a tick comes when it comes.
	r.until = time.Now().Add(r.next - p.Interval/2)
	p.idle[o.UUID] = r
}

// logHold says why a collection is not purged, once as long as that is the reason.
func (p *Purger) logHold(ctx context.Context, o store.Outbox, held *store.HeldError) {
	if p.loggedHolds[o.UUID] == *held {
		return
	}
	p.loggedHolds[o.UUID] = *held
	level := slog.LevelWarn
	if held.Hold == store.HoldNoPosition || held.Hold == store.HoldGap || held.Hold == store.HoldUnread {
		level = slog.LevelInfo // as it should be
	}
	p.Log.Log(ctx, level, held.Error(), "collection", o.NS(), "reason", string(held.Hold))
}

// purgeCollection removes from one collection what is in front of the cut, batch by batch, for as long as its turn lasts.
func (p *Purger) purgeCollection(ctx context.Context, o store.Outbox, cuts *store.Cuts) (int64, error) {
	begun := time.Now()
	return store.PurgeLoop{
		Coll: p.Client.Database(o.DB).Collection(o.Coll),
		Size: p.pace.batchSize,
		Cut: func(ctx context.Context) (store.Cut, error) {
			if !p.Valid() { // N2
				return store.Cut{}, errSuspended
			}
			return cuts.Of(ctx, o)
		},
		Step: func(ctx context.Context, n int64) error {
			if n > 0 {
				p.Purged(int(n))
			}
			crash.At("mid-purge")
			if err := p.pace.waitForRate(ctx, n, time.Now()); err != nil || n == 0 || time.Since(begun) < p.turn {
				return err
			}
			return errTurn
		},
	}.Run(ctx)
}
