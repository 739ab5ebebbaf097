package figures

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/inventory"
	"github.com/outrelay/outrelay/internal/service/lettercount"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// Limit is the number at which counting the pending envelopes of an outbox, and the letters and messages of handlers in a collection,
// stops. Without it, a backlog would be read completely for each count, by a server that is busy with the backlog.
const Limit = 100_000

const (
	countTimeout  = 30 * time.Second // bounds one count
	maxConcurrent = 4                // collections that are counted at the same time
	maxTopics     = 1000             // topics in the figures
	maxRetries    = 100              // handlers that fail in the figures
	maxScheduled  = 1000             // outboxes with their scheduled envelopes in the figures
	indexesEvery  = 5 * time.Minute  // interval at which indexes are compared with the wanted ones
)

// Counter counts the figures of one watcher. It keeps the numbers of the outboxes that a count leaves out. The fields must not change
// after the first use. It is not safe for concurrent use, except for [Counter.CountScheduled].
type Counter struct {
	State          state.Database
	Watcher        string
	HandlerLetters []string // names of the collections with dead letters of handlers
	// ConsumerDatabases are databases of services, also without an outbox of the watcher.
	ConsumerDatabases []string

	Now     func() time.Time                                      // of the server
	Indexes *outboxes.Indexes                                     // wanted on each outbox; nil: they are not compared
	Inspect func(ctx context.Context) ([]outboxes.Finding, error) // nil: the watched names are not inspected
	Oplog   func(ctx context.Context) (problems.Oplog, error)     // nil: unknown

	// Lenient leaves out what the user has no privilege to read. Otherwise it is an error.
	Lenient bool

	outboxes         map[string]outboxCount     // of the last count, by namespace
	scheduled        map[string]ScheduledOutbox // of the last count, by namespace
	lastOutbox       string                     // the last one that was counted
	lastScheduled    string
	indexesCheckedAt time.Time
	unreadable       []outboxes.Finding // of the last inspection, or before the first one as they are stored
	inspected        bool
}

// outboxCount has the numbers of one outbox.
type outboxCount struct {
	metrics.Collection
	envelopes int64
}

// ScheduledOutbox counts the scheduled envelopes of one outbox.
type ScheduledOutbox struct {
	N       int64
	First   time.Time // when the first one is due; zero if there is none
	Unknown bool      // the outbox is large and has no index for the count
}

// round is one count.
type round struct {
	*Counter
	names    []string         // the registered outboxes, sorted
	dead     map[string]int64 // letters by outbox
	inboxes  map[string]int64 // marks by database
	position bson.Timestamp   // that all slots have passed; zero if one has none
	found    Figures
}

// Count counts everything once. It reads each waiting envelope, an index entry for each dead letter and scheduled envelope, and the
// collections of services in the databases of [inventory.ChooseDatabases]. It counts up to [outboxes.MaxCounted] outboxes, and takes the numbers of the others from
// earlier counts. After an error, the figures are incomplete.
func (c *Counter) Count(ctx context.Context) (Figures, error) {
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	round := &round{Counter: c, inboxes: map[string]int64{}, found: Figures{At: time.Now().UTC()}}
	var err error
	if round.names, err = outboxes.NewRegistry(c.State.Collection("collections")).Names(ctx, c.Watcher); err != nil {
		return round.found, err
	}

	// The oplog and the names are optional: without the privileges they are unknown.
	if c.Oplog != nil {
		round.found.Oplog, _ = c.Oplog(ctx)
	}
	if c.Inspect != nil {
		if round.found.Unreadable, err = c.inspectNames(ctx); c.tolerate(err) != nil {
			return round.found, err
		}
	}

	// If the watcher has no position yet, no envelope is pending.
	round.position, _ = lease.LowestPosition(ctx, c.State.Collection("watchers"), c.Watcher)
	for _, count := range []func(context.Context) error{
		round.countWaiting, round.countLetters, round.countScheduled, round.countServices, round.countOutboxes,
	} {
		if err := count(ctx); err != nil {
			return round.found, err
		}
	}
	return round.found, nil
}

// inspectNames inspects the watched names. A finding of an earlier count keeps its time, also if another process has counted.
func (c *Counter) inspectNames(ctx context.Context) ([]outboxes.Finding, error) {
	if !c.inspected {
		stored, err := Read(ctx, c.State, c.Watcher)
		if err != nil {
			return nil, err
		}
		c.unreadable, c.inspected = stored.Figures.Unreadable, true
	}

	found, err := c.Inspect(ctx)
	if err != nil {
		return nil, err
	}
	c.unreadable = outboxes.KeepSince(found, c.unreadable, c.Now().UTC())
	return c.unreadable, nil
}

// tolerate returns nil if err is caused by a missing privilege and the counter is lenient, and err otherwise.
func (c *Counter) tolerate(err error) error {
	if c.Lenient && mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return nil
	}
	return err
}

// countWaiting counts the waiting envelopes. The sums come from the topics, so that both views agree.
func (r *round) countWaiting(ctx context.Context) error {
	topics, err := waiting.CountTopics(ctx, r.State.Collection("waiting"), r.Watcher)
	if err != nil {
		return err
	}
	counts := &r.found.Counts
	for _, topic := range topics {
		counts.Retry += topic.Retry
		counts.Blocked += topic.Blocked
		counts.Parked += topic.Parked
		counts.Queued += topic.Queued
		counts.BlockedKeys += topic.Keys
	}

	slices.SortStableFunc(topics, func(a, b waiting.Topic) int {
		// A topic whose envelopes have no time comes last.
		if a.Oldest.IsZero() != b.Oldest.IsZero() {
			return cmp.Compare(b.Oldest.Unix(), a.Oldest.Unix())
		}
		return cmp.Or(a.Oldest.Compare(b.Oldest), strings.Compare(a.Topic, b.Topic))
	})
	r.found.Topics = topics[:min(len(topics), maxTopics)]
	return nil
}

// countLetters counts the dead letters of the relay.
func (r *round) countLetters(ctx context.Context) (err error) {
	coll, counts := r.State.Collection("letters"), &r.found.Counts
	if counts.DeadAll, err = letters.Count(ctx, coll, letters.Query{Watcher: r.Watcher}); err != nil || counts.DeadAll == 0 {
		return err
	}
	if counts.Dead, r.found.Letters.Oldest, err = letters.CountOpen(ctx, coll, r.Watcher); err != nil {
		return err
	}
	r.found.Letters.Relay = counts.Dead
	r.dead, err = mongodb.CountValues(ctx, mongodb.Majority(coll), bson.D{{Key: "watcher", Value: r.Watcher}}, "ns", Limit)
	return err
}

// ListScheduled returns those of the watcher's outboxes, names, that may hold scheduled envelopes. Of many outboxes, these are the ones on
// the list that the relay keeps, on which an outbox is as soon as the relay has read a scheduled envelope of it.
func ListScheduled(ctx context.Context, database state.Database, watcher string, names []string) ([]string, error) {
	if len(names) <= outboxes.MaxCounted {
		return names, nil
	}
	return outboxes.ListScheduled(ctx, database.Collection("schedules"), watcher)
}

// countScheduled counts the scheduled envelopes of up to outboxes.MaxCounted outboxes, and takes the numbers of the others from earlier
// counts. It adds the claimed ones, which have left the outboxes.
func (r *round) countScheduled(ctx context.Context) error {
	names, err := ListScheduled(ctx, r.State, r.Watcher, r.names)
	if err != nil {
		return err
	}
	part := outboxes.NextToCount(names, r.lastScheduled)
	counted, err := r.CountScheduled(ctx, part)
	if err != nil {
		return err
	}
	if len(part) > 0 {
		r.lastScheduled = part[len(part)-1]
	}

	claimed, err := waiting.CountClaimed(ctx, r.State.Collection(waiting.ClaimsName), r.Watcher)
	if err != nil {
		return err
	}
	r.found.Counts.Scheduled = claimed
	before := r.scheduled
	r.scheduled = make(map[string]ScheduledOutbox, len(names))
	for _, ns := range names {
		one, isNew := counted[ns]
		if !isNew {
			one = before[ns]
		}
		r.scheduled[ns] = one
		r.found.Counts.Scheduled += one.N
		if one.N > 0 {
			r.found.Scheduled = append(r.found.Scheduled, ScheduledCount{ns, one.N})
		}
	}

	slices.SortStableFunc(r.found.Scheduled, func(a, b ScheduledCount) int { return cmp.Compare(b.N, a.N) })
	r.found.Scheduled = r.found.Scheduled[:min(len(r.found.Scheduled), maxScheduled)]
	return nil
}

// CountScheduled counts the scheduled envelopes of the named outboxes, several at the same time. It reads an index entry for each.
func (c *Counter) CountScheduled(ctx context.Context, names []string) (map[string]ScheduledOutbox, error) {
	return countEach(ctx, names, func(ctx context.Context, ns string) (one ScheduledOutbox, err error) {
		one.N, one.First, err = outboxes.CountDue(ctx, outboxes.CollectionOf(c.State.Client(), ns), slot.Range{}, math.MaxInt64)
		if errors.Is(err, outboxes.ErrNotIndexed) {
			return ScheduledOutbox{Unknown: true}, nil
		}
		return one, c.tolerate(err)
	})
}

// countEach calls count for each of the names, at most [maxConcurrent] at the same time. It returns the results by name.
func countEach[T any](ctx context.Context, names []string, count func(context.Context, string) (T, error)) (map[string]T, error) {
	var mu sync.Mutex
	results := make(map[string]T, len(names))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(maxConcurrent)
	for _, name := range names {
		group.Go(func() error {
			result, err := count(ctx, name)

			mu.Lock()
			defer mu.Unlock()
			results[name] = result
			return err
		})
	}
	err := group.Wait()
	return results, err
}

// countServices counts the documents of services in their databases.
func (r *round) countServices(ctx context.Context) error {
	for _, name := range inventory.ChooseDatabases(r.ConsumerDatabases, outboxes.DatabasesOf(r.names)) {
		if err := r.countService(ctx, mongodb.Database(r.State.Client(), name)); r.tolerate(err) != nil {
			return err
		}
	}
	r.found.Counts.HandlerDead = r.found.Letters.Handlers

	slices.SortStableFunc(r.found.Retries, func(a, b problems.Retry) int { return a.Since.Compare(b.Since) })
	r.found.Retries = r.found.Retries[:min(len(r.found.Retries), maxRetries)]
	return nil
}

// countService counts the inboxes, sagas, waiting messages and dead letters of handlers in one database.
func (r *round) countService(ctx context.Context, db *mongo.Database) error {
	counts := &r.found.Counts
	found, err := inventory.Find(ctx, db, r.HandlerLetters)
	if err != nil {
		return err
	}
	for _, coll := range found.Letters {
		if err := r.countHandlerLetters(ctx, db, coll); r.tolerate(err) != nil {
			return err
		}
	}

	for _, coll := range found.Inboxes {
		n, err := mongostore.New(db, inbox.Settings{Collection: coll}).Counts(ctx)
		if err != nil {
			return err
		}
		counts.InboxHandled += n.Markers
		counts.InboxClaimed += n.Claimed
		r.inboxes[db.Name()] += n.Markers
	}
	if found.Waiting {
		if err := r.countRetries(ctx, setaside.NewDesk(db, setaside.DefaultCollection)); err != nil {
			return err
		}
	}

	if !found.Sagas {
		return nil
	}
	types, err := sagas.NewMongo(db).Types(ctx)
	if err != nil {
		return err
	}
	for _, sagaType := range types {
		n, err := db.Collection(sagaType.Name).EstimatedDocumentCount(ctx)
		if err != nil {
			return mongodb.DescribeError(err, "counting sagas of "+sagaType.Name, "find", db.Name()+"."+sagaType.Name)
		}
		counts.Sagas += n
	}
	return nil
}

// countRetries counts the messages that the handlers of one database retry.
func (r *round) countRetries(ctx context.Context, desk *setaside.Desk) error {
	handlers, err := desk.CountHandlers(ctx, Limit)
	if err != nil {
		return err
	}
	for _, count := range handlers {
		r.found.Counts.HandlerWaiting += count.N
		if count.Since.IsZero() {
			continue
		}
		place := setaside.Place{Handler: count.Handler}
		group, handler := place.SplitHandler()
		r.found.Retries = append(r.found.Retries, problems.Retry{Group: group, Handler: handler, Messages: count.N, Since: count.Since.UTC()})
	}
	return nil
}

// countHandlerLetters counts the dead letters of handlers in one collection.
func (r *round) countHandlerLetters(ctx context.Context, db *mongo.Database, coll string) error {
	series, err := lettercount.CountSeries(ctx, db, coll, Limit)
	if err != nil {
		return err
	}
	var open int64
	for _, one := range series {
		open += one.Dead
		r.found.Handlers = append(r.found.Handlers, metrics.HandlerLetters(one))
	}
	if open == 0 {
		return nil
	}

	died, err := lettercount.OldestOpen(ctx, db, coll)
	if oldest := r.found.Letters.Oldest; died != nil && (oldest == nil || died.Before(*oldest)) {
		r.found.Letters.Oldest = died
	}
	r.found.Letters.Handlers += open
	return err
}

// countOutboxes counts the outboxes of this round, and adds everything that is known about each outbox.
func (r *round) countOutboxes(ctx context.Context) error {
	part := outboxes.NextToCount(r.names, r.lastOutbox)
	checkIndexes := r.needsIndexCheck()
	counted, err := countEach(ctx, part, func(ctx context.Context, ns string) (outboxCount, error) {
		one, err := r.countOutbox(ctx, ns, checkIndexes)
		return one, r.tolerate(err)
	})
	if err != nil {
		return err
	}
	if len(part) > 0 {
		r.lastOutbox = part[len(part)-1]
	}

	counts, before := &r.found.Counts, r.outboxes
	r.outboxes = make(map[string]outboxCount, len(r.names))
	for _, ns := range r.names {
		one, isNew := counted[ns]
		if !isNew {
			one = before[ns]
		}
		r.completeOutbox(&one, ns)
		r.outboxes[ns] = one
		r.found.Outboxes = append(r.found.Outboxes, one.Collection)
		counts.Envelopes += one.envelopes
		counts.Pending += one.Pending
		counts.PendingMore = counts.PendingMore || one.Pending >= Limit
	}
	return nil
}

// completeOutbox adds the numbers of an outbox that are counted elsewhere.
func (r *round) completeOutbox(outbox *outboxCount, ns string) {
	outbox.Name = ns
	outbox.DeadLetters, outbox.HasDead = r.dead[ns], true

	scheduled := r.scheduled[ns]
	outbox.Scheduled, outbox.HasScheduled, outbox.Overdue = scheduled.N, !scheduled.Unknown, 0
	if !scheduled.First.IsZero() {
		outbox.Overdue = max(r.Now().Sub(scheduled.First), 0)
	}

	// All outboxes of a database share its inboxes.
	db, _, _ := strings.Cut(ns, ".")
	outbox.Inbox, outbox.HasInbox = r.inboxes[db], r.inboxes[db] > 0
	delete(r.inboxes, db)
}

// needsIndexCheck reports whether this round compares the indexes of its outboxes.
func (r *round) needsIndexCheck() bool {
	if r.Indexes == nil {
		return false
	}
	// A start makes missing indexes concurrently with the delivery, so they are checked more often.
	every := indexesEvery
	for _, outbox := range r.outboxes {
		if outbox.MissingIndexes > 0 {
			every = indexesEvery / 10
		}
	}
	if time.Since(r.indexesCheckedAt) <= every && len(r.names) <= outboxes.MaxCounted {
		return false
	}
	r.indexesCheckedAt = time.Now()
	return true
}

// countOutbox counts the envelopes of one outbox. It leaves out a number that only a read of a large collection could supply.
func (r *round) countOutbox(ctx context.Context, ns string, checkIndexes bool) (outboxCount, error) {
	var outbox outboxCount
	coll := outboxes.CollectionOf(r.State.Client(), ns)
	outbox.MissingIndexes, outbox.HasIndexes = r.outboxes[ns].MissingIndexes, r.outboxes[ns].HasIndexes
	if checkIndexes {
		// Without the privilege to list them, the number is unknown until the next check.
		missing, err := r.Indexes.Missing(ctx, coll)
		outbox.MissingIndexes, outbox.HasIndexes = len(missing), err == nil
	}

	var err error
	if outbox.envelopes, err = coll.EstimatedDocumentCount(ctx); err != nil || r.position.IsZero() {
		return outbox, err
	}
	n, oldest, err := outboxes.CountAfter(ctx, coll, r.position, Limit)
	if errors.Is(err, outboxes.ErrNotIndexed) {
		return outbox, nil
	}
	outbox.Pending, outbox.HasPending = n, err == nil
	if !oldest.IsZero() {
		outbox.OldestAge = max(r.Now().Sub(time.Unix(int64(oldest.T), 0)), 0)
	}
	return outbox, err
}
