package admin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/store"
)

// The entries of the events log that tell of dead letters.
const (
	deadRequeued   store.Kind = "dead_requeued"
	deadEdited     store.Kind = "dead_edited"
	deadDiscarding store.Kind = "dead_discarding" // before the first is gone: afterwards nothing would tell of a crash
	deadDiscarded  store.Kind = "dead_discarded"
)

// auditWait bounds the writing of an entry after the action itself was called off.
const auditWait = 5 * time.Second

// audit notes what was done, also when ctx has ended meanwhile. The action's own error comes first. While the caller waits, so does
// this: a server that is slow is no reason for a gap in the log.
func (o Operator) audit(called context.Context, kind store.Kind, fields bson.D, done error) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(called))
	defer cancel()
	defer context.AfterFunc(called, func() { time.AfterFunc(auditWait, cancel) })()
	fields = append(fields, bson.E{Key: "complete", Value: done == nil})
	return errors.Join(done, o.note(ctx, kind, fields))
}

// DeadOptions of a requeue.
type DeadOptions struct {
	IgnoreExpiry bool // deliver also what has expired; its expiry is taken off
	DryRun       bool
}

// DeadOutcome counts what a requeue did, or with DryRun would do.
type DeadOutcome struct {
	DryRun   bool          `json:"dry_run"`
	Matched  int64         `json:"matched"` // letters that were not requeued yet
	Requeued int64         `json:"requeued"`
	Refused  int64         `json:"refused"` // letters that cannot be delivered as they are, and stay
	Why      []DeadRefused `json:"why"`     // the first of them
	Run      string        `json:"run,omitempty"`
}

// DeadRefused is a letter that stays, with what to do about it.
type DeadRefused struct {
	Collection string `json:"collection"`
	ID         string `json:"id"`
	Delivery   int32  `json:"delivery"`
	Reason     string `json:"reason"`
}

func (d *DeadOutcome) add(o deadletter.Outcome) {
	d.Requeued += o.Requeued
	d.Refused += o.Refused
	for _, w := range o.Why {
		if len(d.Why) < deadletter.MaxRefused {
			d.Why = append(d.Why, DeadRefused{w.ID.NS, w.ID.Text(), w.ID.Delivery, w.Reason})
		}
	}
}

// DeadRequeue gives every letter that matches and was not requeued yet back to its outbox, at once: each is the next
// delivery of the same envelope. did, if not nil, hears how many of the letters are through. On an error what was done until
// then is done, and the same call does the rest.
func (o Operator) DeadRequeue(ctx context.Context, f DeadFilter, opts DeadOptions, did func(int64)) (DeadOutcome, error) {
	out := DeadOutcome{DryRun: opts.DryRun, Why: []DeadRefused{}}
	if f.Stand == string(deadletter.Requeued) {
		return out, errors.New("letters that were requeued are not requeued again; outrelay replay sends what was sent")
	}
	f.Stand = string(deadletter.Replayable)
	namespaces, q, err := o.scope(ctx, f)
	if err != nil {
		return out, err
	}
	if q.Empty() && !q.All {
		return out, deadletter.ErrEmptyQuery
	}
	if out.Matched, err = deadletter.Count(ctx, o.State.Client(), namespaces, q); err != nil || out.Matched == 0 {
		return out, err
	}
	desk := deadletter.NewDesk(o.State, o.Watcher, o.Actor)
	for _, ns := range namespaces {
		before := out.Requeued + out.Refused
		var got deadletter.Outcome
		got, err = desk.Requeue(ctx, ns, q, deadletter.Options{Late: opts.IgnoreExpiry, DryRun: opts.DryRun}, func(p deadletter.Outcome) {
			if did != nil {
				did(before + p.Requeued + p.Refused)
			}
		})
		out.add(got)
		if err != nil {
			break
		}
	}
	if opts.DryRun {
		return out, err
	}
	out.Run = desk.Run
	return out, o.audit(ctx, deadRequeued, bson.D{
		{Key: "run", Value: out.Run}, {Key: "requeued", Value: out.Requeued}, {Key: "refused", Value: out.Refused}, {Key: "query", Value: f.audit()},
	}, err)
}

// DeadEdited is what an edit made of a letter, or with a dry run would make.
type DeadEdited struct {
	DryRun     bool     `json:"dry_run"`
	Collection string   `json:"collection"`
	ID         string   `json:"id"`
	Died       int32    `json:"died"`     // the delivery that died
	Delivery   int32    `json:"delivery"` // the one that it becomes
	Edited     []string `json:"edited"`   // fields
	Run        string   `json:"run,omitempty"`
}

// DeadEdit gives one letter back with a changed envelope. It is refused unless the letter still has the version that the
// edit was made from, and unless the result is a valid envelope.
func (o Operator) DeadEdit(ctx context.Context, ref DeadRef, e DeadEdit, opts DeadOptions) (DeadEdited, error) {
	d, err := o.find(ctx, ref)
	if err != nil {
		return DeadEdited{}, err
	}
	edit, err := e.edit(d.Envelope)
	if err != nil {
		return DeadEdited{}, err
	}
	desk := deadletter.NewDesk(o.State, o.Watcher, o.Actor)
	out := DeadEdited{DryRun: opts.DryRun, Collection: d.ID.NS, ID: d.ID.Text(), Died: d.ID.Delivery, Edited: edit.Fields()}
	out.Delivery, err = desk.EditAndRequeue(ctx, d.ID, edit, deadletter.Options{Late: opts.IgnoreExpiry, DryRun: opts.DryRun})
	if err != nil || opts.DryRun {
		return out, err
	}
	out.Run = desk.Run
	return out, o.audit(ctx, deadEdited, bson.D{
		{Key: "run", Value: out.Run}, {Key: "letter", Value: d.ID.String()}, {Key: "delivery", Value: out.Delivery}, {Key: "edited", Value: out.Edited},
	}, nil)
}

// DeadDiscarded counts what was discarded, or with a dry run would be.
type DeadDiscarded struct {
	DryRun    bool  `json:"dry_run"`
	Matched   int64 `json:"matched"`
	Discarded int64 `json:"discarded"`
}

// DeadDiscard removes every letter that matches, for good. did, if not nil, hears how many are gone.
func (o Operator) DeadDiscard(ctx context.Context, f DeadFilter, dryRun bool, did func(int64)) (DeadDiscarded, error) {
	out := DeadDiscarded{DryRun: dryRun}
	namespaces, q, err := o.scope(ctx, f)
	if err != nil {
		return out, err
	}
	if q.Empty() && !q.All {
		return out, deadletter.ErrEmptyQuery
	}
	if out.Matched, err = deadletter.Count(ctx, o.State.Client(), namespaces, q); err != nil || dryRun || out.Matched == 0 {
		return out, err
	}
	if err := o.note(ctx, deadDiscarding, bson.D{{Key: "matched", Value: out.Matched}, {Key: "query", Value: f.audit()}}); err != nil {
		return out, fmt.Errorf("nothing was discarded: %w", err)
	}
	desk := deadletter.NewDesk(o.State, o.Watcher, o.Actor)
	for _, ns := range namespaces {
		before := out.Discarded
		var n int64
		n, err = desk.Discard(ctx, ns, q, func(n int64) {
			if did != nil {
				did(before + n)
			}
		})
		if out.Discarded += n; err != nil {
			break
		}
	}
	return out, o.audit(ctx, deadDiscarded, bson.D{{Key: "discarded", Value: out.Discarded}, {Key: "query", Value: f.audit()}}, err)
}
