package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
)

// Operator acts on one watcher. Every action is written to the events log with its actor.
type Operator struct {
	State   *mongo.Database
	Watcher string
	Actor   string
	Source  string // the way by which the actor came: cli, api or page; "" is not written down
	Slot    string // only this slot of it, such as "0of2", where an action is one on the lease; "" is all (N28)
	// Outboxes lists what the watcher reads by its configuration. Without it the registry tells what the watcher has read so far.
	Outboxes func(ctx context.Context) ([]store.Outbox, error)
}

// ids are the watcher documents that an action is on. A watcher that never ran has one, which is not there.
func (o Operator) ids(ctx context.Context) ([]string, error) {
	if o.Slot != "" {
		p, err := slot.Parse(o.Slot)
		if err != nil {
			return nil, invalid("%v", err)
		}
		return []string{p.ID(o.Watcher)}, nil
	}
	ids, err := store.NewDivisions(o.State).IDs(ctx, o.Watcher)
	if err == nil && len(ids) == 0 {
		ids = []string{slot.Part{}.ID(o.Watcher)}
	}
	return ids, err
}

// all are the ids of the documents that the watcher has, or should have; of the one slot that is named, only its own. A slot
// of another division is refused: its document would make the watcher one that is divided in two ways.
func (o Operator) all(ctx context.Context) ([]string, error) {
	d := store.NewDivisions(o.State)
	v, err := d.Read(ctx, o.Watcher)
	if errors.Is(err, store.ErrNotFound) { // from before divisions were noted: it has as many slots as its documents say
		var there []string
		if there, err = d.IDs(ctx, o.Watcher); err == nil && len(there) > 0 {
			_, p, _ := slot.ParseID(there[0])
			v.Of = p.N
		}
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, p := range slot.Parts(v.Of) {
		ids = append(ids, p.ID(o.Watcher))
	}
	if o.Slot == "" {
		return ids, nil
	}
	one, err := o.ids(ctx)
	if err == nil && v.Of > 0 && !slices.Contains(ids, one[0]) {
		err = invalid("watcher %s has %d slots, and %s is none of them", o.Watcher, v.Of, o.Slot)
	}
	return one, err
}

// each does the same to each of the documents, and writes down that it was done where it was done to any: one that fails
// does not spare the others, and its error comes with theirs.
func (o Operator) each(ctx context.Context, kind store.Kind, fields bson.D, do func(id string) error) error {
	ids, err := o.ids(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range ids {
		if err := do(id); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) == len(ids) {
		return errors.Join(errs...)
	}
	return errors.Join(append(errs, o.note(ctx, kind, fields))...)
}

// Slots are the slots that an action on the lease is for, as their owners last told of them.
func (o Operator) Slots(ctx context.Context) ([]Watcher, error) {
	ids, err := o.ids(ctx)
	if err != nil {
		return nil, err
	}
	s, err := ReadStatus(ctx, o.State)
	if err != nil {
		return nil, err
	}
	out := slices.DeleteFunc(s.Watchers, func(w Watcher) bool { return !slices.Contains(ids, w.Name+"/"+w.Slot) })
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: %w", ids[0], lease.ErrNotFound)
	}
	return out, nil
}

func (o Operator) watchers() *mongo.Collection { return o.State.Collection("watchers") }

// note writes the action down; one that cannot be written down has happened all the same, so its error comes with that.
func (o Operator) note(ctx context.Context, kind store.Kind, fields bson.D) error {
	fields = append(fields, bson.E{Key: "actor", Value: o.Actor})
	if o.Slot != "" {
		fields = append(fields, bson.E{Key: "slot", Value: o.Slot})
	}
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
	return o.each(ctx, store.Paused, nil, func(id string) error { return lease.Pause(ctx, o.watchers(), id) })
}

// Resume ends a pause.
func (o Operator) Resume(ctx context.Context) error {
	return o.each(ctx, store.Resumed, nil, func(id string) error { return lease.Resume(ctx, o.watchers(), id) })
}

// ErrOtherNode refuses a pin that would stop the watcher: to a node that lives and does not run it.
var ErrOtherNode = errors.New("the node does not run the watcher")

// Pin hands the watcher to node and keeps it there while that node lives; an empty node ends it. A node that nobody has heard
// of may be pinned to before it is started; until then any other runs the watcher.
func (o Operator) Pin(ctx context.Context, node string) error {
	if err := o.runs(ctx, node); err != nil {
		return err
	}
	return o.each(ctx, "pinned", bson.D{{Key: "to", Value: node}}, func(id string) error { return lease.Pin(ctx, o.watchers(), id, node) })
}

// runs refuses a node that is alive, so that all others would keep away, and that works for other watchers only.
func (o Operator) runs(ctx context.Context, node string) error {
	if node == "" {
		return nil
	}
	list, err := store.NewNodes(o.State.Collection("nodes")).List(ctx)
	if err != nil {
		return err
	}
	for i := range list {
		if n := &list[i]; n.Node == node && n.Alive(nodeStale) && !slices.Contains(n.Watchers, o.Watcher) {
			return fmt.Errorf("node %s works for %q and not for watcher %s, so nobody would send its events: %w", node, n.Watchers, o.Watcher, ErrOtherNode)
		}
	}
	return nil
}

// StepDown makes the owner release, and keeps it away for hold, which must be positive.
func (o Operator) StepDown(ctx context.Context, hold time.Duration) error {
	if hold < time.Millisecond {
		return invalid("a node that steps down for %s would not step down at all; give a time such as 30s", hold)
	}
	return o.each(ctx, store.SteppedDown, bson.D{{Key: "hold_ms", Value: hold.Milliseconds()}}, func(id string) error { return lease.StepDown(ctx, o.watchers(), id, hold) })
}

// Adopt makes state that was copied from another replica set this one's (N5).
func (o Operator) Adopt(ctx context.Context) error {
	here, err := lease.ReplicaSetID(ctx, o.State.Client())
	if err != nil {
		return err
	}
	return o.each(ctx, "adopted", bson.D{{Key: "replica_set", Value: here}}, func(id string) error { return lease.Adopt(ctx, o.watchers(), id, here) })
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
// on envelopes are swept, which must not be in the future; the zero time is everything that the collections hold. What the
// watcher has not delivered yet is swept in any case. An order that comes during a sweep is carried out as well.
func (o Operator) Recover(ctx context.Context, from time.Time) error {
	since, err := o.sweptFrom(ctx, from)
	if err != nil {
		return err
	}
	ids, err := o.all(ctx)
	if err != nil {
		return err
	}
	for _, id := range ids { // a repetition orders what is ordered
		if err := lease.OrderSweep(ctx, o.watchers(), id, since, bounce); err != nil {
			return err
		}
	}
	return o.note(ctx, "recover_ordered", bson.D{{Key: "from", Value: from}})
}

// sweptFrom is the cluster time of an order to sweep. One of the future would skip what is not delivered, or mean a mistake
// with a time zone.
func (o Operator) sweptFrom(ctx context.Context, from time.Time) (bson.Timestamp, error) {
	if from.IsZero() {
		return bson.Timestamp{}, nil
	}
	now, err := store.ServerTime(ctx, o.State.Client())
	if err != nil {
		return bson.Timestamp{}, err
	}
	if from.After(now) {
		return bson.Timestamp{}, invalid("nothing can be swept from %s on, which is in the future: for MongoDB it is %s; check the time zone", from.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	if from.Unix() <= 0 {
		return bson.Timestamp{}, invalid("%s is before 1970; leave the time out to sweep everything", from.UTC().Format(time.RFC3339))
	}
	return bson.Timestamp{T: uint32(from.Unix())}, nil
}
