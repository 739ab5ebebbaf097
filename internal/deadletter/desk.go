package deadletter

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// Desk edits, requeues and discards the dead letters of a watcher. It is for processes that do not
// own the watcher. A Desk is made for one action: its Run is stored on the letters that the action
// requeues.
type Desk struct {
	State   *mongo.Database // contains the watcher documents; its client also reaches the outboxes
	Watcher string
	Actor   string
	Run     string
	Mapping *envelope.Mapping // reads the envelopes; nil: they are those of the contract
}

// NewDesk returns a Desk for one action of actor, with a new Run.
func NewDesk(state *mongo.Database, watcher, actor string) Desk {
	return Desk{State: state, Watcher: watcher, Actor: actor, Run: uuid.NewString()}
}

func (k Desk) client() *mongo.Client { return k.State.Client() }

// newEnvelopeBuilder reads the server time and the seal, which all envelopes of a requeue have in
// common.
func (k Desk) newEnvelopeBuilder(ctx context.Context, ignoreExpiry bool) (envelopeBuilder, error) {
	now, err := mongodb.ServerTime(ctx, k.client())
	if err != nil {
		return envelopeBuilder{}, err
	}

	seal, err := outboxes.NewRegistry(k.State.Collection("collections")).Seal(ctx)
	return envelopeBuilder{mapping: k.Mapping, now: now, ignoreExpiry: ignoreExpiry, seal: seal}, err
}

func (k Desk) outboxCollection(ns string) *mongo.Collection {
	return mongodb.Majority(outboxes.CollectionOf(k.client(), ns))
}

// RefusedError is returned for a letter that cannot be requeued as it is. The reason includes the
// fix. Nothing was changed.
type RefusedError struct {
	ID     ID
	Reason string
}

func (e *RefusedError) Error() string { return e.ID.String() + ": " + e.Reason }

// ConflictError is returned for an edit that was made from another version of the letter.
type ConflictError struct {
	ID         ID
	Want, Have int32
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("%s: it is at version %d, but the edit was made from version %d; "+
		"show it again and edit that version",
		e.ID, e.Have, e.Want)
}

// ReplayedError is returned for a letter that is already requeued.
type ReplayedError struct {
	ID ID
	By Replayed
}

func (e *ReplayedError) Error() string {
	return fmt.Sprintf("%s: %s requeued it at %s as delivery %d; if that delivery died too, requeue its dead letter",
		e.ID, e.By.Actor, e.By.At.UTC().Format(time.RFC3339), e.By.Delivery)
}

// markReplayed marks the letters that match filter as requeued with the given delivery, and returns
// their number. edited names the fields that were changed.
func (k Desk) markReplayed(
	tx context.Context, dead *mongo.Collection, filter bson.D, delivery int32, edited []string,
) (int64, error) {
	// Literals, because a text that begins with $ would be an expression in a pipeline.
	replayed := bson.D{
		{Key: "at", Value: "$$NOW"},
		{Key: "actor", Value: mongodb.Literal(k.Actor)},
		{Key: "delivery", Value: mongodb.Literal(delivery)},
		{Key: "run", Value: mongodb.Literal(k.Run)},
	}
	if len(edited) > 0 {
		replayed = append(replayed, bson.E{Key: "edited", Value: mongodb.Literal(edited)})
	}

	oldVersion := bson.D{{Key: "$ifNull", Value: bson.A{"$version", int32(0)}}}
	res, err := dead.UpdateMany(tx, filter, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "version", Value: bson.D{{Key: "$add", Value: bson.A{oldVersion, int32(1)}}}},
		{Key: "replayed", Value: replayed},
	}}}})
	if err != nil {
		return 0, fmt.Errorf("marking dead letters of %s as requeued: %w", mongodb.Namespace(dead), err)
	}
	return res.MatchedCount, nil
}

// readOutboxEntries returns the state of the envelopes with these ids that are in the outbox, by
// [mongodb.ValueKey] of the id.
func readOutboxEntries(
	ctx context.Context, outbox *mongo.Collection, ids []bson.RawValue,
) (map[string]*outboxEntry, error) {
	fields := options.Find().SetProjection(bson.D{
		{Key: "state", Value: 1},
		{Key: "dueAt", Value: 1},
		{Key: "claim", Value: 1},
		{Key: "sentAt", Value: 1},
		{Key: "delivery", Value: 1},
	})

	entries := make(map[string]*outboxEntry)
	err := mongodb.FindEach(ctx, outbox, "finding envelopes in "+mongodb.Namespace(outbox), idIn(ids), func(raw bson.Raw) error {
		entries[mongodb.ValueKey(raw.Lookup("_id"))] = newOutboxEntry(raw)
		return nil
	}, fields)
	return entries, err
}

// mapKey returns a map key for the id.
func (id ID) mapKey() string { return strconv.Itoa(int(id.Delivery)) + mongodb.ValueKey(id.ID) + id.NS }
