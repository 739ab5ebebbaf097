package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/resume"
)

// collections contains the watched collections of a term and claims them for the watcher.
type collections struct {
	calls    *calls
	client   *mongo.Client
	registry *outboxes.Registry
	scope    *changestream.Scope
	watcher  string
	part     slot.Range
	log      *slog.Logger

	// claimed contains the collections that are registered for this watcher, by UUID (N25). Once
	// the pump runs, only its goroutine uses it.
	claimed map[[16]byte]bool

	mu     sync.Mutex
	listed []outboxes.Outbox // as they were listed last
}

// listCollections updates the list of collections that have a watched name.
func (c *collections) listCollections(ctx context.Context) error {
	var dbs []string
	if db, _ := c.scope.Target(); db != "" {
		dbs = []string{db}
	}
	return c.calls.retryCall(ctx, func(ctx context.Context) error {
		found, err := outboxes.ListOutboxes(ctx, c.client, c.scope.Matches, dbs...)
		if err != nil {
			return err
		}
		for i := range found {
			found[i].Part = c.part
		}

		c.mu.Lock()
		defer c.mu.Unlock()
		c.listed = found
		return nil
	})
}

// watchedOutboxes returns a copy of the list of watched collections.
func (c *collections) watchedOutboxes() []outboxes.Outbox {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.listed)
}

// registrations returns the claims of the watcher.
func (c *collections) registrations(ctx context.Context) (claims []outboxes.Registration, err error) {
	err = c.calls.retryCall(ctx, func(ctx context.Context) (err error) {
		claims, err = c.registry.Registrations(ctx, c.watcher)
		return err
	})
	return claims, err
}

// claimCollections registers the watched collections: a collection belongs to one watcher (N25).
// When a collection that is new in the registry got its name is unknown. It was before the current
// cluster time. The first collections of a watcher are registered with the time start at which the
// watcher starts.
func (c *collections) claimCollections(
	ctx context.Context, claims []outboxes.Registration, start bson.Timestamp,
) error {
	for _, o := range c.watchedOutboxes() {
		if !o.Identified() {
			c.log.Warn("the identity of a collection cannot be read; it is not told apart from a re-created one",
				"collection", o.NS(), "advice", "grant listCollections on its database")
			continue
		}

		claimed := func(c outboxes.Registration) bool {
			return [16]byte(c.UUID.Data) == o.UUID && c.NS == o.NS() && !c.Away()
		}
		if slices.ContainsFunc(claims, claimed) {
			c.claimed[o.UUID] = true
		}
	}

	if len(claims) > 0 {
		start = bson.Timestamp{}
	}
	return c.claimNewCollections(ctx, start)
}

// claimNewCollections registers the listed collections that are not registered, as seen at the
// cluster time at. The zero time stands for now.
func (c *collections) claimNewCollections(ctx context.Context, at bson.Timestamp) error {
	for _, o := range c.watchedOutboxes() {
		if !o.Identified() || c.claimed[o.UUID] {
			continue
		}

		if at.IsZero() {
			now, err := c.calls.operationTime(ctx)
			if err != nil {
				return err
			}
			at = now
		}
		if _, err := c.claimCollection(ctx, o, at); err != nil {
			return err
		}
	}
	return nil
}

// claimCollection registers a collection that had its name at the cluster time at. It returns the
// previous claim. If another watcher has claimed the collection, the error is a *HaltError.
func (c *collections) claimCollection(
	ctx context.Context, o outboxes.Outbox, at bson.Timestamp,
) (before outboxes.Registration, err error) {
	c.claimed[o.UUID] = true

	// A claim of another watcher does not go away, so it must not be retried.
	var claimed *outboxes.ClaimedError
	err = c.calls.retryCall(ctx, func(ctx context.Context) (err error) {
		before, err = c.registry.RegisterAt(ctx, o.UUID, o.NS(), c.watcher, at)
		if errors.As(err, &claimed) {
			return nil
		}
		return err
	})
	if claimed != nil {
		return before, &HaltError{What: claimed.Error()}
	}
	return before, err
}

// adoptCollection registers and lists the collection of ev, which appeared while the stream runs.
func (c *collections) adoptCollection(ctx context.Context, ev *changestream.Event) (outboxes.Outbox, error) {
	o := outboxes.Outbox{DB: string(ev.DB), Coll: string(ev.Coll), UUID: ev.UUID, Part: c.part}
	if _, err := c.claimCollection(ctx, o, ev.ClusterTime); err != nil {
		return o, err
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	others := slices.DeleteFunc(c.listed, func(x outboxes.Outbox) bool { return x.NS() == o.NS() })
	c.listed = append(others, o)
	c.log.Info("a new collection is watched", "collection", o.NS())
	return o, nil
}

// leaveCollection stores in the registry up to where a collection was read that loses its watched
// name with the rename ev.
func (c *collections) leaveCollection(ctx context.Context, ev *changestream.Event) error {
	return c.calls.retryCall(ctx, func(ctx context.Context) error {
		return c.registry.Leave(ctx, ev.UUID, c.watcher, ev.ClusterTime)
	})
}

// collectionIdentities returns the watched collections in the form that the watcher document
// stores.
func (c *collections) collectionIdentities() []lease.Collection {
	out := []lease.Collection{}
	for _, o := range c.watchedOutboxes() {
		if o.Identified() {
			uuid := bson.Binary{Subtype: bson.TypeBinaryUUID, Data: slices.Clone(o.UUID[:])}
			out = append(out, lease.Collection{NS: o.NS(), UUID: uuid})
		}
	}
	return out
}

// dirtyList is the list of collections that contain exceptions or scheduled envelopes. It is stored
// in the watcher document. A takeover and the reconciler read only collections on this list (N17).
type dirtyList struct {
	held        *lease.Held
	calls       *calls
	collections *collections
	state       *mongo.Database
	reached     func() (resume.Position, bool) // the watermark
	pause       time.Duration                  // between two checks of the list
	log         *slog.Logger

	mu     sync.Mutex
	listed map[string]bool
}

// mark adds a collection to the list. When it returns nil, the list is majority-committed. It costs
// nothing if the collection is on the list already.
func (d *dirtyList) mark(ctx context.Context, ns string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listed[ns] {
		return nil
	}
	if err := d.held.Save(ctx, lease.Update{Dirty: []string{ns}}); err != nil {
		return err
	}
	d.listed[ns] = true
	return nil
}

// addCommitted adds a collection that a fenced transaction has added to the stored list.
func (d *dirtyList) addCommitted(ns string) {
	d.mu.Lock()
	d.listed[ns] = true
	d.mu.Unlock()
}

// dirtyOutboxes returns the watched collections that are on the list. It includes collections that
// other processes have added to the stored list since.
func (d *dirtyList) dirtyOutboxes() []outboxes.Outbox {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, ns := range d.held.Dirty() {
		d.listed[ns] = true
	}
	if len(d.listed) == 0 {
		return nil
	}
	return slices.DeleteFunc(d.collections.watchedOutboxes(), func(o outboxes.Outbox) bool { return !d.listed[o.NS()] })
}

// markAllNonEmpty adds the collections that contain exceptions or scheduled envelopes. It is for
// envelopes that no stream contains: they were inserted before the first position of the watcher,
// or in a gap.
func (d *dirtyList) markAllNonEmpty(ctx context.Context) error {
	for _, o := range d.collections.watchedOutboxes() {
		if err := d.markIfNonEmpty(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// markIfNonEmpty is like markAllNonEmpty, for one collection.
func (d *dirtyList) markIfNonEmpty(ctx context.Context, o outboxes.Outbox) error {
	still := false
	err := d.calls.retryRead(ctx, func(ctx context.Context) (err error) {
		coll := mongodb.Majority(d.state.Client().Database(o.DB).Collection(o.Coll))
		still, err = outboxes.StillDirty(ctx, coll, o.Part)
		return err
	})
	if err != nil || !still {
		return err
	}
	return d.mark(ctx, o.NS())
}

const (
	// cleanShare bounds the cost of checking the list: after a check, the pause is at least this
	// many times as long as the check took.
	cleanShare = 50
	// cleanTimeout bounds the transaction that removes a collection. During it, nothing can be
	// added to the list.
	cleanTimeout = time.Second
)

// cleanPeriodically removes collections that are empty from the list, until ctx ends.
func (d *dirtyList) cleanPeriodically(ctx context.Context) error {
	for wait := d.pause; retry.Sleep(ctx, wait) == nil; {
		began := time.Now()
		for _, o := range d.dirtyOutboxes() {
			if err := d.removeIfEmpty(ctx, o); err != nil && ctx.Err() == nil {
				d.log.Debug("cannot remove a collection from the dirty list", "collection", o.NS(), "reason", err)
			}
		}
		wait = max(d.pause, cleanShare*time.Since(began))
	}
	return nil
}

// removeIfEmpty removes a collection from the list if it contains no work. Most collections contain
// some, so a read without lock and transaction comes first.
func (d *dirtyList) removeIfEmpty(ctx context.Context, o outboxes.Outbox) error {
	reached, _ := d.reached()
	if holds, err := d.holdsWork(ctx, d.state.Client(), mongodb.Majority, o, reached); err != nil || holds {
		return err
	}
	return d.removeInTransaction(ctx, o)
}

// holdsWork reports whether a collection contains an exception or a scheduled envelope, or has a
// dead letter whose event the stream would repeat for a later owner, which starts at the position
// at.
func (d *dirtyList) holdsWork(
	ctx context.Context, client *mongo.Client, as func(*mongo.Collection) *mongo.Collection,
	o outboxes.Outbox, at resume.Position,
) (bool, error) {
	db := client.Database(o.DB)
	if still, err := outboxes.StillDirty(ctx, as(db.Collection(o.Coll)), o.Part); err != nil || still {
		return still, err
	}
	return deadletter.HasLater(ctx, as(db.Collection(deadletter.Collection(o.Coll))), outboxes.PosOf(at))
}

// errCheckSlow ends a transaction that cannot determine soon enough whether a collection is empty.
var errCheckSlow = errors.New("checking whether the collection is empty takes too long; is an index missing?")

// removeInTransaction checks the collection again and removes it from the list, in one transaction
// with the fence. Every other writer of exceptions takes the fence, too. The stream waits in mark
// during the transaction.
func (d *dirtyList) removeInTransaction(ctx context.Context, o outboxes.Outbox) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	removed := false
	err := d.held.Fenced(ctx, nil, func(tx context.Context) error {
		removed = false
		call, cancel := context.WithTimeoutCause(tx, cleanTimeout, errCheckSlow)
		defer cancel()

		client := mongo.SessionFromContext(tx).Client()
		watchers := client.Database(d.state.Name()).Collection("watchers")
		own := bson.D{{Key: "_id", Value: d.held.Document().ID}}
		var doc lease.Document
		err := watchers.FindOne(call, own).Decode(&doc)

		holds := false
		if err == nil {
			inside := func(c *mongo.Collection) *mongo.Collection { return c }
			holds, err = d.holdsWork(call, client, inside, o, doc.Position())
		}
		if err == nil && !holds {
			pull := bson.D{{Key: "$pull", Value: bson.D{{Key: "dirty", Value: o.NS()}}}}
			_, err = watchers.UpdateOne(call, own, pull)
			removed = err == nil
		}

		// The driver would repeat the transaction, and a repetition takes as long. This error
		// prevents it.
		if err != nil && errors.Is(context.Cause(call), errCheckSlow) {
			return errCheckSlow
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("removing a collection from the dirty list: %w", err)
	}

	if removed {
		delete(d.listed, o.NS())
		d.held.RemoveDirty(o.NS())
	}
	return nil
}
