package inbox

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/outbox"
)

// Admit says for each entry whether it is fresh, and marks the fresh as handled, in the transaction of ctx: they are
// handled if it commits, and nothing has happened if it does not. Of entries with the same identity the first is fresh.
// The watermarks move past every entry, whether it is fresh or not; entries of one lane must be in the order of their
// offsets.
//
// Without a running transaction it returns outbox.ErrNoTransaction. If somebody holds an Eager claim on an entry it is a
// *ClaimedError. If another process has attached to a newer generation of a partition it is a *StaleError. After an error
// the transaction cannot commit: return the error, as the driver needs it to decide on a retry.
func (x *Inbox) Admit(ctx context.Context, list []Entry) (fresh []bool, err error) {
	if len(list) == 0 {
		return nil, nil
	}
	if err := validate(list); err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}
	if !inTransaction(ctx) {
		return nil, fmt.Errorf("admitting: %w", outbox.ErrNoTransaction)
	}
	memo := memoOf(ctx)
	fresh, rest := memo.answer(list)
	if len(rest) == 0 {
		return fresh, nil
	}
	x.note(ctx)
	ask := make([]Entry, len(rest))
	for i, at := range rest {
		ask[i] = list[at]
	}
	// Joining makes the transaction rollback-only if any of it fails.
	err = outbox.Transaction(ctx, x.client, func(ctx context.Context) error {
		answers, err := x.admit(ctx, ask)
		for i, at := range rest[:len(answers)] {
			fresh[at] = answers[i]
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}
	memo.keep(list, fresh)
	return fresh, nil
}

// admit reads first: an insert that fails would abort the whole transaction.
func (x *Inbox) admit(ctx context.Context, list []Entry) ([]bool, error) {
	r, err := x.read(ctx, list)
	if err != nil {
		return nil, err
	}
	v, err := x.decide(list, r)
	if err != nil {
		return nil, err
	}
	if err := x.insert(ctx, list, r, v.insert); err != nil {
		return nil, err
	}
	if err := x.retake(ctx, list, r, v.retake); err != nil {
		return nil, err
	}
	return v.fresh, x.advance(ctx, moves(list, r.marks))
}

// insert writes new markers with one command.
//
// A marker that another transaction wrote since this one began is a write conflict (112), by which the transaction starts
// afresh and then reads it. A duplicate key (11000) can only come from an index that somebody else has made.
func (x *Inbox) insert(ctx context.Context, list []Entry, r *reading, which []int) error {
	if len(which) == 0 {
		return nil
	}
	now, err := serverTime(ctx)
	if err != nil {
		return err
	}
	docs := make([]any, len(which))
	keys := make([]Key, len(which))
	for i, at := range which {
		docs[i], keys[i] = x.handledMarker(r.ids[at], list[at].Place, now), list[at].Key
	}
	if _, err := x.markers.InsertMany(ctx, docs); err != nil {
		if dup := duplicates(err, keys); dup != nil {
			return &DuplicateError{Keys: dup, Err: err}
		}
		return fmt.Errorf("inserting markers: %w", err)
	}
	return nil
}

// retake turns the markers of claims whose lease is over. Their holders cannot finish any more: the owner goes.
func (x *Inbox) retake(ctx context.Context, list []Entry, r *reading, which []int) error {
	for _, at := range which {
		m := r.markers[string(r.ids[at])]
		filter := bson.D{{Key: "_id", Value: m.ID}, {Key: "s", Value: stateClaimed}, {Key: "o", Value: m.Owner}, {Key: "e", Value: m.Epoch}}
		res, err := x.markers.UpdateOne(ctx, filter, append(x.toHandled(), bson.D{{Key: "$unset", Value: "o"}}))
		if err != nil {
			return fmt.Errorf("taking over a claim: %w", err)
		}
		if res.MatchedCount == 0 {
			return &ClaimedError{Key: list[at].Key, Until: r.leases[string(m.ID)].Until}
		}
	}
	return nil
}

// Pass moves the watermarks past the entries without marking them: for messages that somebody else will handle, or nobody.
// It joins a transaction that is in ctx and needs none. Entries without a place are ignored. Pass accepts an entry
// that Admit refuses because its identity is too long.
func (x *Inbox) Pass(ctx context.Context, list []Entry) error {
	lanes := make(map[lane]struct{})
	for _, e := range list {
		if err := e.validatePlace(); err != nil {
			return fmt.Errorf("passing: %w", err)
		}
		if e.Place.Topic != "" {
			lanes[laneOf(e)] = struct{}{}
		}
	}
	if len(lanes) == 0 {
		return nil
	}
	err := x.join(ctx, func(ctx context.Context) error {
		m, err := x.readMarks(ctx, lanes)
		if err != nil {
			return err
		}
		for l := range lanes {
			if err := x.checkAttached(l.partition, m.generation(l.partition, l.lane)); err != nil {
				return err
			}
		}
		return x.advance(ctx, moves(list, m))
	})
	if err != nil {
		return fmt.Errorf("passing: %w", err)
	}
	return nil
}

// Check is Admit without a trace: it says what would be fresh, or which error Admit would return. It joins a transaction
// that is in ctx and needs none; only an error of the server keeps that from being committed.
func (x *Inbox) Check(ctx context.Context, list []Entry) (fresh []bool, err error) {
	if err := validate(list); err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}
	fresh, rest := memoOf(ctx).answer(list)
	if len(rest) == 0 {
		return fresh, nil
	}
	ask := make([]Entry, len(rest))
	for i, at := range rest {
		ask[i] = list[at]
	}
	var r *reading
	err = x.join(ctx, func(ctx context.Context) (err error) {
		r, err = x.read(ctx, ask)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}
	v, err := x.decide(ask, r)
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}
	for i, at := range rest {
		fresh[at] = v.fresh[i]
	}
	return fresh, nil
}

// Insert marks all entries or, if any of them was handled before, none: then the *DuplicateError has exactly those. An
// identity that is in the list twice is one. It makes a transaction, or joins that of ctx, which a duplicate then dooms.
func (x *Inbox) Insert(ctx context.Context, list []Entry) error {
	list, err := x.distinct(list)
	if err != nil {
		return fmt.Errorf("inserting: %w", err)
	}
	err = outbox.Transaction(ctx, x.client, func(ctx context.Context) error {
		fresh, err := x.Admit(ctx, list)
		if err != nil {
			return err
		}
		var dup []Key
		for i, f := range fresh {
			if !f {
				dup = append(dup, list[i].Key)
			}
		}
		if dup != nil {
			return &DuplicateError{Keys: dup}
		}
		return nil
	})
	var refused *DuplicateError
	if errors.As(err, &refused) && refused.Err != nil {
		return x.probe(ctx, list, err)
	}
	return err
}

// probe finds out, after the transaction was aborted, which entries the server's refusal is about. If there is none, the
// refusal was about something else and stays what it is.
func (x *Inbox) probe(ctx context.Context, list []Entry, refusal error) error {
	var dup *DuplicateError
	errors.As(refusal, &dup)
	fresh, err := x.Check(mongo.NewSessionContext(ctx, nil), list)
	if err != nil {
		return errors.Join(dup.Err, err)
	}
	var keys []Key
	for i, f := range fresh {
		if !f {
			keys = append(keys, list[i].Key)
		}
	}
	if keys == nil {
		return fmt.Errorf("inserting markers: %w", dup.Err)
	}
	return &DuplicateError{Keys: keys, Err: dup.Err}
}

// distinct leaves out entries whose identity came before in the list.
func (x *Inbox) distinct(list []Entry) ([]Entry, error) {
	if err := validate(list); err != nil {
		return nil, err
	}
	seen := make(map[string]struct{}, len(list))
	kept := make([]Entry, 0, len(list))
	for _, e := range list {
		id, err := x.identity(e, 0)
		if err != nil {
			return nil, err
		}
		if _, ok := seen[string(id)]; !ok {
			seen[string(id)] = struct{}{}
			kept = append(kept, e)
		}
	}
	return kept, nil
}

// join runs fn in the transaction of ctx, which its error dooms, or without one.
func (x *Inbox) join(ctx context.Context, fn func(context.Context) error) error {
	if !inTransaction(ctx) {
		return fn(ctx)
	}
	return outbox.Transaction(ctx, x.client, fn)
}
