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

func (f *SagaFinding) tell() []string {
	return []string{
		fmt.Sprintf("sagas             %s, %d not complete", thousands(f.Sagas), f.Unfinished),
		fmt.Sprintf("steps             %s, %.0f a second · lost %d · double %d · run again after a conflict %s", thousands(f.Steps), f.StepRate, f.LostSteps, f.DoubleSteps, thousands(f.Conflicts)),
		fmt.Sprintf("told of           %s, %d of them twice", thousands(f.Told), f.ToldTwice),
		fmt.Sprintf("nodes             %d kill -9 · %d rebalances", f.Kills, f.Rebalances),
		fmt.Sprintf("repeated records  %s written on purpose; the inbox refused %s messages", thousands(f.Injected), thousands(f.Refused)),
	}
}

func runSaga(ctx context.Context, s *stage) (_ Finding, err error) {
	f := &SagaFinding{}
	if _, err := s.start(ctx, "owner"); err != nil {
		return f, err
	}
	if err := s.createTopic(ctx, member.Taken); err != nil {
		return f, err
	}
	steps := max(s.o.Events/sagas, 1)
	c, err := s.newCrew(ctx, member.Saga, s.names.topic(member.Asked))
	if err != nil {
		return f, err
	}
	c.spec.Steps = steps
	defer func() {
		if err != nil {
			c.disband(true)
		}
	}()
	hands, err := c.serve(ctx, 2)
	if err != nil {
		return f, err
	}
	r, repeated, err := s.repeatSome(ctx)
	if err != nil {
		return f, err
	}
	ears := s.hearSteps(ctx, s.names.topic(member.Taken))
	began := time.Now()
	asked := make(chan error, 1)
	s.loads.Go(func() { asked <- s.ask(ctx, steps) })
	if err := s.killNode(ctx, c, hands[0], steps*sagas/2); err != nil {
		return f, err
	}
	f.Kills++
	if err := errors.Join(<-asked, s.arrive(ctx), repeated()); err != nil {
		return f, err
	}
	f.Injected = int(r.n.Load())
	if err := s.finishSteps(ctx, f, ears, steps*sagas, began); err != nil {
		return f, err
	}
	c.disband(false)
	f.Told, f.ToldTwice = ears.distinct(), ears.twice()
	return f, s.judgeSteps(ctx, f, steps)
}

// killNode kills a node by SIGKILL when so many steps are taken, and starts another one.
func (s *stage) killNode(ctx context.Context, c *crew, h *hand, after int) error {
	if err := s.takeSteps(ctx, after); err != nil {
		return err
	}
	if err := c.kill(h); err != nil {
		return err
	}
	s.say("consumer %s is killed with -9 in the middle; another one starts", h.name)
	_, err := c.join()
	return err
}

// finishSteps waits until all steps are taken and told of, and a little longer for one too many. That they do not come in
// time is noted: what is missing is counted later.
func (s *stage) finishSteps(ctx context.Context, f *SagaFinding, e *ears, n int, began time.Time) error {
	err := s.takeSteps(ctx, n)
	f.StepRate = float64(int(float64(n) / time.Since(began).Seconds()))
	if err == nil {
		err = s.await(ctx, "each step is told of", patience, func() bool { return e.distinct() >= n })
	}
	var broken *brokenPromise
	if errors.As(err, &broken) {
		s.broke("%s", broken.why)
	} else if err != nil {
		return err
	}
	return s.pass(ctx, settleTime)
}

// takeSteps waits until the sagas have taken so many steps.
func (s *stage) takeSteps(ctx context.Context, n int) error {
	return s.awaitRead(ctx, fmt.Sprintf("%s steps are taken", thousands(n)), func(ctx context.Context) (bool, error) {
		got, err := member.CountSteps(ctx, s.db())
		return got >= n, err
	})
}

// ask appends the messages, those of one saga by several workers under many keys.
func (s *stage) ask(ctx context.Context, steps int) error {
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
		s.check.Begin(check.Event{ID: ids[i], Key: e.Key(), Topics: []string{s.names.topic(member.Asked)}})
	}
	err := outbox.Transaction(ctx, s.client, func(ctx context.Context) error { return s.service.box.AppendMany(ctx, batch) })
	if err != nil {
		return err
	}
	s.check.Committed(time.Now(), ids...)
	return nil
}

// ears hear what is told of steps.
type ears struct {
	mu    sync.Mutex
	steps map[string]bool
	again int // the same event again, or another one of the same step
}

func (s *stage) hearSteps(ctx context.Context, topic string) *ears {
	e := &ears{steps: map[string]bool{}}
	s.loads.Go(func() { devstack.Tail(ctx, s.stack.Brokers(), []string{topic}, e.hear) })
	return e
}

func (e *ears) hear(m devstack.Message) {
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

func (e *ears) distinct() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.steps)
}

func (e *ears) twice() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.again
}

// judgeSteps reads what became of it all.
func (s *stage) judgeSteps(ctx context.Context, f *SagaFinding, steps int) error {
	db := s.db()
	r, err := member.JudgeSteps(ctx, db, outbox.DefaultCollection, sagas, steps)
	if err != nil {
		return err
	}
	f.Sagas, f.Steps, f.Unfinished = r.Sagas, r.Steps, r.Unfinished
	f.LostSteps, f.DoubleSteps = r.Lost+r.LostEmitted, r.Double+r.DoubleEmitted
	if err := r.Err(); err != nil {
		s.broke("%v", err)
	}
	if f.Told != sagas*steps || f.ToldTwice > 0 {
		s.broke("%d of %d steps were told of, %d of them twice", f.Told, sagas*steps, f.ToldTwice)
	}
	if f.Letters, err = s.letters(ctx); err != nil {
		return err
	}
	counts, err := member.ReadCounts(ctx, db)
	if err != nil {
		return err
	}
	f.Conflicts = counts.Conflicts
	f.Refused, f.Rebalances, err = s.membership(ctx)
	return err
}
