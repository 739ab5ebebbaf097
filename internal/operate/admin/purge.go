package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"golang.org/x/time/rate"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/purge"
)

// Purge requests that delivered envelopes are removed now. It follows the same rules as the owner's
// purge. It never removes
//   - envelopes after the position of the slowest watcher, less the margin of the server's
//     transactions,
//   - scheduled and waiting envelopes,
//   - envelopes of a collection with a gap.
type Purge struct {
	Collections []string      // as database.collection; empty means all that the watcher is registered for
	OlderThan   time.Duration // age relative to the position; at least the margin
	Rate        int           // envelopes per second; 0 means no limit
	Batch       int           // envelopes per statement; 500 if it is 0 or less
	DryRun      bool          // only count

	Progress func(removed int64) // called after each statement with the total; may be nil
}

// PurgedCollection is the result of a purge for one collection.
type PurgedCollection struct {
	Collection string     `json:"collection"`
	Cut        *time.Time `json:"cut,omitempty"`     // older envelopes are removed
	Watcher    string     `json:"watcher,omitempty"` // id of the watcher document with the earliest position
	Purgeable  int64      `json:"purgeable"`         // number of envelopes before the purge; 0 if the purge may not run
	Removed    int64      `json:"removed"`
	Timeless   int64      `json:"timeless"`         // number of envelopes before the purge without a ts or a time in their id; it stamps them
	Held       string     `json:"held,omitempty"`   // why nothing is purged, as a word for programs
	Reason     string     `json:"reason,omitempty"` // the same as a sentence
}

// PurgeReport is the result of a Purge.
type PurgeReport struct {
	DryRun      bool               `json:"dry_run"`
	KeptS       float64            `json:"kept_s"` // the requested age, or the margin if that is greater
	Collections []PurgedCollection `json:"collections"`
	Purgeable   int64              `json:"purgeable"`
	Timeless    int64              `json:"timeless"`
	Removed     int64              `json:"removed"`
	TookS       float64            `json:"took_s"`
}

const defaultPurgeBatch = 500

// maxPurgeWait bounds the wait for the position to pass envelopes without a stamp.
const maxPurgeWait = 15 * time.Second

// Purge counts delivered envelopes, and removes them unless it is a dry run. If it fails, the
// report contains the removals until then, and the same call continues. It writes an entry to the
// audit log if it removed anything.
func (o Operator) Purge(ctx context.Context, order Purge) (PurgeReport, error) {
	began := time.Now()
	outboxes, err := o.registeredOutboxes(ctx, order.Collections)
	if err != nil {
		return PurgeReport{}, err
	}
	margin, err := mongodb.AskMargin(ctx, o.State.Client())
	if err != nil {
		return PurgeReport{}, err
	}

	// An open transaction may still commit envelopes that are as old as the margin (N25).
	keep := max(order.OlderThan, margin)
	report := PurgeReport{DryRun: order.DryRun, KeptS: keep.Seconds()}
	cuts := purge.NewCuts(o.State, keep)
	if order.Batch <= 0 {
		order.Batch = defaultPurgeBatch
	}
	// A burst of one batch lets each delete wait for its own envelopes only.
	limit := rate.NewLimiter(rate.Inf, order.Batch)
	if order.Rate > 0 {
		limit.SetLimit(rate.Limit(order.Rate))
	}

	for _, b := range outboxes {
		collection, err := o.purgeCollection(ctx, order, b, cuts, limit, report.Removed)
		report.Collections = append(report.Collections, collection)
		report.Purgeable += collection.Purgeable
		report.Timeless += collection.Timeless
		report.Removed += collection.Removed
		if err != nil {
			return report, errors.Join(err, o.logPurge(ctx, report))
		}
	}
	report.TookS = time.Since(began).Seconds()
	return report, o.logPurge(ctx, report)
}

// logPurge logs a purge that removed anything, even if ctx has ended.
func (o Operator) logPurge(ctx context.Context, report PurgeReport) error {
	if report.Removed == 0 {
		return nil
	}
	return o.logAction(context.WithoutCancel(ctx), "purged", bson.D{
		{Key: "removed", Value: report.Removed},
		{Key: "kept_ms", Value: int64(report.KeptS * 1000)},
		{Key: "collections", Value: len(report.Collections)},
	})
}

// purgeCollection purges one outbox. removedBefore is the number of envelopes removed from the
// outboxes before it. If the outbox may not be purged, the result contains the reason, and
// the error is nil.
func (o Operator) purgeCollection(
	ctx context.Context, order Purge, outbox outboxes.Outbox, cuts *purge.Cuts, limit *rate.Limiter, removedBefore int64,
) (PurgedCollection, error) {
	collection := PurgedCollection{Collection: outbox.NS()}

	cut, err := cuts.Of(ctx, outbox)
	var held *purge.HeldError
	if errors.As(err, &held) {
		collection.Held = string(held.Hold)
		collection.Reason = held.Error()
		collection.Watcher = held.Slot
		return collection, nil
	}
	if err != nil {
		return collection, err
	}
	before := cut.Time()
	collection.Cut = &before
	collection.Watcher = cut.Slot

	coll := o.State.Client().Database(outbox.DB).Collection(outbox.Coll)
	if order.DryRun {
		n, err := purge.CountPurgeable(ctx, coll, cut)
		collection.Purgeable, collection.Timeless = n.Stamped+n.Unstamped, n.Timeless
		return collection, err
	}

	total := removedBefore
	candidates := &purge.Candidates{}
	loop := purge.Loop{
		Coll:       coll,
		Candidates: candidates,
		Size:       func() int { return order.Batch },
		Cut:        func(ctx context.Context) (purge.Cut, error) { return cuts.Of(ctx, outbox) },
		Step: func(ctx context.Context, n int64) error {
			total += n
			if order.Progress != nil {
				order.Progress(total)
			}

			// Copied envelopes that share a timestamp are removed together, so n may exceed the
			// batch.
			for ; n > 0; n -= int64(order.Batch) {
				if err := limit.WaitN(ctx, int(min(n, int64(order.Batch)))); err != nil {
					return fmt.Errorf("pacing the purge: %w", err)
				}
			}
			return nil
		},
	}

	// Envelopes without a stamp are removed once the position has passed the time at which they were read. The
	// position of an idle stream moves about every ten seconds.
	for waited := time.Now(); ; {
		before := candidates.Len()
		var removed int64
		removed, err = loop.Run(ctx)
		collection.Removed += removed
		if candidates.Len() != before {
			waited = time.Now()
		}
		if err != nil || candidates.Len() == 0 || time.Since(waited) > maxPurgeWait {
			break
		}
		if err = retry.Sleep(ctx, time.Second); err != nil {
			break
		}
	}

	// A gap may be found while the purge runs.
	if errors.As(err, &held) {
		collection.Held = string(held.Hold)
		collection.Reason = held.Error()
		err = nil
	}
	return collection, err
}

// registeredOutboxes returns the existing collections that the watcher is registered for, or only
// the named ones.
func (o Operator) registeredOutboxes(ctx context.Context, only []string) ([]outboxes.Outbox, error) {
	claims, err := o.listRegistrations(ctx)
	if err != nil {
		return nil, err
	}

	// The UUID identifies a collection: its name may belong to another one by now.
	registered := make(map[[16]byte]bool)
	var databases, names []string
	for _, c := range claims {
		db, _, _ := strings.Cut(c.NS, ".")
		if len(c.UUID.Data) == 16 && (len(only) == 0 || slices.Contains(only, c.NS)) {
			registered[[16]byte(c.UUID.Data)] = true
			databases = append(databases, db)
		}
		names = append(names, c.NS)
	}
	for _, ns := range only {
		if !slices.Contains(names, ns) {
			return nil, fmt.Errorf("watcher %s is not registered for %s; its collections are: %s",
				o.Watcher, ns, strings.Join(names, ", "))
		}
	}
	if len(registered) == 0 {
		return nil, errNoCollections(o)
	}

	slices.Sort(databases)
	matchAll := func(_, _ []byte) bool { return true }
	all, err := outboxes.ListOutboxes(ctx, o.State.Client(), matchAll, slices.Compact(databases)...)
	if err != nil {
		return nil, err
	}
	existing := slices.DeleteFunc(all, func(outbox outboxes.Outbox) bool { return !registered[outbox.UUID] })
	if len(existing) == 0 {
		return nil, fmt.Errorf("none of the collections that watcher %s is registered for exists: %s; "+
			"if they do exist, grant listCollections on their databases", o.Watcher, strings.Join(names, ", "))
	}
	return existing, nil
}
