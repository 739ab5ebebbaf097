package sagatest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/outrelay/outrelay/internal/service/sagas"
)

func (s *suite) saveAndLoad() {
	s.checkRecord(s.ctx, "a", 0, nil)
	first := s.mustSave(s.ctx, sagas.Record{ID: "a", Body: newBody(1)})
	if first.Version != 1 || first.CreatedAt.IsZero() || !first.CreatedAt.Equal(first.UpdatedAt) || first.Completed() {
		s.Errorf("after the start: %+v", first)
	}

	s.checkRecord(s.ctx, "a", 1, newBody(1))
	first.Body = newBody(2)
	second := s.mustSave(s.ctx, first)
	if second.Version != 2 || !second.CreatedAt.Equal(first.CreatedAt) || second.UpdatedAt.Before(first.UpdatedAt) {
		s.Errorf("after a change: %+v", second)
	}

	got := s.checkRecord(s.ctx, "a", 2, newBody(2))
	if !got.CreatedAt.Equal(first.CreatedAt) || !got.UpdatedAt.Equal(second.UpdatedAt) {
		s.Errorf("Save returned the times %v and %v, but Load returned %v and %v",
			second.CreatedAt, second.UpdatedAt, got.CreatedAt, got.UpdatedAt)
	}

	s.mustSave(s.ctx, sagas.Record{ID: "b"})
	s.checkRecord(s.ctx, "b", 1, nil)
	s.checkRecord(s.ctx, "a", 2, newBody(2))
}

func (s *suite) everyKindOfID() {
	for i, id := range []any{uuid.New(), "7", int32(7), int64(-7), "", int32(0), int64(1) << 40} {
		s.mustSave(s.ctx, sagas.Record{ID: id, Body: newBody(i)})
		s.checkRecord(s.ctx, id, 1, newBody(i))
	}
}

func (s *suite) secondStart() {
	s.mustSave(s.ctx, sagas.Record{ID: "a", Body: newBody(1)})
	_, err := s.Store.Save(s.ctx, sagaName, sagas.Record{ID: "a", Body: newBody(2)})
	s.checkConflict(err)
	err = s.Box.Transaction(s.ctx, func(ctx context.Context) error {
		_, err := s.Store.Save(ctx, sagaName, sagas.Record{ID: "a", Body: newBody(2)})
		return err
	})
	s.checkConflict(err)
	s.checkRecord(s.ctx, "a", 1, newBody(1))
}

func (s *suite) staleChange() {
	old := s.mustSave(s.ctx, sagas.Record{ID: "a", Body: newBody(1)})
	s.mustSave(s.ctx, sagas.Record{ID: "a", Version: 1, Body: newBody(2)})
	old.Body = newBody(3)
	_, err := s.Store.Save(s.ctx, sagaName, old)
	s.checkConflict(err)
	_, err = s.Store.Save(s.ctx, sagaName, sagas.Record{ID: "nobody", Version: 1, Body: newBody(3)})
	s.checkConflict(err)
	s.checkRecord(s.ctx, "a", 2, newBody(2))
	s.checkRecord(s.ctx, "nobody", 0, nil)
}

func (s *suite) completionDeletes() {
	record := s.mustSave(s.ctx, sagas.Record{ID: "a", Body: newBody(1)})
	s.must(s.Store.Complete(s.ctx, sagaName, record, 0))
	s.checkRecord(s.ctx, "a", 0, nil)
	s.must(s.Store.Complete(s.ctx, sagaName, sagas.Record{ID: "never"}, 0))
	if again := s.mustSave(s.ctx, sagas.Record{ID: "a", Body: newBody(2)}); again.Version != 1 {
		s.Errorf("a saga that was started again has version %d, want 1", again.Version)
	}
}

func (s *suite) staleCompletion() {
	old := s.mustSave(s.ctx, sagas.Record{ID: "a", Body: newBody(1)})
	s.mustSave(s.ctx, sagas.Record{ID: "a", Version: 1, Body: newBody(2)})
	s.checkConflict(s.Store.Complete(s.ctx, sagaName, old, 0))
	s.checkConflict(s.Store.Complete(s.ctx, sagaName, old, time.Hour))
	s.checkConflict(s.Store.Complete(s.ctx, sagaName, sagas.Record{ID: "nobody", Version: 4}, 0))
	s.checkRecord(s.ctx, "a", 2, newBody(2))
}

func (s *suite) tombstoneStays() {
	record := s.mustSave(s.ctx, sagas.Record{ID: "a", Body: newBody(1)})
	record.Body = newBody(2)
	s.must(s.Store.Complete(s.ctx, sagaName, record, time.Hour))
	s.must(s.Store.Complete(s.ctx, sagaName, sagas.Record{ID: "b", Body: newBody(3)}, time.Hour))
	s.checkRecord(s.ctx, "a", 2, newBody(2))
	s.checkRecord(s.ctx, "b", 1, newBody(3))
	for _, id := range []string{"a", "b"} {
		got, _, err := s.Store.Load(s.ctx, sagaName, id)
		s.must(err)
		if !got.Completed() || !got.ExpiresAt.Equal(got.CompletedAt.Add(time.Hour)) || got.CompletedAt.Before(got.CreatedAt) {
			s.Errorf("tombstone: %+v", got)
		}

		_, err = s.Store.Save(s.ctx, sagaName, sagas.Record{ID: id, Body: newBody(9)})
		s.checkConflict(err)
	}
}

func (s *suite) recentOrder() {
	var want []any
	var last time.Time
	for i := range 6 {
		// Times have millisecond precision. Change the record until it is later than the
		// previous one.
		record := s.mustSave(s.ctx, sagas.Record{ID: int32(i), Body: newBody(i)})
		for !record.UpdatedAt.After(last) {
			record = s.mustSave(s.ctx, record)
		}

		last = record.UpdatedAt
		want = append([]any{int32(i)}, want...)
	}

	for limit, n := range map[int]int{-1: 0, 0: 0, 1: 1, 4: 4, 100: 6} {
		var got []any
		for r, err := range s.Store.Recent(s.ctx, sagaName, limit) {
			s.must(err)
			got = append(got, r.ID)
		}
		if !slices.Equal(got, want[:n]) {
			s.Errorf("the last %d records: got %v, want %v", limit, got, want[:n])
		}
	}

	for r, err := range s.Store.Recent(s.ctx, "other_sagas", 10) {
		s.must(err)
		s.Errorf("a saga that was never used has the record %v, want none", r.ID)
	}
}

func (s *suite) prepareTypes() {
	mine := sagas.Type{Name: "b_sagas", Owner: "shop.Order", ID: sagas.UUID}
	sagaType := sagas.Type{Name: "a_sagas", Owner: "shop.Order", ID: sagas.Int32}
	for _, want := range []sagas.Type{mine, mine, sagaType} {
		if found, err := s.Store.Prepare(s.ctx, want); err != nil || found != want {
			s.Errorf("Prepare of %+v: %+v, %v", want, found, err)
		}
	}

	for _, other := range []sagas.Type{
		{Name: "b_sagas", Owner: "billing.Order", ID: sagas.UUID},
		{Name: "b_sagas", Owner: "shop.Order", ID: sagas.String},
	} {
		if found, err := s.Store.Prepare(s.ctx, other); err != nil || found != mine {
			s.Errorf("another saga of the same name: found %+v, %v", found, err)
		}
	}

	types, err := s.Store.Types(s.ctx)
	s.must(err)
	if !slices.Equal(types, []sagas.Type{sagaType, mine}) {
		s.Errorf("types: %+v", types)
	}
}

func (s *suite) rollbackLeavesNothing() {
	boom := errors.New("boom")
	kept := s.mustSave(s.ctx, sagas.Record{ID: "kept", Body: newBody(1)})
	done := s.mustSave(s.ctx, sagas.Record{ID: "done", Body: newBody(1)})
	err := s.Box.Transaction(s.ctx, func(ctx context.Context) error {
		s.mustSave(ctx, sagas.Record{ID: "new", Body: newBody(2)})
		s.mustSave(ctx, sagas.Record{ID: "kept", Version: kept.Version, Body: newBody(2)})
		s.must(s.Store.Complete(ctx, sagaName, done, 0))
		return boom
	})
	if !errors.Is(err, boom) {
		s.Errorf("the transaction returned %v", err)
	}

	s.checkRecord(s.ctx, "new", 0, nil)
	s.checkRecord(s.ctx, "kept", 1, newBody(1))
	s.checkRecord(s.ctx, "done", 1, newBody(1))
}

// joinedFailure checks that a transaction whose inner part failed cannot commit.
func (s *suite) joinedFailure() {
	boom := errors.New("boom")
	err := s.Box.Transaction(s.ctx, func(ctx context.Context) error {
		err := s.Box.Transaction(ctx, func(ctx context.Context) error {
			s.mustSave(ctx, sagas.Record{ID: "a", Body: newBody(1)})
			return boom
		})
		if !errors.Is(err, boom) {
			s.Errorf("the inner transaction returned %v", err)
		}

		return nil
	})
	if !errors.Is(err, boom) {
		s.Errorf("the outer transaction returned %v, want the error of the inner one", err)
	}

	s.checkRecord(s.ctx, "a", 0, nil)
	s.must(s.Box.Transaction(s.ctx, func(ctx context.Context) error {
		return s.Box.Transaction(ctx, func(ctx context.Context) error {
			s.mustSave(ctx, sagas.Record{ID: "b", Body: newBody(2)})
			return nil
		})
	}))

	s.checkRecord(s.ctx, "b", 1, newBody(2))
}

func (s *suite) ownWrites() {
	s.must(s.Box.Transaction(s.ctx, func(ctx context.Context) error {
		record := s.mustSave(ctx, sagas.Record{ID: "a", Body: newBody(1)})
		s.checkRecord(ctx, "a", 1, newBody(1))
		record.Body = newBody(2)
		record = s.mustSave(ctx, record)
		s.checkRecord(ctx, "a", 2, newBody(2))
		s.must(s.Store.Complete(ctx, sagaName, record, 0))
		s.checkRecord(ctx, "a", 0, nil)
		s.mustSave(ctx, sagas.Record{ID: "b", Body: newBody(3)})
		return nil
	}))

	s.checkRecord(s.ctx, "a", 0, nil)
	s.checkRecord(s.ctx, "b", 1, newBody(3))
}

// concurrentChanges checks that of several changes of one version only one succeeds, and that all
// succeed in the end.
func (s *suite) concurrentChanges() {
	const workers, each = 4, 10
	s.mustSave(s.ctx, sagas.Record{ID: "a"})
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				if err := s.changeWithRetries("a"); err != nil {
					s.Error(err)
					return
				}
			}
		})
	}

	wg.Wait()
	s.checkRecord(s.ctx, "a", 1+workers*each, nil)
}

// changeWithRetries increases the version in a transaction. It retries after each conflict that the
// transaction did not resolve.
func (s *suite) changeWithRetries(id any) error {
	for {
		err := s.Box.Transaction(s.ctx, func(ctx context.Context) error {
			record, _, err := s.Store.Load(ctx, sagaName, id)
			if err != nil {
				return err
			}

			_, err = s.Store.Save(ctx, sagaName, record)
			return err
		})
		if !errors.Is(err, sagas.ErrConflict) {
			return err
		}
	}
}
