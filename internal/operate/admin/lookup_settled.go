package admin

import (
	"context"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// settledUpTo decides which envelopes the watcher has passed: those that were committed before its position.
type settledUpTo struct {
	op       Operator
	position bson.Timestamp // zero if it is unknown: then every envelope is recent
	margin   time.Duration  // between a timestamp and its commit
}

// readSettled reads the position of the watcher. Read it before the waiting envelopes: one that is stored as waiting later is after it.
func readSettled(ctx context.Context, op Operator) settledUpTo {
	position, _ := op.lowestPosition(ctx)
	return settledUpTo{op: op, position: position, margin: mongodb.Margin(ctx, op.State.Client())}
}

// describeStored describes envelopes that are stored in an outbox. It reads the recent ones again, as of the position.
func (s settledUpTo) describeStored(ctx context.Context, ns string, stored []bson.Raw) ([]FoundEnvelope, error) {
	found := make([]FoundEnvelope, len(stored))
	var recent []bson.RawValue
	for i, raw := range stored {
		found[i] = s.describeEnvelope(ns, s.op.Mapping.ToContract(raw))
		if found[i].State == stateAppended {
			recent = append(recent, raw.Lookup("_id"))
		}
	}
	passed, err := s.findPassed(ctx, ns, recent)
	if err != nil {
		return nil, err
	}

	for i, raw := range stored {
		if found[i].State == stateAppended && passed[mongodb.ValueKey(raw.Lookup("_id"))] {
			found[i].State = stateDelivered
		}
	}
	return found, nil
}

// findPassed returns which of the ids were in the outbox at the position: their commits are before it, whatever their stamps are. It returns
// none if the server has no snapshot of that time any more, because the position is minutes old.
func (s settledUpTo) findPassed(ctx context.Context, ns string, ids []bson.RawValue) (map[string]bool, error) {
	if len(ids) == 0 || s.position.IsZero() {
		return nil, nil
	}
	// Events of the very time of the position may still come.
	before := bson.Timestamp{T: s.position.T, I: s.position.I - 1}
	if s.position.I == 0 {
		before = bson.Timestamp{T: s.position.T - 1, I: math.MaxUint32}
	}

	client := s.op.State.Client()
	session, err := client.StartSession(options.Session().SetCausalConsistency(false).SetSnapshot(true).SetSnapshotTime(before))
	if err != nil {
		return nil, wrapError("starting a session", err)
	}
	defer session.EndSession(context.WithoutCancel(ctx))

	passed := map[string]bool{}
	list, err := mongodb.FindAll[bson.Raw](mongo.NewSessionContext(ctx, session), outboxes.CollectionOf(client, ns), "finding envelopes in "+ns,
		bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	if mongodb.HasCode(err, mongodb.CodeSnapshotTooOld, mongodb.CodeSnapshotUnavailable) {
		return nil, nil
	}
	for _, raw := range list {
		passed[mongodb.ValueKey(raw.Lookup("_id"))] = true
	}
	return passed, err
}
