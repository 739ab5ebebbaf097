package deadletter

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/store"
)

// MaxRefused is how many of the letters that a requeue refuses are told one by one.
const MaxRefused = 100

// Options of a requeue.
type Options struct {
	Late   bool // deliver also what has expired: its expiry is taken off
	DryRun bool // judge every letter, write nothing
}

// Outcome counts what a requeue did, or with DryRun would do.
type Outcome struct {
	Requeued int64
	Refused  int64           // letters that cannot be delivered as they are, and stay
	Why      []*RefusedError // the first of them
}

func (o *Outcome) addOutcome(p Outcome) {
	o.Requeued += p.Requeued
	o.Refused += p.Refused
	o.Why = append(o.Why, p.Why[:min(len(p.Why), MaxRefused-len(o.Why))]...)
}

// Requeue gives the letters of one outbox that match back to it, each as the next delivery of the same envelope, which the
// reconciler then publishes (N18). Letters that were requeued already are left out, and so are those that die while it
// runs, so it ends; after a crash in the middle the same call requeues the rest. The letters stay, marked as replayed.
//
// The order is that of the stream. Each part of at most [MaxLetters] letters and [MaxBytes] bytes is one transaction with
// the fence of all slots (N3): envelopes are written and letters marked, or neither. did, if not nil, hears the sum after each.
// An error comes with what was done until then.
func (k Desk) Requeue(ctx context.Context, ns string, q Query, o Options, did func(Outcome)) (Outcome, error) {
	var total Outcome
	now, err := store.ServerTime(ctx, k.client())
	if err != nil {
		return total, err
	}
	if q, err = q.restrictToAction(now); err != nil {
		return total, err
	}
	q.Stand = Replayable
	dead, err := deadCollection(k.client(), ns)
	if err != nil {
		return total, err
	}
	if err := store.CatchUp(ctx, dead); err != nil {
		return total, err
	}
	s, p := &scan{dead: dead, filter: q.mongoFilter()}, newPace()
	for {
		part, err := s.nextPart(ctx, p.partSize, MaxBytes)
		if err != nil || len(part) == 0 {
			return total, err
		}
		letters, err := s.readLetters(ctx, part)
		if err != nil {
			return total, err
		}
		began := time.Now()
		got, err := k.requeuePart(ctx, ns, letters, o)
		took := time.Since(began)
		p.recordDuration(took, len(part))
		if err != nil {
			return total, fmt.Errorf("requeueing %d letters of %s: %w", len(letters), ns, err)
		}
		total.addOutcome(got)
		if did != nil {
			did(total)
		}
		if o.DryRun || s.exhausted {
			continue
		}
		if err := yieldToOwner(ctx, took); err != nil {
			return total, err
		}
	}
}

// requeuePart requeues letters in one transaction.
func (k Desk) requeuePart(ctx context.Context, ns string, letters []*Dead, o Options) (Outcome, error) {
	if o.DryRun {
		return k.dryRunPart(ctx, ns, letters, o)
	}
	a, err := k.newEnvelopeBuilder(ctx, o.Late)
	if err != nil {
		return Outcome{}, err
	}
	var got Outcome
	err = store.Foreign(ctx, k.State, k.Watcher, []string{ns}, func(tx context.Context) error {
		got = Outcome{}
		left, done, err := k.filterOpenLetters(tx, ns, letters)
		if err != nil || len(left) == 0 {
			got.Requeued = done
			return err
		}
		plan, err := k.planPart(tx, ns, left, a)
		if err != nil {
			return err
		}
		got = plan.outcome
		got.Requeued += done
		return k.writePlan(tx, ns, plan)
	})
	return got, err
}

// dryRunPart judges letters as part does, and writes nothing.
func (k Desk) dryRunPart(ctx context.Context, ns string, letters []*Dead, o Options) (Outcome, error) {
	a, err := k.newEnvelopeBuilder(ctx, o.Late)
	if err != nil {
		return Outcome{}, err
	}
	plan, err := k.planPart(ctx, ns, letters, a)
	if err != nil {
		return Outcome{}, err
	}
	return plan.outcome, nil
}

// filterOpenLetters are those letters that are still there and not requeued; done counts those that this very action requeued, in an
// attempt whose outcome was not known.
func (k Desk) filterOpenLetters(tx context.Context, ns string, letters []*Dead) (left []*Dead, done int64, err error) {
	dead, err := deadCollection(k.client(), ns)
	if err != nil {
		return nil, 0, err
	}
	ids := make([]ID, len(letters))
	for i, d := range letters {
		ids[i] = d.ID
	}
	cur, err := dead.Find(tx, fieldIn("_id", ids), options.Find().SetProjection(bson.D{{Key: "replayed", Value: 1}}))
	if err != nil {
		return nil, 0, fmt.Errorf("reading %s: %w", store.Namespace(dead), err)
	}
	var found []struct {
		ID       ID        `bson:"_id"`
		Replayed *Replayed `bson:"replayed"`
	}
	if err := cur.All(tx, &found); err != nil {
		return nil, 0, fmt.Errorf("reading %s: %w", store.Namespace(dead), err)
	}
	open := make(map[string]bool, len(found))
	for _, f := range found {
		switch {
		case f.Replayed == nil:
			open[f.ID.mapKey()] = true
		case f.Replayed.Run == k.Run:
			done++
		}
	}
	for _, d := range letters {
		if open[d.ID.mapKey()] {
			left = append(left, d)
		}
	}
	return left, done, nil
}

// requeuePlan is what one transaction writes.
type requeuePlan struct {
	outcome   Outcome
	envelopes []mongo.WriteModel
	replayed  map[int32][]ID // letters by the delivery that they become
}

func (k Desk) planPart(ctx context.Context, ns string, letters []*Dead, a envelopeBuilder) (requeuePlan, error) {
	p := requeuePlan{replayed: make(map[int32][]ID)}
	outbox, err := k.outboxCollection(ns)
	if err != nil {
		return p, err
	}
	ids := make([]bson.RawValue, len(letters))
	for i, d := range letters {
		ids[i] = d.ID.ID
	}
	have, err := readOutboxEntries(ctx, outbox, ids)
	if err != nil {
		return p, err
	}
	for _, d := range letters {
		id := valueKey(d.ID.ID)
		delivery, err := have[id].nextDelivery(d)
		var doc bson.D
		if err == nil {
			doc, err = a.buildEnvelope(d, delivery)
		}
		var refused *RefusedError
		if errors.As(err, &refused) {
			p.outcome.addOutcome(Outcome{Refused: 1, Why: []*RefusedError{refused}})
			continue
		} else if err != nil {
			return p, err
		}
		// A replacement of the whole document: the server stamps its ts.
		p.envelopes = append(p.envelopes, mongo.NewReplaceOneModel().SetUpsert(true).SetFilter(bson.D{{Key: "_id", Value: d.ID.ID}}).SetReplacement(doc))
		p.replayed[delivery] = append(p.replayed[delivery], d.ID)
		p.outcome.Requeued++
		have[id] = &outboxEntry{active: true} // another letter of the same id has to wait
	}
	return p, nil
}

func (k Desk) writePlan(tx context.Context, ns string, p requeuePlan) error {
	if len(p.envelopes) == 0 {
		return nil
	}
	outbox, err := k.outboxCollection(ns)
	if err != nil {
		return err
	}
	dead, err := deadCollection(k.client(), ns)
	if err != nil {
		return err
	}
	if _, err := outbox.BulkWrite(tx, p.envelopes); err != nil {
		return fmt.Errorf("giving envelopes back to %s: %w", ns, err)
	}
	crash.At("mid-requeue")
	for _, delivery := range slices.Sorted(maps.Keys(p.replayed)) {
		if _, err := k.markReplayed(tx, dead, fieldIn("_id", p.replayed[delivery]), delivery, nil); err != nil {
			return err
		}
	}
	return nil
}
