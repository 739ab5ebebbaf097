// Package requeues delivers dead letters again, as they are or with a changed envelope.
//
// A requeue is a plain transaction of the state database: it stores the envelope as waiting, as its next delivery, and
// marks the letter, or does neither. It takes no fence, because it changes nothing that the owner of the watcher has
// decided: the owner finds the envelope among those that wait, and sends it (N18). The letter stays.
//
// Letters are requeued in the order of their positions, in parts of at most [atOnce] letters and [mongodb.MaxBytes] bytes.
// Each part costs four reads, one bulk write and an update for each delivery number. Two requeues of one letter at the same time are decided by
// MongoDB: one of the transactions conflicts, runs again, and finds the mark.
package requeues

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Desk requeues the dead letters of a watcher. A Desk is made for one action: its Run is stored on the letters that the
// action requeues.
type Desk struct {
	Letters *mongo.Collection // of the state database
	Waiting *mongo.Collection // of the same database
	Watcher string
	Actor   string
	Run     string
	Mapping *envelope.Mapping // reads the envelopes; nil: they are those of the contract
	Router  *routing.Router   // of the watcher; nil: the owner finds out whether an envelope may be sent
}

// NewDesk returns a Desk for one action of actor, with a new Run.
func NewDesk(coll, waiting *mongo.Collection, watcher, actor string) Desk {
	return Desk{Letters: coll, Waiting: waiting, Watcher: watcher, Actor: actor, Run: uuid.NewString()}
}

// maxRejected bounds Outcome.Why.
const maxRejected = 100

// atOnce is how many letters one transaction requeues.
const atOnce = 500

// Options of a requeue.
type Options struct {
	IgnoreExpiry bool   // also requeue expired envelopes, without their expiry
	Topic        string // send to this topic only, which the routing need not have; "": to all topics that the envelope routes to
	DryRun       bool   // check every letter, but write nothing
}

// Outcome counts the effects of a requeue, or with DryRun the expected effects.
type Outcome struct {
	Requeued int64
	Rejected int64                    // letters that cannot be delivered as they are, and stay
	Why      []*letters.RejectedError // the first of the rejected letters, at most 100
}

func (o *Outcome) add(outcome Outcome) {
	o.Requeued += outcome.Requeued
	o.Rejected += outcome.Rejected
	o.Why = append(o.Why, outcome.Why[:min(len(outcome.Why), maxRejected-len(o.Why))]...)
}

func (o *Outcome) reject(why *letters.RejectedError) {
	o.add(Outcome{Rejected: 1, Why: []*letters.RejectedError{why}})
}

// Requeue stores the envelopes of the matching letters as waiting, each as the next delivery of the same envelope to all
// topics that it routes to, or to the topic of the options. The owner then sends them (N18). The letters stay, marked as requeued.
// Requeue leaves out letters that are already requeued, and letters of envelopes that die while it
// runs, so it ends. If Requeue is interrupted, the same call requeues the rest.
//
// query.Watcher must be that of the desk. If did is not nil, Requeue calls it with the total after each
// part. If Requeue fails, it returns the total until then.
func (k Desk) Requeue(ctx context.Context, query letters.Query, options Options, did func(Outcome)) (Outcome, error) {
	var total Outcome
	now, err := mongodb.ServerTime(ctx, k.Letters.Database().Client())
	if err != nil {
		return total, err
	}
	if query, err = query.RestrictToAction(now); err != nil {
		return total, err
	}
	query.RequeueStatus = letters.NotRequeued

	scan, err := letters.NewScan(ctx, k.Letters, query)
	if err != nil {
		return total, err
	}
	for {
		part, err := scan.Next(ctx, atOnce, mongodb.MaxBytes)
		if err != nil || len(part) == 0 {
			return total, err
		}

		outcome, err := k.requeueHalves(ctx, part, options)
		total.add(outcome)
		if did != nil {
			did(total)
		}
		if err != nil {
			return total, fmt.Errorf("requeueing %d dead letters: %w", len(part), err)
		}
	}
}

// requeueHalves requeues letters in one transaction. If MongoDB rejects an envelope, it divides the list until the envelope
// is alone, and counts its letter as rejected.
func (k Desk) requeueHalves(ctx context.Context, list []*letters.Dead, options Options) (Outcome, error) {
	plan, err := k.requeueList(ctx, list, options, nil)
	switch {
	case err == nil:
		return plan.outcome, nil
	case !isRejected(err):
		return Outcome{}, err
	case len(list) == 1:
		return Outcome{Rejected: 1, Why: []*letters.RejectedError{newRejection(list[0], err)}}, nil
	}

	half := len(list) / 2
	first, err := k.requeueHalves(ctx, list[:half], options)
	if err != nil {
		return first, err
	}
	second, err := k.requeueHalves(ctx, list[half:], options)
	first.add(second)
	return first, err
}

// rejectedError means that MongoDB rejects one of the envelopes as a waiting envelope, so that another attempt fails in the same way. An
// error of another statement concerns no single envelope.
type rejectedError struct{ error }

func (e *rejectedError) Unwrap() error { return e.error }

func isRejected(err error) bool {
	var rejected *rejectedError
	return errors.As(err, &rejected)
}

func newRejection(letter *letters.Dead, err error) *letters.RejectedError {
	return &letters.RejectedError{Letter: letter, Reason: fmt.Sprintf(
		"MongoDB rejects its envelope of %d bytes as a waiting envelope (%s); discard it, or edit it",
		letter.Size, letters.DescribeRejection(err))}
}

// plan contains the writes of one transaction.
type plan struct {
	outcome  Outcome
	delivery int32 // of the last letter in outcome.Requeued
	entries  []waiting.Entry
	letters  map[int32][]string // that the entries requeue, by delivery
}

// requeueList requeues letters in one transaction. edited names the fields of their envelopes that were changed.
func (k Desk) requeueList(ctx context.Context, list []*letters.Dead, options Options, edited []string) (planned plan, err error) {
	client := k.Letters.Database().Client()
	now, err := mongodb.ServerTime(ctx, client)
	if err != nil {
		return planned, err
	}
	if options.DryRun {
		return planned, k.planEntries(ctx, list, now, options, &planned)
	}

	err = mongodb.InTransaction(ctx, client, func(tx context.Context) error {
		// The transaction may run several times, and only its last run counts.
		planned = plan{}
		open, err := k.filterOpen(tx, list, &planned)
		if err != nil || len(open) == 0 {
			return err
		}
		if err := k.planEntries(tx, open, now, options, &planned); err != nil {
			return err
		}
		if len(edited) > 0 {
			if err := k.checkNoneWaits(tx, open[0], planned.entries); err != nil {
				return err
			}
		}
		return k.writeEntries(tx, &planned, options.Topic, edited)
	})
	return planned, err
}

// filterOpen returns the letters that still exist, are not requeued, and have not been moved into the archive or out of it. It counts in plan the
// letters that this action requeued in an earlier attempt whose outcome was unknown.
func (k Desk) filterOpen(tx context.Context, list []*letters.Dead, plan *plan) ([]*letters.Dead, error) {
	ids := make([]string, len(list))
	for i, d := range list {
		ids[i] = d.ID
	}
	found, err := mongodb.FindAll[letters.Dead](tx, k.Letters, "reading "+mongodb.Namespace(k.Letters), idIn(ids),
		options.Find().SetProjection(mongodb.Fields("requeued", "archived")))
	if err != nil {
		return nil, err
	}

	// A letter that was discarded since the scan stays discarded.
	type state struct {
		id         string
		isArchived bool
	}
	open := make(map[state]bool, len(found))
	for _, f := range found {
		switch {
		case f.Requeued == nil:
			open[state{f.ID, f.Archived != nil}] = true
		case f.Requeued.Run == k.Run:
			// An attempt with an unknown outcome has committed.
			plan.outcome.Requeued++
			plan.delivery = f.Requeued.Delivery
		}
	}
	return slices.DeleteFunc(slices.Clone(list), func(letter *letters.Dead) bool { return !open[state{letter.ID, letter.Archived != nil}] }), nil
}

// planEntries adds to plan the entries of those letters that can be requeued. The other letters are counted as rejected.
func (k Desk) planEntries(ctx context.Context, list []*letters.Dead, now time.Time, options Options, plan *plan) error {
	taken, err := k.findTaken(ctx, list)
	if err != nil {
		return err
	}
	plan.letters = map[int32][]string{}

	for _, d := range list {
		entry, err := k.newEntry(d, deliveryOf(d).next(taken), now, options)
		var rejected *letters.RejectedError
		if errors.As(err, &rejected) {
			plan.outcome.reject(rejected)
			continue
		}
		if err != nil {
			return err
		}

		plan.entries = append(plan.entries, entry)
		plan.letters[entry.Delivery] = append(plan.letters[entry.Delivery], d.ID)
		plan.outcome.Requeued++
		plan.delivery = entry.Delivery
	}
	return nil
}

// checkNoneWaits returns a [*letters.RejectedError] if the envelope of an edited letter waits already, because another letter of the event was
// requeued: the document of that delivery would stay as it is, without the edit.
func (k Desk) checkNoneWaits(tx context.Context, letter *letters.Dead, entries []waiting.Entry) error {
	for i := range entries {
		found, err := waiting.FindExisting(tx, k.Waiting, [][waiting.IDSize]byte{entries[i].DocumentID()})
		if err != nil {
			return err
		}
		if len(found) > 0 {
			return &letters.RejectedError{Letter: letter, Reason: fmt.Sprintf("delivery %d of the event waits already, from another letter; "+
				"edit the letter when that delivery has ended", entries[i].Delivery)}
		}
	}
	return nil
}

// writeEntries stores the envelopes as waiting and marks the letters with the chosen topic and the edited fields, in the transaction tx.
func (k Desk) writeEntries(tx context.Context, plan *plan, topic string, edited []string) error {
	if len(plan.entries) == 0 {
		return nil
	}
	err := waiting.Enter(tx, k.Waiting, plan.entries)
	if mongodb.IsRejection(err) {
		return &rejectedError{err}
	}
	if err != nil {
		return err
	}

	by := bson.D{{Key: "actor", Value: k.Actor}, {Key: "run", Value: k.Run}}
	if topic != "" {
		by = append(by, bson.E{Key: "topic", Value: topic})
	}
	if len(edited) > 0 {
		by = append(by, bson.E{Key: "edited", Value: edited})
	}
	for delivery, ids := range plan.letters {
		next := bson.E{Key: "delivery", Value: mongodb.Literal(delivery)}
		if _, err := k.Letters.UpdateMany(tx, idIn(ids), listing.Mark("requeued", by, next)); err != nil {
			return mongodb.DescribeError(err, "marking dead letters as requeued", "update", mongodb.Namespace(k.Letters))
		}
	}
	return nil
}

// delivery is one delivery of an event.
type delivery struct {
	ns, id, pos string
	number      int32
}

func deliveryOf(letter *letters.Dead) delivery {
	return delivery{letter.NS, mongodb.ValueKey(letter.EnvelopeID), letter.Pos, letter.Delivery}
}

// next returns the number of the first later delivery without a letter, or a negative one if there is none.
func (d delivery) next(taken map[delivery]bool) int32 {
	d.number++
	for taken[d] {
		d.number++
	}
	return d.number
}

// findTaken returns the deliveries that have letters, of the events of list. Another letter of an event may have been requeued before:
// if its delivery was rejected too, a second one with that number would leave no letter.
func (k Desk) findTaken(ctx context.Context, list []*letters.Dead) (map[delivery]bool, error) {
	ids := []bson.RawValue{}
	for _, d := range list {
		// A letter without a valid envelope may have no id.
		if !d.EnvelopeID.IsZero() {
			ids = append(ids, d.EnvelopeID)
		}
	}
	filter := bson.D{{Key: "id", Value: bson.D{{Key: "$in", Value: ids}}}, {Key: "watcher", Value: k.Watcher}}
	found, err := mongodb.FindAll[letters.Dead](ctx, k.Letters, "finding the deliveries of dead letters", filter,
		options.Find().SetProjection(mongodb.Fields("ns", "id", "pos", "delivery")))
	if err != nil {
		return nil, err
	}

	taken := make(map[delivery]bool, len(found))
	for i := range found {
		taken[deliveryOf(&found[i])] = true
	}
	return taken, nil
}

// checkRouting returns why the owner would reject the envelope of letter for topics, or for all its topics if topics is nil. It returns
// nil without a Router.
func (k Desk) checkRouting(letter *letters.Dead, view *envelope.View, topics []string) *record.Rejection {
	if k.Router == nil {
		return nil
	}
	db, coll, _ := strings.Cut(letter.NS, ".")
	_, err := k.Router.Route(view, &routing.Meta{DB: []byte(db), Coll: []byte(coll)}, nil)
	if err == nil {
		return nil
	}

	// Only a rule that discards the envelope applies to topics that an operator has chosen.
	rejection := record.RejectionOf(err)
	if topics != nil && rejection.Class != record.Dropped {
		return nil
	}
	return rejection
}

// newEntry returns the waiting envelope of letter for a delivery, with the server time now. If letter cannot be delivered as it is, the
// error is a [*letters.RejectedError].
func (k Desk) newEntry(letter *letters.Dead, delivery int32, now time.Time, options Options) (waiting.Entry, error) {
	reject := func(reason string) (waiting.Entry, error) {
		return waiting.Entry{}, &letters.RejectedError{Letter: letter, Reason: reason}
	}
	if delivery < 0 {
		return reject("it has reached the highest delivery number")
	}

	elems, err := letter.Envelope.Elements()
	switch {
	case err != nil:
		return reject("its envelope is not valid BSON; edit it")
	case len(elems) <= 1:
		return reject("only its id is left; edit it")
	}
	var view envelope.View
	if err := k.Mapping.Parse(letter.Envelope, &view); err != nil {
		id := letter.Envelope.Lookup("_id")
		if _, idErr := envelope.ParseID(id.Type, id.Value); idErr != nil || view.IDType == 0 {
			return reject(err.Error() + "; an id cannot be edited: append the event again with another id, and discard this letter")
		}
		fields := record.RejectionOf(err).Fields
		if len(fields) == 0 || slices.Contains(fields, "id") {
			return reject(err.Error() + "; edit it")
		}
		return waiting.Entry{}, &letters.RejectedError{
			Letter: letter, Reason: err.Error() + "; set " + strings.Join(fields, ", ") + " in an edit", Fields: fields,
		}
	}

	raw := letter.Envelope
	if view.HasExpiresAt && view.ExpiresAt <= now.UnixMilli() {
		if !options.IgnoreExpiry {
			return reject("it has expired; ignore the expiry, or edit it")
		}
		if raw, err = outboxes.WithoutField(letter.Envelope, k.Mapping.Name("expiresAt")); err != nil {
			return waiting.Entry{}, fmt.Errorf("removing the expiry of %s: %w", letter.ID, err)
		}
	}

	var topics []string
	if options.Topic != "" {
		topics = []string{options.Topic}
	}
	// Otherwise the envelope would die again at once.
	if rejection := k.checkRouting(letter, &view, topics); rejection != nil {
		return reject(rejection.Error() + "; correct the routing, choose another topic, or edit it")
	}
	return waiting.Entry{
		Watcher:  letter.Watcher,
		NS:       letter.NS,
		Raw:      raw,
		Delivery: delivery,
		Key:      string(view.OrderingKey()),
		Slot:     max(view.Slot, 0),
		Pos:      positionOf(letter),
		Pending:  topics,
		Reason:   waiting.Queued,
		Origin:   waiting.OriginRequeue,
		NextAt:   now,
		ReplayOf: letter.ID,
	}, nil
}

// positionOf returns the position of the letter among the waiting envelopes of its key: its own, or else the timestamp of
// the insert, or else the time at which the letter died.
func positionOf(letter *letters.Dead) string {
	if letter.Pos != "" {
		return letter.Pos
	}
	if letter.Stamp.T > 0 {
		return outboxes.PosAt(letter.Stamp)
	}
	died := min(max(letter.MovedAt.Unix(), 0), math.MaxUint32)
	return outboxes.PosAt(bson.Timestamp{T: uint32(died)})
}

// idIn returns the filter for the documents with these ids.
func idIn(ids []string) bson.D {
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
}
