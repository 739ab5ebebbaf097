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
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

func formatInt(n int64) string { return strconv.FormatInt(n, 10) }

// Pong is the result of a ping.
type Pong struct {
	MongoDB   bool      `json:"mongodb"`
	Now       time.Time `json:"now"`        // server time
	RoundTrip float64   `json:"round_trip"` // seconds
	Storage   bool      `json:"storage"`    // the state database has a watcher document
}

// Ping reads the server time and checks whether the state database exists.
func (k Desk) Ping(ctx context.Context) (Pong, error) {
	began := time.Now()
	now, err := mongodb.ServerTime(ctx, k.State.Client())
	if err != nil {
		return Pong{}, err
	}
	p := Pong{MongoDB: true, Now: now.UTC(), RoundTrip: time.Since(began).Seconds()}

	n, err := k.watcherDocuments().EstimatedDocumentCount(ctx)
	p.Storage = n > 0
	return p, wrapError("reading the state database", err)
}

func (k Desk) newMigration() (Migration, error) {
	if k.d.Outboxes == nil {
		return Migration{}, fmt.Errorf("indexes: %w", ErrUnavailable)
	}
	return Migration{Operator: k.Operator, Node: k.d.Node, Version: k.d.Version, Outboxes: k.d.Outboxes}, nil
}

// MigrationsStatus returns the content of the ledger of migrations.
func (k Desk) MigrationsStatus(ctx context.Context) (MigrationStatus, error) {
	m, err := k.newMigration()
	if err != nil {
		return MigrationStatus{}, err
	}
	return m.Status(ctx)
}

// IndexesVerify compares the indexes of all watched collections with the declared indexes.
func (k Desk) IndexesVerify(ctx context.Context) (Verification, error) {
	m, err := k.newMigration()
	if err != nil {
		return Verification{}, err
	}
	return m.Verify(ctx, false)
}

// IndexesRebuild creates missing indexes, replaces those that differ, and drops the indexes of
// older versions. While an index is built, purges and queries of its collection are slow.
func (k Desk) IndexesRebuild(ctx context.Context) (Verification, error) {
	m, err := k.newMigration()
	if err != nil {
		return Verification{}, err
	}

	if _, err := m.Up(ctx); err != nil {
		return Verification{}, err
	}
	return m.Verify(ctx, true)
}

// The kinds of collections that [Desk.Clear] can empty.
const (
	ClearEnvelopes = "envelopes"
	ClearDead      = "dead"
	ClearInbox     = "inbox"
	ClearSagas     = "sagas"
	ClearEvents    = "events"
	ClearReplays   = "replays"
)

// Clearable returns the names of everything that can be cleared.
func Clearable() []string {
	return []string{ClearEnvelopes, ClearDead, ClearInbox, ClearSagas, ClearEvents, ClearReplays}
}

// ClearOrder requests that collections are emptied.
type ClearOrder struct {
	What       []string // names of [Clearable]; nothing else is cleared
	Collection string   // an outbox: restricts the order to it and the services of its database; "" means all outboxes
	Confirm    string   // must equal [ClearPhrase]
	Force      bool     // clear even if a relay works for the watcher
	DryRun     bool     // only count
}

// ClearPhrase returns the phrase that confirms a clearing.
func ClearPhrase(watcher string) string { return "clear " + watcher }

// ClearedCollection counts the documents of one collection.
type ClearedCollection struct {
	Collection string `json:"collection"`
	What       string `json:"what"`
	Found      int64  `json:"found"`
	Removed    int64  `json:"removed"`
}

// Cleared is the result of a clearing, or with DryRun the expected result.
type Cleared struct {
	DryRun      bool                `json:"dry_run"`
	Confirm     string              `json:"confirm"` // the phrase that confirms the clearing
	Collections []ClearedCollection `json:"collections"`
	Found       int64               `json:"found"`
	Removed     int64               `json:"removed"`
}

// ErrUnconfirmed is returned for a clearing without the phrase.
var ErrUnconfirmed = errors.New("it was not confirmed")

// Clear empties collections permanently. It keeps their indexes, the documents of entities, and the
// watcher's position. It returns an error if the order does not contain the phrase, or if a relay
// works for the watcher, unless Force is set. Events that the watcher has not read yet remain in
// the change stream, and are sent when the watcher continues.
func (k Desk) Clear(ctx context.Context, c ClearOrder) (Cleared, error) {
	out := Cleared{DryRun: c.DryRun, Confirm: ClearPhrase(k.Watcher), Collections: []ClearedCollection{}}
	if len(c.What) == 0 {
		return out, invalidRequest("the order does not name what to clear; use any of %v", Clearable())
	}
	for _, w := range c.What {
		if !slices.Contains(Clearable(), w) {
			return out, invalidRequest("%q cannot be cleared; use any of %v", w, Clearable())
		}
	}
	if !c.DryRun && c.Confirm != out.Confirm {
		return out, fmt.Errorf("clearing watcher %s: %w: type %q", k.Watcher, ErrUnconfirmed, out.Confirm)
	}

	list, err := k.collectionsToClear(ctx, c)
	if err != nil {
		return out, err
	}
	if !c.DryRun {
		if err := k.checkUnowned(ctx, c.Force); err != nil {
			return out, err
		}

		// Logged before the first removal. Otherwise a clearing that crashes would leave no entry.
		fields := bson.D{{Key: "what", Value: c.What}, {Key: "force", Value: c.Force}}
		if err := k.logAction(ctx, "clearing", fields); err != nil {
			return out, fmt.Errorf("nothing was cleared: %w", err)
		}
	}

	for _, one := range list {
		coll, err := outboxes.Outboxed(k.State.Client(), one.Collection)
		if err != nil {
			return out, err
		}
		one.Found, err = coll.EstimatedDocumentCount(ctx)
		if err == nil && !c.DryRun && one.Found > 0 {
			one.Removed, err = removeAll(ctx, mongodb.Majority(coll), k.removableFilter(one.What))
		}

		out.Collections = append(out.Collections, one)
		out.Found += one.Found
		out.Removed += one.Removed
		if err != nil {
			return out, k.logCleared(ctx, c, out, err)
		}
	}
	return out, k.logCleared(ctx, c, out, nil)
}

// logCleared logs a clearing, unless it was a dry run, and returns clearErr joined with its own
// error.
func (k Desk) logCleared(ctx context.Context, c ClearOrder, out Cleared, clearErr error) error {
	if c.DryRun {
		return clearErr
	}
	return k.logOutcome(ctx, "cleared", bson.D{
		{Key: "what", Value: c.What},
		{Key: "removed", Value: out.Removed},
		{Key: "collections", Value: len(out.Collections)},
	}, clearErr)
}

// removableFilter returns the filter of the documents that a clearing removes. In collections that
// several watchers share, it leaves the documents of other watchers, running replays, and the log
// entries about clearings.
func (k Desk) removableFilter(what string) bson.D {
	switch what {
	case ClearEvents:
		return bson.D{{Key: "watcher", Value: k.Watcher}, {Key: "kind", Value: bson.D{{Key: "$ne", Value: "clearing"}}}}
	case ClearReplays:
		notRunning := bson.D{{Key: "$ne", Value: ReplayRunning}}
		return bson.D{{Key: "watcher", Value: k.Watcher}, {Key: "state", Value: notRunning}}
	}
	return bson.D{}
}

// checkUnowned returns [ErrInUse] if a slot of the watcher has an owner that may be sending. With
// force it checks nothing.
func (k Desk) checkUnowned(ctx context.Context, force bool) error {
	if force {
		return nil
	}

	s, err := ReadStatus(ctx, k.State)
	if err != nil {
		return err
	}
	for _, w := range s.Watchers {
		if w.Name == k.Watcher && w.Owner != "" && w.ExpiresInMS > 0 {
			return fmt.Errorf("%w: %s owns slot %s of watcher %s; pause it, wait until it has released, then clear",
				ErrInUse, w.Node, w.Slot, w.Name)
		}
	}
	return nil
}

// collectionsToClear returns the collections of the kinds that the order names.
func (k Desk) collectionsToClear(ctx context.Context, c ClearOrder) ([]ClearedCollection, error) {
	names, err := k.Collections(ctx, c.Collection)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)

	var list []ClearedCollection
	add := func(what, ns string) { list = append(list, ClearedCollection{Collection: ns, What: what}) }

	// A collection that was dropped and created again is registered twice.
	for _, ns := range slices.Compact(names) {
		if slices.Contains(c.What, ClearEnvelopes) {
			add(ClearEnvelopes, ns)
		}
		if slices.Contains(c.What, ClearDead) {
			add(ClearDead, deadletter.Collection(ns))
		}
	}

	for _, db := range databaseNames(names) {
		if err := k.addServiceCollections(ctx, c, db, add); err != nil {
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

// addServiceCollections calls add for the collections of inboxes and sagas in db that the order
// names.
func (k Desk) addServiceCollections(ctx context.Context, c ClearOrder, db string, add func(what, ns string)) error {
	clearInbox := slices.Contains(c.What, ClearInbox)
	clearSagas := slices.Contains(c.What, ClearSagas)
	if !clearInbox && !clearSagas {
		return nil
	}

	found, err := k.findServices(ctx, db)
	if err != nil {
		return err
	}
	if clearInbox {
		for _, name := range found.inboxes {
			for _, suffix := range []string{"", offsetsSuffix, "_claims"} {
				add(ClearInbox, db+"."+name+suffix)
			}
		}
	}

	if clearSagas && found.sagas {
		types, err := k.listSagaTypes(ctx, db)
		if err != nil {
			return err
		}
		for _, t := range types {
			add(ClearSagas, db+"."+t.Name)
		}
	}
	return nil
}
