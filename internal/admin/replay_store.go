package admin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/state"
)

// The states of a replay.
const (
	ReplayRunning   = "running" // or interrupted: it can be resumed
	ReplayDone      = "done"    // all found envelopes are queued
	replayCancelled = "cancelled"
)

const codeBadValue = 2 // returned for a hint to an index that does not exist

// ErrReplayMoved is returned if another process runs the replay, or has ended it.
var ErrReplayMoved = errors.New("another process moved the replay")

// replayCursor is the progress of a replay: the collections before At are done, and all timestamps up
// to TS of the collection At.
type replayCursor struct {
	At int            `bson:"at"` // index into the collections of the query
	TS bson.Timestamp `bson:"ts"`
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

// Start stores a new replay. The server sets its times.
func (r *replayStore) Start(ctx context.Context, p storedReplay) error {
	p.State = ReplayRunning
	raw, err := bson.Marshal(p)
	if err != nil {
		return fmt.Errorf("writing replay %s: %w", p.ID, err)
	}

	// An insert could contain only the time of the client.
	times := bson.D{{Key: "startedAt", Value: "$$NOW"}, {Key: "updatedAt", Value: "$$NOW"}}
	document := bson.D{{Key: "$mergeObjects", Value: bson.A{mongodb.Literal(bson.Raw(raw)), times}}}
	_, err = r.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: p.ID}},
		mongo.Pipeline{{{Key: "$replaceWith", Value: document}}}, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return mongodb.Refusal(err, "writing replay "+p.ID, "find, insert and update", mongodb.Namespace(r.coll))
	}
	return nil
}

// Get returns a replay, or [mongodb.ErrNotFound].
func (r *replayStore) Get(ctx context.Context, id string) (storedReplay, error) {
	var p storedReplay
	err := r.coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&p)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return p, fmt.Errorf("replay %s: %w; outrelay replay list lists the replays", id, mongodb.ErrNotFound)
	}
	if err != nil {
		return p, mongodb.Refusal(err, "reading replay "+id, "find", mongodb.Namespace(r.coll))
	}
	return p, nil
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
		return mongodb.Refusal(err, "ending replay "+id, "find and update", mongodb.Namespace(r.coll))
	}

	if res.MatchedCount == 0 {
		return fmt.Errorf("ending replay %s: %w", id, ErrReplayMoved)
	}
	return nil
}

// requeue is one envelope that a replay sends again.
type requeue struct {
	ID      bson.RawValue
	TS      bson.Timestamp // the envelope is not changed if it has another timestamp by now
	Key     string         // canonical text of its ordering key if the envelope has no key, otherwise ""
	Pending []string       // topics that get it; nil means all that it routes to
}

// replayBatch is one transaction, which queues envelopes of one collection and moves the cursor.
type replayBatch struct {
	Name      string // unique; identifies a repeated transaction whose outcome was unknown
	NS        string
	From, To  replayCursor
	Envelopes []requeue // at most 1,000
	Skipped   int64     // envelopes that were read with them and left out
}

// Queue writes one batch in one transaction. It returns the number of queued envelopes, and how long
// the owner could not renew. It leaves out envelopes whose timestamp has changed or that are exceptions
// by now. If the cursor is not at From, it writes nothing and returns [ErrReplayMoved].
//
// N18: a queued envelope is an exception in state retry, due immediately, with its next delivery
// number. It gets a new timestamp, because retention counts from the latest delivery. So the same
// replay never finds it twice. Its pos contains the previous timestamp, which keeps the order within a
// key.
func (r *replayStore) Queue(
	ctx context.Context, id, watcher string, b replayBatch,
) (queued int64, held time.Duration, err error) {
	coll := outboxes.CollectionOf(r.state.Client(), b.NS)

	seal, err := outboxes.NewRegistry(r.state.Collection("collections")).Seal(ctx)
	if err != nil {
		return 0, 0, fmt.Errorf("replay %s: %w", id, err)
	}

	// The seal shows the relay that outrelay itself has written the state (N16).
	models := make([]mongo.WriteModel, len(b.Envelopes))
	for i := range b.Envelopes {
		models[i] = b.Envelopes[i].update(id, seal)
	}

	again := false
	err = mongodb.Foreign(ctx, r.state.Collection("watchers"), watcher, []string{b.NS}, func(tx context.Context) error {
		began := time.Now()
		defer func() { held = time.Since(began) }()
		// Foreign may run this several times.
		queued, again = 0, false
		moved, err := r.move(tx, id, b)
		if err != nil || !moved {
			again = err == nil
			return err
		}

		if len(models) > 0 {
			res, err := coll.BulkWrite(tx, models)
			if err != nil {
				return mongodb.Refusal(err, "queueing envelopes of "+b.NS, "find and update", b.NS)
			}

			queued = res.MatchedCount
		}
		_, err = r.coll.UpdateOne(tx, bson.D{{Key: "_id", Value: id}},
			bson.D{{Key: "$inc", Value: bson.D{{Key: "queued", Value: queued}, {Key: "skipped", Value: b.Skipped}}}})
		if err != nil {
			return fmt.Errorf("counting for replay %s: %w", id, err)
		}

		return nil
	})
	if err != nil {
		return 0, held, fmt.Errorf("replay %s: %w", id, err)
	}

	if again {
		// The document has the exact count.
		queued = int64(len(b.Envelopes))
	}
	return queued, held, nil
}

// move moves the cursor. It returns false if this batch was committed before.
func (r *replayStore) move(tx context.Context, id string, b replayBatch) (bool, error) {
	var p struct {
		State  string       `bson:"state"`
		Cursor replayCursor `bson:"cursor"`
		Batch  string       `bson:"batch"`
	}
	if err := r.coll.FindOne(tx, bson.D{{Key: "_id", Value: id}}).Decode(&p); err != nil {
		return false, mongodb.Refusal(err, "reading replay "+id, "find", mongodb.Namespace(r.coll))
	}

	switch {
	case p.Batch == b.Name:
		// An earlier attempt was committed, although its outcome was unknown.
		return false, nil
	case p.State != ReplayRunning || p.Cursor != b.From:
		return false, ErrReplayMoved
	}

	_, err := r.coll.UpdateOne(tx, bson.D{{Key: "_id", Value: id}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "cursor", Value: mongodb.Literal(b.To)}, {Key: "batch", Value: mongodb.Literal(b.Name)}, {Key: "updatedAt", Value: "$$NOW"},
	}}}})
	if err != nil {
		return false, mongodb.Refusal(err, "moving replay "+id, "find and update", mongodb.Namespace(r.coll))
	}
	return true, nil
}

// update returns the write that queues one envelope.
func (q *requeue) update(replay string, seal []byte) mongo.WriteModel {
	delivery := bson.D{{Key: "$ifNull", Value: bson.A{"$delivery", int32(0)}}}
	set := bson.D{
		{Key: "state", Value: "retry"},
		{Key: "nextAt", Value: "$$NOW"},
		{Key: "attempts", Value: mongodb.Literal(int32(0))},
		{Key: "delivery", Value: bson.D{{Key: "$add", Value: bson.A{delivery, int32(1)}}}},
		{Key: "origin", Value: outboxes.OriginReplay},
		{Key: "replayOf", Value: mongodb.Literal(replay)},
		{Key: "seal", Value: seal},
		// The envelopes of a key follow each other as they were first committed.
		{Key: "pos", Value: outboxes.PosAt(q.TS)},
		{Key: "ts", Value: "$$CLUSTER_TIME"},
		{Key: "firstTs", Value: outboxes.FirstStamp},
	}

	if q.Key != "" {
		set = append(set, bson.E{Key: "key", Value: mongodb.Literal(q.Key)})
	}

	// The outcome of the earlier delivery does not belong to the replay.
	drop := bson.A{"sentAt", "sent", "lastError", "history", "claim"}
	if q.Pending != nil {
		set = append(set, bson.E{Key: "pending", Value: mongodb.Literal(q.Pending)})
	} else {
		drop = append(drop, "pending")
	}

	return mongo.NewUpdateOneModel().
		// A replay gives each envelope another timestamp, so two replays cannot queue it at the same time.
		SetFilter(bson.D{
			{Key: "_id", Value: q.ID}, {Key: "ts", Value: q.TS}, {Key: "state", Value: nil}, {Key: "dueAt", Value: nil},
		}).
		SetUpdate(mongo.Pipeline{{{Key: "$set", Value: set}}, {{Key: "$unset", Value: drop}}})
}

// Outstanding counts the envelopes that the replay has queued in a collection and that the relay has
// not settled, up to limit. Without the index for that, it uses the index of all exceptions.
func (r *replayStore) Outstanding(ctx context.Context, id string, ns string, limit int64) (int64, error) {
	coll := outboxes.CollectionOf(r.state.Client(), ns)

	mine := bson.D{{Key: "origin", Value: outboxes.OriginReplay}, {Key: "replayOf", Value: id}}
	opts := options.Count().SetLimit(max(limit, 1))
	n, err := mongodb.Majority(coll).CountDocuments(ctx, mine, opts.SetHint(mongodb.ReplayIndex))
	if mongodb.HasCode(err, codeBadValue) {
		mine = append(mine,
			bson.E{Key: "state", Value: bson.D{{Key: "$in", Value: bson.A{envelope.StateRetry, envelope.StateBlocked, envelope.StateParked}}}})
		n, err = mongodb.Majority(coll).CountDocuments(ctx, mine, options.Count().SetLimit(max(limit, 1)))
	}
	if err != nil {
		return 0, mongodb.Refusal(err, "counting what replay "+id+" has queued in "+ns, "find", ns)
	}
	return n, nil
}
