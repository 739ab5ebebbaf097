package sagatest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/outrelay/outrelay/pkg/saga"
)

func (s *suite) save() {
	s.is(s.ctx, "a", 0, nil)
	first := s.mustSave(s.ctx, saga.Record{ID: "a", Body: body(1)})
	if first.Version != 1 || first.CreatedAt.IsZero() || !first.CreatedAt.Equal(first.UpdatedAt) || first.Completed() {
		s.Errorf("after the start: %+v", first)
	}
	s.is(s.ctx, "a", 1, body(1))
	first.Body = body(2)
	second := s.mustSave(s.ctx, first)
	if second.Version != 2 || !second.CreatedAt.Equal(first.CreatedAt) || second.UpdatedAt.Before(first.UpdatedAt) {
		s.Errorf("after a change: %+v", second)
	}
	got := s.is(s.ctx, "a", 2, body(2))
	if !got.CreatedAt.Equal(first.CreatedAt) || !got.UpdatedAt.Equal(second.UpdatedAt) {
		s.Errorf("Save told the times %v and %v, and loaded are %v and %v", second.CreatedAt, second.UpdatedAt, got.CreatedAt, got.UpdatedAt)
	}
	s.mustSave(s.ctx, saga.Record{ID: "b"})
	s.is(s.ctx, "b", 1, nil)
	s.is(s.ctx, "a", 2, body(2))
}

func (s *suite) everyKindOfID() {
	for i, id := range []any{uuid.New(), "7", int32(7), int64(-7), "", int32(0), int64(1) << 40} {
		s.mustSave(s.ctx, saga.Record{ID: id, Body: body(i)})
		s.is(s.ctx, id, 1, body(i))
	}
}

func (s *suite) secondStart() {
	s.mustSave(s.ctx, saga.Record{ID: "a", Body: body(1)})
	_, err := s.Store.Save(s.ctx, name, saga.Record{ID: "a", Body: body(2)})
	s.conflict(err, 0)
	err = s.Store.Transaction(s.ctx, func(ctx context.Context) error {
		_, err := s.Store.Save(ctx, name, saga.Record{ID: "a", Body: body(2)})
		return err
	})
	s.conflict(err, 0)
	s.is(s.ctx, "a", 1, body(1))
}

func (s *suite) staleChange() {
	old := s.mustSave(s.ctx, saga.Record{ID: "a", Body: body(1)})
	s.mustSave(s.ctx, saga.Record{ID: "a", Version: 1, Body: body(2)})
	old.Body = body(3)
	_, err := s.Store.Save(s.ctx, name, old)
	s.conflict(err, 1)
	_, err = s.Store.Save(s.ctx, name, saga.Record{ID: "nobody", Version: 1, Body: body(3)})
	s.conflict(err, 1)
	s.is(s.ctx, "a", 2, body(2))
	s.is(s.ctx, "nobody", 0, nil)
}

func (s *suite) completionDeletes() {
	r := s.mustSave(s.ctx, saga.Record{ID: "a", Body: body(1)})
	s.must(s.Store.Complete(s.ctx, name, r, 0))
	s.is(s.ctx, "a", 0, nil)
	s.must(s.Store.Complete(s.ctx, name, saga.Record{ID: "never"}, 0))
	s.must(s.Store.Complete(s.ctx, name, saga.Record{ID: "a", Version: saga.AnyVersion}, 0))
	s.must(s.Store.Complete(s.ctx, name, saga.Record{ID: "a", Version: saga.AnyVersion}, time.Hour))
	s.is(s.ctx, "a", 0, nil)
	if again := s.mustSave(s.ctx, saga.Record{ID: "a", Body: body(2)}); again.Version != 1 {
		s.Errorf("a saga that begins afresh has version %d", again.Version)
	}
}

func (s *suite) staleCompletion() {
	old := s.mustSave(s.ctx, saga.Record{ID: "a", Body: body(1)})
	s.mustSave(s.ctx, saga.Record{ID: "a", Version: 1, Body: body(2)})
	s.conflict(s.Store.Complete(s.ctx, name, old, 0), 1)
	s.conflict(s.Store.Complete(s.ctx, name, old, time.Hour), 1)
	s.conflict(s.Store.Complete(s.ctx, name, saga.Record{ID: "nobody", Version: 4}, 0), 4)
	s.is(s.ctx, "a", 2, body(2))
	old.Version = saga.AnyVersion
	s.must(s.Store.Complete(s.ctx, name, old, 0))
	s.is(s.ctx, "a", 0, nil)
}

func (s *suite) tombstone() {
	r := s.mustSave(s.ctx, saga.Record{ID: "a", Body: body(1)})
	r.Body = body(2)
	s.must(s.Store.Complete(s.ctx, name, r, time.Hour))
	s.must(s.Store.Complete(s.ctx, name, saga.Record{ID: "b", Body: body(3)}, time.Hour))
	s.is(s.ctx, "a", 2, body(2))
	s.is(s.ctx, "b", 1, body(3))
	for _, id := range []string{"a", "b"} {
		got, _, err := s.Store.Load(s.ctx, name, id)
		s.must(err)
		if !got.Completed() || !got.ExpiresAt.Equal(got.CompletedAt.Add(time.Hour)) || got.CompletedAt.Before(got.CreatedAt) {
			s.Errorf("tombstone: %+v", got)
		}
		_, err = s.Store.Save(s.ctx, name, saga.Record{ID: id, Body: body(9)})
		s.conflict(err, 0)
	}
}

func (s *suite) recent() {
	var want []any
	var last time.Time
	for i := range 6 {
		// Times are to the millisecond: change it until it is later than the one before.
		r := s.mustSave(s.ctx, saga.Record{ID: int32(i), Body: body(i)})
		for !r.UpdatedAt.After(last) {
			r = s.mustSave(s.ctx, r)
		}
		last = r.UpdatedAt
		want = append([]any{int32(i)}, want...)
	}
	for limit, n := range map[int]int{-1: 0, 0: 0, 1: 1, 4: 4, 100: 6} {
		list, err := s.Store.Recent(s.ctx, name, limit)
		s.must(err)
		var got []any
		for _, r := range list {
			got = append(got, r.ID)
		}
		if !slices.Equal(got, want[:n]) {
			s.Errorf("the last %d: %v, want %v", limit, got, want[:n])
		}
	}
	list, err := s.Store.Recent(s.ctx, "other_sagas", 10)
	s.must(err)
	if len(list) != 0 {
		s.Errorf("a saga that was never used has %d", len(list))
	}
}

func (s *suite) prepare() {
	mine := saga.TypeInfo{Name: "b_sagas", Owner: "shop.Order", ID: saga.KindUUID, Messages: []string{"Placed"}}
	for range 2 {
		s.must(s.Store.Prepare(s.ctx, mine))
	}
	s.must(s.Store.Prepare(s.ctx, saga.TypeInfo{Name: "a_sagas", Owner: "shop.Order", ID: saga.KindInt32}))
	for _, other := range []saga.TypeInfo{
		{Name: "b_sagas", Owner: "billing.Order", ID: saga.KindUUID},
		{Name: "b_sagas", Owner: "shop.Order", ID: saga.KindString},
	} {
		err := s.Store.Prepare(s.ctx, other)
		var owner *saga.OwnerError
		if !errors.Is(err, saga.ErrDuplicateSaga) || !errors.As(err, &owner) {
			s.Fatalf("another saga of the same name: %v", err)
		}
		if owner.Found.Owner != "shop.Order" || owner.Found.ID != saga.KindUUID {
			s.Errorf("the owner is told as %+v", owner.Found)
		}
	}
	types, err := s.Store.Types(s.ctx)
	s.must(err)
	if len(types) != 2 || types[0].Name != "a_sagas" || types[0].ID != saga.KindInt32 || types[1].Name != "b_sagas" || types[1].Owner != "shop.Order" {
		s.Errorf("types: %+v", types)
	}
}

func (s *suite) rollback() {
	boom := errors.New("boom")
	kept := s.mustSave(s.ctx, saga.Record{ID: "kept", Body: body(1)})
	done := s.mustSave(s.ctx, saga.Record{ID: "done", Body: body(1)})
	if s.Store.InTransaction(s.ctx) {
		s.Error("a context without a transaction is said to have one")
	}
	err := s.Store.Transaction(s.ctx, func(ctx context.Context) error {
		if !s.Store.InTransaction(ctx) {
			s.Error("the transaction's context is said to have none")
		}
		s.mustSave(ctx, saga.Record{ID: "new", Body: body(2)})
		s.mustSave(ctx, saga.Record{ID: "kept", Version: kept.Version, Body: body(2)})
		s.must(s.Store.Complete(ctx, name, done, 0))
		return boom
	})
	if !errors.Is(err, boom) {
		s.Errorf("the transaction returned %v", err)
	}
	s.is(s.ctx, "new", 0, nil)
	s.is(s.ctx, "kept", 1, body(1))
	s.is(s.ctx, "done", 1, body(1))
}

// joinedFailure: a part that failed cannot be committed by who goes on.
func (s *suite) joinedFailure() {
	boom := errors.New("boom")
	err := s.Store.Transaction(s.ctx, func(ctx context.Context) error {
		err := s.Store.Transaction(ctx, func(ctx context.Context) error {
			s.mustSave(ctx, saga.Record{ID: "a", Body: body(1)})
			return boom
		})
		if !errors.Is(err, boom) {
			s.Errorf("the inner transaction returned %v", err)
		}
		return nil
	})
	if !errors.Is(err, boom) {
		s.Errorf("the outer transaction returned %v, want it to say why it cannot commit", err)
	}
	s.is(s.ctx, "a", 0, nil)
	s.must(s.Store.Transaction(s.ctx, func(ctx context.Context) error {
		return s.Store.Transaction(ctx, func(ctx context.Context) error {
			s.mustSave(ctx, saga.Record{ID: "b", Body: body(2)})
			return nil
		})
	}))
	s.is(s.ctx, "b", 1, body(2))
}

func (s *suite) ownWrites() {
	s.must(s.Store.Transaction(s.ctx, func(ctx context.Context) error {
		r := s.mustSave(ctx, saga.Record{ID: "a", Body: body(1)})
		s.is(ctx, "a", 1, body(1))
		r.Body = body(2)
		r = s.mustSave(ctx, r)
		s.is(ctx, "a", 2, body(2))
		s.must(s.Store.Complete(ctx, name, r, 0))
		s.is(ctx, "a", 0, nil)
		s.mustSave(ctx, saga.Record{ID: "b", Body: body(3)})
		return nil
	}))
	s.is(s.ctx, "a", 0, nil)
	s.is(s.ctx, "b", 1, body(3))
}

// concurrentChanges: of changes on one version one is made, and all are made in the end.
func (s *suite) concurrentChanges() {
	const workers, each = 4, 10
	s.mustSave(s.ctx, saga.Record{ID: "a"})
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				if err := s.change("a"); err != nil {
					s.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	s.is(s.ctx, "a", 1+workers*each, nil)
}

// change adds one to the version in a transaction, again after each conflict that the transaction did not settle itself.
func (s *suite) change(id any) error {
	for {
		err := s.Store.Transaction(s.ctx, func(ctx context.Context) error {
			r, _, err := s.Store.Load(ctx, name, id)
			if err != nil {
				return err
			}
			_, err = s.Store.Save(ctx, name, r)
			return err
		})
		if !errors.Is(err, saga.ErrConflict) {
			return err
		}
	}
}
