package sagatest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

type counter struct{ Starts, Steps int }

type instance = saga.Instance[counter, string]

// counting defines a saga that counts its steps and emits an event for each.
func (s *suite) counting(fail func() error) consumer.Handler {
	s.Helper()
	reg, err := saga.NewRegistry(s.Store, saga.WithOutbox(s.Outbox))
	s.must(err)
	def, err := saga.New[counter, string](reg, name, saga.WithTombstone(time.Hour))
	s.must(err)
	by := saga.ByKey[string]()
	def.Start("Start", by, func(_ context.Context, in *instance, _ *consumer.Message) error {
		in.State.Starts++
		in.Emit(event.New("counter", in.ID(), "Started", "{}"))
		return fail()
	})
	def.Handle("Step", by, func(_ context.Context, in *instance, _ *consumer.Message) error {
		in.State.Steps++
		in.Emit(event.New("counter", in.ID(), "Stepped", "{}"))
		return fail()
	})
	def.Handle("Wait", by, func(_ context.Context, in *instance, _ *consumer.Message) error {
		return errors.Join(in.Timeout("one", time.Hour, nil), in.Timeout("two", time.Hour, nil), in.Timeout("one", time.Minute, nil))
	})
	def.Handle("End", by, func(_ context.Context, in *instance, _ *consumer.Message) error {
		in.Complete()
		return fail()
	})
	for _, t := range []string{"one", "two"} {
		def.Timeout(t, func(context.Context, *instance, *consumer.Message) error { return nil })
	}
	h, err := def.Handler()
	s.must(err)
	s.must(reg.Prepare(s.ctx))
	return h
}

func never() error { return nil }

func message(typ, key string) *consumer.Message {
	return &consumer.Message{ID: typ + "-" + key, Type: typ, Key: []byte(key), Value: []byte("{}")}
}

func (s *suite) events(want ...string) {
	s.Helper()
	got, err := s.Events(s.ctx)
	s.must(err)
	if !slices.Equal(got, want) {
		s.Errorf("events in the outbox: %v, want %v", got, want)
	}
}

func (s *suite) concurrentStarts() {
	h := s.counting(never)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := h.Handle(s.ctx, message("Start", "a")); err != nil {
				s.Error(err)
			}
		})
	}
	wg.Wait()
	s.events("Started")
}

func (s *suite) step() {
	boom := errors.New("boom")
	err := boom
	h := s.counting(func() error { return err })
	if got := h.Handle(s.ctx, message("Start", "a")); !errors.Is(got, boom) {
		s.Errorf("Start: %v", got)
	}
	s.is(s.ctx, "a", 0, nil)
	s.events()
	err = nil
	s.must(h.Handle(s.ctx, message("Start", "a")))
	err = boom
	if got := h.Handle(s.ctx, message("Step", "a")); !errors.Is(got, boom) {
		s.Errorf("Step: %v", got)
	}
	s.events("Started")
	err = nil
	s.must(h.Handle(s.ctx, message("Step", "a")))
	s.events("Started", "Stepped")
	s.must(s.Store.Transaction(s.ctx, func(ctx context.Context) error { return h.Handle(ctx, message("End", "a")) }))
	s.must(h.Handle(s.ctx, message("Start", "a")))
	s.must(h.Handle(s.ctx, message("Step", "a")))
	s.events("Started", "Stepped")
}

func (s *suite) timeouts() {
	h := s.counting(never)
	s.must(h.Handle(s.ctx, message("Start", "a")))
	s.must(h.Handle(s.ctx, message("Wait", "a")))
	s.events("Started", name+".two", name+".one")
	s.must(h.Handle(s.ctx, message("Wait", "a")))
	s.events("Started", name+".two", name+".one")
	s.must(h.Handle(s.ctx, message("End", "a")))
	s.events("Started")
}
