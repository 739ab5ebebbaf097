package admin

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/gap"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// SweepCount counts the envelopes of one collection that a sweep would send again.
type SweepCount struct {
	Collection string `json:"collection"`
	Envelopes  int64  `json:"envelopes"`
}

// RecoverPlan counts the envelopes of each collection that [Operator.Recover] would send, by the
// conditions of the sweep itself:
//   - the envelopes written at from or later, less the margin for open transactions,
//   - the envelopes without a timestamp,
//   - all envelopes of a collection that was renamed after the position.
//
// It leaves out envelopes that wait, and envelopes that are marked as sent. Envelopes that are
// appended before the sweep runs are not included. RecoverPlan reads the collections.
func (o Operator) RecoverPlan(ctx context.Context, from time.Time) ([]SweepCount, error) {
	since, err := o.sweepTimestamp(ctx, from)
	if err != nil {
		return nil, err
	}
	claims, err := o.registrations(ctx)
	if err != nil {
		return nil, err
	}
	if len(claims) == 0 {
		return nil, errNoCollections(o)
	}

	swept, err := o.sweptOutboxes(ctx, claims)
	if err != nil {
		return nil, err
	}
	ids, err := o.expectedIDs(ctx)
	if err != nil {
		return nil, err
	}

	counts := make([]SweepCount, len(swept))
	margin := mongodb.Margin(ctx, o.State.Client())
	// Each slot has its own position, so the sweeps are counted slot by slot.
	for _, id := range ids {
		_, part, _ := slot.ParseID(id)
		doc, _, err := lease.Read(ctx, o.watcherDocuments(), id)
		if err != nil && !errors.Is(err, lease.ErrNotFound) {
			return nil, err
		}

		begin := doc.SweepStart(since)
		sweep := gap.Sweep{
			Client:   o.State.Client(),
			From:     begin,
			ReadUpTo: outboxes.ReadUpTo(claims, swept, doc.ClusterTime, begin),
			Claims:   outboxes.ByUUID(claims),
			Margin:   margin,
		}
		for i, b := range swept {
			b.Part = part
			n, err := sweep.Count(ctx, b)
			if err != nil {
				return nil, err
			}
			counts[i].Collection = b.NS()
			counts[i].Envelopes += n
		}
	}
	return counts, nil
}

// sweptOutboxes returns the collections that a sweep would read.
func (o Operator) sweptOutboxes(ctx context.Context, claims []outboxes.Registration) ([]outboxes.Outbox, error) {
	// Only the scope of the configured watcher finds collections that are not registered yet.
	if o.Outboxes != nil && o.isConfigured() {
		return o.Outboxes(ctx)
	}

	var swept []outboxes.Outbox
	for _, c := range claims {
		// A collection that was dropped and created again has two registrations with the same name.
		known := slices.ContainsFunc(swept, func(b outboxes.Outbox) bool { return b.NS() == c.NS })
		if c.Away() || known {
			continue
		}

		db, coll, _ := strings.Cut(c.NS, ".")
		b := outboxes.Outbox{DB: db, Coll: coll}
		copy(b.UUID[:], c.UUID.Data)
		swept = append(swept, b)
	}
	return swept, nil
}
