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
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/retry"
)

// MaxRefused bounds Outcome.Why.
const MaxRefused = 100

const (
	// requeueAtOnce is how many letters one transaction requeues. In the meantime, the owner cannot renew its lease.
	requeueAtOnce = 250
	maxPause      = 200 * time.Millisecond // after a part
)

// Options of a requeue.
type Options struct {
	IgnoreExpiry bool // also requeue expired envelopes, without their expiry
	DryRun       bool // check every letter, but write nothing
}

// Outcome counts the effects of a requeue, or with DryRun the expected effects.
type Outcome struct {
	Requeued int64
	Refused  int64           // letters that cannot be delivered as they are, and stay
	Why      []*RefusedError // the first of the refused letters, at most [MaxRefused]
}

func (o *Outcome) addOutcome(p Outcome) {
	o.Requeued += p.Requeued
	o.Refused += p.Refused
	o.Why = append(o.Why, p.Why[:min(len(p.Why), MaxRefused-len(o.Why))]...)
}

// Requeue puts the matching letters of one outbox back into it, each as the next delivery of the
// same envelope. The reconciler then sends them (N18). The letters stay, marked as requeued.
// Requeue leaves out letters that are already requeued, and letters of envelopes that die while it
// runs, so it ends. If Requeue is interrupted, the same call requeues the rest.
//
// Requeue works in the order of the stream. Each part of at most [mongodb.MaxDocuments] letters and
// [mongodb.MaxBytes] bytes is one transaction with the fence of all slots (N3): it writes the envelopes and
// marks the letters, or does neither. If did is not nil, Requeue calls it with the total after each
// part. If Requeue fails, it returns the total until then.
func (k Desk) Requeue(ctx context.Context, ns string, q Query, o Options, did func(Outcome)) (Outcome, error) {
	var total Outcome
	now, err := mongodb.ServerTime(ctx, k.client())
	if err != nil {
		return total, err
	}
	if q, err = q.restrictToAction(now); err != nil {
		return total, err
	}
	q.RequeueStatus = Replayable

	dead := deadCollection(k.client(), ns)

	// Without this, majority reads may miss a letter that was moved just before the call (N22).
	if err := mongodb.CatchUp(ctx, dead); err != nil {
		return total, err
	}

	s := &scan{dead: dead, filter: q.mongoFilter()}
	size := mongodb.NewPartSize(requeueAtOnce)
	for {
		read, err := s.nextPart(ctx, requeueAtOnce, mongodb.MaxBytes)
		if err != nil || len(read) == 0 {
			return total, err
		}
		letters, err := s.readLetters(ctx, read)
		if err != nil {
			return total, err
		}

		left := len(letters)
		err = mongodb.InParts(size, letters, nil, func(part []*Dead) error {
			began := time.Now()
			plan, err := k.requeuePart(ctx, ns, part, o, nil)
			if err != nil {
				return fmt.Errorf("requeueing %d dead letters of %s: %w", len(part), ns, err)
			}
			total.addOutcome(plan.outcome)
			if did != nil {
				did(total)
			}

			// The owner needs no pause after a dry run, which takes no fence, or after the last part.
			left -= len(part)
			if o.DryRun || s.exhausted && left == 0 {
				return nil
			}
			// In the pause, the owner can renew its lease.
			return retry.Sleep(ctx, min(10*time.Millisecond+time.Since(began)/4, maxPause))
		})
		if err != nil {
			return total, err
		}
	}
}

// requeuePart requeues letters in one transaction. edited names the fields of their envelopes that were changed.
func (k Desk) requeuePart(
	ctx context.Context, ns string, letters []*Dead, o Options, edited []string,
) (plan requeuePlan, err error) {
	builder, err := k.newEnvelopeBuilder(ctx, o.IgnoreExpiry)
	if err != nil {
		return plan, err
	}
	if o.DryRun {
		err = k.planPart(ctx, ns, letters, builder, &plan)
		return plan, err
	}

	err = mongodb.Foreign(ctx, k.State.Collection("watchers"), k.Watcher, []string{ns}, mongodb.LimitRuns(len(letters), func(tx context.Context) error {
		// The transaction may run several times, and only its last run counts.
		plan = requeuePlan{}
		open, err := k.filterOpenLetters(tx, ns, letters, &plan)
		if err != nil || len(open) == 0 {
			return err
		}
		if err := k.planPart(tx, ns, open, builder, &plan); err != nil {
			return err
		}
		return k.writePlan(tx, ns, plan, edited)
	}))
	return plan, err
}

// filterOpenLetters returns the letters that still exist and are not requeued. It counts in plan the
// letters that this action requeued in an earlier attempt whose outcome was unknown.
func (k Desk) filterOpenLetters(tx context.Context, ns string, letters []*Dead, plan *requeuePlan) ([]*Dead, error) {
	dead := deadCollection(k.client(), ns)

	ids := make([]ID, len(letters))
	for i, d := range letters {
		ids[i] = d.ID
	}
	found, err := mongodb.FindAll[Dead](tx, dead, "reading "+mongodb.Namespace(dead), idIn(ids),
		options.Find().SetProjection(bson.D{{Key: "replayed", Value: 1}}))
	if err != nil {
		return nil, err
	}

	open := make(map[string]bool, len(found))
	for _, f := range found {
		switch {
		case f.Replayed == nil:
			open[f.ID.mapKey()] = true
		case f.Replayed.Run == k.Run:
			// An attempt with an unknown outcome has committed.
			plan.outcome.Requeued++
			plan.delivery = f.Replayed.Delivery
		}
	}
	return slices.DeleteFunc(slices.Clone(letters), func(d *Dead) bool { return !open[d.ID.mapKey()] }), nil
}

// requeuePlan contains the writes of one transaction.
type requeuePlan struct {
	outcome   Outcome
	delivery  int32 // of the last letter in outcome.Requeued
	envelopes []mongo.WriteModel
	replayed  map[int32][]ID // letters by the number of their new delivery
}

// planPart adds to plan the envelopes of those letters that can be requeued. The other letters are
// counted as refused.
func (k Desk) planPart(ctx context.Context, ns string, letters []*Dead, builder envelopeBuilder, plan *requeuePlan) error {
	plan.replayed = make(map[int32][]ID)
	outbox := k.outboxCollection(ns)

	ids := make([]bson.RawValue, len(letters))
	for i, d := range letters {
		ids[i] = d.ID.ID
	}
	// In the transaction: a delivery that is on its way must not be replaced.
	entries, err := readOutboxEntries(ctx, outbox, ids)
	if err != nil {
		return err
	}

	for _, d := range letters {
		key := mongodb.ValueKey(d.ID.ID)
		delivery, err := entries[key].nextDelivery(d)
		var doc bson.D
		if err == nil {
			doc, err = builder.buildEnvelope(d, delivery)
		}

		var refused *RefusedError
		if errors.As(err, &refused) {
			plan.outcome.addOutcome(Outcome{Refused: 1, Why: []*RefusedError{refused}})
			continue
		}
		if err != nil {
			return err
		}

		// The whole document is replaced, so that the server sets its ts.
		plan.envelopes = append(plan.envelopes, mongo.NewReplaceOneModel().SetUpsert(true).
			SetFilter(bson.D{{Key: "_id", Value: d.ID.ID}}).
			SetReplacement(doc))
		plan.replayed[delivery] = append(plan.replayed[delivery], d.ID)
		plan.outcome.Requeued++
		plan.delivery = delivery

		// Another letter with the same envelope id has to wait until this delivery ends.
		entries[key] = &outboxEntry{active: true}
	}
	return nil
}

// writePlan writes the envelopes and marks the letters, in the transaction tx.
func (k Desk) writePlan(tx context.Context, ns string, plan requeuePlan, edited []string) error {
	if len(plan.envelopes) == 0 {
		return nil
	}

	outbox := k.outboxCollection(ns)
	dead := deadCollection(k.client(), ns)

	if _, err := outbox.BulkWrite(tx, plan.envelopes); err != nil {
		return fmt.Errorf("writing envelopes back to %s: %w", ns, err)
	}
	crash.At("mid-requeue")

	for _, delivery := range slices.Sorted(maps.Keys(plan.replayed)) {
		if err := k.markReplayed(tx, dead, plan.replayed[delivery], delivery, edited); err != nil {
			return err
		}
	}
	return nil
}
