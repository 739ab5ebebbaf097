package app

import (
	"context"
	"errors"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/resume"
)

// findCollections lists the watched collections and returns the claims of the watcher. A watcher
// with claims has had a position, because the first position is saved before the first claim. If it
// has none, its document has vanished, and the error is a *HaltError.
func (t *term) findCollections(ctx context.Context, doc *lease.Document) (claims []outboxes.Registration, err error) {
	if err := t.listCollections(ctx); err != nil {
		return nil, err
	}
	err = t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		claims, err = t.slot.relay.registry.Registrations(ctx, t.slot.cfg.Watcher)
		return err
	})

	if err == nil && doc.Position().IsZero() && doc.Gap == nil && len(claims) > 0 && t.slotHadBegun(ctx) {
		err = &HaltError{
			What: "the watcher document of " + t.slot.displayName() + " vanished: its place in the stream is lost",
			Fix:  "run `outrelay recover`, which sweeps the collections; no envelope is lost",
		}
	}
	return claims, err
}

// listCollections updates the list of collections that have a watched name.
func (t *term) listCollections(ctx context.Context) error {
	var dbs []string
	if db, _ := t.slot.scope.Target(); db != "" {
		dbs = []string{db}
	}
	return t.retryCall(ctx, "mongodb", func(ctx context.Context) error {
		found, err := outboxes.ListOutboxes(ctx, t.slot.relay.mongo.state, t.slot.scope.Matches, dbs...)
		if err == nil {
			t.setWatchedOutboxes(t.assignSlot(found))
		}
		return err
	})
}

// watchedOutboxes returns a copy of the list of watched collections.
func (t *term) watchedOutboxes() []outboxes.Outbox {
	t.watched.Lock()
	defer t.watched.Unlock()
	return slices.Clone(t.watched.outboxes)
}

func (t *term) setWatchedOutboxes(list []outboxes.Outbox) {
	t.watched.Lock()
	defer t.watched.Unlock()
	t.watched.outboxes = list
}

// claimCollections registers the watched collections: a collection belongs to one watcher (N25).
// When a collection that is new in the registry got its name is unknown. It was before the current
// cluster time. The first collections of a watcher are registered with the time at which the
// watcher starts.
func (t *term) claimCollections(ctx context.Context, claims []outboxes.Registration) error {
	t.collections = map[[16]byte]bool{}
	for _, o := range t.watchedOutboxes() {
		if !o.Identified() {
			t.log.Warn("the identity of a collection cannot be read; it is not told apart from a re-created one",
				"collection", o.NS(), "advice", "grant listCollections on its database")
			continue
		}

		claimed := func(c outboxes.Registration) bool {
			return [16]byte(c.UUID.Data) == o.UUID && c.NS == o.NS() && !c.Away()
		}
		if slices.ContainsFunc(claims, claimed) {
			t.collections[o.UUID] = true
		}
	}

	if len(claims) == 0 {
		return t.claimNewCollections(ctx, t.from.ClusterTime)
	}
	return t.claimNewCollections(ctx, bson.Timestamp{})
}

// claimNewCollections registers the listed collections that are not registered, as seen at the
// cluster time at. The zero time stands for now.
func (t *term) claimNewCollections(ctx context.Context, at bson.Timestamp) error {
	for _, o := range t.watchedOutboxes() {
		if !o.Identified() || t.collections[o.UUID] {
			continue
		}

		if at.IsZero() {
			now, err := t.operationTime(ctx)
			if err != nil {
				return err
			}
			at = now
		}
		if _, err := t.claimCollection(ctx, o, at); err != nil {
			return err
		}
	}
	return nil
}

// claimCollection registers a collection that had its name at the cluster time at. It returns the
// previous claim. If another watcher has claimed the collection, the error is a *HaltError.
func (t *term) claimCollection(
	ctx context.Context, o outboxes.Outbox, at bson.Timestamp,
) (before outboxes.Registration, err error) {
	t.collections[o.UUID] = true

	// A claim of another watcher does not go away, so it must not be retried.
	var claimed *outboxes.ClaimedError
	err = t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		before, err = t.slot.relay.registry.RegisterAt(ctx, o.UUID, o.NS(), t.slot.cfg.Watcher, at)
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

// adoptCollection registers a collection that appeared while the stream runs. The pump calls it
// before it delivers the first event of the collection.
func (t *term) adoptCollection(ctx context.Context, ev *changestream.Event) error {
	o := outboxes.Outbox{DB: string(ev.DB), Coll: string(ev.Coll), UUID: ev.UUID, Part: t.slot.part}
	if _, err := t.claimCollection(ctx, o, ev.ClusterTime); err != nil {
		return err
	}

	others := slices.DeleteFunc(t.watchedOutboxes(), func(x outboxes.Outbox) bool { return x.NS() == o.NS() })
	t.setWatchedOutboxes(append(others, o))
	t.log.Info("a new collection is watched", "collection", o.NS())
	t.runInBackground(func(ctx context.Context) { t.ensureIndexes(ctx, o) })

	list := t.collectionIdentities()
	err := t.held.Save(ctx, lease.Update{Collections: &list})

	// A batch may contain many new collections, and would look like a hung pump without ticks.
	t.progress.ticks.Add(1)
	return err
}

// collectionIdentities returns the watched collections in the form that the watcher document
// stores.
func (t *term) collectionIdentities() []lease.Collection {
	out := []lease.Collection{}
	for _, o := range t.watchedOutboxes() {
		if o.Identified() {
			uuid := bson.Binary{Subtype: bson.TypeBinaryUUID, Data: slices.Clone(o.UUID[:])}
			out = append(out, lease.Collection{NS: o.NS(), UUID: uuid})
		}
	}
	return out
}

func resumeCollection(c lease.Collection) resume.Collection {
	r := resume.Collection{NS: c.NS}
	copy(r.UUID[:], c.UUID.Data)
	return r
}
