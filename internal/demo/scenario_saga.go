package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/demo/check"
	"github.com/outrelay/outrelay/internal/demo/member"
	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/pkg/event"
)

var sagaScenario = Scenario{
	Name:    "saga",
	Promise: "two nodes take every step of every saga once and emit one event for it, although one of them is killed with -9",
	events:  10_000,
	types:   []string{member.Asked},
	run:     runSaga,
}

const (
	sagas    = 100
	askedPer = 20 // maximum number of messages in one transaction
)

// SagaFinding is the result of scenario saga. The database decides about steps, and the topic
// decides about their events.
type SagaFinding struct {
	Outcome
	Sagas       int     `json:"sagas"`
	Steps       int     `json:"steps"`
	DoubleSteps int     `json:"double_steps"`
	LostSteps   int     `json:"lost_steps"`
	Conflicts   int     `json:"conflicts_retried"` // conflicting steps; a killed node may have lost some
	Told        int     `json:"told"`              // steps for which a consumer received an event
	ToldTwice   int     `json:"told_twice"`
	Unfinished  int     `json:"unfinished"` // sagas that are not complete
	Rebalances  int     `json:"rebalances"`
	Kills       int     `json:"kills"`
	Injected    int     `json:"injected"` // messages that were written to the topic once more
	Refused     int     `json:"refused"`  // messages that had a mark in the inbox
	StepRate    float64 `json:"steps_rate"`
	Letters     int     `json:"dead_steps"`
}

func (f *SagaFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("sagas             %s, %d not complete", formatThousands(f.Sagas), f.Unfinished),
		fmt.Sprintf("steps             %s, %.0f a second · lost %d · double %d · run again after a conflict %s",
			formatThousands(f.Steps), f.StepRate, f.LostSteps, f.DoubleSteps, formatThousands(f.Conflicts)),
		fmt.Sprintf("events received   %s, %d of them twice", formatThousands(f.Told), f.ToldTwice),
		fmt.Sprintf("nodes             %d kill -9 · %d rebalances", f.Kills, f.Rebalances),
		fmt.Sprintf("repeated records  %s written on purpose; the inbox refused %s messages",
			formatThousands(f.Injected), formatThousands(f.Refused)),
	}
}

func runSaga(ctx context.Context, s *stage) (_ Finding, err error) {
	f := &SagaFinding{}
	if _, err := s.startAndAwait(ctx, "owner"); err != nil {
		return f, err
	}
	if err := s.createTopic(ctx, member.Taken); err != nil {
		return f, err
	}

	steps := max(s.options.Events/sagas, 1)
	c, err := s.newCrew(ctx, member.Saga, s.names.topicName(member.Asked))
	if err != nil {
		return f, err
	}
	c.spec.Steps = steps
	defer func() {
		if err != nil {
			c.stopAll(true)
		}
	}()
	members, err := c.startMembers(ctx, 2)
	if err != nil {
		return f, err
	}
	// The repeater publishes records a second time: the saga must ignore them.
	r, stopRepeater, err := s.repeatSome(ctx)
	if err != nil {
		return f, err
	}
	emitted := s.collectSteps(ctx, s.names.topicName(member.Taken))

	began := time.Now()
	asked := make(chan error, 1)
	s.loads.Go(func() { asked <- s.askSteps(ctx, steps) })
	// The kill comes after half of the steps, while both members handle messages.
	if err := s.killNode(ctx, c, members[0], steps*sagas/2); err != nil {
		return f, err
	}
	f.Kills++
	if err := errors.Join(<-asked, s.awaitArrival(ctx), stopRepeater()); err != nil {
		return f, err
	}
	f.Injected = int(r.repeated.Load())

	if err := s.finishSteps(ctx, f, emitted, steps*sagas, began); err != nil {
		return f, err
	}
	c.stopAll(false)
	f.Told = emitted.countDistinct()
	f.ToldTwice = emitted.countRepeated()
	return f, s.judgeSteps(ctx, f, steps)
}

// killNode kills a node after this number of steps, and starts another one.
func (s *stage) killNode(ctx context.Context, c *crew, m *crewMember, after int) error {
	if err := s.takeSteps(ctx, after); err != nil {
		return err
	}
	if err := c.killMember(m); err != nil {
		return err
	}

	s.printEvent("consumer %s is killed with -9 after half of the steps; another one starts", m.name)
	_, err := c.startMember()
	return err
}

// finishSteps blocks until all steps are taken and their events received, and then for the settle
// time, in which a surplus event would arrive. If that takes too long, it records a broken promise.
// judgeSteps counts the missing steps.
func (s *stage) finishSteps(ctx context.Context, f *SagaFinding, emitted *stepEvents, n int, began time.Time) error {
	err := s.takeSteps(ctx, n)
	f.StepRate = float64(int(float64(n) / time.Since(began).Seconds()))
	if err == nil {
		err = s.awaitCondition(ctx, "an event of each step is received", patience, func() bool {
			return emitted.countDistinct() >= n
		})
	}

	var broken *brokenPromise
	if errors.As(err, &broken) {
		s.recordBroken("%s", broken.why)
	} else if err != nil {
		return err
	}
	return s.runFor(ctx, settleTime)
}

// takeSteps blocks until the sagas have taken this number of steps.
func (s *stage) takeSteps(ctx context.Context, n int) error {
	what := fmt.Sprintf("%s steps are taken", formatThousands(n))
	return s.awaitRead(ctx, what, func(ctx context.Context) (bool, error) {
		taken, err := member.CountSteps(ctx, s.shopDatabase())
		return taken >= n, err
	})
}

// askSteps appends the messages. Several workers append messages of the same saga, with many keys.
func (s *stage) askSteps(ctx context.Context, steps int) error {
	g, ctx := errgroup.WithContext(ctx)
	for w := range workers {
		g.Go(func() error {
			var batch []event.Event
			for i := w; i < sagas*steps; i += workers {
				key := fmt.Sprintf("walker-%d%02d", w+1, rand.IntN(customers))
				id := event.WithID(uuid.Must(uuid.NewV7()))
				batch = append(batch, member.Ask(int32(i%sagas), i/sagas+1, key, id))

				last := i+workers >= sagas*steps
				if len(batch) < askedPer && !last {
					continue
				}
				if err := s.askBatch(ctx, batch); err != nil {
					return fmt.Errorf("appending messages for sagas: %w", err)
				}
				batch = nil
			}
			return nil
		})
	}
	return g.Wait()
}

func (s *stage) askBatch(ctx context.Context, batch []event.Event) error {
	ids := make([]string, len(batch))
	for i, e := range batch {
		ids[i] = e.ID().String()
		s.check.Begin(check.Event{ID: ids[i], Key: e.Key(), Topics: []string{s.names.topicName(member.Asked)}})
	}

	err := s.service.box.Transaction(ctx, func(ctx context.Context) error {
		return s.service.box.Append(ctx, batch...)
	})
	if err != nil {
		return err
	}
	s.check.Committed(time.Now(), ids...)
	return nil
}

// stepEvents collects the events that sagas emit for their steps.
type stepEvents struct {
	mu    sync.Mutex
	steps map[string]bool
	again int // records of a step that had one before
}

func (s *stage) collectSteps(ctx context.Context, topic string) *stepEvents {
	e := &stepEvents{steps: map[string]bool{}}
	s.loads.Go(func() { devstack.Tail(ctx, s.stack.Brokers(), []string{topic}, e.addRecord) })
	return e
}

func (e *stepEvents) addRecord(m devstack.Message) {
	var step struct{ Saga, N int }
	name := fmt.Sprintf("%q", m.Value)
	if json.Unmarshal(m.Value, &step) == nil {
		name = fmt.Sprint(step)
	}

	e.mu.Lock()
	defer e.mu.Unlock()
	if e.steps[name] {
		e.again++
	}
	e.steps[name] = true
}

func (e *stepEvents) countDistinct() int {
	e.mu.Lock()
	defer e.mu.Unlock()

	return len(e.steps)
}

func (e *stepEvents) countRepeated() int {
	e.mu.Lock()
	defer e.mu.Unlock()

	return e.again
}

// judgeSteps checks the stored sagas and their events, and reads the counts of the members.
func (s *stage) judgeSteps(ctx context.Context, f *SagaFinding, steps int) error {
	db := s.shopDatabase()
	r, err := member.JudgeSteps(ctx, db, outboxName, sagas, steps)
	if err != nil {
		return err
	}
	f.Sagas = r.Sagas
	f.Steps = r.Steps
	f.Unfinished = r.Unfinished
	f.LostSteps = r.Lost + r.LostEmitted
	f.DoubleSteps = r.Double + r.DoubleEmitted
	if err := r.Err(); err != nil {
		s.recordBroken("%v", err)
	}
	if f.Told != sagas*steps || f.ToldTwice > 0 {
		s.recordBroken("events of %d of %d steps were received, %d of them twice", f.Told, sagas*steps, f.ToldTwice)
	}

	if f.Letters, err = s.countLetters(ctx); err != nil {
		return err
	}
	counts, err := member.ReadCounts(ctx, db)
	if err != nil {
		return err
	}
	f.Conflicts = counts.Conflicts
	f.Refused, f.Rebalances, err = s.readMembership(ctx)
	return err
}
