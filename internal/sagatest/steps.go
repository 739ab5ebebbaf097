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

// newCounterSaga returns the handler of a saga that counts its steps and emits an event for each.
// fail returns the error of a step.
func (s *suite) newCounterSaga(fail func() error) consumer.Handler {
	s.Helper()
	reg, err := saga.NewRegistry(s.Store, saga.WithOutbox(s.Outbox))
	s.must(err)
	def, err := saga.New[counter, string](reg, sagaName, saga.WithTombstone(time.Hour))
	s.must(err)

	by := saga.ByKey[string]()
	def.Start("Start", by, func(_ context.Context, in *instance, _ *consumer.Message) error {
		in.State.Starts++
		in.Emit(event.New(event.Aggregate{Type: "counter", ID: in.ID()}, "Started", event.Bytes("", []byte("{}"))))
		return fail()
	})

	def.Handle("Step", by, func(_ context.Context, in *instance, _ *consumer.Message) error {
		in.State.Steps++
		in.Emit(event.New(event.Aggregate{Type: "counter", ID: in.ID()}, "Stepped", event.Bytes("", []byte("{}"))))
		return fail()
	})

	def.Handle("Wait", by, func(_ context.Context, in *instance, _ *consumer.Message) error {
		return errors.Join(
			in.Timeout("one", time.Hour, event.Payload{}),
			in.Timeout("two", time.Hour, event.Payload{}),
			in.Timeout("one", time.Minute, event.Payload{}),
		)
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

func noFailure() error { return nil }

func newMessage(typ, key string) *consumer.Message {
	return &consumer.Message{ID: typ + "-" + key, Name: typ, Key: []byte(key), Value: []byte("{}")}
}

// checkEvents fails the test unless the outbox contains events of exactly these types.
func (s *suite) checkEvents(want ...string) {
	s.Helper()
	got, err := s.Events(s.ctx)
	s.must(err)
	if !slices.Equal(got, want) {
		s.Errorf("events in the outbox: %v, want %v", got, want)
	}
}

func (s *suite) concurrentStarts() {
	h := s.newCounterSaga(noFailure)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := h.Handle(s.ctx, newMessage("Start", "a")); err != nil {
				s.Error(err)
			}
		})
	}

	wg.Wait()
	s.checkEvents("Started")
}

func (s *suite) stepIsOneTransaction() {
	boom := errors.New("boom")
	err := boom
	h := s.newCounterSaga(func() error { return err })
	if got := h.Handle(s.ctx, newMessage("Start", "a")); !errors.Is(got, boom) {
		s.Errorf("Start: %v", got)
	}

	s.checkRecord(s.ctx, "a", 0, nil)
	s.checkEvents()
	err = nil
	s.must(h.Handle(s.ctx, newMessage("Start", "a")))
	err = boom
	if got := h.Handle(s.ctx, newMessage("Step", "a")); !errors.Is(got, boom) {
		s.Errorf("Step: %v", got)
	}

	s.checkEvents("Started")
	err = nil
	s.must(h.Handle(s.ctx, newMessage("Step", "a")))
	s.checkEvents("Started", "Stepped")
	s.must(s.Store.Transaction(s.ctx, func(ctx context.Context) error { return h.Handle(ctx, newMessage("End", "a")) }))
	s.must(h.Handle(s.ctx, newMessage("Start", "a")))
	s.must(h.Handle(s.ctx, newMessage("Step", "a")))
	s.checkEvents("Started", "Stepped")
}

func (s *suite) timeoutEvents() {
	h := s.newCounterSaga(noFailure)
	s.must(h.Handle(s.ctx, newMessage("Start", "a")))
	s.must(h.Handle(s.ctx, newMessage("Wait", "a")))
	s.checkEvents("Started", sagaName+".two", sagaName+".one")
	s.must(h.Handle(s.ctx, newMessage("Wait", "a")))
	s.checkEvents("Started", sagaName+".two", sagaName+".one")
	s.must(h.Handle(s.ctx, newMessage("End", "a")))
	s.checkEvents("Started")
}
