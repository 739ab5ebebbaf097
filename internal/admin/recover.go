package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/reconcile"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
)

// ErrNoCollections says that the watcher has not registered any collection.
var ErrNoCollections = errors.New("it has no collections")

// Swept is how much a sweep would deliver again of one collection.
type Swept struct {
	Collection string `json:"collection"`
	Envelopes  int64  `json:"envelopes"`
}

// RecoverPlan counts what [Operator.Recover] would have delivered of each collection, by the conditions of the sweep itself:
// the envelopes from that time on, less the margin for open transactions, and those without a stamp, that neither wait nor
// were marked as sent; of a collection that was renamed behind the position, all. What is appended until the sweep runs
// comes on top. It reads the collections.
func (o Operator) RecoverPlan(ctx context.Context, from time.Time) ([]Swept, error) {
	since, err := o.sweptFrom(ctx, from)
	if err != nil {
		return nil, err
	}
	claims, err := store.NewRegistry(o.State.Collection("collections")).Claims(ctx, o.Watcher)
	if err != nil {
		return nil, err
	}
	if len(claims) == 0 {
		return nil, fmt.Errorf("watcher %s: %w", o.Watcher, ErrNoCollections)
	}
	boxes, err := o.boxes(ctx, claims)
	if err != nil {
		return nil, err
	}
	ids, err := o.all(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]Swept, len(boxes))
	margin := store.Margin(ctx, o.State.Client())
	for _, id := range ids {
		_, part, _ := slot.ParseID(id)
		doc, _, err := lease.Read(ctx, o.watchers(), id)
		if err != nil && !errors.Is(err, lease.ErrNotFound) {
			return nil, err
		}
		begin := doc.SweepFrom(since)
		s := reconcile.Sweep{Client: o.State.Client(), From: begin, ReadUpTo: store.ReadUpTo(claims, boxes, doc.ClusterTime, begin), Margin: margin}
		for i, box := range boxes {
			box.Part = part
			n, err := s.Count(ctx, box)
			if err != nil {
				return nil, err
			}
			out[i].Collection = box.NS()
			out[i].Envelopes += n
		}
	}
	return out, nil
}

// boxes are the collections that a sweep would read.
func (o Operator) boxes(ctx context.Context, claims []store.Claim) ([]store.Outbox, error) {
	if o.Outboxes != nil {
		return o.Outboxes(ctx)
	}
	var out []store.Outbox
	for _, c := range claims {
		db, coll, _ := strings.Cut(c.NS, ".")
		box := store.Outbox{DB: db, Coll: coll}
		copy(box.UUID[:], c.UUID.Data)
		// A collection that was made anew has two entries by its name.
		if !c.Away() && !slices.ContainsFunc(out, func(b store.Outbox) bool { return b.NS() == c.NS }) {
			out = append(out, box)
		}
	}
	return out, nil
}
