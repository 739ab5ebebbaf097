package admin

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// The states of a replay.
const (
	ReplayRunning   = "running" // or interrupted: it can be resumed
	ReplayDone      = "done"    // all found envelopes are queued
	replayCancelled = "cancelled"
)

// ErrReplayMoved is returned if another process runs the replay, or has ended it.
var ErrReplayMoved = errors.New("another process moved the replay")

// replayCursor is the progress of a replay: the collections before At are done, and all timestamps before
// TS of the collection At. Of the envelopes with TS itself, those up to Place are done, or all if Place is "".
type replayCursor struct {
	At    int            `bson:"at"` // index into the collections of the query
	TS    bson.Timestamp `bson:"ts"`
	Place string         `bson:"place,omitempty"` // as in placeOf
}

// placeOf returns the place of an envelope among those with one timestamp.
func placeOf(id bson.RawValue) string {
	sum := sha256.Sum256([]byte(mongodb.ValueKey(id)))
	return hex.EncodeToString(sum[:])
}

// storedReplay is a document of the collection replays in the state database. Its times are server
// times.
type storedReplay struct {
	ID         string       `bson:"_id"`
	Watcher    string       `bson:"watcher"`
	Query      replayQuery  `bson:"query"`
	State      string       `bson:"state"`
	Actor      string       `bson:"actor"`
	Cursor     replayCursor `bson:"cursor"`
	Batch      string       `bson:"batch"`   // name of the latest batch
	Found      int64        `bson:"found"`   // when it was ordered
	Queued     int64        `bson:"queued"`  // for the relay to send
	Skipped    int64        `bson:"skipped"` // expired, malformed, or routed to none of the topics
	Rate       float64      `bson:"rate"`    // envelopes per second; 0 means no limit
	Delivery   int32        `bson:"delivery"`
	StartedAt  time.Time    `bson:"startedAt"`
	UpdatedAt  time.Time    `bson:"updatedAt"`
	FinishedAt *time.Time   `bson:"finishedAt,omitempty"`
}

// replayStore is the collection replays of the state database.
type replayStore struct {
	state state.Database
	coll  *mongo.Collection
}

func newReplayStore(state state.Database) *replayStore {
	return &replayStore{state: state, coll: mongodb.Majority(state.Collection("replays"))}
}

// Start stores a new replay, and returns it with its times, which the server sets.
func (r *replayStore) Start(ctx context.Context, replay storedReplay) (stored storedReplay, err error) {
	replay.State = ReplayRunning
	raw, err := bson.Marshal(replay)
	if err != nil {
		return stored, fmt.Errorf("writing replay %s: %w", replay.ID, err)
	}

	// An insert could contain only the time of the client.
	times := bson.D{{Key: "startedAt", Value: "$$NOW"}, {Key: "updatedAt", Value: "$$NOW"}}
	document := bson.D{{Key: "$mergeObjects", Value: bson.A{mongodb.Literal(bson.Raw(raw)), times}}}
	err = r.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: replay.ID}}, mongo.Pipeline{{{Key: "$replaceWith", Value: document}}},
		options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&stored)
	if err != nil {
		return stored, mongodb.DescribeError(err, "writing replay "+replay.ID, "find, insert and update", mongodb.Namespace(r.coll))
	}
	return stored, nil
}

// Get returns a replay, or [mongodb.ErrNotFound].
func (r *replayStore) Get(ctx context.Context, id string) (storedReplay, error) {
	var replay storedReplay
	err := r.coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&replay)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return replay, fmt.Errorf("replay %s: %w; outrelay replay list lists the replays", id, mongodb.ErrNotFound)
	}
	if err != nil {
		return replay, mongodb.DescribeError(err, "reading replay "+id, "find", mongodb.Namespace(r.coll))
	}
	return replay, nil
}

// List returns the latest n replays of a watcher.
func (r *replayStore) List(ctx context.Context, watcher string, n int64) ([]storedReplay, error) {
	filter := bson.D{{Key: "watcher", Value: watcher}}
	return mongodb.FindAll[storedReplay](ctx, r.coll, "listing replays", filter,
		options.Find().SetSort(bson.D{{Key: "startedAt", Value: -1}, {Key: "_id", Value: -1}}).SetLimit(n))
}

// End sets the final state of a running replay, and adds to the skipped envelopes. It returns
// [ErrReplayMoved] if the replay has ended already.
func (r *replayStore) End(ctx context.Context, id, state string, skipped int64) error {
	running := bson.D{{Key: "_id", Value: id}, {Key: "state", Value: ReplayRunning}}
	res, err := r.coll.UpdateOne(ctx, running, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "state", Value: state},
		{Key: "updatedAt", Value: "$$NOW"},
		{Key: "finishedAt", Value: "$$NOW"},
		{Key: "skipped", Value: bson.D{{Key: "$add", Value: bson.A{"$skipped", skipped}}}},
	}}}})
	if err != nil {
		return mongodb.DescribeError(err, "ending replay "+id, "find and update", mongodb.Namespace(r.coll))
	}

	if res.MatchedCount == 0 {
		return fmt.Errorf("ending replay %s: %w", id, ErrReplayMoved)
	}
	return nil
}

// replayBatch is one transaction, which stores envelopes of one collection as waiting and moves the cursor.
type replayBatch struct {
	Name     string // unique; identifies a repeated transaction whose outcome was unknown
	From, To replayCursor
	Entries  []waiting.Entry
	Skipped  int64 // envelopes that were read with them and left out
}

// Queue writes one batch in one transaction of the state database. If the cursor is not at From, it writes nothing and
// returns [ErrReplayMoved]. The owner of the watcher finds the envelopes by their time (N18). No fence is needed, because nothing
// changes that the owner has decided.
func (r *replayStore) Queue(ctx context.Context, id string, batch replayBatch) error {
	store := mongodb.Database(r.state.Client(), r.state.Name()).Collection(r.state.Collection("waiting").Name())
	err := mongodb.InTransaction(ctx, r.state.Client(), func(tx context.Context) error {
		moved, err := r.moveCursor(tx, id, batch)
		if err != nil || !moved {
			return err
		}
		return waiting.Enter(tx, store, batch.Entries)
	})
	if err != nil {
		return fmt.Errorf("replay %s: %w", id, err)
	}
	return nil
}

// moveCursor moves the cursor and counts the batch. It returns false if this batch was committed before.
func (r *replayStore) moveCursor(tx context.Context, id string, batch replayBatch) (bool, error) {
	var stored struct {
		State  string       `bson:"state"`
		Cursor replayCursor `bson:"cursor"`
		Batch  string       `bson:"batch"`
	}
	if err := r.coll.FindOne(tx, bson.D{{Key: "_id", Value: id}}).Decode(&stored); err != nil {
		return false, mongodb.DescribeError(err, "reading replay "+id, "find", mongodb.Namespace(r.coll))
	}

	switch {
	case stored.Batch == batch.Name:
		// An earlier attempt was committed, although its outcome was unknown.
		return false, nil
	case stored.State != ReplayRunning || stored.Cursor != batch.From:
		return false, ErrReplayMoved
	}

	add := func(field string, n int64) bson.E {
		return bson.E{Key: field, Value: bson.D{{Key: "$add", Value: bson.A{"$" + field, n}}}}
	}
	_, err := r.coll.UpdateOne(tx, bson.D{{Key: "_id", Value: id}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "cursor", Value: mongodb.Literal(batch.To)},
		{Key: "batch", Value: mongodb.Literal(batch.Name)},
		{Key: "updatedAt", Value: "$$NOW"},
		add("queued", int64(len(batch.Entries))),
		add("skipped", batch.Skipped),
	}}}})
	if err != nil {
		return false, mongodb.DescribeError(err, "moving replay "+id, "find and update", mongodb.Namespace(r.coll))
	}
	return true, nil
}

// Outstanding counts the envelopes that the replay has queued and that the relay has not settled, up to limit.
func (r *replayStore) Outstanding(ctx context.Context, id string, limit int64) (int64, error) {
	return waiting.CountReplayed(ctx, r.state.Collection("waiting"), id, limit)
}
