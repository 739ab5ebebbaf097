package inbox

import (
	"context"
	"fmt"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
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
//   - An *InProgressError if an entry is claimed.
//   - ErrStale if another process has attached to a newer generation of a partition.
//
// After an error the transaction cannot commit. Return the error from the callback: the driver
// needs it to decide about a retry.
func (x *Inbox) Admit(ctx context.Context, list []Entry) (fresh []bool, err error) {
	return x.admit(ctx, list, x.store.ReadMarkers)
}

// AdmitNew is Admit for entries with places that are most likely new. It does not read their markers. If one of the entries has a
// marker, it returns ErrMarked: begin the transaction again, with Admit.
func (x *Inbox) AdmitNew(ctx context.Context, list []Entry) (fresh []bool, err error) {
	for _, e := range list {
		// The read of the watermark also returns the server's time, from which the retention of a marker begins.
		if err := requireTopic(e.Place.Topic); err != nil {
			return nil, fmt.Errorf("admitting: %w", err)
		}
	}
	return x.admit(ctx, list, assumeNone)
}

// markerReader is ReadMarkers of a Store.
type markerReader func(ctx context.Context, ids []ID) (map[ID]Marker, error)

// assumeNone is a markerReader that finds nothing. The insert of a marker that exists fails.
func assumeNone(context.Context, []ID) (map[ID]Marker, error) { return nil, nil }

// admit is Admit with the markers that readMarkers returns.
func (x *Inbox) admit(ctx context.Context, list []Entry, readMarkers markerReader) (fresh []bool, err error) {
	if len(list) == 0 {
		return nil, nil
	}
	if err := validateEntries(list); err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}
	if x.store.CurrentTransaction(ctx) == nil {
		return nil, fmt.Errorf("admitting: %w", transaction.ErrNone)
	}

	memo := x.memoFromContext(ctx)
	fresh, rest := memo.knownResults(list)

	// Results of this transaction need no second read.
	if len(rest) == 0 {
		return fresh, nil
	}

	// If this process is killed, the next owner of the partition can end the transaction.
	x.store.RecordTransaction(ctx)
	unknown := make([]Entry, len(rest))
	for i, at := range rest {
		unknown[i] = list[at]
	}

	// The joined transaction becomes rollback-only if a part of it fails.
	err = x.store.Transaction(ctx, func(ctx context.Context) error {
		results, err := x.admitEntries(ctx, unknown, readMarkers)
		for i, at := range rest[:len(results)] {
			fresh[at] = results[i]
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}

	memo.storeResults(list, fresh)
	return fresh, nil
}

// Check returns the result that Admit would have, including its errors, but changes nothing. If ctx has
// a transaction, Check joins it. Then only an error of the server prevents it from committing.
func (x *Inbox) Check(ctx context.Context, list []Entry) (fresh []bool, err error) {
	if err := validateEntries(list); err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}

	fresh, rest := x.memoFromContext(ctx).knownResults(list)
	if len(rest) == 0 {
		return fresh, nil
	}
	unknown := make([]Entry, len(rest))
	for i, at := range rest {
		unknown[i] = list[at]
	}

	var state *storedState
	err = x.joinTransaction(ctx, func(ctx context.Context) (err error) {
		state, err = x.readState(ctx, unknown, x.store.ReadMarkers)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}

	// The decision is made outside of the transaction, which can commit although an entry is claimed.
	decision, err := x.decideEntries(unknown, state)
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}
	for i, at := range rest {
		fresh[at] = decision.fresh[i]
	}
	return fresh, nil
}

// admitEntries reads before it writes, because a failed insert aborts the whole transaction.
func (x *Inbox) admitEntries(ctx context.Context, list []Entry, readMarkers markerReader) ([]bool, error) {
	state, err := x.readState(ctx, list, readMarkers)
	if err != nil {
		return nil, err
	}

	decision, err := x.decideEntries(list, state)
	if err != nil {
		return nil, err
	}

	if len(decision.insert) > 0 {
		if err := x.store.InsertMarkers(ctx, decision.insert); err != nil {
			return nil, err
		}
	}

	// A claim that has expired is taken over, so that its holder cannot finish any more.
	for _, id := range decision.takeOver {
		ok, err := x.store.MarkHandled(ctx, id, state.markers[id].Holder, RemoveHolder)
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, &InProgressError{Key: id.Key, Until: state.leases[id].Until}
		}
	}

	return decision.fresh, x.advanceWatermarks(ctx, state.marks.collectMoves(list))
}

// advanceWatermarks writes the moves, if there are any.
func (x *Inbox) advanceWatermarks(ctx context.Context, moves []Move) error {
	if len(moves) == 0 {
		return nil
	}
	return x.store.AdvanceMarks(ctx, moves)
}

// readMarks reads the watermarks of the lanes, if there are any.
func (x *Inbox) readMarks(ctx context.Context, lanes []LaneKey) (Marks, error) {
	if len(lanes) == 0 {
		return nil, nil
	}
	return x.store.ReadMarks(ctx, lanes)
}

// storedState contains the stored state for a list of entries.
type storedState struct {
	marks   Marks
	ids     []*ID // of the marker of each entry, or nil if the watermark alone identifies it
	markers map[ID]Marker
	leases  map[ID]Lease // of claimed messages
}

// readState reads the watermarks first: they determine the generation of an identity, and which
// entries need no marker. MongoDB does not allow one command for both in a transaction.
func (x *Inbox) readState(ctx context.Context, list []Entry, readMarkers markerReader) (*storedState, error) {
	state := &storedState{ids: make([]*ID, len(list))}

	var err error
	if state.marks, err = x.readMarks(ctx, lanesOf(list)); err != nil {
		return nil, err
	}

	var ids []ID
	for i, e := range list {
		var generation int64
		if e.Place.Topic != "" {
			generation = state.marks.currentGeneration(entryLane(e))
			if state.marks.covers(e) || e.isPlaceID() {
				// The watermark is sufficient.
				continue
			}
		}

		id := e.markerID(generation)
		state.ids[i] = &id
		ids = append(ids, id)
	}

	if len(ids) == 0 {
		return state, nil
	}
	if state.markers, err = readMarkers(ctx, ids); err != nil {
		return nil, err
	}

	// Usually there are no claims, which costs nothing.
	var claimed []ID
	for id, m := range state.markers {
		if m.State == StateClaimed {
			claimed = append(claimed, id)
		}
	}
	if len(claimed) > 0 {
		state.leases, err = x.store.ReadLeases(ctx, claimed)
	}
	return state, err
}

// decision is the treatment of a list of entries.
type decision struct {
	fresh    []bool
	insert   []NewMarker
	takeOver []ID // markers of claims that have expired
}

// decideEntries decides about the entries on the basis of the stored state. The error is an
// *InProgressError or ErrStale.
func (x *Inbox) decideEntries(list []Entry, state *storedState) (decision, error) {
	decision := decision{fresh: make([]bool, len(list))}
	seen := make(map[ID]struct{}, len(list))
	for i, e := range list {
		if e.Place.Topic != "" {
			lane := entryLane(e)
			if err := x.checkAttached(lane.Partition, state.marks.currentGeneration(lane)); err != nil {
				return decision, err
			}
			if state.marks.covers(e) {
				continue
			}
		}

		// An entry without a marker is identified by its place, which the key contains.
		id := ID{Key: e.Key}
		if state.ids[i] != nil {
			id = *state.ids[i]
		}
		if _, ok := seen[id]; ok {
			continue
		}
		seen[id] = struct{}{}

		marker, marked := state.markers[id]
		switch {
		case state.ids[i] == nil:
			// The watermark is sufficient.
		case !marked:
			decision.insert = append(decision.insert, NewMarker{id, e.Place})
		case marker.State != StateClaimed:
			continue
		case state.leases[id].Live:
			return decision, &InProgressError{Key: e.Key, Until: state.leases[id].Until}
		default:
			decision.takeOver = append(decision.takeOver, id)
		}

		decision.fresh[i] = true
	}

	return decision, nil
}

// Pass moves the watermarks past the entries without marking them as handled. Use it for messages
// that another handler handles, or that no handler handles. If ctx has a transaction, Pass joins
// it. Entries without a place are ignored. Unlike Admit, Pass accepts an identity that is too long.
func (x *Inbox) Pass(ctx context.Context, list []Entry) error {
	for _, e := range list {
		if err := e.validatePlace(); err != nil {
			return fmt.Errorf("passing: %w", err)
		}
	}

	lanes := lanesOf(list)
	if len(lanes) == 0 {
		return nil
	}

	err := x.joinTransaction(ctx, func(ctx context.Context) error {
		marks, err := x.readMarks(ctx, lanes)
		if err != nil {
			return err
		}

		for _, l := range lanes {
			if l.Lane == PartitionLane {
				continue
			}
			if err := x.checkAttached(l.Partition, marks.currentGeneration(l)); err != nil {
				return err
			}
		}

		return x.advanceWatermarks(ctx, marks.collectMoves(list))
	})
	if err != nil {
		return fmt.Errorf("passing: %w", err)
	}

	return nil
}

// Handled reports whether there is a marker for a handled message. It ignores watermarks. If ctx has a
// transaction, Handled joins it.
func (x *Inbox) Handled(ctx context.Context, key Key) (found bool, err error) {
	entry := Entry{Key: key}
	if err := entry.validateEntry(); err != nil {
		return false, err
	}

	id := entry.markerID(0)
	err = x.joinTransaction(ctx, func(ctx context.Context) error {
		markers, err := x.store.ReadMarkers(ctx, []ID{id})
		found = markers[id].State == StateHandled
		return err
	})
	if err != nil {
		return false, fmt.Errorf("looking for %s: %w", key, err)
	}
	return found, nil
}

// joinTransaction runs fn in the transaction of ctx, or without one. In a transaction, an error of
// fn makes it rollback-only.
func (x *Inbox) joinTransaction(ctx context.Context, fn func(context.Context) error) error {
	if x.store.CurrentTransaction(ctx) == nil {
		return fn(ctx)
	}
	return x.store.Transaction(ctx, fn)
}
