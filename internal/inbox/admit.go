package inbox

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/transaction"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Admit reports for each entry whether it is fresh, which means that it was not handled before. It
// marks fresh entries as handled in the transaction of ctx, so they count as handled only if the
// transaction commits. Of several entries with the same identity, only the first is fresh.
//
// The watermarks move past all entries, fresh or not. Entries of one lane must be in the order of
// their offsets.
//
// Admit returns:
//   - outbox.ErrNoTransaction if no transaction is running.
//   - A *ClaimedError if an entry has an Eager claim.
//   - A *StaleError if another process has attached to a newer generation of a partition.
//
// After an error the transaction cannot commit. Return the error from the callback: the driver
// needs it to decide about a retry.
func (x *Inbox) Admit(ctx context.Context, list []Entry) (fresh []bool, err error) {
	if len(list) == 0 {
		return nil, nil
	}
	if err := validateEntries(list); err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}
	if !inTransaction(ctx) {
		return nil, fmt.Errorf("admitting: %w", outbox.ErrNoTransaction)
	}

	memo := memoFromContext(ctx)
	fresh, rest := memo.knownAnswers(list)

	// Answers of this transaction need no second read.
	if len(rest) == 0 {
		return fresh, nil
	}

	// If this process is killed, the next owner of the partition can end the transaction.
	x.recordSession(ctx)
	unknown := make([]Entry, len(rest))
	for i, at := range rest {
		unknown[i] = list[at]
	}

	// The joined transaction becomes rollback-only if a part of it fails.
	err = transaction.Run(ctx, x.client, func(ctx context.Context) error {
		answers, err := x.admitEntries(ctx, unknown)
		for i, at := range rest[:len(answers)] {
			fresh[at] = answers[i]
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}

	memo.storeAnswers(list, fresh)
	return fresh, nil
}

// admitEntries reads before it writes, because a failed insert would abort the whole transaction.
func (x *Inbox) admitEntries(ctx context.Context, list []Entry) ([]bool, error) {
	state, err := x.readState(ctx, list)
	if err != nil {
		return nil, err
	}

	d, err := x.decideEntries(list, state)
	if err != nil {
		return nil, err
	}
	if err := x.insertMarkers(ctx, list, state, d.insert); err != nil {
		return nil, err
	}
	if err := x.takeOverClaims(ctx, list, state, d.takeOver); err != nil {
		return nil, err
	}

	return d.fresh, x.advanceWatermarks(ctx, collectMoves(list, state.marks))
}

// insertMarkers inserts new markers with one command.
//
// If another transaction has written a marker since this one began, the insert is a write conflict
// (112). Then the transaction starts again and reads the marker. A duplicate key (11000) can only
// come from an index that is not one of EnsureIndexes.
func (x *Inbox) insertMarkers(ctx context.Context, list []Entry, r *storedState, which []int) error {
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
		docs[i] = x.newHandledMarker(r.ids[at], list[at].Place, now)
		keys[i] = list[at].Key
	}

	if _, err := x.markers.InsertMany(ctx, docs); err != nil {
		if dup := duplicateKeys(err, keys); dup != nil {
			return &DuplicateError{Keys: dup, Err: err}
		}
		return fmt.Errorf("inserting markers: %w", err)
	}

	return nil
}

// takeOverClaims marks messages as handled whose claim has expired. It removes the owner, so that
// the earlier holder cannot finish any more.
func (x *Inbox) takeOverClaims(ctx context.Context, list []Entry, r *storedState, which []int) error {
	for _, at := range which {
		m := r.markers[string(r.ids[at])]
		filter := bson.D{
			{Key: "_id", Value: m.ID},
			{Key: "s", Value: stateClaimed},
			{Key: "o", Value: m.Owner},
			{Key: "e", Value: m.Epoch},
		}
		update := append(x.handledUpdate(), bson.D{{Key: "$unset", Value: "o"}})
		res, err := x.markers.UpdateOne(ctx, filter, update)
		if err != nil {
			return fmt.Errorf("taking over a claim: %w", err)
		}
		if res.MatchedCount == 0 {
			return &ClaimedError{Key: list[at].Key, Until: r.leases[string(m.ID)].Until}
		}
	}

	return nil
}

// Pass moves the watermarks past the entries without marking them as handled. Use it for messages
// that another handler handles, or that no handler handles. If ctx has a transaction, Pass joins
// it. Entries without a place are ignored. Unlike Admit, Pass accepts an identity that is too long.
func (x *Inbox) Pass(ctx context.Context, list []Entry) error {
	lanes := make(map[lane]struct{})
	for _, e := range list {
		if err := e.validatePlace(); err != nil {
			return fmt.Errorf("passing: %w", err)
		}
		if e.Place.Topic != "" {
			lanes[entryLane(e)] = struct{}{}
		}
	}

	if len(lanes) == 0 {
		return nil
	}

	err := x.joinTransaction(ctx, func(ctx context.Context) error {
		m, err := x.readMarks(ctx, lanes)
		if err != nil {
			return err
		}

		for l := range lanes {
			if err := x.checkAttached(l.partition, m.currentGeneration(l.partition, l.lane)); err != nil {
				return err
			}
		}

		return x.advanceWatermarks(ctx, collectMoves(list, m))
	})
	if err != nil {
		return fmt.Errorf("passing: %w", err)
	}

	return nil
}

// Check returns the result that Admit would have, including its errors, but changes nothing. If ctx
// has a transaction, Check joins it. Then only an error of the server prevents it from committing.
func (x *Inbox) Check(ctx context.Context, list []Entry) (fresh []bool, err error) {
	if err := validateEntries(list); err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}

	fresh, rest := memoFromContext(ctx).knownAnswers(list)
	if len(rest) == 0 {
		return fresh, nil
	}

	unknown := make([]Entry, len(rest))
	for i, at := range rest {
		unknown[i] = list[at]
	}

	var state *storedState
	err = x.joinTransaction(ctx, func(ctx context.Context) (err error) {
		state, err = x.readState(ctx, unknown)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}

	d, err := x.decideEntries(unknown, state)
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}

	for i, at := range rest {
		fresh[at] = d.fresh[i]
	}

	return fresh, nil
}

// Insert marks all entries as handled. If some of them were handled before, it marks none, and the
// *DuplicateError contains exactly those. Entries with the same identity count as one. Insert
// starts a transaction, or joins the one of ctx. Then a duplicate makes that transaction
// rollback-only.
func (x *Inbox) Insert(ctx context.Context, list []Entry) error {
	list, err := x.distinctEntries(list)
	if err != nil {
		return fmt.Errorf("inserting: %w", err)
	}

	err = transaction.Run(ctx, x.client, func(ctx context.Context) error {
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

	// With an error of the server, the duplicates of the whole list are not known yet.
	var dup *DuplicateError
	if errors.As(err, &dup) && dup.Err != nil {
		return x.findDuplicates(ctx, list, err)
	}

	return err
}

// findDuplicates returns a *DuplicateError for all entries that were handled before. It is called
// after the server rejected an insert and the transaction was aborted. If there are no such
// entries, it returns the error of the server.
func (x *Inbox) findDuplicates(ctx context.Context, list []Entry, refusal error) error {
	var dup *DuplicateError
	errors.As(refusal, &dup)

	// The transaction was aborted, so this reads outside of it.
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

// distinctEntries returns the entries without those whose identity occurs earlier in the list.
func (x *Inbox) distinctEntries(list []Entry) ([]Entry, error) {
	if err := validateEntries(list); err != nil {
		return nil, err
	}

	seen := make(map[string]struct{}, len(list))
	kept := make([]Entry, 0, len(list))
	for _, e := range list {
		id, err := x.markerID(e, 0)
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

// joinTransaction runs fn in the transaction of ctx, or without one. In a transaction, an error of
// fn makes it rollback-only.
func (x *Inbox) joinTransaction(ctx context.Context, fn func(context.Context) error) error {
	if !inTransaction(ctx) {
		return fn(ctx)
	}
	return transaction.Run(ctx, x.client, fn)
}
