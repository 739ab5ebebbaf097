package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

const (
	patience  = 90 * time.Second // for things that normally happen within seconds
	lookEvery = 20 * time.Millisecond
)

// stage is the environment of a scenario: the servers, relays and the consumer of the demo, and
// loads that start and stop.
type stage struct {
	*demo
	scenario Scenario
	topics   []string                               // that the consumer reads, also those that are created later
	wantDead int                                    // expected dead letters at the end
	onRecord atomic.Pointer[func(devstack.Message)] // called with each record before the checker
	cancel   context.CancelCauseFunc
	loads    sync.WaitGroup

	violations struct {
		sync.Mutex
		list []string
	}
}

func newStage(demo *demo, scenario Scenario) *stage {
	st := &stage{demo: demo, scenario: scenario, topics: []string{demo.names.topicName(aggregate)}}
	for _, t := range slices.Concat(scenario.types, scenario.late) {
		st.topics = append(st.topics, demo.names.topicName(t))
	}
	return st
}

// createTopics creates the collections and the topics.
func (s *stage) createTopics(ctx context.Context) error {
	if err := s.service.createCollections(ctx); err != nil {
		return err
	}
	for _, t := range append([]string{aggregate}, s.scenario.types...) {
		if err := s.createTopic(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

// playScenario starts the consumer, runs the scenario, and then stops the loads, the relays and the
// consumer.
func (s *stage) playScenario(ctx context.Context) (Finding, error) {
	ctx, s.cancel = context.WithCancelCause(ctx)
	// The watchers outlive the scenario's context: they must see the end of the relays as well.
	watch, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	var watchers sync.WaitGroup
	watchers.Go(func() { s.follow.Run(watch) })
	watchers.Go(func() { s.watchRelays(watch) })
	watchers.Go(func() { devstack.Tail(watch, s.stack.Brokers(), s.topics, s.handleRecord) })

	finding, err := s.scenario.run(ctx, s)
	// If a watcher has ended the scenario, the cause explains the error.
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}

	s.cancel(nil)
	s.loads.Wait()
	s.view.finishStatus()
	s.relays.stopAll(stopWithin)
	stopWatching()
	watchers.Wait()
	return finding, err
}

func (s *stage) handleRecord(message devstack.Message) {
	if onRecord := s.onRecord.Load(); onRecord != nil {
		(*onRecord)(message)
	}
	s.checkRecord(message)
}

// watchRelays ends the scenario when a relay ends unexpectedly.
func (s *stage) watchRelays(ctx context.Context) {
	for {
		select {
		case relay := <-s.relays.ended:
			if !relay.isExpected() && !s.stopping.Load() {
				s.cancel(&brokenPromise{fmt.Sprintf("relay %s ended unexpectedly: %v; the end of its log:\n%s",
					relay.node, relay.prog.Err(), lastLogLines(relay))})
			}
		case <-ctx.Done():
			return
		}
	}
}

// printEvent prints a step of the scenario.
func (s *stage) printEvent(format string, args ...any) { s.view.printEvent(format, args...) }

// recordBroken records a broken promise.
func (s *stage) recordBroken(format string, args ...any) {
	s.violations.Lock()
	defer s.violations.Unlock()

	s.violations.list = append(s.violations.list, fmt.Sprintf(format, args...))
}

// awaitCondition blocks until ok returns true, and draws the progress. It returns a *brokenPromise
// if that takes too long.
func (s *stage) awaitCondition(ctx context.Context, what string, within time.Duration, ok func() bool) error {
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

// awaitSetUp is awaitCondition for a step before the fault. Being late there breaks no promise, because the relay has not been tried yet.
func (s *stage) awaitSetUp(ctx context.Context, what string, within time.Duration, ok func() bool) error {
	err := s.awaitCondition(ctx, what, within, ok)
	if late, isLate := errors.AsType[*brokenPromise](err); isLate {
		return fmt.Errorf("the scenario could not begin: %s; run it on a faster machine, or with fewer --events", late.why)
	}
	return err
}

// runFor blocks for duration while the loads run.
func (s *stage) runFor(ctx context.Context, duration time.Duration) error {
	until := time.Now().Add(duration)
	return s.awaitCondition(ctx, "the time", duration+time.Minute, func() bool { return !time.Now().Before(until) })
}

// durationOf returns how long the load takes to append this number of events.
func (s *stage) durationOf(events int) time.Duration {
	return time.Duration(events) * time.Second / time.Duration(s.options.Rate)
}

// drawProgress shows the current figures, at most every redrawEvery.
func (s *stage) drawProgress() {
	now := time.Now()
	if now.Sub(s.drawnAt) < redrawEvery {
		return
	}

	committed, delivered := s.check.Progress()
	rate := 0.0
	if !s.drawnAt.IsZero() {
		rate = float64(delivered-s.drawnDelivered) / now.Sub(s.drawnAt).Seconds()
	}
	s.drawnAt = now
	s.drawnDelivered = delivered
	s.view.showFigures(fmt.Sprintf(" events %s · delivered %s · %.0f/s · waiting %s",
		formatThousands(committed), formatThousands(delivered), rate, formatThousands(committed-delivered)))
}

// startAndAwait starts one more relay and blocks until it has the given phase.
func (s *stage) startAndAwait(ctx context.Context, phase string) (*relay, error) {
	relay, err := s.relays.startRelay()
	if err != nil {
		return nil, err
	}
	return relay, s.relays.awaitRelay(ctx, relay, "become "+phase, func() bool { return s.relays.readPhase(ctx, relay) == phase })
}

// stopAndWait stops a relay gracefully and blocks until its process has ended.
func (s *stage) stopAndWait(relay *relay) {
	relay.markExpected()
	relay.stopProcess(stopWithin)
	<-relay.prog.Done()
}

// load is a running service.
type load struct {
	*service
	stop  context.CancelFunc
	ended chan error
}

// startLoad starts a service that appends events of the aggregate type. Its keys begin with
// keyPrefix. If events is 0, the load has no end. configure functions change the service before it
// starts.
func (s *stage) startLoad(
	ctx context.Context, aggregateType, keyPrefix string, rate, events int, configure ...func(*service),
) (*load, error) {
	svc, err := newService(s.client, s.names, s.check, rate, events)
	if err != nil {
		return nil, err
	}
	svc.aggregate = aggregateType
	svc.keyPrefix = keyPrefix
	for _, f := range configure {
		f(svc)
	}

	ctx, stop := context.WithCancel(ctx)
	load := &load{service: svc, stop: stop, ended: make(chan error, 1)}
	s.loads.Go(func() {
		err := svc.Run(ctx)
		if err != nil && ctx.Err() == nil {
			s.cancel(err)
		}
		load.ended <- err
	})
	return load, nil
}

// appendInBulk makes a service append as fast as possible.
func appendInBulk(service *service) {
	service.rate = 1_000_000
	service.maxPerTransaction = 40
	service.even = true
}

func appendEvenly(service *service) { service.even = true }

// finishLoad blocks until the load has ended: immediately with now, or after it has appended all
// events.
func (l *load) finishLoad(now bool) error {
	if now {
		l.stop()
	}
	err := <-l.ended
	l.stop()
	return err
}

// awaitArrival blocks until all committed events are delivered, and then for the settle time, in
// which a surplus record would arrive.
func (s *stage) awaitArrival(ctx context.Context) error {
	err := s.awaitCondition(ctx, "all committed events are delivered", patience, func() bool {
		committed, delivered := s.check.Progress()
		return committed == delivered
	})
	if err != nil {
		return err
	}
	return s.runFor(ctx, settleTime)
}

// currentLag returns the age of the oldest committed event that is not delivered.
func (s *stage) currentLag() time.Duration {
	report := s.check.Report()
	if report.Oldest.IsZero() {
		return 0
	}
	return time.Since(report.Oldest)
}

func (s *stage) outboxCollection() *mongo.Collection {
	return s.shopDatabase().Collection(outboxName)
}

// ofWatcher is the condition for the documents of the watcher in a collection of the state database. Parts of large letters have no
// watcher.
func ofWatcher(and ...bson.E) bson.D { return append(bson.D{{Key: "watcher", Value: watcher}}, and...) }

// countWaiting returns the number of envelopes that wait for one of the reasons, or for any, or −1 if the query fails.
func (s *stage) countWaiting(ctx context.Context, reasons ...waiting.Reason) int {
	filter := ofWatcher()
	if len(reasons) > 0 {
		filter = ofWatcher(bson.E{Key: "reason", Value: bson.D{{Key: "$in", Value: reasons}}})
	}
	n, err := s.stateDatabase().Collection("waiting").CountDocuments(ctx, filter)
	if err != nil {
		return -1
	}
	return int(n)
}

const lettersOnPage = 1000

// deadLetters returns all dead letters of the watcher.
func (s *stage) deadLetters(ctx context.Context) (all []letters.Dead, err error) {
	for after := ""; ; {
		list, next, err := letters.List(ctx, s.lettersCollection(), letters.Query{Watcher: watcher}, lettersOnPage, after)
		if err != nil {
			return nil, fmt.Errorf("reading the dead letters: %w", err)
		}
		all = append(all, list...)
		if after = next; after == "" {
			return all, nil
		}
	}
}

func (s *stage) countDeadLetters(ctx context.Context) (int64, error) {
	return letters.Count(ctx, s.lettersCollection(), letters.Query{Watcher: watcher})
}

func (s *stage) lettersCollection() *mongo.Collection { return s.stateDatabase().Collection("letters") }

// countLogged returns the number of entries of this kind in the audit log.
func (s *stage) countLogged(ctx context.Context, kind string) (int, error) {
	n, err := s.stateDatabase().Collection("audit").CountDocuments(ctx, bson.D{{Key: "kind", Value: kind}})
	if err != nil {
		return 0, fmt.Errorf("reading the audit log: %w", err)
	}
	return int(n), nil
}

// completeOutcome sets the fields of the outcome that all scenarios have in common.
func (s *stage) completeOutcome(ctx context.Context, outcome *Outcome, took time.Duration) error {
	dead, err := s.countDeadLetters(ctx)
	if err != nil {
		return fmt.Errorf("counting the dead letters: %w", err)
	}
	if int(dead) != s.wantDead {
		s.recordBroken("%d dead letters, %d expected", dead, s.wantDead)
	}

	// The run has ended: each event that still waits is lost.
	report := s.check.Report()
	if err := report.Err(); err != nil {
		s.recordBroken("%v", err)
	}
	if report.Committed == 0 {
		s.recordBroken("no event was committed")
	}

	s.violations.Lock()
	defer s.violations.Unlock()
	outcome.Scenario = s.scenario.Name
	outcome.Events = report.Committed
	outcome.Delivered = report.Delivered
	outcome.Lost = report.Waiting
	outcome.Dead = int(dead)
	outcome.Duplicates = report.Duplicates
	outcome.OutOfOrder = report.OutOfOrder + report.Strayed
	outcome.Phantoms = report.Phantoms + report.Altered
	outcome.Seconds = roundSeconds(took)
	outcome.Broken = append(append([]string{}, outcome.Broken...), s.violations.list...)
	outcome.Held = len(outcome.Broken) == 0
	return nil
}

// roundSeconds returns duration in seconds, to the millisecond.
func roundSeconds(duration time.Duration) float64 { return float64(duration.Milliseconds()) / 1000 }
