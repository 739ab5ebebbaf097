package nodes

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Kind is the kind of an entry of the audit log.
type Kind string

// The kinds of entries. A reader must accept other kinds, because newer versions may write them.
const (
	TookOver    Kind = "took_over"
	Released    Kind = "released"
	LeaseLost   Kind = "lease_lost"
	SteppedDown Kind = "stepped_down"
	Paused      Kind = "paused"
	Resumed     Kind = "resumed"
	PinLapsed   Kind = "pin_lapsed"
	GapFound    Kind = "gap_found"
	GapClosed   Kind = "gap_closed"
	Invalidated Kind = "invalidated"
	Dropped     Kind = "collection_dropped"
	Renamed     Kind = "collection_renamed"
	// WaitingDiscarded counts the events that waited of a dropped collection or database, and were removed.
	WaitingDiscarded Kind = "waiting_discarded"
	Halted           Kind = "halted"

	NodeStarted    Kind = "node_started"
	NodeStopped    Kind = "node_stopped"
	NodeStale      Kind = "node_stale"            // another node sends no more heartbeats
	NodeReturned   Kind = "node_returned"         // it sends heartbeats again
	NodeListed     Kind = "node_listed_again"     // its entry was removed while it ran
	NodeTwice      Kind = "node_name_taken_twice" // two processes have one name
	ConfigDiffers  Kind = "configuration_differs" // of two nodes of one watcher
	ConfigReloaded Kind = "config_reloaded"       // while the process ran
	ConfigRejected Kind = "config_rejected"       // the new configuration cannot be used
	TopicParked    Kind = "topic_parked"
	TopicUnparked  Kind = "topic_unparked"
)

// Kinds returns the kinds of entries that nodes write.
func Kinds() []Kind {
	return []Kind{
		TookOver, Released, LeaseLost, SteppedDown, Paused, Resumed, PinLapsed, GapFound, GapClosed, Invalidated, Dropped,
		Renamed, WaitingDiscarded, Halted, NodeStarted, NodeStopped, NodeStale, NodeReturned, NodeListed, NodeTwice, ConfigDiffers,
		ConfigReloaded, ConfigRejected, TopicParked, TopicUnparked,
	}
}

// The bounds of the log.
const (
	entriesKept = 10_000 // the newest entries, after each [Member.RemoveOld]; an index of the collection removes entries by age

	// entryTimeout bounds the write of an entry for which nothing may wait long.
	entryTimeout = 2 * time.Second
)

// AuditEntry is one entry of the log.
type AuditEntry struct {
	ID      bson.ObjectID `bson:"_id"`
	At      time.Time     `bson:"at"` // of the server
	Kind    Kind          `bson:"kind"`
	Watcher string        `bson:"watcher"`
	Node    string        `bson:"node"`
	Fields  bson.Raw      `bson:"fields"`
}

// AuditLog is the collection `audit` of the state database: a log for operators. It has no payloads.
type AuditLog struct {
	coll    *mongo.Collection
	watcher string
	node    string
}

// NewAuditLog returns the log in coll, for entries of a watcher and a node. Either may be "".
func NewAuditLog(coll *mongo.Collection, watcher, node string) *AuditLog {
	return &AuditLog{coll: coll, watcher: watcher, node: node}
}

// Append writes an entry.
func (e *AuditLog) Append(ctx context.Context, kind Kind, fields bson.D) error {
	if fields == nil {
		fields = bson.D{}
	}

	// Only an update with a pipeline can use the time of the server, so it is an upsert instead of an insert.
	_, err := e.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: bson.NewObjectID()}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "at", Value: "$$NOW"},
		{Key: "kind", Value: mongodb.Literal(kind)},
		{Key: "watcher", Value: mongodb.Literal(e.watcher)},
		{Key: "node", Value: mongodb.Literal(e.node)},
		{Key: "fields", Value: mongodb.Literal(fields)},
	}}}}, options.UpdateOne().SetUpsert(true))
	return mongodb.DescribeError(err, "writing the audit entry "+string(kind), "find, insert and update", mongodb.Namespace(e.coll))
}

// AppendOrWarn writes an entry about a running process. It blocks for at most [entryTimeout], whatever time the caller has left.
// If the write fails, it logs a warning.
func (e *AuditLog) AppendOrWarn(ctx context.Context, log *slog.Logger, kind Kind, fields bson.D) {
	// The end of the caller must not cancel the write. The server might still execute it, and the entry would follow later
	// ones.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), entryTimeout)
	defer cancel()

	if err := e.Append(ctx, kind, fields); err != nil {
		log.Warn("an entry of the audit log is lost", "kind", string(kind), "error", err)
	}
}

// Trim removes all entries but the newest, of all watchers. keep is at least 1.
func (e *AuditLog) Trim(ctx context.Context, keep int64) (removed int64, err error) {
	var last AuditEntry
	err = e.coll.FindOne(ctx, bson.D{}, options.FindOne().SetSort(newest).SetSkip(keep-1)).Decode(&last)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return 0, nil
	}
	if err != nil {
		return 0, mongodb.DescribeError(err, "trimming the audit log", "find", mongodb.Namespace(e.coll))
	}

	res, err := e.coll.DeleteMany(ctx, bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "at", Value: bson.D{{Key: "$lt", Value: last.At}}}},
		bson.D{{Key: "at", Value: last.At}, {Key: "_id", Value: bson.D{{Key: "$lt", Value: last.ID}}}},
	}}})
	if err != nil {
		return 0, mongodb.DescribeError(err, "trimming the audit log", "remove", mongodb.Namespace(e.coll))
	}
	return res.DeletedCount, nil
}

var newest = bson.D{{Key: "at", Value: -1}, {Key: "_id", Value: -1}}

// Latest returns up to n entries of all watchers, the newest first.
func (e *AuditLog) Latest(ctx context.Context, n int64) ([]AuditEntry, error) {
	return mongodb.FindAll[AuditEntry](ctx, e.coll, "reading the audit log", bson.D{},
		options.Find().SetSort(newest).SetLimit(max(n, 1)))
}
