package admin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/store"
)

// Slot is the one slot of a watcher that is not split (N28).
const Slot = "0of1"

// Operator acts on one watcher. Every action is written to the events log with its actor.
type Operator struct {
	State   *mongo.Database
	Watcher string
	Actor   string
	Source  string // the way by which the actor came: cli, api or page; "" is not written down
}

func (o Operator) id() string                  { return o.Watcher + "/" + Slot }
func (o Operator) watchers() *mongo.Collection { return o.State.Collection("watchers") }

// note writes the action down; one that cannot be written down has happened all the same, so its error comes with that.
func (o Operator) note(ctx context.Context, kind store.Kind, fields bson.D) error {
	fields = append(fields, bson.E{Key: "actor", Value: o.Actor})
	if o.Source != "" {
		fields = append(fields, bson.E{Key: "source", Value: o.Source})
	}
	if err := store.NewEvents(o.State.Collection("events"), o.Watcher, "").Append(ctx, kind, fields); err != nil {
		return fmt.Errorf("done, but not written to the events log: %w", err)
	}
	return nil
}

// Pause stops the watcher, whoever owns it, until Resume: the owner drains and releases at its next renewal.
func (o Operator) Pause(ctx context.Context) error {
	if err := lease.Pause(ctx, o.watchers(), o.id()); err != nil {
		return err
	}
	return o.note(ctx, store.Paused, nil)
}

// Resume ends a pause.
func (o Operator) Resume(ctx context.Context) error {
	if err := lease.Resume(ctx, o.watchers(), o.id()); err != nil {
		return err
	}
	return o.note(ctx, store.Resumed, nil)
}

// Pin hands the watcher to node and keeps it there while that node lives; an empty node ends it.
func (o Operator) Pin(ctx context.Context, node string) error {
	if err := lease.Pin(ctx, o.watchers(), o.id(), node); err != nil {
		return err
	}
	return o.note(ctx, "pinned", bson.D{{Key: "to", Value: node}})
}

// StepDown makes the owner release, and keeps it away for hold.
func (o Operator) StepDown(ctx context.Context, hold time.Duration) error {
	if err := lease.StepDown(ctx, o.watchers(), o.id(), hold); err != nil {
		return err
	}
	return o.note(ctx, store.SteppedDown, bson.D{{Key: "hold_ms", Value: hold.Milliseconds()}})
}

// Adopt makes state that was copied from another replica set this one's (N5).
func (o Operator) Adopt(ctx context.Context) error {
	here, err := lease.ReplicaSetID(ctx, o.State.Client())
	if err != nil {
		return err
	}
	if err := lease.Adopt(ctx, o.watchers(), o.id(), here); err != nil {
		return err
	}
	return o.note(ctx, "adopted", bson.D{{Key: "replica_set", Value: here}})
}

// Release gives up the watcher's claim on a collection, so that another watcher may read it (N25). It reports whether
// there was one.
func (o Operator) Release(ctx context.Context, ns string) (bool, error) {
	r := store.NewRegistry(o.State.Collection("collections"))
	claims, err := r.Claims(ctx, o.Watcher)
	if err != nil {
		return false, err
	}
	for _, c := range claims {
		if c.NS != ns {
			continue
		}
		if err := r.Release(ctx, [16]byte(c.UUID.Data), o.Watcher); err != nil {
			return false, err
		}
		return true, o.note(ctx, "collection_released", bson.D{{Key: "collection", Value: ns}})
	}
	return false, nil
}

// bounce is how long an owner that is told to recover stays away, so that it acquires anew and sees the order.
const bounce = time.Second

// Recover orders a sweep: the next owner delivers, flagged as redelivered, every envelope of the watched collections that
// its place in the stream does not cover, and goes on with the stream behind it. It serves a watcher whose document
// vanished, which is made anew, and one that halted over lost history or a dropped collection. from is the time from which
// on envelopes are swept; the zero time is everything that the collections hold.
func (o Operator) Recover(ctx context.Context, from time.Time) error {
	since := bson.Timestamp{}
	if !from.IsZero() {
		since.T = uint32(from.Unix())
	}
	gap := lease.Gap{Reason: lease.GapOrdered, From: since, Since: time.Now()}
	_, err := o.watchers().UpdateOne(ctx, bson.D{{Key: "_id", Value: o.id()}}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "gap", Value: gap}}},
		{Key: "$setOnInsert", Value: bson.D{{Key: "owner", Value: nil}, {Key: "expiresAt", Value: time.UnixMilli(0)}}},
	}, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("ordering a sweep for watcher %s: %w", o.Watcher, err)
	}
	if err := lease.StepDown(ctx, o.watchers(), o.id(), bounce); err != nil && !errors.Is(err, lease.ErrNotFound) {
		return err
	}
	return o.note(ctx, "recover_ordered", bson.D{{Key: "from", Value: from}})
}
