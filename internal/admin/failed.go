package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/letters"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/waiting"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// The entries of the events log for actions on failed envelopes.
const (
	failedReset   nodes.Kind = "failed_reset"
	failedRetried nodes.Kind = "failed_retried"
)

// FailedEnvelope is an envelope that was rejected for its own reason and waits for another attempt.
type FailedEnvelope struct {
	Collection string    `json:"collection"`
	ID         string    `json:"id"`
	Delivery   int32     `json:"delivery"`
	Type       string    `json:"type"`
	Key        string    `json:"key,omitempty"`
	Topics     []string  `json:"topics"` // topics that do not have it yet; empty means all that it routes to
	Attempts   int32     `json:"attempts"`
	NextAt     time.Time `json:"next_at"`
	Class      string    `json:"class"`
	Reason     string    `json:"reason"`
	Topic      string    `json:"topic,omitempty"` // the topic that rejected it
	FailedAt   time.Time `json:"failed_at"`
}

// Failed returns up to limit failed envelopes of all collections of the watcher, or of the
// named one. The latest failure comes first. limit is at most 100, which is also the default.
func (w Waiting) Failed(ctx context.Context, collection string, limit int) ([]FailedEnvelope, error) {
	failed := []FailedEnvelope{}
	namespaces, err := w.op.Collections(ctx, collection)
	if err != nil {
		return failed, err
	}
	if limit <= 0 || limit > waiting.MaxFailed {
		limit = waiting.MaxFailed
	}

	// Each collection may have the latest failures, so each of them returns as many as the result may have.
	for _, ns := range namespaces {
		coll := outboxes.CollectionOf(w.op.State.Client(), ns)
		list, err := waiting.ListFailed(ctx, coll, w.op.Mapping, limit)
		if err != nil {
			return failed, err
		}
		for i := range list {
			failed = append(failed, newFailedEnvelope(ns, &list[i]))
		}
	}

	// Each list has the latest failures of its collection, so the latest of all are among them.
	slices.SortStableFunc(failed, func(a, b FailedEnvelope) int { return b.FailedAt.Compare(a.FailedAt) })
	return failed[:min(len(failed), limit)], nil
}

func newFailedEnvelope(ns string, f *waiting.Failed) FailedEnvelope {
	e := FailedEnvelope{
		Collection: ns,
		ID:         letters.IDText(f.ID),
		Delivery:   f.Delivery,
		Type:       truncateText(f.Type),
		Key:        truncateText(envelope.CanonicalText(f.Key)),
		Topics:     f.Pending,
		Attempts:   f.Attempts,
		NextAt:     f.NextAt,
		Class:      f.LastError.Class,
		Reason:     f.LastError.Reason,
		Topic:      f.LastError.Topic,
		FailedAt:   f.LastError.At,
	}

	if e.Topics == nil {
		e.Topics = []string{}
	}
	return e
}

// FailedOutcome counts the effects of an action on failed envelopes, or with a dry run the expected
// effects.
type FailedOutcome struct {
	DryRun bool  `json:"dry_run"`
	Given  int   `json:"given"`  // ids
	Failed int64 `json:"failed"` // failed envelopes with these ids
	Done   int64 `json:"done"`
}

// failedAction changes failed envelopes with the given ids in the transaction ctx, and returns
// their number.
type failedAction func(ctx context.Context, coll *mongo.Collection, ids []bson.RawValue) (int64, error)

// Reset removes the failed attempts and the last error from the envelopes with these ids.
// They are tried again immediately, as often as new envelopes. It does not change envelopes that
// wait for another reason, or that were sent in the meantime.
func (w Waiting) Reset(
	ctx context.Context, collection string, ids []string, dryRun bool,
) (FailedOutcome, error) {
	if len(ids) == 0 {
		return FailedOutcome{}, errors.New("no ids are given; outrelay failed list shows them")
	}
	return w.applyToFailed(ctx, collection, ids, dryRun, failedReset, waiting.ResetFailed)
}

// Retry makes the envelopes with these ids due now. Without ids, it uses the envelopes that
// [Waiting.Failed] returns. Their failed attempts still count.
func (w Waiting) Retry(
	ctx context.Context, collection string, ids []string, dryRun bool,
) (FailedOutcome, error) {
	if len(ids) == 0 {
		list, err := w.Failed(ctx, collection, 0)
		if err != nil {
			return FailedOutcome{}, err
		}
		for _, e := range list {
			ids = append(ids, e.ID)
		}
	}
	return w.applyToFailed(ctx, collection, ids, dryRun, failedRetried, waiting.HurryFailed)
}

// applyToFailed applies action to the failed envelopes with these ids, and logs it as kind.
func (w Waiting) applyToFailed(
	ctx context.Context, collection string, ids []string, dryRun bool, kind nodes.Kind, action failedAction,
) (FailedOutcome, error) {
	out := FailedOutcome{DryRun: dryRun, Given: len(ids)}
	namespaces, err := w.op.Collections(ctx, collection)
	if err != nil {
		return out, err
	}

	// A text may stand for ids of several BSON types.
	var values []bson.RawValue
	for _, text := range ids {
		v, err := parseIDValues(text)
		if err != nil {
			return out, err
		}
		values = append(values, v...)
	}

	err = w.applyToCollections(ctx, namespaces, values, &out, dryRun, action)
	if dryRun || out.Done == 0 {
		return out, err
	}
	return out, w.op.logOutcome(ctx, kind, bson.D{
		{Key: "count", Value: out.Done},
		{Key: "ids", Value: ids[:min(len(ids), 100)]},
	}, err)
}

// applyToCollections applies action to each collection that contains failed envelopes with the
// given ids.
func (w Waiting) applyToCollections(
	ctx context.Context, namespaces []string, ids []bson.RawValue, out *FailedOutcome, dryRun bool, action failedAction,
) error {
	for _, ns := range namespaces {
		coll := outboxes.CollectionOf(w.op.State.Client(), ns)

		for part := range slices.Chunk(ids, mongodb.MaxDocuments) {
			n, err := mongodb.Majority(coll).CountDocuments(ctx, bson.D{
				{Key: "_id", Value: bson.D{{Key: "$in", Value: part}}},
				{Key: "state", Value: envelope.StateRetry},
				{Key: "attempts", Value: bson.D{{Key: "$gt", Value: 0}}},
			})
			if err != nil {
				return fmt.Errorf("counting failed envelopes of %s: %w", ns, err)
			}
			out.Failed += n

			// A watcher may read a thousand collections, so only a collection with a match
			// costs a transaction with the fence.
			if n == 0 || dryRun {
				continue
			}
			var done int64
			err = mongodb.Foreign(ctx, w.op.State, w.op.Watcher, []string{ns}, func(tx context.Context) (err error) {
				done, err = action(tx, coll, part)
				return err
			})
			if err != nil {
				return fmt.Errorf("resetting failed envelopes of %s: %w", ns, err)
			}
			out.Done += done
		}
	}
	return nil
}
