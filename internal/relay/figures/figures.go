// Package figures counts the documents of a watcher: in its outboxes, in the state database, and in the collections of
// services.
//
// One process counts for a watcher and stores the result in the collection `figures` of the state database, so metrics, health rules,
// page, API and commands show the same numbers. If no process has stored any recently, a command counts with the same [Counter].
//
// Order: none. Blocking: all functions block until MongoDB responds. Cost: see [Counter.Count]; the stored document has at most
// 1,000 topics with 20 outboxes each.
package figures

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/health"
	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// collectionName is the name of the collection in the state database, with one document for each watcher.
const collectionName = "figures"

// Counts are numbers of documents in the watcher's collections, and in the databases that contain
// them.
type Counts struct {
	Envelopes   int64 `json:"envelopes"`    // all in the outboxes, also delivered ones; from the collections' metadata
	Pending     int64 `json:"pending"`      // written after the watcher's position; at most 100,000 per collection; of many outboxes, a part is counted in each round
	PendingMore bool  `json:"pending_more"` // a collection reached that limit, so there may be more
	Retry       int64 `json:"retry"`
	Blocked     int64 `json:"blocked"`
	Parked      int64 `json:"parked"`
	Queued      int64 `json:"queued"`       // sent next: due, requeued or replayed
	BlockedKeys int64 `json:"blocked_keys"` // ordering keys with any of these, counted for each topic; 0 if more than 50,000 envelopes wait
	Scheduled   int64 `json:"scheduled"`    // in the outboxes, and claimed to be sent within seconds
	Dead        int64 `json:"dead"`         // letters that are not requeued
	DeadAll     int64 `json:"dead_all"`     // all letters
	HandlerDead int64 `json:"handler_dead"` // letters of handlers that are not requeued
	// HandlerWaiting are messages that handlers retry, or that follow such a message of their key; at most 100,000 per database.
	HandlerWaiting int64 `json:"handler_waiting"`
	InboxHandled   int64 `json:"inbox_handled"` // marks, from the collections' metadata
	InboxClaimed   int64 `json:"inbox_claimed"`
	Sagas          int64 `json:"sagas"`
}

// Waiting returns the number of waiting envelopes.
func (c Counts) Waiting() int64 { return c.Retry + c.Blocked + c.Parked + c.Queued }

// Letters returns the dead letters of both kinds that are not requeued.
func (c Counts) Letters() problems.Letters {
	return problems.Letters{Relay: c.Dead, Handlers: c.HandlerDead}
}

// Figures are the result of one count.
type Figures struct {
	At         time.Time          // when the count began, by the clock of its process
	Counts     Counts             // sums
	Topics     []waiting.Topic    // waiting envelopes by topic, at most 1,000; the topic with the oldest one comes first
	Letters    problems.Letters   // dead letters
	Scheduled  []ScheduledCount   // of outboxes that have scheduled envelopes, at most 1,000, the most of them first
	Retries    []problems.Retry   // handlers that fail, at most 100, the one that fails for the longest time first
	Oplog      problems.Oplog     // zero if unknown
	Unreadable []outboxes.Finding // watched names whose events are not delivered, or may get lost
	Health     *health.Report     // nil if the rules were not evaluated

	// Outboxes and Handlers are for the metrics of the process that has counted. They are not stored.
	Outboxes []metrics.Collection     `bson:"-"`
	Handlers []metrics.HandlerLetters `bson:"-"`
}

// ScheduledCount is the number of the scheduled envelopes of an outbox.
type ScheduledCount struct {
	NS string
	N  int64
}

// CountScheduledOf returns how many scheduled envelopes the outbox coll of db had.
func (f *Figures) CountScheduledOf(db, coll string) (total int64) {
	for _, counted := range f.Scheduled {
		if counted.NS == db+"."+coll {
			total += counted.N
		}
	}
	return total
}

// AddTo adds copies of the figures to the facts about a watcher.
func (f *Figures) AddTo(facts *problems.Facts) {
	letters := f.Letters
	facts.CountedAt, facts.Letters, facts.Oplog, facts.Health, facts.Unreadable = f.At, &letters, f.Oplog, f.Health, f.Unreadable
	facts.Retries = f.Retries
	facts.Waiting = make(map[string]problems.Waiting, len(f.Topics))
	for _, topic := range f.Topics {
		counted := problems.Waiting{Events: topic.Retry + topic.Blocked + topic.Parked}
		if !topic.Oldest.IsZero() {
			counted.Oldest = &topic.Oldest
		}
		facts.Waiting[topic.Topic] = counted
	}
}

// Stored are the figures that a process has stored for a watcher.
type Stored struct {
	Figures Figures
	Current bool // the next count is not overdue: the process counts regularly
	Acted   bool // an operator may have acted since the count began
}

// document is the stored form. Its times are of the server's clock.
type document struct {
	Figures Figures   `bson:"figures"`
	SavedAt time.Time `bson:"savedAt"`
	ValidMS int64     `bson:"validMs"`
	Actions int64     `bson:"actions"` // of operators
	Seen    int64     `bson:"seen"`    // Actions before the count
	Now     time.Time `bson:"now,omitempty"`
}

// Save stores the figures of a watcher, which are current for valid. seen is the number of operators' actions that the previous Save
// returned, or 0. A reader takes the figures as older than all later actions.
func Save(
	ctx context.Context, database state.Database, watcher string, figures Figures, valid time.Duration, seen int64,
) (actions int64, err error) {
	set := bson.D{{Key: "figures", Value: figures}, {Key: "validMs", Value: valid.Milliseconds()}, {Key: "seen", Value: seen}}
	update := bson.D{
		{Key: "$set", Value: set},
		{Key: "$currentDate", Value: bson.D{{Key: "savedAt", Value: true}}},
		{Key: "$inc", Value: bson.D{{Key: "actions", Value: int64(0)}}},
	}
	var stored document
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After).SetProjection(mongodb.Fields("actions"))
	coll := mongodb.Majority(database.Collection(collectionName))
	if err := coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: watcher}}, update, opts).Decode(&stored); err != nil {
		return seen, fmt.Errorf("storing the figures of watcher %s: %w", watcher, err)
	}
	return stored.Actions, nil
}

// Read returns the stored figures of a watcher, or the zero value if there are none.
func Read(ctx context.Context, database state.Database, watcher string) (Stored, error) {
	var found document
	fields := append(mongodb.Fields("figures", "savedAt", "validMs", "actions", "seen"), bson.E{Key: "now", Value: "$$NOW"})
	coll := mongodb.Majority(database.Collection(collectionName))
	err := coll.FindOne(ctx, bson.D{{Key: "_id", Value: watcher}}, options.FindOne().SetProjection(fields)).Decode(&found)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return Stored{}, nil
	}
	if err != nil {
		return Stored{}, mongodb.DescribeError(err, "reading the figures of watcher "+watcher, "find", database.Namespace(collectionName))
	}
	age := found.Now.Sub(found.SavedAt)
	return Stored{found.Figures, age < time.Duration(found.ValidMS)*time.Millisecond, found.Actions != found.Seen}, nil
}

// NoteAction records that an operator has acted on the watcher, so that the next reader counts again.
func NoteAction(ctx context.Context, database state.Database, watcher string) error {
	coll := database.Collection(collectionName)
	_, err := coll.UpdateByID(ctx, watcher, bson.D{{Key: "$inc", Value: bson.D{{Key: "actions", Value: int64(1)}}}})
	return err
}
