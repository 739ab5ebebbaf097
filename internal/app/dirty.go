package app

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

// dirtyList is the list of collections that contain exceptions or scheduled envelopes. It is stored
// in the watcher document. A takeover and the reconciler read only collections on this list (N17).
type dirtyList struct {
	t      *term
	mu     sync.Mutex
	listed map[string]bool
}

// newDirtyList returns the list that doc contains.
func newDirtyList(t *term, doc *lease.Document) *dirtyList {
	d := &dirtyList{t: t, listed: map[string]bool{}}
	for _, ns := range doc.Dirty {
		d.listed[ns] = true
	}
	return d
}

// mark adds a collection to the list. When it returns nil, the list is majority-committed. It costs
// nothing if the collection is on the list already.
func (d *dirtyList) mark(ctx context.Context, ns string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listed[ns] {
		return nil
	}
	if err := d.t.held.Save(ctx, lease.Update{Dirty: []string{ns}}); err != nil {
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
	for _, ns := range d.t.held.Dirty() {
		d.listed[ns] = true
	}
	if len(d.listed) == 0 {
		return nil
	}
	return slices.DeleteFunc(d.t.watchedOutboxes(), func(o outboxes.Outbox) bool { return !d.listed[o.NS()] })
}

// markAllNonEmpty adds the collections that contain exceptions or scheduled envelopes. It is for
// envelopes that no stream contains: they were inserted before the first position of the watcher,
// or in a gap.
func (d *dirtyList) markAllNonEmpty(ctx context.Context) error {
	for _, o := range d.t.watchedOutboxes() {
		if err := d.markIfNonEmpty(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// markIfNonEmpty is like markAllNonEmpty, for one collection.
func (d *dirtyList) markIfNonEmpty(ctx context.Context, o outboxes.Outbox) error {
	still := false
	err := d.t.retryRead(ctx, func(ctx context.Context) (err error) {
		coll := mongodb.Majority(d.t.slot.relay.mongo.state.Database(o.DB).Collection(o.Coll))
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
	for wait := d.t.slot.relay.pace.clean; retry.Sleep(ctx, wait) == nil; {
		began := time.Now()
		for _, o := range d.dirtyOutboxes() {
			if err := d.removeIfEmpty(ctx, o); err != nil && ctx.Err() == nil {
				d.t.log.Debug("cannot remove a collection from the dirty list", "collection", o.NS(), "reason", err)
			}
		}
		wait = max(d.t.slot.relay.pace.clean, cleanShare*time.Since(began))
	}
	return nil
}

// removeIfEmpty removes a collection from the list if it contains no work. Most collections contain
// some, so a read without lock and transaction comes first.
func (d *dirtyList) removeIfEmpty(ctx context.Context, o outboxes.Outbox) error {
	reached, _ := d.t.dispatcher.Reached()
	if holds, err := d.holdsWork(ctx, d.t.slot.relay.mongo.state, mongodb.Majority, o, reached); err != nil || holds {
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
	err := d.t.held.Fenced(ctx, nil, func(tx context.Context) error {
		removed = false
		call, cancel := context.WithTimeoutCause(tx, cleanTimeout, errCheckSlow)
		defer cancel()

		client := mongo.SessionFromContext(tx).Client()
		watchers := client.Database(d.t.slot.cfg.MongoDB.State).Collection("watchers")
		own := bson.D{{Key: "_id", Value: d.t.held.Document().ID}}
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
		d.t.held.RemoveDirty(o.NS())
	}
	return nil
}
