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

	"github.com/outrelay/outrelay/internal/store"
)

// Purge asks for the removal of delivered envelopes, now and by hand. It observes what the owner's purge does: nothing
// beyond the position of the watcher that is furthest behind, less the margin of the server's transactions; nothing that
// is scheduled or an exception; and nothing of a collection with a gap.
type Purge struct {
	Collections []string      // as database.collection; empty is all that the watcher is registered for
	OlderThan   time.Duration // by the position; what is less than the margin is the margin
	Rate        int           // envelopes a second; 0 is no limit
	Batch       int           // envelopes in one statement; 500 if it is 0 or less
	DryRun      bool          // only count

	Progress func(removed int64) // called after each statement, with the sum; may be nil
}

// PurgedCollection is what a purge found in one collection, or did.
type PurgedCollection struct {
	Collection string     `json:"collection"`
	Cut        *time.Time `json:"cut,omitempty"`     // what was written before goes
	Watcher    string     `json:"watcher,omitempty"` // the watcher document that is furthest behind
	Purgeable  int64      `json:"purgeable"`         // counted before; 0 where it is held
	Removed    int64      `json:"removed"`
	Held       string     `json:"held,omitempty"`   // why nothing is purged: a word for programs
	Reason     string     `json:"reason,omitempty"` // and a sentence for people
}

// PurgeReport is the answer to a Purge.
type PurgeReport struct {
	DryRun      bool               `json:"dry_run"`
	KeptS       float64            `json:"kept_s"` // the age that was asked for, or the margin
	Collections []PurgedCollection `json:"collections"`
	Purgeable   int64              `json:"purgeable"`
	Removed     int64              `json:"removed"`
	Seconds     float64            `json:"seconds"`
}

const purgeBatch = 500

// Purge counts, and unless it is a dry run removes, what was delivered. After an error the report holds what was removed
// until then, and the same call goes on. It is written to the events log if it removed anything.
func (o Operator) Purge(ctx context.Context, p Purge) (PurgeReport, error) {
	begun := time.Now()
	outboxes, err := o.claimed(ctx, p.Collections)
	if err != nil {
		return PurgeReport{}, err
	}
	margin, err := store.AskMargin(ctx, o.State.Client())
	if err != nil {
		return PurgeReport{}, err
	}
	keep := max(p.OlderThan, margin)
	r := PurgeReport{DryRun: p.DryRun, KeptS: keep.Seconds()}
	cuts := store.NewCuts(o.State, keep)
	if p.Batch <= 0 {
		p.Batch = purgeBatch
	}
	limit := rate.NewLimiter(rate.Inf, p.Batch)
	if p.Rate > 0 {
		limit.SetLimit(rate.Limit(p.Rate))
	}
	for _, b := range outboxes {
		c, err := o.purgeOne(ctx, p, b, cuts, limit, r.Removed)
		r.Collections = append(r.Collections, c)
		r.Purgeable += c.Purgeable
		r.Removed += c.Removed
		if err != nil {
			return r, errors.Join(err, o.notePurge(ctx, r))
		}
	}
	r.Seconds = time.Since(begun).Seconds()
	return r, o.notePurge(ctx, r)
}

func (o Operator) notePurge(ctx context.Context, r PurgeReport) error {
	if r.Removed == 0 {
		return nil
	}
	return o.note(context.WithoutCancel(ctx), "purged", bson.D{
		{Key: "removed", Value: r.Removed}, {Key: "kept_ms", Value: int64(r.KeptS * 1000)}, {Key: "collections", Value: len(r.Collections)},
	})
}

func (o Operator) purgeOne(ctx context.Context, p Purge, b store.Outbox, cuts *store.Cuts, limit *rate.Limiter, before int64) (PurgedCollection, error) {
	c := PurgedCollection{Collection: b.NS()}
	var held *store.HeldError
	cut, err := cuts.Of(ctx, b)
	if errors.As(err, &held) {
		c.Held, c.Reason, c.Watcher = string(held.Hold), held.Error(), held.Slot
		return c, nil
	}
	if err != nil {
		return c, err
	}
	at := cut.SentBefore().UTC()
	c.Cut, c.Watcher = &at, cut.Slot
	coll := o.State.Client().Database(b.DB).Collection(b.Coll)
	if p.DryRun {
		stamped, unstamped, err := store.Purgeable(ctx, coll, cut)
		c.Purgeable = stamped + unstamped
		return c, err
	}
	c.Removed, err = store.PurgeLoop{
		Coll: coll,
		Size: func() int { return p.Batch },
		Cut:  func(ctx context.Context) (store.Cut, error) { return cuts.Of(ctx, b) },
		Step: func(ctx context.Context, n int64) error {
			before += n
			if p.Progress != nil {
				p.Progress(before)
			}
			for ; n > 0; n -= int64(p.Batch) { // copied envelopes that share a stamp go together
				if err := limit.WaitN(ctx, int(min(n, int64(p.Batch)))); err != nil {
					return fmt.Errorf("pacing the purge: %w", err)
				}
			}
			return nil
		},
	}.Run(ctx)
	if errors.As(err, &held) { // a gap was found meanwhile
		c.Held, c.Reason, err = string(held.Hold), held.Error(), nil
	}
	return c, err
}

// claimed are the collections that the watcher is registered for and that are there, or those of them that are asked for.
func (o Operator) claimed(ctx context.Context, only []string) ([]store.Outbox, error) {
	claims, err := store.NewRegistry(o.State.Collection("collections")).Claims(ctx, o.Watcher)
	if err != nil {
		return nil, err
	}
	mine := make(map[[16]byte]bool)
	var databases, names []string
	for _, c := range claims {
		db, _, _ := strings.Cut(c.NS, ".")
		if len(c.UUID.Data) == 16 && (len(only) == 0 || slices.Contains(only, c.NS)) {
			mine[[16]byte(c.UUID.Data)] = true
			databases = append(databases, db)
		}
		names = append(names, c.NS)
	}
	for _, ns := range only {
		if !slices.Contains(names, ns) {
			return nil, fmt.Errorf("watcher %s is not registered for %s; it is for: %s", o.Watcher, ns, strings.Join(names, ", "))
		}
	}
	if len(mine) == 0 {
		return nil, fmt.Errorf("watcher %s is registered for no collection; check the watcher's name, or start outrelay run once", o.Watcher)
	}
	slices.Sort(databases)
	all, err := store.ListOutboxes(ctx, o.State.Client(), func(_, _ []byte) bool { return true }, slices.Compact(databases)...)
	if err != nil {
		return nil, err
	}
	there := slices.DeleteFunc(all, func(b store.Outbox) bool { return !mine[b.UUID] })
	if len(there) == 0 {
		return nil, fmt.Errorf("none of the collections that watcher %s is registered for is there: %s; if they are, grant listCollections on their databases, by which they are known",
			o.Watcher, strings.Join(names, ", "))
	}
	return there, nil
}
