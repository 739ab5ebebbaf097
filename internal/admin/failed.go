package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// The entries of the events log that tell of failed envelopes.
const (
	failedReset   store.Kind = "failed_reset"
	failedRetried store.Kind = "failed_retried"
)

// FailedEnvelope is an envelope that was refused for its own reason and will be tried again.
type FailedEnvelope struct {
	Collection string    `json:"collection"`
	ID         string    `json:"id"`
	Delivery   int32     `json:"delivery"`
	Type       string    `json:"type"`
	Key        string    `json:"key,omitempty"`
	Topics     []string  `json:"topics"` // that are left; empty is all that it routes to
	Attempts   int32     `json:"attempts"`
	NextAt     time.Time `json:"next_at"`
	Class      string    `json:"class"`
	Reason     string    `json:"reason"`
	Topic      string    `json:"topic,omitempty"` // that refused it
	FailedAt   time.Time `json:"failed_at"`
}

// FailedList are up to limit failed envelopes of the watcher's collections, or of the one that is named, those that failed
// last first. limit is at most 100; 0 is that.
func (o Operator) FailedList(ctx context.Context, collection string, limit int) ([]FailedEnvelope, error) {
	out := []FailedEnvelope{}
	namespaces, err := o.Collections(ctx, collection)
	if err != nil {
		return out, err
	}
	if limit <= 0 || limit > store.MaxFailed {
		limit = store.MaxFailed
	}
	for _, ns := range namespaces {
		coll, err := store.Outboxed(o.State.Client(), ns)
		if err != nil {
			return out, err
		}
		list, err := store.ListFailed(ctx, coll, limit)
		if err != nil {
			return out, err
		}
		for i := range list {
			out = append(out, failedEnvelope(ns, &list[i]))
		}
	}
	slices.SortStableFunc(out, func(a, b FailedEnvelope) int { return b.FailedAt.Compare(a.FailedAt) })
	return out[:min(len(out), limit)], nil
}

func failedEnvelope(ns string, f *store.Failed) FailedEnvelope {
	e := FailedEnvelope{
		Collection: ns, ID: idText(f.ID), Delivery: f.Delivery, Type: clip(f.Type), Key: clip(idText(f.Key)), Topics: f.Pending, Attempts: f.Attempts, NextAt: f.NextAt,
		Class: f.LastError.Class, Reason: f.LastError.Reason, Topic: f.LastError.Topic, FailedAt: f.LastError.At,
	}
	if e.Topics == nil {
		e.Topics = []string{}
	}
	return e
}

// idText is the canonical text of an id or a key.
func idText(v bson.RawValue) string {
	switch v.Type {
	case bson.TypeInt32, bson.TypeInt64:
		return fmt.Sprint(v.AsInt64())
	case bson.TypeString, bson.TypeObjectID, bson.TypeBinary:
		var id event.ID
		if id.UnmarshalBSONValue(byte(v.Type), v.Value) == nil {
			return id.String()
		}
	}
	return ""
}

// FailedOutcome counts what an action on failed envelopes did, or with a dry run would do.
type FailedOutcome struct {
	DryRun bool  `json:"dry_run"`
	Given  int   `json:"given"`  // ids
	Failed int64 `json:"failed"` // envelopes of these ids that have failed
	Done   int64 `json:"done"`
}

// FailedReset takes the failed attempts off the envelopes of these ids, and the error: they are tried again at once, and as
// often as new ones. Envelopes that wait for another reason, or were sent meanwhile, are left alone.
func (o Operator) FailedReset(ctx context.Context, collection string, ids []string, dryRun bool) (FailedOutcome, error) {
	if len(ids) == 0 {
		return FailedOutcome{}, errors.New("no ids are given; outrelay failed list shows them")
	}
	return o.failed(ctx, collection, ids, dryRun, failedReset, store.ResetFailed)
}

// FailedRetry makes the envelopes of these ids, or without any those that [Operator.FailedList] shows, due now; the attempts
// that failed still count.
func (o Operator) FailedRetry(ctx context.Context, collection string, ids []string, dryRun bool) (FailedOutcome, error) {
	if len(ids) == 0 {
		list, err := o.FailedList(ctx, collection, 0)
		if err != nil {
			return FailedOutcome{}, err
		}
		for _, e := range list {
			ids = append(ids, e.ID)
		}
	}
	return o.failed(ctx, collection, ids, dryRun, failedRetried, store.HurryFailed)
}

func (o Operator) failed(ctx context.Context, collection string, ids []string, dryRun bool, kind store.Kind,
	act func(context.Context, *mongo.Collection, []bson.RawValue) (int64, error),
) (FailedOutcome, error) {
	out := FailedOutcome{DryRun: dryRun, Given: len(ids)}
	namespaces, err := o.Collections(ctx, collection)
	if err != nil {
		return out, err
	}
	var values []bson.RawValue
	for _, text := range ids {
		v, err := idValues(text)
		if err != nil {
			return out, err
		}
		values = append(values, v...)
	}
	if err = o.eachFailed(ctx, namespaces, values, &out, dryRun, act); dryRun || out.Done == 0 {
		return out, err
	}
	return out, o.audit(ctx, kind, bson.D{{Key: "count", Value: out.Done}, {Key: "ids", Value: ids[:min(len(ids), 100)]}}, err)
}

// eachFailed takes the fence only where there is something to do: a watcher may read a thousand collections.
func (o Operator) eachFailed(ctx context.Context, namespaces []string, values []bson.RawValue, out *FailedOutcome, dryRun bool,
	act func(context.Context, *mongo.Collection, []bson.RawValue) (int64, error),
) error {
	for _, ns := range namespaces {
		coll, err := store.Outboxed(o.State.Client(), ns)
		if err != nil {
			return err
		}
		for part := range slices.Chunk(values, store.MaxExceptions) {
			n, err := store.Majority(coll).CountDocuments(ctx, bson.D{
				{Key: "_id", Value: bson.D{{Key: "$in", Value: part}}}, {Key: "state", Value: event.StateRetry}, {Key: "attempts", Value: bson.D{{Key: "$gt", Value: 0}}},
			})
			if err != nil {
				return fmt.Errorf("counting failed envelopes of %s: %w", ns, err)
			}
			if out.Failed += n; n == 0 || dryRun {
				continue
			}
			var done int64
			err = store.Foreign(ctx, o.State, o.Watcher, []string{ns}, func(tx context.Context) (err error) {
				done, err = act(tx, coll, part)
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
