// Package watched contains the collections that a term watches: the list of existing collections,
// their claims for the watcher, and the list of outboxes with scheduled envelopes.
//
// Blocking: the functions with a context call MongoDB. They repeat failed calls until they succeed, the lease is
// lost, or the context ends. The others return at once. Cost: none for an event of a known collection. Schedules writes at most once
// a minute for each outbox that gets scheduled envelopes.
package watched

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Collections contains the watched collections of a term and claims them for the watcher.
type Collections struct {
	Calls    *readiness.Calls
	Client   *mongo.Client
	Registry *outboxes.Registry
	Scope    *changes.Scope
	Watch    []string // the configured names and patterns
	Watcher  string
	Slot     slot.Range
	Log      *slog.Logger

	// Claimed contains the collections that are registered for this watcher, by UUID (N25). Once
	// the pump runs, only its goroutine uses it.
	Claimed map[[16]byte]bool

	irregular map[[16]byte]bool // collections that this term has marked; for the pump's goroutine

	mu       sync.Mutex
	listed   []outboxes.Outbox  // as they were listed last
	left     []lease.Collection // that this slot has read and that are not listed, with the time up to which it has read them
	reported []outboxes.Finding
}

// claimedAtOnce bounds the collections that are registered with one statement.
const claimedAtOnce = 1000

// ListCollections updates the list of collections that have a watched name. It logs once what hides events of a watched
// name, or may lose them.
func (c *Collections) ListCollections(ctx context.Context) error {
	var dbs []string
	if db, _ := c.Scope.Target(); db != "" {
		dbs = []string{db}
	}
	// Thousands of databases take longer than one call may. The pump may be the caller.
	defer c.Calls.KeepTicking(ctx, time.Second)()
	found, err := outboxes.ListEach(ctx, c.Client, c.Scope.Matches, c.Calls.RetryCall, dbs...)
	if err != nil {
		return err
	}
	list := found.Outboxes
	for i := range list {
		list[i].Slot = c.Slot
	}
	findings := found.Inspect(c.Watch)

	c.mu.Lock()
	defer c.mu.Unlock()
	c.listed = list
	for _, f := range findings {
		if slices.ContainsFunc(c.reported, f.IsSame) {
			continue
		}
		// A collection that does not exist yet is usual before the first event.
		level := slog.LevelWarn
		if f.Kind == outboxes.IsMissing {
			level = slog.LevelInfo
		}
		c.Log.Log(ctx, level, "a watched name is no regular collection", "name", f.NS, "kind", f.Kind, "error", f.Cause, "fix", f.Fix)
	}
	c.reported = findings
	return nil
}

// ListWithTime is ListCollections, and returns a time from which on a stream contains every insert into a collection that is not in
// the list. N22: the time is settled before the list is read. Otherwise the commit that makes a collection could be before the time, and
// visible only after the list.
func (c *Collections) ListWithTime(ctx context.Context) (from bson.Timestamp, err error) {
	err = c.Calls.RetryCall(ctx, func(ctx context.Context) (err error) {
		from, err = c.Registry.SettledTime(ctx)
		return err
	})
	if err != nil {
		return from, err
	}
	return from, c.ListCollections(ctx)
}

// WatchedOutboxes returns a copy of the list of watched collections.
func (c *Collections) WatchedOutboxes() []outboxes.Outbox {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.listed)
}

// Registrations returns the claims of the watcher.
func (c *Collections) Registrations(ctx context.Context) (claims []outboxes.Registration, err error) {
	err = c.Calls.RetryCall(ctx, func(ctx context.Context) (err error) {
		claims, err = c.Registry.Registrations(ctx, c.Watcher)
		return err
	})
	return claims, err
}

// ClaimCollections registers the watched collections: a collection belongs to one watcher (N25).
// When a collection that is new in the registry got its name is unknown. It was before the current
// cluster time. The first collections of a watcher are registered with the time start at which the
// watcher starts.
func (c *Collections) ClaimCollections(
	ctx context.Context, claims []outboxes.Registration, start bson.Timestamp,
) error {
	of := outboxes.ByUUID(claims)
	for _, o := range c.WatchedOutboxes() {
		if !o.Identified() {
			c.Log.Warn("cannot read the identity of a collection; a re-creation is not detected",
				"collection", o.NS(), "fix", "grant listCollections on its database")
			continue
		}

		if claim, known := of[o.UUID]; known && claim.NS == o.NS() && !claim.Away() {
			c.Claimed[o.UUID] = true
		}
	}

	// Later collections get the current time from the registry.
	if len(claims) > 0 {
		start = bson.Timestamp{}
	}
	return c.ClaimNewCollections(ctx, start)
}

// ClaimNewCollections registers the listed collections that are not registered, as seen at
// the cluster time listedAt. The zero time stands for now.
func (c *Collections) ClaimNewCollections(ctx context.Context, listedAt bson.Timestamp) error {
	unclaimed := slices.DeleteFunc(c.WatchedOutboxes(), func(outbox outboxes.Outbox) bool {
		return !outbox.Identified() || c.Claimed[outbox.UUID]
	})
	if len(unclaimed) == 0 {
		return nil
	}
	if listedAt.IsZero() {
		now, err := c.Calls.OperationTime(ctx)
		if err != nil {
			return err
		}
		listedAt = now
	}

	for part := range slices.Chunk(unclaimed, claimedAtOnce) {
		var claimed *outboxes.ClaimedError
		err := c.Calls.RetryCall(ctx, func(ctx context.Context) error {
			err := c.Registry.RegisterAll(ctx, part, c.Watcher, listedAt)
			if errors.As(err, &claimed) {
				return nil
			}
			return err
		})
		if claimed != nil {
			return &readiness.HaltError{What: claimed.Error()}
		}
		if err != nil {
			return err
		}
		for _, o := range part {
			c.Claimed[o.UUID] = true
		}
	}
	return nil
}

// ClaimCollection registers a collection that had its name at the cluster time namedAt. It returns the
// previous claim. If another watcher has claimed the collection, the error is a *HaltError.
func (c *Collections) ClaimCollection(
	ctx context.Context, outbox outboxes.Outbox, namedAt bson.Timestamp,
) (before outboxes.Registration, err error) {
	c.Claimed[outbox.UUID] = true

	// A claim of another watcher does not go away, so it must not be retried.
	var claimed *outboxes.ClaimedError
	err = c.Calls.RetryCall(ctx, func(ctx context.Context) (err error) {
		before, err = c.Registry.Register(ctx, outbox.UUID, outbox.NS(), c.Watcher, namedAt)
		if errors.As(err, &claimed) {
			return nil
		}
		return err
	})
	if claimed != nil {
		return before, &readiness.HaltError{What: claimed.Error()}
	}
	return before, err
}

// AdoptCollection registers and lists the collection of ev, which appeared while the stream runs.
func (c *Collections) AdoptCollection(ctx context.Context, ev *changes.Event) (outboxes.Outbox, error) {
	outbox := outboxes.Outbox{DB: string(ev.DB), Coll: string(ev.Coll), UUID: ev.UUID, Slot: c.Slot}
	if _, err := c.ClaimCollection(ctx, outbox, ev.ClusterTime); err != nil {
		return outbox, err
	}

	// A collection that is listed with this name is a later one if ev is from before the list. It is an earlier one if it was resharded: then
	// the stream brings no end of it.
	hasName := func(box outboxes.Outbox) bool { return box.NS() == outbox.NS() }
	list := c.WatchedOutboxes()
	if i := slices.IndexFunc(list, hasName); i >= 0 && list[i].Identified() {
		var holder [16]byte
		err := c.Calls.RetryCall(ctx, func(ctx context.Context) (err error) {
			holder, err = list[i].NameHolder(ctx, c.Client)
			return err
		})
		if err != nil || holder != outbox.UUID {
			return outbox, err
		}
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	c.listed = append(slices.DeleteFunc(c.listed, hasName), outbox)
	c.Log.Info("a new collection is watched", "collection", outbox.NS())
	return outbox, nil
}

// ForgetCollection removes the collection of the drop ev from the list and the registry, so that tenants that come and
// go leave nothing. An event of the collection that another slot or a later owner still reads registers it again, and
// the drop that follows removes it again.
func (c *Collections) ForgetCollection(ctx context.Context, ev *changes.Event) error {
	c.mu.Lock()
	uuid := ev.UUID
	c.listed = slices.DeleteFunc(c.listed, func(outbox outboxes.Outbox) bool {
		gone := outbox.DB == string(ev.DB) && outbox.Coll == string(ev.Coll) && (!ev.HasUUID || outbox.UUID == ev.UUID)
		if gone {
			uuid = outbox.UUID
		}
		return gone
	})
	c.left = withoutUUID(c.left, uuid)
	c.mu.Unlock()
	if uuid == [16]byte{} {
		return nil
	}

	delete(c.Claimed, uuid)
	return c.Calls.RetryCall(ctx, func(ctx context.Context) error { return c.Registry.Release(ctx, uuid, c.Watcher) })
}

// ForgetGone removes collections that do not exist any more from the registry and from the collections that were read: their drops
// happened while nobody read the stream. It costs one call for each database with such a collection that is not in the list. If a database
// cannot be listed, its collections stay. It may run concurrently with the pump.
func (c *Collections) ForgetGone(ctx context.Context, claims []outboxes.Registration) {
	names := map[[16]byte]string{}
	for uuid, claim := range outboxes.ByUUID(claims) {
		names[uuid] = claim.NS
	}
	c.mu.Lock()
	for _, collection := range c.left {
		names[[16]byte(collection.UUID.Data)] = collection.NS
	}
	listed := c.listedUUIDsLocked()
	c.mu.Unlock()

	missing := map[string][][16]byte{}
	for uuid, ns := range names {
		if db, _, ok := strings.Cut(ns, "."); ok && !listed[uuid] {
			missing[db] = append(missing[db], uuid)
		}
	}

	forgotten := 0
	for db, uuids := range missing {
		call, cancel := context.WithTimeout(ctx, c.Calls.Timeout)
		exist, err := mongodb.CollectionUUIDs(call, c.Client, db)
		for _, uuid := range uuids {
			if err != nil || exist[uuid] {
				continue
			}
			c.mu.Lock()
			c.left = withoutUUID(c.left, uuid)
			c.mu.Unlock()
			if err = c.Registry.Release(call, uuid, c.Watcher); err == nil {
				forgotten++
			}
		}
		cancel()
		if err != nil && ctx.Err() == nil {
			c.Log.Debug("cannot check whether collections are gone", "database", db, "error", err)
		}
		if ctx.Err() != nil {
			return
		}
	}
	if forgotten > 0 {
		c.Log.Info("forgot collections that were dropped", "count", forgotten)
	}
}

// LeaveCollection stores up to where a collection was read that loses its watched name with the rename ev.
func (c *Collections) LeaveCollection(ctx context.Context, ev *changes.Event) error {
	if ev.HasUUID {
		c.mu.Lock()
		c.listed = slices.DeleteFunc(c.listed, func(outbox outboxes.Outbox) bool { return outbox.UUID == ev.UUID })
		c.left = append(withoutUUID(c.left, ev.UUID), lease.Collection{
			NS: string(ev.ToDB) + "." + string(ev.ToColl), UUID: mongodb.EncodeUUID(ev.UUID), ReadUpTo: ev.ClusterTime,
		})
		c.mu.Unlock()
	}

	return c.Calls.RetryCall(ctx, func(ctx context.Context) error {
		return c.Registry.Leave(ctx, ev.UUID, c.Watcher, ev.ClusterTime)
	})
}

// MarkIrregularIDs returns once the registry has recorded that the ids of a collection must not be used as times.
// It costs nothing if this term has marked the collection already.
func (c *Collections) MarkIrregularIDs(ctx context.Context, uuid [16]byte) error {
	if c.irregular[uuid] {
		return nil
	}

	err := c.Calls.RetryCall(ctx, func(ctx context.Context) error {
		return c.Registry.MarkIrregularIDs(ctx, uuid, c.Watcher)
	})
	if err != nil {
		return err
	}

	if c.irregular == nil {
		c.irregular = map[[16]byte]bool{}
	}
	c.irregular[uuid] = true
	for _, o := range c.WatchedOutboxes() {
		if o.UUID == uuid {
			c.Log.Info("the times in the ids of a collection differ from the commits by more than a day, so they are "+
				"not used; if the stream's history is lost, every envelope without a ts is delivered again",
				"collection", o.NS(), "fix", "insert ts: Timestamp(0,0)")
		}
	}
	return nil
}

// CompareWatched returns the listed collections that are not in before, the collections of the stream up to position, and the times up to
// which an even earlier stream has read them, or zero. A collection that is not listed stays in the watcher document: a rename or the
// configuration may give it a watched name again. If no name of the configuration matches it, position is the time up to which it was read.
func (c *Collections) CompareWatched(before []lease.Collection, position bson.Timestamp) (added []outboxes.Outbox, readUpTo map[string]bson.Timestamp) {
	known := map[[16]byte]lease.Collection{}
	c.mu.Lock()
	listed := c.listedUUIDsLocked()
	for _, collection := range before {
		uuid := [16]byte(collection.UUID.Data)
		known[uuid] = collection
		if listed[uuid] {
			continue
		}
		db, coll, _ := strings.Cut(collection.NS, ".")
		if collection.ReadUpTo.IsZero() && !c.Scope.Matches([]byte(db), []byte(coll)) {
			collection.ReadUpTo = position
		}
		c.left = append(c.left, collection)
	}
	c.mu.Unlock()

	readUpTo = map[string]bson.Timestamp{}
	for _, outbox := range c.WatchedOutboxes() {
		collection, found := known[outbox.UUID]
		if outbox.Identified() && (!found || !collection.ReadUpTo.IsZero()) {
			added = append(added, outbox)
			readUpTo[outbox.NS()] = collection.ReadUpTo
		}
	}
	return added, readUpTo
}

// ReclaimCollections claims added collections as if they had just got their names, and returns the other claims. So the purge waits until the
// position has passed the sweep.
func (c *Collections) ReclaimCollections(ctx context.Context, added []outboxes.Outbox, claims []outboxes.Registration) ([]outboxes.Registration, error) {
	if len(added) == 0 {
		return claims, nil
	}
	now, err := c.Calls.OperationTime(ctx)
	if err != nil {
		return nil, err
	}

	// A collection without a claim gets one as any other does.
	err = c.Calls.RetryCall(ctx, func(ctx context.Context) error { return c.Registry.SeeAgain(ctx, added, c.Watcher, now) })
	if err != nil {
		return nil, err
	}
	of := outboxes.ByUUID(claims)
	for _, outbox := range added {
		delete(of, outbox.UUID)
	}
	return slices.Collect(maps.Values(of)), nil
}

// CollectionIdentities returns the collections that this slot has read, in the form that the watcher document stores. It has read the
// listed ones up to the position.
func (c *Collections) CollectionIdentities() []lease.Collection {
	c.mu.Lock()
	defer c.mu.Unlock()
	listed := c.listedUUIDsLocked()
	out := slices.DeleteFunc(slices.Clone(c.left), func(collection lease.Collection) bool { return listed[[16]byte(collection.UUID.Data)] })
	for _, o := range c.listed {
		if o.Identified() {
			out = append(out, lease.Collection{NS: o.NS(), UUID: mongodb.EncodeUUID(o.UUID)})
		}
	}
	return out
}

// listedUUIDsLocked returns the UUIDs of the listed collections.
func (c *Collections) listedUUIDsLocked() map[[16]byte]bool {
	listed := make(map[[16]byte]bool, len(c.listed))
	for _, o := range c.listed {
		listed[o.UUID] = true
	}
	return listed
}

// withoutUUID removes the collection with the UUID from list.
func withoutUUID(list []lease.Collection, uuid [16]byte) []lease.Collection {
	return slices.DeleteFunc(list, func(collection lease.Collection) bool { return bytes.Equal(collection.UUID.Data, uuid[:]) })
}
