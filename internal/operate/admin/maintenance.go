package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/service/inbox"

	"go.mongodb.org/mongo-driver/v2/bson"
)

func formatInt(n int64) string { return strconv.FormatInt(n, 10) }

// Pong is the result of a ping.
type Pong struct {
	MongoDB    bool      `json:"mongodb"`
	Now        time.Time `json:"now"` // server time
	RoundTripS float64   `json:"round_trip_s"`
	Storage    bool      `json:"storage"` // the state database has a watcher document

	Kafka           bool    `json:"kafka"`              // a broker accepts the login
	KafkaRoundTripS float64 `json:"kafka_round_trip_s"` // for connecting, the login and a request; 0 if Kafka was not asked
}

// Ping reads MongoDB's time, checks whether the state database exists, and logs in to Kafka. If Kafka fails, it returns the result of
// MongoDB with a [*KafkaError].
func (o Operator) Ping(ctx context.Context) (Pong, error) {
	began := time.Now()
	now, err := mongodb.ServerTime(ctx, o.State.Client())
	if err != nil {
		return Pong{}, err
	}
	pong := Pong{MongoDB: true, Now: now.UTC(), RoundTripS: time.Since(began).Seconds()}

	n, err := o.watcherDocuments().EstimatedDocumentCount(ctx)
	pong.Storage = n > 0
	if err != nil || o.CheckKafka == nil {
		return pong, wrapError("reading the state database", err)
	}

	began = time.Now()
	if err := o.CheckKafka(ctx); err != nil {
		return pong, &KafkaError{err}
	}
	pong.Kafka, pong.KafkaRoundTripS = true, time.Since(began).Seconds()
	return pong, nil
}

// The kinds of collections that [Operator.Clear] can empty.
const (
	ClearEnvelopes = "envelopes"
	clearDead      = "dead"
	clearInbox     = "inbox"
	ClearHandlers  = "handler_dead"
	clearSagas     = "sagas"
	clearAudit     = "audit"
	clearReplays   = "replays"
)

// Clearable returns the names of everything that can be cleared.
func Clearable() []string {
	return []string{ClearEnvelopes, clearDead, clearInbox, ClearHandlers, clearSagas, clearAudit, clearReplays}
}

// ClearOrder requests that collections are emptied.
type ClearOrder struct {
	What       []string `json:"what" minItems:"1" maxItems:"10" enum:"envelopes,dead,inbox,handler_dead,sagas,audit,replays"` // nothing else is cleared
	Collection string   `json:"collection,omitempty" maxLength:"255" doc:"Only this outbox, and the services of its database."`
	Confirm    string   `json:"confirm,omitempty" maxLength:"200"` // must equal [ClearPhrase]
	Force      bool     `json:"force,omitempty" doc:"Also while a relay works for the watcher."`
	DryRun     bool     `json:"dry_run,omitempty"`
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
func (o Operator) Clear(ctx context.Context, order ClearOrder) (Cleared, error) {
	clearing := &clearing{op: o, order: order}
	clearing.done = Cleared{DryRun: order.DryRun, Confirm: ClearPhrase(o.Watcher), Collections: []ClearedCollection{}}
	err := clearing.checkOrder()
	if err != nil {
		return clearing.done, err
	}

	list, err := clearing.findCollections(ctx)
	if err != nil {
		return clearing.done, err
	}
	if order.DryRun {
		return clearing.done, clearing.clearCollections(ctx, list)
	}

	// A relay that works at the same time would find documents gone that it is about to change.
	if err := clearing.checkUnowned(ctx); err != nil {
		return clearing.done, err
	}

	// Logged before the first removal. Otherwise a clearing that crashes would leave no entry.
	fields := bson.D{{Key: "what", Value: order.What}, {Key: "force", Value: order.Force}}
	if err := o.logAction(ctx, "clearing", fields); err != nil {
		return clearing.done, fmt.Errorf("nothing was cleared: %w", err)
	}
	err = clearing.clearCollections(ctx, list)
	return clearing.done, o.logOutcome(ctx, "cleared", bson.D{
		{Key: "what", Value: order.What},
		{Key: "removed", Value: clearing.done.Removed},
		{Key: "collections", Value: len(clearing.done.Collections)},
	}, err)
}

// clearing is one execution of a [ClearOrder].
type clearing struct {
	op    Operator
	order ClearOrder
	done  Cleared
}

// hasKind reports whether the order names the kind.
func (c *clearing) hasKind(what string) bool { return slices.Contains(c.order.What, what) }

// checkOrder returns an error if the order is invalid or not confirmed.
func (c *clearing) checkOrder() error {
	if len(c.order.What) == 0 {
		return invalidRequest("the order does not name what to clear; use any of %v", Clearable())
	}
	for _, what := range c.order.What {
		if !slices.Contains(Clearable(), what) {
			return invalidRequest("%q cannot be cleared; use any of %v", what, Clearable())
		}
	}
	if !c.order.DryRun && c.order.Confirm != c.done.Confirm {
		return fmt.Errorf("clearing watcher %s: %w: type %q", c.op.Watcher, ErrUnconfirmed, c.done.Confirm)
	}
	return nil
}

// checkUnowned returns [ErrInUse] if a slot of the watcher has an owner that may be sending. With
// Force it checks nothing.
func (c *clearing) checkUnowned(ctx context.Context) error {
	if c.order.Force {
		return nil
	}

	status, err := ReadStatus(ctx, c.op.State)
	if err != nil {
		return err
	}
	for _, w := range status.Slots {
		if w.Name == c.op.Watcher && w.Owner != "" && w.ExpiresInMS > 0 {
			return fmt.Errorf("%w: %s owns slot %s of watcher %s; pause it, wait until it has released, then clear",
				ErrInUse, w.Node, w.Slot, w.Name)
		}
	}
	return nil
}

// clearCollections counts the documents of the collections, and removes them unless the order is a
// dry run.
func (c *clearing) clearCollections(ctx context.Context, list []ClearedCollection) error {
	for _, one := range list {
		coll := outboxes.CollectionOf(c.op.State.Client(), one.Collection)
		filter := c.removableFilter(one.What)
		var err error
		if len(filter) > 0 {
			one.Found, err = coll.CountDocuments(ctx, filter)
		} else {
			// All documents of a collection are removed, and counting millions of them would take long.
			one.Found, err = coll.EstimatedDocumentCount(ctx)
		}
		if err == nil && !c.order.DryRun && one.Found > 0 {
			one.Removed, err = removeAll(ctx, mongodb.Majority(coll), filter)
		}

		c.done.Collections = append(c.done.Collections, one)
		c.done.Found += one.Found
		c.done.Removed += one.Removed
		if err != nil {
			return err
		}
	}
	return nil
}

// removableFilter returns the filter of the documents that a clearing removes. In collections that
// several watchers share, it leaves the documents of other watchers, running replays, and the log
// entries about clearings.
func (c *clearing) removableFilter(what string) bson.D {
	watcher := bson.E{Key: "watcher", Value: c.op.Watcher}

	switch what {
	case clearDead:
		if c.order.Collection != "" {
			return bson.D{watcher, {Key: "ns", Value: c.order.Collection}}
		}
		return bson.D{watcher}
	case clearAudit:
		// The entry that announces the clearing stays.
		filter := AuditFilter{Watcher: c.op.Watcher}.mongoFilter()
		return append(filter, bson.E{Key: "kind", Value: bson.D{{Key: "$ne", Value: "clearing"}}})
	case clearReplays:
		return bson.D{watcher, {Key: "state", Value: bson.D{{Key: "$ne", Value: ReplayRunning}}}}
	}
	return bson.D{}
}

// findCollections returns the collections of the kinds that the order names.
func (c *clearing) findCollections(ctx context.Context) ([]ClearedCollection, error) {
	names, err := c.op.Collections(ctx, c.order.Collection)
	if err != nil {
		return nil, err
	}

	var list []ClearedCollection
	add := func(what, ns string) { list = append(list, ClearedCollection{Collection: ns, What: what}) }
	for _, ns := range names {
		if c.hasKind(ClearEnvelopes) {
			add(ClearEnvelopes, ns)
		}
	}

	if c.hasKind(clearDead) {
		add(clearDead, mongodb.Namespace(c.op.letters()))
	}

	// Inboxes and sagas belong to a database, which may have several outboxes.
	databases := outboxes.DatabasesOf(names)
	if c.order.Collection == "" {
		databases = slices.Compact(slices.Sorted(slices.Values(slices.Concat(databases, consumerDatabases(c.op)))))
	}
	for _, db := range databases {
		if err := c.findServiceCollections(ctx, db, add); err != nil {
			return nil, err
		}
	}

	if c.hasKind(clearAudit) {
		add(clearAudit, c.op.State.Namespace("audit"))
	}
	if c.hasKind(clearReplays) {
		add(clearReplays, c.op.State.Namespace("replays"))
	}
	return list, nil
}

// findServiceCollections calls add for the collections of inboxes, sagas and letters of handlers in db that the order
// names.
func (c *clearing) findServiceCollections(ctx context.Context, db string, add func(what, ns string)) error {
	if !c.hasKind(clearInbox) && !c.hasKind(clearSagas) && !c.hasKind(ClearHandlers) {
		return nil
	}

	found, err := c.op.findServices(ctx, db)
	if err != nil {
		return err
	}
	// The messages of handlers that are set aside stay: they exist nowhere else.
	if c.hasKind(clearInbox) {
		for _, name := range found.Inboxes {
			for _, suffix := range []string{"", inbox.OffsetsSuffix, inbox.ClaimsSuffix} {
				add(clearInbox, db+"."+name+suffix)
			}
		}
	}

	if c.hasKind(ClearHandlers) {
		for _, name := range found.Letters {
			add(ClearHandlers, db+"."+name)
		}
	}

	if c.hasKind(clearSagas) && found.Sagas {
		types, err := c.op.Sagas().listTypes(ctx, db)
		if err != nil {
			return err
		}
		for _, t := range types {
			add(clearSagas, db+"."+t.Name)
		}
	}
	return nil
}
