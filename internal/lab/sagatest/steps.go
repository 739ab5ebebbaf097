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

type instance = saga.Instance[counter]

func eventType(name string) event.Type[struct{}] {
	return event.Type[struct{}]{Aggregate: "counter", Name: name}
}

// newCounterSaga returns the handler of a saga that counts its steps and emits an event for each.
// fail returns the error of a step.
func (s *suite) newCounterSaga(fail func() error) consumer.Handler {
	s.Helper()
	def := saga.Define[counter](sagaName, saga.WithTombstone(time.Hour))

	saga.Start(def, eventType("Start"), func(_ context.Context, instance *instance, _ struct{}) error {
		instance.State.Starts++
		instance.Emit(eventType("Started").New(instance.ID(), struct{}{}))
		return fail()
	})
	saga.On(def, eventType("Step"), func(_ context.Context, instance *instance, _ struct{}) error {
		instance.State.Steps++
		instance.Emit(eventType("Stepped").New(instance.ID(), struct{}{}))
		return fail()
	})
	saga.On(def, eventType("Wait"), func(_ context.Context, instance *instance, _ struct{}) error {
		instance.TimeoutIn("one", time.Hour)
		instance.TimeoutIn("two", time.Hour)
		instance.TimeoutIn("one", time.Minute)
		return nil
	})
	saga.On(def, eventType("End"), func(_ context.Context, instance *instance, _ struct{}) error {
		instance.Complete()
		return fail()
	})
	for _, t := range []string{"one", "two"} {
		def.Timeout(t, func(context.Context, *instance) error { return nil })
	}

	handler, err := def.Handler(s.Box)
	s.must(err)
	return handler
}

func noFailure() error { return nil }

func newMessage(typ, key string) *consumer.Message {
	return &consumer.Message{ID: typ + "-" + key, Name: typ, Aggregate: event.Aggregate{ID: key}, Value: []byte("{}")}
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
	handler := s.newCounterSaga(noFailure)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			err := saga.ErrConflict
			for errors.Is(err, saga.ErrConflict) {
				err = handler.Handle(s.ctx, newMessage("Start", "a"))
			}
			if err != nil {
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
	handler := s.newCounterSaga(func() error { return err })
	if got := handler.Handle(s.ctx, newMessage("Start", "a")); !errors.Is(got, boom) {
		s.Errorf("Start: %v", got)
	}

	s.checkRecord(s.ctx, "a", 0, nil)
	s.checkEvents()
	err = nil
	s.must(handler.Handle(s.ctx, newMessage("Start", "a")))
	err = boom
	if got := handler.Handle(s.ctx, newMessage("Step", "a")); !errors.Is(got, boom) {
		s.Errorf("Step: %v", got)
	}

	s.checkEvents("Started")
	err = nil
	s.must(handler.Handle(s.ctx, newMessage("Step", "a")))
	s.checkEvents("Started", "Stepped")
	s.must(s.Box.Transaction(s.ctx, func(ctx context.Context) error { return handler.Handle(ctx, newMessage("End", "a")) }))
	s.must(handler.Handle(s.ctx, newMessage("Start", "a")))
	s.must(handler.Handle(s.ctx, newMessage("Step", "a")))
	s.checkEvents("Started", "Stepped")
}

func (s *suite) timeoutEvents() {
	handler := s.newCounterSaga(noFailure)
	s.must(handler.Handle(s.ctx, newMessage("Start", "a")))
	s.must(handler.Handle(s.ctx, newMessage("Wait", "a")))
	s.checkEvents("Started", sagaName+".two", sagaName+".one")
	s.must(handler.Handle(s.ctx, newMessage("Wait", "a")))
	s.checkEvents("Started", sagaName+".two", sagaName+".one")
	s.must(handler.Handle(s.ctx, newMessage("End", "a")))
	s.checkEvents("Started")
}
