package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/requeues"
)

// The entries of the audit log for actions on dead letters.
const (
	deadRequeued   nodes.Kind = "dead_requeued"
	deadEdited     nodes.Kind = "dead_edited"
	deadDiscarding nodes.Kind = "dead_discarding" // written first, so that a discard that crashes leaves an entry
	deadDiscarded  nodes.Kind = "dead_discarded"
)

// DeadOptions are the options of a requeue.
type DeadOptions struct {
	IgnoreExpiry bool // of letters of the relay: also requeue expired envelopes, without their expiry
	// Topic is the only topic that gets the events of letters of the relay, for example after a topic was renamed. The routing need not have
	// it. "" means the topics that the routing chooses now. With a topic, the action is on letters of the relay.
	Topic    string
	Handlers []string // of letters of handlers: the handlers that get the messages, instead of the handlers that failed
	DryRun   bool     // write nothing
}

// ofRelay returns the options for letters of the relay.
func (o DeadOptions) ofRelay() requeues.Options {
	return requeues.Options{IgnoreExpiry: o.IgnoreExpiry, Topic: o.Topic, DryRun: o.DryRun}
}

// Restrict returns the filter with the letters that the options can apply to. The error is that there are none of them, or that the relay
// may not write to the topic.
func (o DeadOptions) Restrict(op Operator, filter DeadFilter) (DeadFilter, error) {
	if o.Topic == "" {
		return filter, nil
	}
	if filter.Source == FromHandler || filter.Group+filter.Handler != "" {
		return filter, invalidRequest("messages of handlers go back to their handlers, and not to topic %s: leave the topic out, or select letters of the relay", o.Topic)
	}
	if len(o.Handlers) > 0 {
		return filter, invalidRequest("a requeue has either a topic, for letters of the relay, or handlers, for letters of handlers: leave one of them out")
	}

	check := func(topic string) *record.Rejection { return routing.CheckTopic(topic, nil) }
	if op.Router != nil {
		check = op.Router.CheckTopic
	}
	if rejection := check(o.Topic); rejection != nil {
		return filter, invalidRequest("the relay cannot send to the topic: %s; choose another topic", rejection.Reason)
	}
	filter.Source = FromRelay
	return filter, nil
}

// DeadOutcome counts the effects of a requeue, or with DryRun the expected effects.
type DeadOutcome struct {
	DryRun   bool           `json:"dry_run"`
	Matched  int64          `json:"matched"` // letters that were not requeued before
	Requeued int64          `json:"requeued"`
	Rejected int64          `json:"rejected"`            // letters that cannot be delivered as they are, and stay
	Why      []DeadRejected `json:"why"`                 // the first rejected letters
	NotFound []string       `json:"not_found,omitempty"` // those ids of the filter that no letter has, requeued or not
	Run      string         `json:"run,omitempty"`
}

// DeadRejected is a letter that cannot be requeued. The reason includes the fix.
type DeadRejected struct {
	Letter     string `json:"letter,omitempty"` // id of the letter; "" for a letter of a handler
	Collection string `json:"collection"`
	ID         string `json:"id"` // "" if a dry run rejects all letters of a handler for the reason
	Delivery   int32  `json:"delivery"`
	Reason     string `json:"reason"`
}

// Requeue stores the envelope of every matching letter that is not requeued yet as waiting, as the next
// delivery of the same envelope. It returns when all are stored, which may be before they are sent. If did is not nil, Requeue
// calls it with the number of processed letters. If Requeue fails, it returns the outcome until
// then, and the same call does the rest.
func (l Letters) Requeue(
	ctx context.Context, filter DeadFilter, opts DeadOptions, did func(int64),
) (DeadOutcome, error) {
	out := DeadOutcome{DryRun: opts.DryRun, Why: []DeadRejected{}}
	if filter.RequeueStatus == string(letters.Requeued) {
		return out, errors.New("requeued dead letters cannot be requeued again; use outrelay replay to send sent events again")
	}
	filter, err := opts.Restrict(l.op, filter)
	if err != nil {
		return out, err
	}
	if out, err = l.requeueKinds(ctx, filter, opts, did); err != nil {
		return out, err
	}

	// After the requeue, because letters may be discarded while it runs. Requeued letters stay in the list.
	filter.RequeueStatus = ""
	out.NotFound, err = l.findMissing(ctx, filter)
	return out, err
}

// findMissing returns those ids of the filter that no letter has that matches.
func (l Letters) findMissing(ctx context.Context, filter DeadFilter) ([]string, error) {
	return findMissing(filter.IDs, func(after string) (Page[DeadLetter], error) {
		return l.List(ctx, filter, MaxPage, after)
	}, func(letter *DeadLetter) []string { return []string{letter.Row, letter.ID} })
}

// requeueKinds requeues the letters of the relay, and then those of handlers.
func (l Letters) requeueKinds(ctx context.Context, filter DeadFilter, opts DeadOptions, did func(int64)) (DeadOutcome, error) {
	out := DeadOutcome{DryRun: opts.DryRun, Why: []DeadRejected{}}
	kinds, err := l.kindsOfAction(ctx, filter)
	if err != nil {
		return out, err
	}

	if kinds.relay {
		if out, err = l.requeueOfRelay(ctx, filter, opts, did); err != nil {
			return out, err
		}
	}
	if !kinds.handlers {
		return out, nil
	}

	more, err := l.ofHandlers().requeue(ctx, filter, opts, addDone(did, out.Requeued+out.Rejected))
	out.Matched += more.Matched
	out.Requeued += more.Requeued
	out.Rejected += more.Rejected
	out.Why = append(out.Why, more.Why...)
	return out, err
}

// kindsOfAction is kindsOf for an action. It rejects a filter without any condition. If a watcher without collections has letters of
// handlers only, the action is on these.
func (l Letters) kindsOfAction(ctx context.Context, filter DeadFilter) (deadKinds, error) {
	if err := CheckSelection(filter, filter.All); err != nil {
		return deadKinds{}, err
	}
	return l.kindsOf(ctx, filter)
}

// addDone returns did for a part of an action before which n letters were processed.
func addDone(did func(int64), n int64) func(int64) {
	if did == nil {
		return nil
	}
	return func(done int64) { did(n + done) }
}

// requeueOfRelay is Requeue for letters of the relay.
func (l Letters) requeueOfRelay(ctx context.Context, filter DeadFilter, opts DeadOptions, did func(int64)) (DeadOutcome, error) {
	out := DeadOutcome{DryRun: opts.DryRun, Why: []DeadRejected{}}
	filter.RequeueStatus = string(letters.NotRequeued)
	query, matched, err := l.countMatching(ctx, filter)
	out.Matched = matched
	if err != nil || out.Matched == 0 {
		return out, err
	}

	// The action is logged even if it fails halfway.
	desk := l.op.newDesk()
	outcome, err := desk.Requeue(ctx, query, opts.ofRelay(), func(progress requeues.Outcome) {
		if did != nil {
			did(progress.Requeued + progress.Rejected)
		}
	})
	out.Requeued, out.Rejected = outcome.Requeued, outcome.Rejected
	for _, w := range outcome.Why {
		letter := w.Letter
		out.Why = append(out.Why, DeadRejected{letter.ID, letter.NS, letter.IDText(), letter.Delivery, w.Reason})
	}
	if opts.DryRun {
		return out, err
	}

	out.Run = desk.Run
	fields := bson.D{
		{Key: "run", Value: out.Run},
		{Key: "requeued", Value: out.Requeued},
		{Key: "rejected", Value: out.Rejected},
		{Key: "query", Value: auditFields(filter)},
	}
	if opts.Topic != "" {
		fields = append(fields, bson.E{Key: "topic", Value: opts.Topic})
	}
	return out, l.op.logOutcome(ctx, deadRequeued, fields, err)
}

// countMatching returns the query of a filter for an action on letters, and counts the letters that it matches. It
// rejects a filter without any condition.
func (l Letters) countMatching(ctx context.Context, filter DeadFilter) (query letters.Query, matched int64, err error) {
	if err = CheckSelection(filter, filter.All); err == nil {
		query, err = l.query(filter)
	}
	if err == nil {
		matched, err = letters.Count(ctx, l.op.letters(), query)
	}
	if err == nil && matched == 0 && query.NS != "" {
		err = l.checkNames(ctx, query.NS)
	}
	return query, matched, err
}

// DeadEdited is the result of an edit, or with a dry run the expected result.
type DeadEdited struct {
	DryRun     bool     `json:"dry_run"`
	Letter     string   `json:"letter,omitempty"` // id of the letter; "" for a letter of a handler
	Collection string   `json:"collection"`
	ID         string   `json:"id"`
	Died       int32    `json:"died"`     // the delivery that died
	Delivery   int32    `json:"delivery"` // the new delivery
	Edited     []string `json:"edited"`   // changed fields
	Run        string   `json:"run,omitempty"`
}

// Edit requeues one letter with a changed envelope. It returns an error if the letter no longer
// has the version from which the edit was made, or if the result is not a valid envelope. It
// rejects the placeholder of a hidden value, which would replace the value itself.
func (l Letters) Edit(ctx context.Context, ref DeadRef, deadEdit DeadEdit, opts DeadOptions) (DeadEdited, error) {
	if err := l.op.Redact.checkEdit(deadEdit); err != nil {
		return DeadEdited{}, err
	}
	source, err := l.sourceOf(ctx, ref)
	if err != nil {
		return DeadEdited{}, err
	}
	if source == FromHandler {
		return l.ofHandlers().edit(ctx, ref, deadEdit, opts)
	}
	// The edit is checked against the letter as it is now, not as the caller saw it; the version connects the two.
	letter, err := l.findLetter(ctx, ref)
	if err != nil {
		return DeadEdited{}, err
	}
	edit, err := deadEdit.toEdit(letter.Envelope, l.op.Mapping)
	if err != nil {
		return DeadEdited{}, err
	}
	edit = edit.DropSame(letter.Envelope, l.op.Mapping)

	desk := l.op.newDesk()
	out := DeadEdited{
		DryRun:     opts.DryRun,
		Letter:     letter.ID,
		Collection: letter.NS,
		ID:         letter.IDText(),
		Died:       letter.Delivery,
		Edited:     edit.Fields(),
	}
	out.Delivery, err = desk.EditAndRequeue(ctx, letter.ID, edit, opts.ofRelay())
	if err != nil || opts.DryRun {
		return out, err
	}

	out.Run = desk.Run
	return out, l.op.logOutcome(ctx, deadEdited, bson.D{
		{Key: "run", Value: out.Run},
		{Key: "letter", Value: letter.ID},
		{Key: "delivery", Value: out.Delivery},
		{Key: "edited", Value: out.Edited},
	}, nil)
}

// DeadDiscarded counts the discarded letters, or with a dry run the letters that would be
// discarded.
type DeadDiscarded struct {
	DryRun    bool     `json:"dry_run"`
	Matched   int64    `json:"matched"`
	Discarded int64    `json:"discarded"`
	NotFound  []string `json:"not_found,omitempty"` // those ids of the filter of which no letter matched, or one was not discarded
	// ArchivedUntil is when the letters leave the archive, by the clock of this process. It is missing if they are removed at once.
	ArchivedUntil *time.Time `json:"archived_until,omitempty"`
}

// archiveEnd returns when letters that are discarded now leave the archive, or nil if they are removed at once.
func (l Letters) archiveEnd(filter DeadFilter) *time.Time {
	if l.op.LetterArchive <= 0 || filter.Archived {
		return nil
	}
	end := time.Now().Add(l.op.LetterArchive).UTC().Truncate(time.Second)
	return &end
}

// Discard moves every matching letter into the archive, for [Operator.LetterArchive]. Letters that are there already it removes
// permanently. If did is not nil, Discard calls it with the number of letters so far.
func (l Letters) Discard(ctx context.Context, filter DeadFilter, effect Effect, did func(int64)) (DeadDiscarded, error) {
	out := DeadDiscarded{DryRun: bool(effect), ArchivedUntil: l.archiveEnd(filter)}
	if err := CheckSelection(filter, filter.All); err != nil {
		return out, err
	}
	missing, err := l.findMissing(ctx, filter)
	if err != nil {
		return out, err
	}
	if out, err = l.discardKinds(ctx, filter, effect, did); err != nil {
		return out, err
	}

	out.NotFound = missing
	if effect == DryRun || out.Discarded == out.Matched {
		return out, nil
	}
	// A letter that was requeued in the meantime may match no more.
	filter.RequeueStatus = ""
	gone, err := l.findMissing(ctx, filter)
	for _, text := range filter.IDs {
		if !slices.Contains(gone, text) && !slices.Contains(missing, text) {
			out.NotFound = append(out.NotFound, text)
		}
	}
	return out, err
}

// discardKinds discards the letters of the relay, and then those of handlers.
func (l Letters) discardKinds(ctx context.Context, filter DeadFilter, effect Effect, did func(int64)) (DeadDiscarded, error) {
	out := DeadDiscarded{DryRun: bool(effect), ArchivedUntil: l.archiveEnd(filter)}
	kinds, err := l.kindsOfAction(ctx, filter)
	if err != nil {
		return out, err
	}

	if kinds.relay {
		if out, err = l.discardOfRelay(ctx, filter, effect, did); err != nil {
			return out, err
		}
	}
	if !kinds.handlers {
		return out, nil
	}

	more, err := l.ofHandlers().discard(ctx, filter, effect, addDone(did, out.Discarded))
	out.Matched += more.Matched
	out.Discarded += more.Discarded
	return out, err
}

// discardOfRelay is Discard for letters of the relay.
func (l Letters) discardOfRelay(ctx context.Context, filter DeadFilter, effect Effect, did func(int64)) (DeadDiscarded, error) {
	out := DeadDiscarded{DryRun: bool(effect), ArchivedUntil: l.archiveEnd(filter)}
	query, matched, err := l.countMatching(ctx, filter)
	out.Matched = matched
	if err != nil || effect == DryRun || out.Matched == 0 {
		return out, err
	}

	// Logged before the first removal. Otherwise a crash would leave no entry.
	if err := l.op.logDiscarding(ctx, filter, out.Matched); err != nil {
		return out, err
	}
	// The action is logged even if it fails halfway.
	out.Discarded, err = letters.Discard(ctx, l.op.letters(), l.op.watcherDocuments(), query,
		letters.Discarding{Actor: l.op.Actor, Archive: l.op.LetterArchive}, did)
	return out, l.op.logDiscarded(ctx, filter, out.Discarded, err)
}

// logDiscarding must be called before the first removal. Otherwise a discard that crashes would leave no entry.
func (o Operator) logDiscarding(ctx context.Context, filter DeadFilter, matched int64) error {
	err := o.logAction(ctx, deadDiscarding, bson.D{
		{Key: "matched", Value: matched},
		{Key: "query", Value: auditFields(filter)},
	})
	if err != nil {
		return fmt.Errorf("nothing was discarded: %w", err)
	}
	return nil
}

// logDiscarded logs the end of a discard, which returned err.
func (o Operator) logDiscarded(ctx context.Context, filter DeadFilter, discarded int64, err error) error {
	return o.logOutcome(ctx, deadDiscarded, bson.D{
		{Key: "discarded", Value: discarded},
		{Key: "query", Value: auditFields(filter)},
	}, err)
}

// newDesk returns a desk for one action on dead letters.
func (o Operator) newDesk() requeues.Desk {
	desk := requeues.NewDesk(o.letters(), o.waiting(), o.Watcher, o.Actor)
	desk.Mapping = o.Mapping
	if o.isConfigured() {
		desk.Router = o.Router
	}
	return desk
}
