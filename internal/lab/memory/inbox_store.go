package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	engine "github.com/outrelay/outrelay/internal/service/inbox"
)

// inboxStore is the store of an Inbox. Its rows contain markers, engine.Leases and engine.Marks.
type inboxStore struct {
	db        *DB
	retention time.Duration
	markers   *storedTable
	offsets   *storedTable // watermarks
	claims    *storedTable // leases of claims
}

// inboxMarker is a marker with the end of its retention.
type inboxMarker struct {
	engine.Marker
	expires  time.Time
	response *engine.Response // nil: none
}

func markerKey(id engine.ID) string {
	return fmt.Sprintf("%s\x00%s\x00%s\x00%d", id.Consumer, id.Namespace, id.Key.ID, id.Generation)
}

func markKey(lane engine.LaneKey) string {
	return fmt.Sprintf("%s\x00%s\x00%d\x00%d", lane.Consumer, lane.Topic, lane.Number, lane.Lane)
}

// Transaction runs fn in the transaction of ctx, or in a new one.
func (s *inboxStore) Transaction(ctx context.Context, fn func(ctx context.Context) error) error {
	return s.db.Transaction(ctx, fn)
}

// CurrentTransaction returns the unit of work of ctx, if it is running.
func (s *inboxStore) CurrentTransaction(ctx context.Context) any {
	if !s.db.InTransaction(ctx) {
		return nil
	}
	return s.db.unitFromContext(ctx)
}

// Outside returns ctx without its transaction.
func (s *inboxStore) Outside(ctx context.Context) context.Context {
	return transaction.Outside(ctx)
}

// Now returns the current time.
func (s *inboxStore) Now() time.Time { return time.Now() }

// Wait blocks for duration.
func (s *inboxStore) Wait(ctx context.Context, duration time.Duration) error {
	timer := time.NewTimer(duration)
	defer timer.Stop()

	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ReadMarks returns the stored watermarks of the lanes.
func (s *inboxStore) ReadMarks(ctx context.Context, lanes []engine.LaneKey) (engine.Marks, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) engine.Marks {
		found := engine.Marks{}
		for _, l := range lanes {
			if mark, ok := tx.getRow(s.offsets, markKey(l)).(engine.Mark); ok {
				found[l] = mark
			}
		}
		return found
	})
}

// AdvanceMarks writes the moves.
func (s *inboxStore) AdvanceMarks(ctx context.Context, moves []engine.Move) error {
	return s.db.runOperation(ctx, func(tx *tx) error {
		for _, m := range moves {
			next := m.Mark
			if stored, ok := tx.getRow(s.offsets, markKey(m.LaneKey)).(engine.Mark); ok {
				next = stored.Advance(next)
			}
			if err := tx.putRow(s.offsets, markKey(m.LaneKey), next); err != nil {
				return err
			}
		}
		return nil
	})
}

// WriteGeneration writes the watermark of the partition if it is still seen.
func (s *inboxStore) WriteGeneration(ctx context.Context, partition engine.Partition, seen *engine.Mark, next engine.Mark) (bool, error) {
	key := markKey(engine.LaneKey{Partition: partition, Lane: engine.PartitionLane})
	return runResult(ctx, s.db, func(tx *tx) (bool, error) {
		stored, exists := tx.getRow(s.offsets, key).(engine.Mark)
		if exists != (seen != nil) || seen != nil && stored.Generation != seen.Generation {
			return false, nil
		}
		return true, tx.putRow(s.offsets, key, next)
	})
}

// WriteTopicIDs writes the ids into the watermarks of engine.TopicLane.
func (s *inboxStore) WriteTopicIDs(ctx context.Context, ids map[engine.Partition]string) error {
	return s.db.runOperation(ctx, func(tx *tx) error {
		for p, id := range ids {
			if err := tx.putRow(s.offsets, markKey(engine.LaneKey{Partition: p, Lane: engine.TopicLane}), engine.Mark{ID: id}); err != nil {
				return err
			}
		}
		return nil
	})
}

// findMarker returns the marker. ok is false if there is none, or if its retention is over.
func (s *inboxStore) findMarker(tx *tx, id engine.ID) (marker inboxMarker, ok bool) {
	marker, ok = tx.getRow(s.markers, markerKey(id)).(inboxMarker)
	if !ok || !s.Now().Before(marker.expires) {
		return inboxMarker{}, false
	}
	return marker, true
}

// putMarker stores the marker with a new retention.
func (s *inboxStore) putMarker(tx *tx, id engine.ID, marker inboxMarker) error {
	marker.expires = s.Now().Add(s.retention)
	return tx.putRow(s.markers, markerKey(id), marker)
}

// ReadMarkers returns the stored markers with these ids.
func (s *inboxStore) ReadMarkers(ctx context.Context, ids []engine.ID) (map[engine.ID]engine.Marker, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) map[engine.ID]engine.Marker {
		found := map[engine.ID]engine.Marker{}
		for _, id := range ids {
			if marker, ok := s.findMarker(tx, id); ok {
				found[id] = marker.Marker
			}
		}
		return found
	})
}

// InsertMarkers inserts markers of handled messages.
func (s *inboxStore) InsertMarkers(ctx context.Context, list []engine.NewMarker) error {
	return s.db.runOperation(ctx, func(tx *tx) error {
		for _, m := range list {
			if _, exists := s.findMarker(tx, m.ID); exists {
				return engine.ErrMarked
			}
			if err := s.putMarker(tx, m.ID, inboxMarker{Marker: engine.Marker{State: engine.StateHandled}}); err != nil {
				return err
			}
		}
		return nil
	})
}

// ClaimMarker writes a claim into the marker and counts an attempt, if that is possible.
func (s *inboxStore) ClaimMarker(ctx context.Context, n engine.NewMarker, holder engine.Holder) (engine.Marker, error) {
	return runResult(ctx, s.db, func(tx *tx) (engine.Marker, error) {
		stored, ok := s.findMarker(tx, n.ID)
		// A claim with this epoch or a higher one belongs to a later holder.
		if ok && (stored.State == engine.StateHandled || stored.Epoch >= holder.Epoch) {
			return stored.Marker, nil
		}

		marker := engine.Marker{State: engine.StateClaimed, Holder: holder, Attempts: stored.Attempts + 1}
		return marker, s.putMarker(tx, n.ID, inboxMarker{Marker: marker})
	})
}

// MarkHandled marks a claimed message as handled, if holder is still the holder.
func (s *inboxStore) MarkHandled(ctx context.Context, id engine.ID, holder engine.Holder, next engine.NextHolder) (bool, error) {
	return runResult(ctx, s.db, func(tx *tx) (bool, error) {
		marker, exists := tx.getRow(s.markers, markerKey(id)).(inboxMarker)
		if !exists || marker.Holder != holder {
			return false, nil
		}

		marker.State = engine.StateHandled
		if next == engine.RemoveHolder {
			marker.Owner = ""
		}
		return true, s.putMarker(tx, id, marker)
	})
}

// WriteResponse stores the response in the marker.
func (s *inboxStore) WriteResponse(ctx context.Context, id engine.ID, response engine.Response) error {
	return s.db.runOperation(ctx, func(tx *tx) error {
		marker, exists := tx.getRow(s.markers, markerKey(id)).(inboxMarker)
		if !exists {
			return errors.New("storing the result of a message: the marker does not exist")
		}
		marker.response = &engine.Response{Fingerprint: slices.Clone(response.Fingerprint), Value: slices.Clone(response.Value)}
		return tx.putRow(s.markers, markerKey(id), marker)
	})
}

// ReadResponse returns the response of the marker, or nil.
func (s *inboxStore) ReadResponse(ctx context.Context, id engine.ID) (*engine.Response, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) *engine.Response {
		marker, _ := s.findMarker(tx, id)
		return marker.response
	})
}

// ReadLeases returns the stored leases with these ids.
func (s *inboxStore) ReadLeases(ctx context.Context, ids []engine.ID) (map[engine.ID]engine.Lease, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) map[engine.ID]engine.Lease {
		found := map[engine.ID]engine.Lease{}
		for _, id := range ids {
			if lease, ok := tx.getRow(s.claims, markerKey(id)).(engine.Lease); ok {
				lease.Live = s.Now().Before(lease.Until)
				found[id] = lease
			}
		}
		return found
	})
}

// AcquireLease acquires the lease for the owner if it has expired.
func (s *inboxStore) AcquireLease(ctx context.Context, id engine.ID, owner string, duration time.Duration) (engine.Lease, error) {
	return runResult(ctx, s.db, func(tx *tx) (engine.Lease, error) {
		now := s.Now()
		lease, exists := tx.getRow(s.claims, markerKey(id)).(engine.Lease)
		if exists && now.Before(lease.Until) {
			return lease, nil
		}

		// The time makes the epoch rise even if the lease was deleted in between.
		epoch := max(lease.Epoch+1, now.UnixMilli())
		lease = engine.Lease{Holder: engine.Holder{Owner: owner, Epoch: epoch}, Until: now.Add(duration)}
		return lease, tx.putRow(s.claims, markerKey(id), lease)
	})
}

// updateLease stores the result of change for the lease, if the owner still holds it.
func (s *inboxStore) updateLease(ctx context.Context, id engine.ID, owner string, change func(lease engine.Lease) any) (bool, error) {
	return runResult(ctx, s.db, func(tx *tx) (bool, error) {
		lease, exists := tx.getRow(s.claims, markerKey(id)).(engine.Lease)
		if !exists || lease.Owner != owner {
			return false, nil
		}
		return true, tx.putRow(s.claims, markerKey(id), change(lease))
	})
}

// RaiseEpoch sets the epoch of the lease, if the owner still holds it.
func (s *inboxStore) RaiseEpoch(ctx context.Context, id engine.ID, holder engine.Holder) (ok bool, err error) {
	return s.updateLease(ctx, id, holder.Owner, func(lease engine.Lease) any {
		lease.Epoch = holder.Epoch
		return lease
	})
}

// RenewLease extends the lease to duration from now, if the owner still holds it.
func (s *inboxStore) RenewLease(ctx context.Context, id engine.ID, owner string, duration time.Duration) (ok bool, err error) {
	return s.updateLease(ctx, id, owner, func(lease engine.Lease) any {
		lease.Until = s.Now().Add(duration)
		return lease
	})
}

// ReleaseLease removes the owner from the lease, which ends after duration, if the owner still holds it.
func (s *inboxStore) ReleaseLease(ctx context.Context, id engine.ID, owner string, duration time.Duration) error {
	_, err := s.updateLease(ctx, id, owner, func(lease engine.Lease) any {
		lease.Owner = ""
		lease.Until = s.Now().Add(duration)
		return lease
	})
	return err
}

// DeleteLease deletes the lease if the owner still holds it.
func (s *inboxStore) DeleteLease(ctx context.Context, id engine.ID, owner string) error {
	_, err := s.updateLease(ctx, id, owner, func(engine.Lease) any { return nil })
	return err
}

// EnsureIndexes does nothing: a DB has no indexes.
func (s *inboxStore) EnsureIndexes(context.Context) error { return nil }

// Sweep deletes at most limit expired markers, the oldest first, and returns their number.
func (s *inboxStore) Sweep(ctx context.Context, limit int) (int64, error) {
	return runResult(ctx, s.db, func(tx *tx) (int64, error) {
		var expired []string
		ends := map[string]time.Time{}
		for key, m := range rowsOf[inboxMarker](tx, s.markers) {
			if !s.Now().Before(m.expires) {
				expired = append(expired, key)
				ends[key] = m.expires
			}
		}
		// The oldest first, as in MongoDB.
		slices.SortStableFunc(expired, func(a, b string) int { return ends[a].Compare(ends[b]) })

		expired = expired[:min(limit, len(expired))]
		return tx.removeRows(s.markers, expired...)
	})
}

// Counts returns the sizes of the inbox.
func (s *inboxStore) Counts(ctx context.Context) (engine.Counts, error) {
	return readSnapshot(ctx, s.db, func(tx *tx) (counts engine.Counts) {
		for range rowsOf[inboxMarker](tx, s.markers) {
			counts.Markers++
		}
		for _, l := range rowsOf[engine.Lease](tx, s.claims) {
			counts.Claimed++
			if !s.Now().Before(l.Until) {
				counts.Expired++
			}
		}
		return counts
	})
}

// A DB has no sessions, and a process that is gone leaves no open transaction. So there are no tenures.

// AddPartition returns no tenure.
func (s *inboxStore) AddPartition(engine.Partition) string { return "" }

// RemovePartitions does nothing.
func (s *inboxStore) RemovePartitions(context.Context, []engine.Partition) error { return nil }

// RecordTransaction does nothing.
func (s *inboxStore) RecordTransaction(context.Context) {}

// Heartbeat does nothing.
func (s *inboxStore) Heartbeat(context.Context) error { return nil }

// EndTransactions does nothing.
func (s *inboxStore) EndTransactions(context.Context, string) error { return nil }
