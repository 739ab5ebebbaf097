package admin

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/sweep"
)

// SweepCount counts the envelopes of one collection that a sweep would send again.
type SweepCount struct {
	Collection string `json:"collection"`
	Envelopes  int64  `json:"envelopes"`
}

// Recovery continues a watcher whose position is lost or doubtful: after lost history, a vanished watcher document, or a copy of
// the state to another replica set.
type Recovery struct{ op Operator }

// PlanSweep counts the envelopes of each collection that [Recovery.OrderSweep] would send, by the
// conditions of the sweep itself:
//   - the envelopes written at from or later, less the margin for open transactions,
//   - the envelopes without a timestamp,
//   - all envelopes of a collection that was renamed after the position.
//
// It leaves out envelopes that are marked as sent. It includes envelopes that wait or are dead letters, although the sweep skips them.
// Envelopes that are appended before the sweep runs are not included. PlanSweep reads the collections.
func (r Recovery) PlanSweep(ctx context.Context, from time.Time) ([]SweepCount, error) {
	since, err := r.sweepTimestamp(ctx, from)
	if err != nil {
		return nil, err
	}
	return r.countSweep(ctx, since)
}

// PlanAdoption counts the envelopes of each collection that the sweep of [Recovery.Adopt] would send, by the
// conditions of [Recovery.PlanSweep]. It returns [lease.ErrNotFound] if there is no state to adopt.
func (r Recovery) PlanAdoption(ctx context.Context) ([]SweepCount, error) {
	if _, err := r.op.Lease().Slots(ctx); err != nil {
		return nil, err
	}
	return r.countSweep(ctx, latestTimestamp)
}

// latestTimestamp is after each position. A sweep that was ordered from it on begins at the position.
var latestTimestamp = bson.Timestamp{T: math.MaxUint32, I: math.MaxUint32}

// countSweep counts the envelopes of a sweep that is ordered from since on.
func (r Recovery) countSweep(ctx context.Context, since bson.Timestamp) ([]SweepCount, error) {
	claims, err := r.op.listRegistrations(ctx)
	if err != nil {
		return nil, err
	}
	if len(claims) == 0 {
		return nil, errNoCollections(r.op)
	}

	swept, err := r.sweptOutboxes(ctx, claims)
	if err != nil {
		return nil, err
	}
	ids, err := r.expectedIDs(ctx)
	if err != nil {
		return nil, err
	}

	counts := make([]SweepCount, len(swept))
	for i, b := range swept {
		counts[i].Collection = b.NS()
	}
	margin := mongodb.Margin(ctx, r.op.State.Client())
	// Each slot has its own position, so the sweeps are counted slot by slot.
	for _, id := range ids {
		_, part, _ := slot.ParseID(id)
		doc, _, err := lease.Read(ctx, r.op.watcherDocuments(), id)
		if err != nil && !errors.Is(err, lease.ErrNotFound) {
			return nil, err
		}

		begin := doc.SweepStart(since)
		// A slot that never started has nothing to sweep.
		if begin == latestTimestamp {
			continue
		}

		sweep := sweep.Sweep{
			Client:   r.op.State.Client(),
			From:     begin,
			ReadUpTo: outboxes.ReadUpTo(claims, swept, doc.ClusterTime, begin),
			Claims:   outboxes.ByUUID(claims),
			Margin:   margin,
		}
		for i, b := range swept {
			b.Slot = part
			n, err := sweep.Count(ctx, b)
			if err != nil {
				return nil, err
			}
			counts[i].Envelopes += n
		}
	}
	return counts, nil
}

// briefHold is how long an owner that must acquire its lease again may not do so.
const briefHold = time.Second

// OrderSweep orders a sweep. The next owner sends every envelope of the watched collections that its
// position in the stream does not cover, marked as redelivered, and then continues with the stream.
// It serves a watcher whose document vanished, which is created again, and a watcher that
// halted after lost history or a dropped collection.
//
// The sweep begins with the envelopes written at from, which must not be in the future. The zero
// time sweeps all envelopes. The sweep begins at the position at the latest. Without a position, envelopes
// before from count as delivered. An order that arrives during a sweep is executed too.
func (r Recovery) OrderSweep(ctx context.Context, from time.Time) error {
	since, err := r.sweepTimestamp(ctx, from)
	if err != nil {
		return err
	}
	ids, err := r.expectedIDs(ctx)
	if err != nil {
		return err
	}

	// If this fails for one of several slots, the operator may repeat it: an order that exists
	// stays as it is.
	return changeDocuments(ctx, r.op, ids, "recover_ordered", bson.D{{Key: "from", Value: from}}, func(id string) error {
		return lease.RequestSweep(ctx, r.op.watcherDocuments(), id, since, briefHold)
	})
}

// Adopt accepts state that was copied from another replica set (N5).
func (r Recovery) Adopt(ctx context.Context) error {
	replicaSet, err := lease.ReplicaSetID(ctx, r.op.State.Client())
	if err != nil {
		return err
	}
	return r.op.Lease().forEachSlot(ctx, "copy_accepted", bson.D{{Key: "replica_set", Value: replicaSet}}, func(id string) error {
		return lease.Adopt(ctx, r.op.watcherDocuments(), id, replicaSet)
	})
}

// ReleaseCollection removes the watcher's registration for a collection, so that another watcher may read it
// (N25). It reports whether the watcher was registered.
func (r Recovery) ReleaseCollection(ctx context.Context, ns string) (bool, error) {
	claims, err := r.op.listRegistrations(ctx)
	if err != nil {
		return false, err
	}

	for _, c := range claims {
		if c.NS != ns {
			continue
		}
		registry := outboxes.NewRegistry(r.op.State.Collection("collections"))
		if err := registry.Release(ctx, [16]byte(c.UUID.Data), r.op.Watcher); err != nil {
			return false, err
		}
		return true, r.op.logAction(ctx, "collection_released", bson.D{{Key: "collection", Value: ns}})
	}
	return false, nil
}

// sweptOutboxes returns the collections that a sweep would read.
func (r Recovery) sweptOutboxes(ctx context.Context, claims []outboxes.Registration) ([]outboxes.Outbox, error) {
	// Only the scope of the configured watcher finds collections that are not registered yet.
	if r.op.Outboxes != nil && r.op.isConfigured() {
		return r.op.Outboxes(ctx)
	}

	var swept []outboxes.Outbox
	for _, c := range claims {
		// A collection that was dropped and created again has two registrations with the same name.
		known := slices.ContainsFunc(swept, func(outbox outboxes.Outbox) bool { return outbox.NS() == c.NS })
		if c.Away() || known {
			continue
		}

		db, coll, _ := strings.Cut(c.NS, ".")
		outbox := outboxes.Outbox{DB: db, Coll: coll}
		copy(outbox.UUID[:], c.UUID.Data)
		swept = append(swept, outbox)
	}
	return swept, nil
}

// sweepTimestamp returns the cluster time of a sweep from the time from. It rejects a time in the
// future: the sweep would skip envelopes that are not sent, or the caller used the wrong time zone.
func (r Recovery) sweepTimestamp(ctx context.Context, from time.Time) (bson.Timestamp, error) {
	if from.IsZero() {
		return bson.Timestamp{}, nil
	}

	now, err := mongodb.ServerTime(ctx, r.op.State.Client())
	if err != nil {
		return bson.Timestamp{}, err
	}
	if from.After(now) {
		return bson.Timestamp{}, invalidRequest("cannot sweep from %s, which is in the future: "+
			"the server time is %s; check the time zone",
			from.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	if from.Unix() <= 0 {
		return bson.Timestamp{}, invalidRequest("%s is before 1970; leave the time out to sweep everything",
			from.UTC().Format(time.RFC3339))
	}
	return bson.Timestamp{T: uint32(from.Unix())}, nil
}

// expectedIDs returns the ids of the documents that the watcher has or should have, or only that of
// r.op.Slot. It rejects a slot that belongs to another number of slots: its document would divide the
// watcher in two ways.
func (r Recovery) expectedIDs(ctx context.Context) ([]string, error) {
	stored := divisions.New(r.op.State)
	division, err := stored.Read(ctx, r.op.Watcher)

	// A watcher that never began has no division, unless its documents were restored without it.
	if errors.Is(err, mongodb.ErrNotFound) {
		division.Of, err = stored.Documents(ctx, r.op.Watcher)
		// Nothing is left of its state, so it begins with the slots of the configuration.
		if division.Of == 0 && r.op.isConfigured() {
			division.Of = r.op.Slots
		}
	}
	if err != nil {
		return nil, err
	}

	var ids []string
	for _, p := range slot.Ranges(division.Of) {
		ids = append(ids, p.ID(r.op.Watcher))
	}
	if r.op.Slot == "" {
		return ids, nil
	}

	named, err := r.op.Lease().watcherIDs(ctx)
	if err == nil && division.Of > 0 && !slices.Contains(ids, named[0]) {
		err = invalidRequest("watcher %s has %d slots, and %s is not one of them", r.op.Watcher, division.Of, r.op.Slot)
	}
	return named, err
}
