package memory_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/breaker"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// plan is a consumer of the topic "plan", which has one partition.
type plan struct {
	*world
	*consumer.Consumer
	reported chan error
}

func newPlan(t *testing.T, opts ...consumer.Option) *plan {
	t.Helper()
	return newPlanIn(newWorld(t), opts...)
}

func newPlanIn(w *world, opts ...consumer.Option) *plan {
	w.Helper()
	p := &plan{world: w, reported: make(chan error, 10_000)}
	p.broker.CreateTopic("plan", 1)
	var err error
	p.Consumer, err = consumer.New("g", nil, append([]consumer.Option{
		consumer.WithTopics("plan"), withSurroundings(consuming.Surroundings{Transport: p.broker, Inbox: p.inbox, Transact: p.db.Transaction}),
		consumer.WithCommitCount(1),
		consumer.WithErrorHook(func(_ context.Context, err error) { p.reported <- err }),
	}, opts...)...)

	p.mustSucceed(err)
	return p
}

// put writes n messages of a type, with different keys or with the same key.
func (p *plan) put(typ string, n int, keys int) {
	p.Helper()
	for i := range n {
		id := fmt.Sprint(typ, "-", i)
		p.mustSucceed(p.broker.Publish(p.context(), "plan", []transport.Record{{
			Key: []byte(fmt.Sprint("key-", i%keys)), Value: []byte(id),
			Headers: []event.Header{{Key: "id", Value: []byte(id)}, {Key: "type", Value: []byte(typ)}},
		}}))
	}
}

func (p *plan) addHandler(typ string, f consumer.HandlerFunc, opts ...consumer.HandlerOption) {
	p.Helper()
	p.mustSucceed(p.Handle("h-"+typ, consumer.Func(f, typ), opts...))
}

// waitPassed waits until all offsets of the topic are committed.
func (p *plan) waitPassed() {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), patience)
	defer cancel()
	p.mustSucceed(p.broker.AwaitCommitted(ctx, "g", "plan"))
}

// takeReports returns the errors that were reported since the last call.
func (p *plan) takeReports() (all []error) {
	for {
		select {
		case err := <-p.reported:
			all = append(all, err)
		default:
			return all
		}
	}
}

// A message that waits for its turn when the consumer stops has not failed. It is neither a dead
// letter nor lost, and is handled later.
func TestMessagesThatWaitForTheirHandlerAtAStopAreNotBlamed(t *testing.T) {
	t.Parallel()
	for name, fate := range map[string]consumer.Retry{
		"dead letter": consumer.NoRetry(),
		"discard":     {MaxAttempts: 1, Then: consumer.ThenDiscard},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlan(t)
			p.put("A", 40, 40)
			var handled atomic.Int32
			begun, release := make(chan struct{}, 40), make(chan struct{})
			p.addHandler("A", func(context.Context, *consumer.Message) error {
				begun <- struct{}{}
				<-release
				handled.Add(1)
				return nil
			}, consumer.WithLimit(1), consumer.WithRetry(fate))

			ctx, stop := context.WithCancel(p.context())
			done := make(chan error, 1)
			go func() { done <- p.Run(ctx) }()
			<-begun
			stop()
			close(release)
			p.mustSucceed(<-done)
			p.start("consumer", p.Run)
			p.waitPassed()

			letters := p.listLetters()
			if n := handled.Load(); n != 40 || len(letters) > 0 {
				t.Errorf("%d of 40 messages were handled, %d are dead letters", n, len(letters))
			}

			for _, err := range p.takeReports() {
				if _, ok := errors.AsType[*consumer.HandlerError](err); ok {
					t.Error(err)
				}
			}
		})
	}
}

func TestALimitedHandlerDoesNotStarveOthers(t *testing.T) {
	t.Parallel()
	p := newPlan(t, consumer.WithConcurrency(4))
	p.put("slow", 64, 64)
	begun, release := make(chan struct{}, 64), make(chan struct{})
	p.addHandler("slow", func(context.Context, *consumer.Message) error {
		begun <- struct{}{}
		<-release
		return nil
	}, consumer.WithLimit(1))

	quick := make(chan struct{}, 1)
	p.addHandler("quick", func(context.Context, *consumer.Message) error {
		quick <- struct{}{}
		return nil
	})
	p.start("consumer", p.Run)
	<-begun
	p.put("quick", 1, 1)
	select {
	case <-quick:
	case <-time.After(patience):
		t.Error("the other handler was not called while 64 messages waited for the limited one")
	}

	close(release)
	p.waitPassed()
}

// One handler is removed while its message waits for the next attempt, and another one with the
// same name replaces it.
func TestAHandlerThatIsReplacedLosesNoMessageThatWaits(t *testing.T) {
	t.Parallel()
	p := newPlan(t)
	p.put("A", 1, 1)
	var effects atomic.Int32
	failed := make(chan struct{}, 10)
	policy := consumer.WithRetry(consumer.Retry{Quick: []time.Duration{500 * time.Millisecond}})
	var calls atomic.Int32
	handler := func(context.Context, *consumer.Message) error {
		if calls.Add(1) == 1 {
			failed <- struct{}{}
			return errors.New("the first time")
		}

		effects.Add(1)
		return nil
	}

	p.addHandler("A", handler, policy)
	p.start("consumer", p.Run)
	<-failed
	p.Remove("h-A")
	p.addHandler("A", handler, policy)
	p.mustSucceed(p.broker.Publish(p.context(), "plan", []transport.Record{{
		Key: []byte("key-0"), Headers: []event.Header{{Key: "id", Value: []byte("second")}, {Key: "type", Value: []byte("A")}},
	}}))
	p.waitPassed()
	if n := effects.Load(); n != 2 {
		t.Errorf("%d of 2 messages had their effect", n)
	}
}

// The server aborts a transaction that is open for too long. The driver runs it again unchanged for
// up to two minutes.
func TestASlowHandlerWithABacklogMakesProgress(t *testing.T) {
	t.Parallel()
	db := memory.NewDB()
	short := func(ctx context.Context, fn func(ctx context.Context) error) error {
		expired := mongo.CommandError{Code: 251, Name: "NoSuchTransaction", Labels: []string{"TransientTransactionError"}}
		for began := time.Now(); ; {
			err := db.Transaction(ctx, func(ctx context.Context) error {
				begun := time.Now()
				if err := fn(ctx); err != nil {
					return err
				}
				if time.Since(begun) > 300*time.Millisecond {
					return errExpired
				}

				return nil
			})

			switch {
			case err == nil || ctx.Err() != nil:
				return err
			case !errors.Is(err, errExpired):
				return err
			case time.Since(began) > 2*time.Minute:
				return expired
			}
		}
	}

	in, err := memory.NewInbox(db)
	if err != nil {
		t.Fatal(err)
	}

	p := newPlan(t, withSurroundings(consuming.Surroundings{Inbox: in, Transact: short}))
	p.put("A", 64, 1)
	p.addHandler("A", func(ctx context.Context, _ *consumer.Message) error {
		select {
		case <-time.After(20 * time.Millisecond):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})

	p.start("consumer", p.Run)
	p.waitPassed()
}

var errExpired = errors.New("the transaction was open for too long")

func TestABreakerOpensForTimeOutsAndForBatches(t *testing.T) {
	t.Parallel()
	hang := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	fail := func(context.Context) error { return errors.New("no") }
	for _, c := range []struct {
		name  string
		batch bool
		f     func(ctx context.Context) error
	}{{"timeouts", false, hang}, {"batches that fail", true, fail}, {"batches that time out", true, hang}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := breaker.New("x", breaker.WithMinimum(5))
			p := newPlan(t)
			p.put("A", 12, 1)
			opts := []consumer.HandlerOption{
				consumer.WithMiddleware(b.Middleware()), consumer.WithTimeout(20 * time.Millisecond), consumer.WithRetry(consumer.NoRetry()),
			}
			if c.batch {
				p.mustSucceed(p.Handle("A", consumer.Batch(0, func(ctx context.Context, _ []*consumer.Message) error { return c.f(ctx) }, "A"), opts...))
			} else {
				p.addHandler("A", func(ctx context.Context, _ *consumer.Message) error { return c.f(ctx) }, opts...)
			}

			p.start("consumer", p.Run)
			timeout := time.After(patience)
			for {
				select {
				case err := <-p.reported:
					if errors.Is(err, breaker.ErrOpen) {
						return
					}
				case <-timeout:
					t.Fatal("all messages fail, and the breaker does not open")
				}
			}
		})
	}
}

func TestUnknownTypesAreReportedOnceEach(t *testing.T) {
	t.Parallel()
	p := newPlan(t)
	p.addHandler("known", func(context.Context, *consumer.Message) error { return nil })
	p.put("A", 10, 3)
	p.put("B", 10, 3)
	p.start("consumer", p.Run)
	p.waitPassed()
	var reports []string
	for _, err := range p.takeReports() {
		if !errors.Is(err, consumer.ErrNoHandler) {
			t.Error(err)
		}
		reports = append(reports, err.Error())
	}

	slices.Sort(reports)
	if len(reports) != 2 || !strings.Contains(reports[0], `"A"`) || !strings.Contains(reports[1], `"B"`) {
		t.Errorf("reported %q", reports)
	}
}

// A handler may use a separate inbox, whose errors are ordinary failures.
func TestAHandlersOwnInboxErrorsAreItsFailures(t *testing.T) {
	t.Parallel()
	for _, failure := range []error{inbox.ErrInProgress, inbox.ErrStale, inbox.ErrClaimLost} {
		t.Run(failure.Error(), func(t *testing.T) {
			t.Parallel()
			p := newPlan(t)
			p.put("A", 1, 1)
			p.addHandler("A", func(context.Context, *consumer.Message) error { return fmt.Errorf("of another inbox: %w", failure) },
				consumer.WithRetry(consumer.NoRetry()))

			p.start("consumer", p.Run)
			p.waitPassed()
			letters := p.listLetters()
			if len(letters) != 1 {
				t.Errorf("%d dead letters", len(letters))
			}
		})
	}
}

func TestATimeOutKeepsTheHandlersOwnError(t *testing.T) {
	t.Parallel()
	own := errors.New("the article is reserved")
	p := newPlan(t)
	p.put("A", 1, 1)
	p.addHandler("A", func(ctx context.Context, _ *consumer.Message) error {
		<-ctx.Done()
		return own
	}, consumer.WithTimeout(10*time.Millisecond),
		consumer.WithRetry(consumer.NoRetry()), consumer.WithRetryFor(consumer.ErrorIs(own), consumer.Retry{MaxAttempts: 1, Then: consumer.ThenDiscard}))

	p.start("consumer", p.Run)
	p.waitPassed()
	reports := p.takeReports()
	if len(reports) != 1 {
		t.Errorf("%d reports: %v", len(reports), reports)
	}
	for _, err := range reports {
		if e, ok := errors.AsType[*consumer.HandlerError](err); !ok || e.Next != "discard" || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	}
}

// measures stores the last lag and age.
type measures struct {
	telemetry.Discard
	lag, age atomic.Int64
}

func (m *measures) Measure(x telemetry.Measurement) {
	switch x.Metric {
	case telemetry.Lag:
		m.lag.Store(x.N)
	case telemetry.Oldest:
		m.age.Store(int64(x.Took))
	default:
	}
}

// If a partition makes no progress, its lag grows and the observer is notified.
func TestTheLagOfAStuckPartitionGrows(t *testing.T) {
	t.Parallel()
	seen := &measures{}
	p := newPlan(t, consumer.WithTelemetry(seen), consumer.WithBuffer(1))
	p.put("A", 1, 1)
	begun, release := make(chan struct{}, 100), make(chan struct{})
	p.addHandler("A", func(context.Context, *consumer.Message) error {
		begun <- struct{}{}
		<-release
		return nil
	})

	p.start("consumer", p.Run)
	t.Cleanup(func() { close(release) })
	<-begun
	p.put("A", 50, 1)
	for ctx := p.context(); seen.lag.Load() != 51 || seen.age.Load() < int64(2*time.Second); {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("the lag is %d of 51, the age %v", seen.lag.Load(), time.Duration(seen.age.Load()))
		}
	}
}

// claims counts releases.
type claims struct {
	*memory.Inbox
	telemetry.Discard
	released    atomic.Int32
	generations chan struct{}
}

func (c *claims) Release(ctx context.Context, list ...inbox.Partition) error {
	c.released.Add(1)
	return c.Inbox.Release(ctx, list...)
}

func (c *claims) Measure(m telemetry.Measurement) {
	if m.Metric == telemetry.Assigned {
		c.generations <- struct{}{}
	}
}

// A handler that ignores its context keeps its claim while it runs, but no slot in later
// generations.
func TestAHandlerThatIsAbandonedKeepsItsClaimAndNoSlot(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.AtLeastOnce, consumer.Transactional} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			kept := &claims{Inbox: w.inbox, generations: make(chan struct{}, 10)}
			p := newPlanIn(w, withSurroundings(consuming.Surroundings{Inbox: kept}), consumer.WithConcurrency(1), consumer.WithDrain(10*time.Millisecond), consumer.WithTelemetry(kept))
			p.put("A", 1, 1)
			hangs, release := make(chan struct{}, 10), make(chan struct{})
			var hung atomic.Bool
			p.addHandler("A", func(context.Context, *consumer.Message) error {
				if hung.CompareAndSwap(false, true) {
					hangs <- struct{}{}
					<-release
				}

				return nil
			}, consumer.WithMode(mode))

			p.start("consumer", p.Run)
			t.Cleanup(func() { close(release) })
			<-kept.generations
			<-hangs

			p.broker.Rebalance("g")
			<-kept.generations
			if n := kept.released.Load(); n > 0 {
				t.Errorf("the claims of a partition were released %d times while its handler ran", n)
			}

			if mode == consumer.AtLeastOnce {
				// The messages pass in the only slot of the next generation.
				p.waitPassed()
			}
		})
	}
}

func TestRetryTopicsOfAHandlerThatComesLaterAreRead(t *testing.T) {
	t.Parallel()
	p := newPlan(t)
	generations := make(chan struct{}, 10)
	p.addHandler("ready", func(context.Context, *consumer.Message) error {
		generations <- struct{}{}
		return nil
	})
	p.start("consumer", p.Run)
	p.put("ready", 1, 1)
	<-generations

	var calls atomic.Int32
	done := make(chan struct{}, 1)
	p.addHandler("A", func(context.Context, *consumer.Message) error {
		if calls.Add(1) == 1 {
			return errors.New("the first time")
		}

		done <- struct{}{}
		return nil
	}, noQuick, consumer.WithRetryTopics(10*time.Millisecond))

	p.put("A", 1, 1)
	select {
	case <-done:
	case <-time.After(patience):
		t.Error("the message is in a retry topic without a reader")
	}
}
