package deadletter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/resume"
)

// maxCheckpointWait is how long a letter's event is waited for that the watcher has not passed.
const maxCheckpointWait = 2 * time.Second

// Discard removes the letters of one outbox that match and were there when it began, and returns how many. It takes no
// fence: no envelope changes. Each part of at most [MaxLetters] is one write with majority; after a crash in the middle the
// same call removes the rest. A letter whose event the watcher has not passed is a [*RefusedError], and nothing is removed:
// the letter alone keeps the next owner from sending that event (N15). did, if not nil, hears the sum after each.
func (k Desk) Discard(ctx context.Context, ns string, q Query, did func(int64)) (int64, error) {
	now, err := store.ServerTime(ctx, k.client())
	if err != nil {
		return 0, err
	}
	if q, err = q.restrictToAction(now); err != nil {
		return 0, err
	}
	dead, err := deadCollection(k.client(), ns)
	if err != nil {
		return 0, err
	}
	if err := store.CatchUp(ctx, dead); err != nil {
		return 0, err
	}
	// A watcher that runs passes the event with its next checkpoint.
	refused := new(RefusedError)
	for began := time.Now(); ; {
		if err = k.checkPassed(ctx, dead, q); !errors.As(err, &refused) || time.Since(began) > maxCheckpointWait {
			break
		}
		if err := retry.Sleep(ctx, maxCheckpointWait/20); err != nil {
			return 0, err
		}
	}
	if err != nil {
		return 0, err
	}
	var total int64
	for s := (&scan{dead: dead, filter: q.mongoFilter()}); ; {
		part, err := s.nextPart(ctx, MaxLetters, math.MaxInt)
		if err != nil || len(part) == 0 {
			return total, err
		}
		ids := make([]ID, len(part))
		chunks := bson.A{}
		for i, p := range part {
			ids[i] = p.ID
			for n := range p.Chunks {
				chunks = append(chunks, chunkID{p.ID, n})
			}
		}
		// Chunks first: a crash between leaves a letter that says so, and not chunks that nobody finds.
		if len(chunks) > 0 {
			if _, err := dead.DeleteMany(ctx, fieldIn("_id", chunks)); err != nil {
				return total, fmt.Errorf("discarding from %s: %w", store.Namespace(dead), err)
			}
		}
		// One that was requeued meanwhile may not match any more.
		res, err := dead.DeleteMany(ctx, joinFilters(fieldIn("_id", ids), q.mongoFilter()))
		if err != nil {
			return total, fmt.Errorf("discarding from %s: %w", store.Namespace(dead), err)
		}
		if total += res.DeletedCount; did != nil {
			did(total)
		}
	}
}

// checkPassed refuses a letter that matches if its event stands behind the position of the watcher or one of its slots.
func (k Desk) checkPassed(ctx context.Context, dead *mongo.Collection, q Query) error {
	watchers := store.Majority(k.State.Collection("watchers"))
	ids, err := store.NewDivisions(k.State).IDs(ctx, k.Watcher)
	if err != nil {
		return err
	}
	for _, id := range ids {
		var doc struct {
			Token       resume.Token   `bson:"token"`
			ClusterTime bson.Timestamp `bson:"clusterTime"`
		}
		err := watchers.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&doc)
		if errors.Is(err, mongo.ErrNoDocuments) || err == nil && doc.ClusterTime.IsZero() {
			continue // without a position nothing is read from one
		}
		if err != nil {
			return fmt.Errorf("reading the position of %s: %w", id, err)
		}
		var letter struct {
			ID ID `bson:"_id"`
		}
		at := cmp.Or(doc.Token.Data(), store.PosAt(doc.ClusterTime))
		err = dead.FindOne(ctx, joinFilters(afterPosition(at), q.mongoFilter()), options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})).Decode(&letter)
		switch {
		case err == nil:
			return &RefusedError{letter.ID, fmt.Sprintf("%s has not passed its event yet, and its next owner would send it without the letter; discard it when the watcher runs and nothing holds it up", id)}
		case !errors.Is(err, mongo.ErrNoDocuments):
			return fmt.Errorf("looking for letters that are needed still in %s: %w", store.Namespace(dead), err)
		}
	}
	return nil
}
