package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/store"
)

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// Pong is the answer to a ping.
type Pong struct {
	MongoDB   bool      `json:"mongodb"`
	Now       time.Time `json:"now"`        // of the server
	RoundTrip float64   `json:"round_trip"` // seconds
	Storage   bool      `json:"storage"`    // the state database has a watcher document
}

// Ping asks the server for its clock, and whether the state database is there.
func (k Desk) Ping(ctx context.Context) (Pong, error) {
	began := time.Now()
	now, err := store.ServerTime(ctx, k.State.Client())
	if err != nil {
		return Pong{}, err
	}
	p := Pong{MongoDB: true, Now: now.UTC(), RoundTrip: time.Since(began).Seconds()}
	n, err := k.watchers().EstimatedDocumentCount(ctx)
	p.Storage = n > 0
	return p, wrapped("reading the state database", err)
}

// migration is the hand on the indexes.
func (k Desk) migration() (Migration, error) {
	if k.d.Outboxes == nil {
		return Migration{}, fmt.Errorf("indexes: %w", ErrUnavailable)
	}
	return Migration{Operator: k.Operator, Node: k.d.Node, Version: k.d.Version, Outboxes: k.d.Outboxes}, nil
}

// MigrationsStatus is what the ledger of migrations says.
func (k Desk) MigrationsStatus(ctx context.Context) (MigrationStatus, error) {
	m, err := k.migration()
	if err != nil {
		return MigrationStatus{}, err
	}
	return m.Status(ctx)
}

// IndexesVerify compares the indexes of all watched collections with what is declared.
func (k Desk) IndexesVerify(ctx context.Context) (Verification, error) {
	m, err := k.migration()
	if err != nil {
		return Verification{}, err
	}
	return m.Verify(ctx, false)
}

// IndexesRebuild makes the indexes that are missing, replaces those that differ and drops those of older versions. While one
// is built, purge and queries of its collection are slow.
func (k Desk) IndexesRebuild(ctx context.Context) (Verification, error) {
	m, err := k.migration()
	if err != nil {
		return Verification{}, err
	}
	if _, err := m.Up(ctx); err != nil {
		return Verification{}, err
	}
	return m.Verify(ctx, true)
}

// What a clearing may remove.
const (
	ClearEnvelopes = "envelopes"
	ClearDead      = "dead"
	ClearInbox     = "inbox"
	ClearSagas     = "sagas"
	ClearEvents    = "events"
	ClearReplays   = "replays"
)

// Clearable are the names of everything that can be cleared.
func Clearable() []string {
	return []string{ClearEnvelopes, ClearDead, ClearInbox, ClearSagas, ClearEvents, ClearReplays}
}

// ClearOrder asks to empty collections.
type ClearOrder struct {
	What       []string // names of [Clearable]; nothing is cleared that is not named
	Collection string   // an outbox: only that one and the services of its database; "" is all of the watcher's
	Confirm    string   // must be what [ClearPhrase] says
	Force      bool     // also while a relay works
	DryRun     bool     // only count
}

// ClearPhrase is what has to be typed to clear what a watcher reads.
func ClearPhrase(watcher string) string { return "clear " + watcher }

// ClearedCollection is how much one collection held.
type ClearedCollection struct {
	Collection string `json:"collection"`
	What       string `json:"what"`
	Found      int64  `json:"found"`
	Removed    int64  `json:"removed"`
}

// Cleared is what a clearing did, or with DryRun would do.
type Cleared struct {
	DryRun      bool                `json:"dry_run"`
	Confirm     string              `json:"confirm"` // what has to be typed
	Collections []ClearedCollection `json:"collections"`
	Found       int64               `json:"found"`
	Removed     int64               `json:"removed"`
}

// ErrUnconfirmed refuses to clear without the phrase.
var ErrUnconfirmed = errors.New("it was not confirmed")

// Clear empties collections for good; their indexes, the documents of entities and the watcher's position stay. It refuses
// while a relay works for the watcher, unless Force is set, and without the phrase. Events that were appended and that the
// watcher has not read yet are in the change stream still, and are sent when it goes on.
func (k Desk) Clear(ctx context.Context, c ClearOrder) (Cleared, error) {
	out := Cleared{DryRun: c.DryRun, Confirm: ClearPhrase(k.Watcher), Collections: []ClearedCollection{}}
	if len(c.What) == 0 {
		return out, invalid("nothing says what is to be cleared; name some of %v", Clearable())
	}
	for _, w := range c.What {
		if !slices.Contains(Clearable(), w) {
			return out, invalid("%q cannot be cleared; what can is %v", w, Clearable())
		}
	}
	if !c.DryRun && c.Confirm != out.Confirm {
		return out, fmt.Errorf("clearing watcher %s: %w: type %q", k.Watcher, ErrUnconfirmed, out.Confirm)
	}
	list, err := k.toClear(ctx, c)
	if err != nil {
		return out, err
	}
	if !c.DryRun {
		if err := k.unowned(ctx, c.Force); err != nil {
			return out, err
		}
		// Before the first is gone: afterwards nothing would tell of a crash.
		if err := k.note(ctx, "clearing", bson.D{{Key: "what", Value: c.What}, {Key: "force", Value: c.Force}}); err != nil {
			return out, fmt.Errorf("nothing was cleared: %w", err)
		}
	}
	for _, one := range list {
		coll, err := store.Outboxed(k.State.Client(), one.Collection)
		if err != nil {
			return out, err
		}
		if one.Found, err = coll.EstimatedDocumentCount(ctx); err == nil && !c.DryRun && one.Found > 0 {
			one.Removed, err = removeAll(ctx, store.Majority(coll), k.mine(one.What))
		}
		out.Collections = append(out.Collections, one)
		out.Found, out.Removed = out.Found+one.Found, out.Removed+one.Removed
		if err != nil {
			return out, k.cleared(ctx, c, out, err)
		}
	}
	if c.DryRun {
		return out, nil
	}
	return out, k.cleared(ctx, c, out, nil)
}

func (k Desk) cleared(ctx context.Context, c ClearOrder, out Cleared, err error) error {
	if c.DryRun {
		return err
	}
	return k.audit(ctx, "cleared", bson.D{{Key: "what", Value: c.What}, {Key: "removed", Value: out.Removed}, {Key: "collections", Value: len(out.Collections)}}, err)
}

// mine keeps other watchers' entries of the shared collections, and what tells of the clearing itself.
func (k Desk) mine(what string) bson.D {
	switch what {
	case ClearEvents:
		return bson.D{{Key: "watcher", Value: k.Watcher}, {Key: "kind", Value: bson.D{{Key: "$ne", Value: "clearing"}}}}
	case ClearReplays:
		return bson.D{{Key: "watcher", Value: k.Watcher}, {Key: "state", Value: bson.D{{Key: "$ne", Value: store.ReplayRunning}}}}
	}
	return bson.D{}
}

// unowned refuses while a slot of the watcher is owned by a process that could be sending.
func (k Desk) unowned(ctx context.Context, force bool) error {
	if force {
		return nil
	}
	s, err := ReadStatus(ctx, k.State)
	if err != nil {
		return err
	}
	for _, w := range s.Watchers {
		if w.Name == k.Watcher && w.Owner != "" && w.ExpiresInMS > 0 {
			return fmt.Errorf("%w: %s owns slot %s of watcher %s; pause it, wait until it has released, then clear", ErrLive, w.Node, w.Slot, w.Name)
		}
	}
	return nil
}

// toClear are the collections of what is named.
func (k Desk) toClear(ctx context.Context, c ClearOrder) ([]ClearedCollection, error) {
	names, err := k.Collections(ctx, c.Collection)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var list []ClearedCollection
	add := func(what, ns string) { list = append(list, ClearedCollection{Collection: ns, What: what}) }
	for _, ns := range slices.Compact(names) {
		if slices.Contains(c.What, ClearEnvelopes) {
			add(ClearEnvelopes, ns)
		}
		if slices.Contains(c.What, ClearDead) {
			add(ClearDead, deadletter.Collection(ns))
		}
	}
	for _, db := range databases(names) {
		if err := k.servicesToClear(ctx, c, db, add); err != nil {
			return nil, err
		}
	}
	if slices.Contains(c.What, ClearEvents) {
		add(ClearEvents, k.State.Name()+".events")
	}
	if slices.Contains(c.What, ClearReplays) {
		add(ClearReplays, k.State.Name()+".replays")
	}
	return list, nil
}

func (k Desk) servicesToClear(ctx context.Context, c ClearOrder, db string, add func(what, ns string)) error {
	if !slices.Contains(c.What, ClearInbox) && !slices.Contains(c.What, ClearSagas) {
		return nil
	}
	there, err := k.services(ctx, db)
	if err != nil {
		return err
	}
	if slices.Contains(c.What, ClearInbox) {
		for _, name := range there.inboxes {
			for _, suffix := range []string{"", offsetsSuffix, "_claims"} {
				add(ClearInbox, db+"."+name+suffix)
			}
		}
	}
	if slices.Contains(c.What, ClearSagas) && there.sagas {
		types, err := k.sagaTypesOf(ctx, db)
		if err != nil {
			return err
		}
		for _, t := range types {
			add(ClearSagas, db+"."+t.Name)
		}
	}
	return nil
}
