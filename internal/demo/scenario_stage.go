package demo

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/pkg/outbox"
)

const (
	patience  = 90 * time.Second // for what should come within seconds
	lookEvery = 20 * time.Millisecond
)

// stage is where a scenario plays: the servers, relays and the consumer of the demo, with loads that begin and end.
type stage struct {
	*demo
	scenario Scenario
	topics   []string                               // that are read, those that come late too
	wantDead int                                    // dead letters, at the end
	hear     atomic.Pointer[func(devstack.Message)] // is told of each record, before the checker is
	cancel   context.CancelCauseFunc
	loads    sync.WaitGroup

	bad struct {
		sync.Mutex
		list []string
	}
}

func newStage(d *demo, s Scenario) *stage {
	st := &stage{demo: d, scenario: s, topics: []string{d.names.topic(aggregate)}}
	for _, t := range slices.Concat(s.types, s.late) {
		st.topics = append(st.topics, d.names.topic(t))
	}
	return st
}

// prepare makes the collections and the topics.
func (s *stage) prepare(ctx context.Context) error {
	if err := s.service.prepare(ctx); err != nil {
		return err
	}
	for _, t := range append([]string{aggregate}, s.scenario.types...) {
		if err := s.createTopic(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

// play runs the scenario between the start of the consumer and the end of the relays.
func (s *stage) play(ctx context.Context) (Finding, error) {
	ctx, s.cancel = context.WithCancelCause(ctx)
	watch, stop := context.WithCancel(context.WithoutCancel(ctx))
	var watchers sync.WaitGroup
	watchers.Go(func() { s.follow.Run(watch) })
	watchers.Go(func() { s.watchRelays(watch) })
	watchers.Go(func() { devstack.Tail(watch, s.stack.Brokers(), s.topics, s.consume) })
	f, err := s.scenario.run(ctx, s)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	s.cancel(nil)
	s.loads.Wait()
	s.v.done()
	s.relays.stop(stopWithin)
	stop()
	watchers.Wait()
	return f, err
}

func (s *stage) consume(m devstack.Message) {
	if hear := s.hear.Load(); hear != nil {
		(*hear)(m)
	}
	s.demo.consume(m)
}

// watchRelays ends the scenario when a relay ends by itself.
func (s *stage) watchRelays(ctx context.Context) {
	for {
		select {
		case x := <-s.relays.ended:
			if !x.isExpected() && !s.dying.Load() {
				s.cancel(&brokenPromise{fmt.Sprintf("relay %s ended by itself: %v; the end of its log:\n%s", x.node, x.prog.Err(), tail(x))})
			}
		case <-ctx.Done():
			return
		}
	}
}

// say is a line of the account that goes on.
func (s *stage) say(format string, args ...any) { s.v.event(format, args...) }

// broke notes what was not as promised.
func (s *stage) broke(format string, args ...any) {
	s.bad.Lock()
	defer s.bad.Unlock()
	s.bad.list = append(s.bad.list, fmt.Sprintf(format, args...))
}

// await waits until ok says so and draws the figures meanwhile. That it does not come in time breaks the promise.
func (s *stage) await(ctx context.Context, what string, within time.Duration, ok func() bool) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	late := time.NewTimer(within)
	defer late.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late.C:
			return &brokenPromise{fmt.Sprintf("not within %v: %s", within, what)}
		case <-tick.C:
			s.drawProgress()
		}
	}
	return nil
}

// pass lets the loads run for a while.
func (s *stage) pass(ctx context.Context, d time.Duration) error {
	until := time.Now().Add(d)
	return s.await(ctx, "the time", d+time.Minute, func() bool { return !time.Now().Before(until) })
}

// takes is how long that many events take at the rate of the load.
func (s *stage) takes(events int) time.Duration {
	return time.Duration(events) * time.Second / time.Duration(s.o.Rate)
}

func (s *stage) drawProgress() {
	now := time.Now()
	if now.Sub(s.drawnAt) < redrawEvery {
		return
	}
	committed, delivered := s.check.Progress()
	rate := 0.0
	if !s.drawnAt.IsZero() {
		rate = float64(delivered-s.delivered) / now.Sub(s.drawnAt).Seconds()
	}
	s.drawnAt, s.delivered = now, delivered
	s.v.figures(fmt.Sprintf(" events %s · delivered %s · %.0f/s · waiting %s", thousands(committed), thousands(delivered), rate, thousands(committed-delivered)))
}

// start runs one more relay and waits until it works, or stands by where another works.
func (s *stage) start(ctx context.Context, role string) (*relay, error) {
	x, err := s.relays.spawn()
	if err != nil {
		return nil, err
	}
	return x, s.relays.await(ctx, x, "become "+role, func() bool { return s.relays.role(ctx, x) == role })
}

// end stops a relay gracefully and waits until it is gone.
func (s *stage) end(x *relay) {
	x.expect()
	x.end(stopWithin)
	<-x.prog.Done()
}

// load is a service that runs.
type load struct {
	*service
	stop  context.CancelFunc
	ended chan error
}

// load starts a service that tells of aggregates of that type, under keys of its own; 0 events have no end.
func (s *stage) load(ctx context.Context, aggregateType, who string, rate, events int, more ...func(*service)) (*load, error) {
	one, err := newService(s.client, s.names, s.check, rate, events)
	if err != nil {
		return nil, err
	}
	one.aggregate, one.who = aggregateType, who
	for _, f := range more {
		f(one)
	}
	ctx, stop := context.WithCancel(ctx)
	l := &load{service: one, stop: stop, ended: make(chan error, 1)}
	s.loads.Go(func() {
		err := one.Run(ctx)
		if err != nil && ctx.Err() == nil {
			s.cancel(err)
		}
		l.ended <- err
	})
	return l, nil
}

// inBulk makes a service append as fast as it goes.
func inBulk(o *service) { o.rate, o.together, o.even = 1_000_000, 40, true }

func evenly(o *service) { o.even = true }

// finish ends a load: at once, or when it has appended all.
func (l *load) finish(now bool) error {
	if now {
		l.stop()
	}
	err := <-l.ended
	l.stop()
	return err
}

// arrive waits until nothing that was committed is missing, and a little longer for a record too many.
func (s *stage) arrive(ctx context.Context) error {
	err := s.await(ctx, "all that was committed arrives", patience, func() bool {
		committed, delivered := s.check.Progress()
		return committed == delivered
	})
	if err != nil {
		return err
	}
	return s.pass(ctx, settleTime)
}

// lag is how long the oldest committed event that has not arrived waits.
func (s *stage) lag() time.Duration {
	r := s.check.Report()
	if r.Oldest.IsZero() {
		return 0
	}
	return time.Since(r.Oldest)
}

func (s *stage) outbox() *mongo.Collection {
	return s.db().Collection(outbox.DefaultCollection)
}

func (s *stage) dead() *mongo.Collection {
	return s.db().Collection(deadletter.Collection(outbox.DefaultCollection))
}

// count counts envelopes; −1 if the server does not say.
func (s *stage) count(ctx context.Context, filter bson.D) int {
	n, err := s.outbox().CountDocuments(ctx, filter)
	if err != nil {
		return -1
	}
	return int(n)
}

// logged is how many entries of that kind the log of events has.
func (s *stage) logged(ctx context.Context, kind string) (int, error) {
	n, err := s.state().Collection("events").CountDocuments(ctx, bson.D{{Key: "kind", Value: kind}})
	if err != nil {
		return 0, fmt.Errorf("reading the log of events: %w", err)
	}
	return int(n), nil
}

// judge completes an outcome.
func (s *stage) judge(ctx context.Context, o *Outcome, took time.Duration) error {
	dead, err := s.dead().CountDocuments(ctx, deadletter.Letters())
	if err != nil {
		return fmt.Errorf("counting the dead letters: %w", err)
	}
	if int(dead) != s.wantDead {
		s.broke("%d dead letters, %d expected", dead, s.wantDead)
	}
	r := s.check.Report()
	if err := r.Err(); err != nil {
		s.broke("%v", err)
	}
	if r.Committed == 0 {
		s.broke("not one event was committed")
	}
	s.bad.Lock()
	defer s.bad.Unlock()
	o.Scenario, o.Events, o.Delivered, o.Lost, o.Dead = s.scenario.Name, r.Committed, r.Delivered, r.Waiting, int(dead)
	o.Duplicates, o.OutOfOrder, o.Phantoms = r.Duplicates, r.OutOfOrder+r.Strayed, r.Phantoms+r.Altered
	o.Seconds = round(took)
	o.Broken = append(append([]string{}, o.Broken...), s.bad.list...)
	o.Held = len(o.Broken) == 0
	return nil
}

// round is a duration in seconds, to the millisecond.
func round(d time.Duration) float64 { return float64(d.Milliseconds()) / 1000 }
