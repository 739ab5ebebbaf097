package deadletter

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
)

// The kinds of sources.
const (
	FromRelay   = "relay"
	FromHandler = "handler"
)

// Desk is where somebody who is not the owner of a watcher deals with its dead letters. One Desk is one action: its Run
// is written on the letters that it requeues.
type Desk struct {
	State   *mongo.Database // of the watcher documents; its client reaches the outboxes too
	Watcher string
	Actor   string
	Run     string
}

// NewDesk begins an action.
func NewDesk(state *mongo.Database, watcher, actor string) Desk {
	return Desk{State: state, Watcher: watcher, Actor: actor, Run: uuid.NewString()}
}

func (k Desk) client() *mongo.Client { return k.State.Client() }

// newEnvelopeBuilder reads what envelopes that are delivered again have in common.
func (k Desk) newEnvelopeBuilder(ctx context.Context, late bool) (envelopeBuilder, error) {
	now, err := store.ServerTime(ctx, k.client())
	if err != nil {
		return envelopeBuilder{}, err
	}
	seal, err := store.NewRegistry(k.State.Collection("collections")).Seal(ctx)
	return envelopeBuilder{now: now, ignoreExpiry: late, seal: seal}, err
}

func (k Desk) outboxCollection(ns string) (*mongo.Collection, error) {
	coll, err := store.Outboxed(k.client(), ns)
	if err != nil {
		return nil, err
	}
	return store.Majority(coll), nil
}

// RefusedError says why a letter cannot be requeued as it is, and what would help. Nothing was changed.
type RefusedError struct {
	ID     ID
	Reason string
}

func (e *RefusedError) Error() string { return e.ID.String() + ": " + e.Reason }

// ErrConflict is what a *ConflictError is.
var ErrConflict = errors.New("the dead letter was changed meanwhile")

// ConflictError refuses an edit that was made from another version of the letter.
type ConflictError struct {
	ID         ID
	Want, Have int32
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("%s: it is at version %d, and the edit was made from version %d; show it again and edit that", e.ID, e.Have, e.Want)
}

// Is makes the error an [ErrConflict].
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// ErrReplayed is what a *ReplayedError is.
var ErrReplayed = errors.New("the dead letter was requeued already")

// ReplayedError refuses a letter that was requeued.
type ReplayedError struct {
	ID ID
	By Replayed
}

func (e *ReplayedError) Error() string {
	return fmt.Sprintf("%s: %s requeued it at %s as delivery %d; if that one died too, it is a letter of its own", e.ID, e.By.Actor, e.By.At.UTC().Format(time.RFC3339), e.By.Delivery)
}

// Is makes the error an [ErrReplayed].
func (e *ReplayedError) Is(target error) bool { return target == ErrReplayed }

// markReplayed writes on letters that they were requeued as one delivery.
func (k Desk) markReplayed(tx context.Context, dead *mongo.Collection, filter bson.D, delivery int32, edited []string) (int64, error) {
	replayed := bson.D{
		{Key: "at", Value: "$$NOW"},
		{Key: "actor", Value: bson.D{{Key: "$literal", Value: k.Actor}}},
		{Key: "delivery", Value: bson.D{{Key: "$literal", Value: delivery}}},
		{Key: "run", Value: bson.D{{Key: "$literal", Value: k.Run}}},
	}
	if len(edited) > 0 {
		replayed = append(replayed, bson.E{Key: "edited", Value: bson.D{{Key: "$literal", Value: edited}}})
	}
	version := bson.D{{Key: "$add", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$version", int32(0)}}}, int32(1)}}}
	res, err := dead.UpdateMany(tx, filter, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "version", Value: version},
		{Key: "replayed", Value: replayed},
	}}}})
	if err != nil {
		return 0, fmt.Errorf("marking letters of %s as requeued: %w", store.Namespace(dead), err)
	}
	return res.MatchedCount, nil
}

// readOutboxEntries reads what the outbox holds under ids, by the bytes of the id.
func readOutboxEntries(ctx context.Context, outbox *mongo.Collection, ids []bson.RawValue) (map[string]*outboxEntry, error) {
	cur, err := outbox.Find(ctx, fieldIn("_id", ids), options.Find().SetProjection(bson.D{
		{Key: "state", Value: 1}, {Key: "dueAt", Value: 1}, {Key: "claim", Value: 1}, {Key: "sentAt", Value: 1}, {Key: "delivery", Value: 1},
	}))
	if err != nil {
		return nil, fmt.Errorf("looking for envelopes in %s: %w", store.Namespace(outbox), err)
	}
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
	out := make(map[string]*outboxEntry)
	for cur.Next(ctx) {
		out[valueKey(cur.Current.Lookup("_id"))] = newOutboxEntry(cur.Current)
	}
	if err := cur.Err(); err != nil {
		return nil, fmt.Errorf("looking for envelopes in %s: %w", store.Namespace(outbox), err)
	}
	return out, nil
}

// valueKey tells values of different types apart.
func valueKey(v bson.RawValue) string { return string([]byte{byte(v.Type)}) + string(v.Value) }

// mapKey is the letter's id for maps.
func (id ID) mapKey() string { return strconv.Itoa(int(id.Delivery)) + valueKey(id.ID) + id.NS }
