package consumer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/hooks"
	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/rates"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// Consumer delivers the messages of a consumer group to handlers. It is safe for concurrent use.
type Consumer struct {
	group          string
	db             *mongo.Database
	s              settings
	reg            registry
	gate           pauseGate
	running        atomic.Bool
	transport      transport.Transport // created by New, or given as an option
	currentSession atomic.Pointer[session]
	health         *health
	waiting        setaside.Store // messages that are set aside; nil if there is no database and the inbox has none
	rates          rates.Store    // nil if there is no database and the inbox has none
	letters        *deadletter.Desk
	sessions       *transaction.Pool // of the handlers' transactions; nil if the database is nil

	unknown, skipped, orphaned, poison *registration

	unknownTypes unknownTypes
}

// New returns a member of a consumer group whose handlers write to db. It does no I/O. It returns all problems of its
// arguments in one error.
func New(group string, db *mongo.Database, opts ...Option) (*Consumer, error) {
	consumer := &Consumer{group: group, db: db, s: newSettings(opts), health: newHealth()}

	problems := []error{consumer.s.validate()}
	if group == "" {
		problems = append(problems, errors.New("the name of the group is empty"))
	}
	// With a replaced inbox and transactions, as in unit tests, there is no database.
	if db == nil && (consumer.s.inbox.replacement == nil || consumer.s.transact == nil) {
		problems = append(problems, errors.New("the database is nil"))
	}

	if consumer.s.inbox.replacement == nil && db != nil {
		inbox, err := mongostore.Open(db, consumer.s.inbox.settings)
		problems = append(problems, err)
		consumer.s.inbox.replacement = inbox
	}

	consumer.transport = consumer.s.transport
	if consumer.transport == nil {
		transport, err := consumer.s.open(consumer.s.kafka)
		problems = append(problems, err)
		consumer.transport = transport
	}

	if consumer.s.disposer == nil {
		letters, err := openLetters(db, consumer.s.inbox.replacement, consumer.s.letters)
		problems = append(problems, err)
		consumer.letters = letters
	}

	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("consumer: %w", err)
	}

	if db != nil {
		consumer.sessions = transaction.NewPool(db.Client())
	}
	consumer.waiting = openWaiting(db, consumer.s.inbox.replacement)
	consumer.rates = openRates(db, consumer.s.inbox.replacement)
	consumer.gate.notify = func(paused bool) { consumer.measureStop("paused", paused) }

	// These take the messages that no handler of the service takes.
	unknown := verdict{Action: actDeadLetter, Reason: deadletter.ClassUnknown}
	consumer.unknown = newSystemHandler(unknown)
	consumer.skipped = newSystemHandler(verdict{Action: actDiscard, Reason: deadletter.ClassUnknown})
	consumer.orphaned = newSystemHandler(unknown)
	consumer.poison = newSystemHandler(verdict{Action: actDeadLetter, Reason: deadletter.ClassMalformed})
	return consumer, nil
}

// openWaiting returns the store of the messages that are set aside. Without a database, it is that of the inbox, or nil.
func openWaiting(db *mongo.Database, inbox consuming.Inbox) setaside.Store {
	if db != nil {
		return setaside.New(db, setaside.DefaultCollection)
	}
	if own, ok := inbox.(interface{ Waiting() setaside.Store }); ok {
		return own.Waiting()
	}
	return nil
}

// newSystemHandler returns the registration for messages that no handler gets. Its verdict is always verdict.
func newSystemHandler(verdict verdict) *registration {
	return &registration{
		handling: handling{mode: AtLeastOnce, timeout: defaultTimeout, batchSize: defaultShared},
		decider:  decider{fixed: &verdict},
		system:   true,
	}
}

// run is the state of one call of Run.
type run struct {
	c            *Consumer
	ctx          context.Context
	disposer     messageDisposer
	givenUp      *hooks.Queue[GivenUp] // messages whose letters are stored; nil without a hook
	inbox        consuming.Inbox
	transact     consuming.Transactor
	memberID     string // of this run, in the counts of the group
	census       census
	reach        databaseReach
	runningLanes atomic.Int64
	heldMessages atomic.Int64
	heldBytes    atomic.Int64
	serving      *serving
	noTopic      atomic.Bool // none of the topics exists
}

// Run joins the group and handles its messages until ctx ends. Then it stops reading, finishes the messages in flight
// within the time of Drain, commits, leaves the group and returns nil. It returns other errors only if it cannot recover
// from them. Run may be called again after it has returned. While it runs, a second call returns ErrRunning.
func (c *Consumer) Run(ctx context.Context) (err error) {
	if !c.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer c.running.Store(false)
	c.health.begin()
	defer func() { c.health.end(err) }()

	// Without handlers, every message would be discarded and committed.
	if len(c.reg.snapshot().all) == 0 {
		return fmt.Errorf("%w: call Handle before Run", ErrNoHandler)
	}
	run := &run{c: c, ctx: ctx, inbox: c.s.inbox.replacement, transact: c.transactor(), memberID: rand.Text(), serving: newServing()}
	run.givenUp = hooks.New("WithGivenUpHook", c.s.onGivenUp, c.s.log)
	defer run.givenUp.Close()
	run.disposer = c.s.disposer
	if run.disposer == nil {
		run.disposer = &disposer{letters: c.letters, publisher: c.transport, report: run.reportTrouble}
	}

	// The refresh ends before Run returns, so no measurement follows.
	healthCtx, stop := context.WithCancel(ctx)
	var refreshing sync.WaitGroup
	defer refreshing.Wait()
	defer stop()
	refreshing.Go(func() { run.refreshHealth(healthCtx) })

	if err := run.ensureIndexes(); err != nil { //nolint:contextcheck // run has the context
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the caller ended the run
		}
		return err
	}

	// They go on while the last handlers end, so that no other member ends the transactions of these handlers.
	beating, stopBeats := context.WithCancel(context.WithoutCancel(ctx))
	var beats sync.WaitGroup
	defer beats.Wait()
	defer stopBeats()
	beats.Go(func() { run.sendHeartbeats(beating) })
	run.note("joining the group", "topics", c.s.topics, "handlers", c.reg.snapshot().names())
	if err := run.joinGroup(ctx); err != nil {
		return fmt.Errorf("consumer: group %s: %w", c.group, err)
	}
	run.note("left the group")
	return nil
}

// ensureIndexes creates the indexes of the inbox, of the dead letters and of the messages that are set aside, and prepares
// the handlers. It blocks while the database is unavailable.
func (r *run) ensureIndexes() error {
	for _, reg := range r.c.reg.snapshot().all {
		if err := r.repeatUntilReady(fmt.Sprintf("handler %q", reg.name), reg.prepare); err != nil {
			return err
		}
	}

	// An inbox that replaces the default may need no indexes.
	if indexed, ok := r.inbox.(interface {
		EnsureIndexes(ctx context.Context) error
	}); ok {
		if err := r.repeatUntilReady("inbox", indexed.EnsureIndexes); err != nil {
			return err
		}
	}

	if r.c.letters != nil {
		ensure := func(ctx context.Context) error { return r.c.letters.EnsureIndexes(ctx, module.Key{}) }
		if err := r.repeatUntilReady("dead letters", ensure); err != nil {
			return err
		}
	}

	if r.c.waiting == nil {
		return nil
	}
	return r.repeatUntilReady("messages that are set aside", r.c.waiting.EnsureIndexes)
}

// repeatUntilReady calls ensureIndexes until it succeeds. It returns errors that are not transient.
func (r *run) repeatUntilReady(name string, ensureIndexes func(ctx context.Context) error) error {
	backoff := retry.Reopen.Start()
	for {
		ctx, cancel := context.WithTimeout(r.ctx, readyTimeout)
		err := ensureIndexes(ctx)
		cancel()
		if err == nil {
			return nil
		}
		if !isTransient(err) && !mongo.IsTimeout(err) {
			return fmt.Errorf("consumer: %s: %w", name, err)
		}

		r.reportTrouble("cannot prepare the collections; the consumer joins its group after that", fmt.Errorf("preparing the %s: %w", name, err))
		if err := backoff.Wait(r.ctx); err != nil {
			return err
		}
	}
}

const readyTimeout = 10 * time.Second

// sendHeartbeats stores signs of life in the inbox until ctx ends.
func (r *run) sendHeartbeats(ctx context.Context) {
	for retry.Sleep(ctx, inbox.HeartbeatInterval) == nil {
		call, cancel := context.WithTimeout(ctx, inbox.HeartbeatInterval)
		err := r.inbox.Heartbeat(call)
		cancel()

		// An outage of the database is reported by the handlers that wait for it.
		if err != nil && !isTransient(err) && !mongo.IsTimeout(err) {
			r.reportTrouble("cannot store a heartbeat in the inbox; it is stored again", fmt.Errorf("inbox: %w", err))
		}
	}
}
