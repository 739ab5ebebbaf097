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
	"github.com/outrelay/outrelay/pkg/outbox"
)

var sagaScenario = Scenario{
	Name:    "saga",
	Promise: "two nodes take every step of every saga once and tell of it once, whichever of them meets a saga, over a kill -9 of one",
	events:  10_000,
	types:   []string{member.Asked},
	run:     runSaga,
}

const (
	sagas    = 100
	askedPer = 20 // messages at most in one transaction
)

// SagaFinding is what scenario saga found. Of steps it judges by the database alone, of what was told of them by the topic.
type SagaFinding struct {
	Outcome
	Sagas       int     `json:"sagas"`
	Steps       int     `json:"steps"`
	DoubleSteps int     `json:"double_steps"`
	LostSteps   int     `json:"lost_steps"`
	Conflicts   int     `json:"conflicts_retried"` // steps that met another one of their saga; a killed node may have forgotten some
	Told        int     `json:"told"`              // distinct steps that an event tells of, at a consumer
	ToldTwice   int     `json:"told_twice"`
	Unfinished  int     `json:"unfinished"` // sagas that are not complete
	Rebalances  int     `json:"rebalances"`
	Kills       int     `json:"kills"`
	Injected    int     `json:"injected"` // messages that were written to the topic once more
	Refused     int     `json:"refused"`  // messages that the inbox knew
	StepRate    float64 `json:"steps_rate"`
	Letters     int     `json:"dead_steps"`
}

func (f *SagaFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("sagas             %s, %d not complete", formatThousands(f.Sagas), f.Unfinished),
		fmt.Sprintf("steps             %s, %.0f a second · lost %d · double %d · run again after a conflict %s", formatThousands(f.Steps), f.StepRate, f.LostSteps, f.DoubleSteps, formatThousands(f.Conflicts)),
		fmt.Sprintf("told of           %s, %d of them twice", formatThousands(f.Told), f.ToldTwice),
		fmt.Sprintf("nodes             %d kill -9 · %d rebalances", f.Kills, f.Rebalances),
		fmt.Sprintf("repeated records  %s written on purpose; the inbox refused %s messages", formatThousands(f.Injected), formatThousands(f.Refused)),
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
	hands, err := c.startMembers(ctx, 2)
	if err != nil {
		return f, err
	}
	r, repeated, err := s.repeatSome(ctx)
	if err != nil {
		return f, err
	}
	ears := s.collectSteps(ctx, s.names.topicName(member.Taken))
	began := time.Now()
	asked := make(chan error, 1)
	s.loads.Go(func() { asked <- s.askSteps(ctx, steps) })
	if err := s.killNode(ctx, c, hands[0], steps*sagas/2); err != nil {
		return f, err
	}
	f.Kills++
	if err := errors.Join(<-asked, s.awaitArrival(ctx), repeated()); err != nil {
		return f, err
	}
	f.Injected = int(r.repeated.Load())
	if err := s.finishSteps(ctx, f, ears, steps*sagas, began); err != nil {
		return f, err
	}
	c.stopAll(false)
	f.Told, f.ToldTwice = ears.countDistinct(), ears.countRepeated()
	return f, s.judgeSteps(ctx, f, steps)
}

// killNode kills a node by SIGKILL when so many steps are taken, and starts another one.
func (s *stage) killNode(ctx context.Context, c *crew, h *crewMember, after int) error {
	if err := s.takeSteps(ctx, after); err != nil {
		return err
	}
	if err := c.killMember(h); err != nil {
		return err
	}
	s.printEvent("consumer %s is killed with -9 in the middle; another one starts", h.name)
	_, err := c.startMember()
	return err
}

// finishSteps waits until all steps are taken and told of, and a little longer for one too many. That they do not come in
// time is noted: what is missing is counted later.
func (s *stage) finishSteps(ctx context.Context, f *SagaFinding, e *stepEvents, n int, began time.Time) error {
	err := s.takeSteps(ctx, n)
	f.StepRate = float64(int(float64(n) / time.Since(began).Seconds()))
	if err == nil {
		err = s.awaitCondition(ctx, "each step is told of", patience, func() bool { return e.countDistinct() >= n })
	}
	var broken *brokenPromise
	if errors.As(err, &broken) {
		s.recordBroken("%s", broken.why)
	} else if err != nil {
		return err
	}
	return s.runFor(ctx, settleTime)
}

// takeSteps waits until the sagas have taken so many steps.
func (s *stage) takeSteps(ctx context.Context, n int) error {
	return s.awaitRead(ctx, fmt.Sprintf("%s steps are taken", formatThousands(n)), func(ctx context.Context) (bool, error) {
		got, err := member.CountSteps(ctx, s.shopDatabase())
		return got >= n, err
	})
}

// askSteps appends the messages, those of one saga by several workers under many keys.
func (s *stage) askSteps(ctx context.Context, steps int) error {
	g, ctx := errgroup.WithContext(ctx)
	for w := range workers {
		g.Go(func() error {
			var batch []event.Event
			for i := w; i < sagas*steps; i += workers {
				key := fmt.Sprintf("walker-%d%02d", w+1, rand.IntN(customers))
				batch = append(batch, member.Ask(int32(i%sagas), i/sagas+1, key, event.WithID(uuid.Must(uuid.NewV7()))))
				if len(batch) == askedPer || i+workers >= sagas*steps {
					if err := s.askBatch(ctx, batch); err != nil {
						return fmt.Errorf("asking for steps: %w", err)
					}
					batch = nil
				}
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
	err := outbox.Transaction(ctx, s.client, func(ctx context.Context) error { return s.service.box.AppendMany(ctx, batch) })
	if err != nil {
		return err
	}
	s.check.Committed(time.Now(), ids...)
	return nil
}

// stepEvents hear what is told of steps.
type stepEvents struct {
	mu    sync.Mutex
	steps map[string]bool
	again int // the same event again, or another one of the same step
}

func (s *stage) collectSteps(ctx context.Context, topic string) *stepEvents {
	e := &stepEvents{steps: map[string]bool{}}
	s.loads.Go(func() { devstack.Tail(ctx, s.stack.Brokers(), []string{topic}, e.addRecord) })
	return e
}

func (e *stepEvents) addRecord(m devstack.Message) {
	var step struct{ Saga, N int }
	what := fmt.Sprintf("%q", m.Value)
	if json.Unmarshal(m.Value, &step) == nil {
		what = fmt.Sprint(step)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.steps[what] {
		e.again++
	}
	e.steps[what] = true
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

// judgeSteps reads what became of it all.
func (s *stage) judgeSteps(ctx context.Context, f *SagaFinding, steps int) error {
	db := s.shopDatabase()
	r, err := member.JudgeSteps(ctx, db, outbox.DefaultCollection, sagas, steps)
	if err != nil {
		return err
	}
	f.Sagas, f.Steps, f.Unfinished = r.Sagas, r.Steps, r.Unfinished
	f.LostSteps, f.DoubleSteps = r.Lost+r.LostEmitted, r.Double+r.DoubleEmitted
	if err := r.Err(); err != nil {
		s.recordBroken("%v", err)
	}
	if f.Told != sagas*steps || f.ToldTwice > 0 {
		s.recordBroken("%d of %d steps were told of, %d of them twice", f.Told, sagas*steps, f.ToldTwice)
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
