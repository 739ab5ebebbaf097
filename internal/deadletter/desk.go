package deadletter

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/state"
)

// Desk edits, requeues and discards the dead letters of a watcher. It is for processes that do not
// own the watcher. A Desk is made for one action: its Run is stored on the letters that the action
// requeues.
type Desk struct {
	State   state.Database // contains the watcher documents; its client also reaches the outboxes
	Watcher string
	Actor   string
	Run     string
	Mapping *envelope.Mapping // reads the envelopes; nil: they are those of the contract
}

// NewDesk returns a Desk for one action of actor, with a new Run.
func NewDesk(state state.Database, watcher, actor string) Desk {
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

var (
	// ErrOtherVersion is returned for an edit that was made from another version of the letter.
	ErrOtherVersion = errors.New("the edit was made from another version")
	// ErrReplayed is returned for an edit of a letter that is already requeued.
	ErrReplayed = errors.New("it is already requeued")
)

// markReplayed marks letters as requeued with the given delivery. edited names the fields that were changed.
func (k Desk) markReplayed(
	tx context.Context, dead *mongo.Collection, letters []ID, delivery int32, edited []string,
) error {
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

	set := bson.D{{Key: "replayed", Value: replayed}}
	if _, err := dead.UpdateMany(tx, idIn(letters), mongo.Pipeline{{{Key: "$set", Value: set}}}); err != nil {
		return fmt.Errorf("marking dead letters of %s as requeued: %w", mongodb.Namespace(dead), err)
	}
	return nil
}

// readOutboxEntries returns the state of the envelopes with these ids that are in the outbox, by
// [mongodb.ValueKey] of the id.
func readOutboxEntries(
	ctx context.Context, outbox *mongo.Collection, ids []bson.RawValue,
) (map[string]*outboxEntry, error) {
	fields := options.Find().SetProjection(mongodb.Fields("state", "dueAt", "claim", "sentAt", "delivery"))
	entries := make(map[string]*outboxEntry)
	err := mongodb.FindEach(ctx, outbox, "finding envelopes in "+mongodb.Namespace(outbox), idIn(ids), func(raw bson.Raw) error {
		entries[mongodb.ValueKey(raw.Lookup("_id"))] = newOutboxEntry(raw)
		return nil
	}, fields)
	return entries, err
}

// mapKey returns a map key for the id.
func (id ID) mapKey() string { return strconv.Itoa(int(id.Delivery)) + mongodb.ValueKey(id.ID) + id.NS }
