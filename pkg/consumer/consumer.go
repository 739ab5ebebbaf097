package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// Consumer takes messages to handlers. It is safe for concurrent use.
type Consumer struct {
	group     string
	db        *mongo.Database
	s         settings
	reg       registry
	gate      gate
	running   atomic.Bool
	transport Transport // made by New, or given
	currentSession       atomic.Pointer[session]
	topicBoard     *topicBoard // of DynamicTopics

	unknown, orphaned, poison *registration
}

// New makes a member of a consumer group whose handlers' effects are in db. It does no I/O; all that is wrong with its
// arguments is reported at once. db may be nil if the inbox and the transactions come by WithInbox and Transactions.
func New(group string, db *mongo.Database, opts ...Option) (*Consumer, error) {
	c := &Consumer{group: group, db: db, s: newSettings(opts)}
	bad := []error{c.s.check()}
	if group == "" {
		bad = append(bad, errors.New("the name of the group is empty"))
	}
	if db == nil && (c.s.inbox == nil || c.s.transact == nil) {
		bad = append(bad, errors.New("the database is nil: give one, or both WithInbox and Transactions"))
	}
	if db == nil && c.s.dynamic {
		bad = append(bad, errors.New("DynamicTopics needs a database"))
	}
	if c.s.inbox == nil && db != nil {
		x, err := inbox.New(db)
		bad = append(bad, err)
		c.s.inbox = x
	}
	if c.transport = c.s.transport; c.transport == nil {
		t, err := NewKafka(c.s.kafka)
		bad = append(bad, err)
		c.transport = t
	}
	if err := errors.Join(bad...); err != nil {
		return nil, fmt.Errorf("consumer: %w", err)
	}
	c.reg.strict = c.s.strict
	if c.s.dynamic {
		c.topicBoard = newTopicBoard(db, group)
	}
	c.gate.notify = func(on bool) { c.s.observer.Suspended("paused", on) }
	own := handling{mode: inbox.None, timeout: DefaultTimeout, batch: 1}
	c.unknown = &registration{handling: own, system: true}
	c.unknown.decider = unknownDecider{ack: c.s.ackUnknown}
	c.orphaned = &registration{handling: own, system: true}
	c.orphaned.decider = unknownDecider{}
	c.poison = &registration{handling: own, system: true}
	c.poison.decider = poisonDecider{c.s.decider}
	return c, nil
}

// Group is the name of the consumer group.
func (c *Consumer) Group() string { return c.group }

// Publisher is the transport's, for what else belongs to the consumer.
func (c *Consumer) Publisher() Publisher { return c.transport }

// unknownDecider decides about messages whose type no handler takes.
type unknownDecider struct{ ack bool }

func (d unknownDecider) Decide(error, *Message, Attempts) Verdict {
	if d.ack {
		return Verdict{Action: Discard, Reason: "no_handler"}
	}
	return Verdict{Action: Park, Reason: "no_handler"}
}

// poisonDecider decides about records that cannot be decoded: to try again would find the same bytes.
type poisonDecider struct{ policy Decider }

func (d poisonDecider) Decide(err error, m *Message, a Attempts) Verdict {
	dead := Verdict{Action: DeadLetter, Reason: "malformed"}
	if d.policy == nil {
		return dead
	}
	switch v := d.policy.Decide(err, m, a); v.Action {
	case Discard, DeadLetter, Park:
		return v
	default:
		return dead
	}
}

// run is one Run.
type run struct {
	c        *Consumer
	ctx      context.Context
	disposer Disposer
	inbox    Inbox
	transact Transactor
	kept     kept
	runningLanes     atomic.Int64
	heldMessages atomic.Int64
	heldBytes    atomic.Int64
}

// Run takes part in the group and handles its messages until ctx ends; then it stops reading, finishes what is in flight
// within the time of Drain, commits, leaves the group and returns nil. Anything else that it returns is an error that it
// cannot get over. It may be called again after it returned, but not before: ErrRunning.
func (c *Consumer) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer c.running.Store(false)
	if len(c.reg.snapshot().all) == 0 && !c.s.idle {
		return fmt.Errorf("%w: register one before Run, or say AllowIdle", ErrNoHandler)
	}
	if _, err := c.retryTopics(c.s.topics); err != nil {
		return fmt.Errorf("consumer: %w", err)
	}
	r := &run{c: c, ctx: ctx, inbox: c.s.inbox, transact: c.transactor()}
	r.disposer = c.s.disposer
	if r.disposer == nil {
		d, err := c.defaultDisposer(r.report)
		if err != nil {
			return fmt.Errorf("consumer: %w", err)
		}
		r.disposer = d
	}
	if err := r.ensureIndexes(); err != nil { //nolint:contextcheck // r has the context
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it was told to stop
		}
		return err
	}
	if err := r.joinGroup(ctx); err != nil {
		return fmt.Errorf("consumer: group %s: %w", c.group, err)
	}
	return nil
}

// ensureIndexes creates the indexes of the inbox and of the dead letters; it waits for a database that is away.
func (r *run) ensureIndexes() error {
	if err := r.ensureIndexesOf("inbox", r.inbox); err != nil {
		return err
	}
	return r.ensureIndexesOf("dead letters", r.disposer)
}

func (r *run) ensureIndexesOf(what string, of any) error {
	x, ok := of.(interface {
		EnsureIndexes(ctx context.Context) error
	})
	if !ok {
		return nil
	}
	b := retry.Reopen.Start()
	for {
		ctx, cancel := context.WithTimeout(r.ctx, readyTimeout)
		err := x.EnsureIndexes(ctx)
		cancel()
		if err == nil {
			return nil
		}
		if !transient(err) && !mongo.IsTimeout(err) {
			return fmt.Errorf("consumer: %s: %w", what, err)
		}
		r.report(fmt.Errorf("preparing the %s: %w", what, err))
		if err := b.Wait(r.ctx); err != nil {
			return err
		}
	}
}

const readyTimeout = 10 * time.Second

// Fault reports what the transport gets over by itself.
func (r *run) Fault(err error) { r.report(err) }

// report hands an error to OnError, or to the log.
func (r *run) report(err error) {
	if err == nil {
		return
	}
	if f := r.c.s.onError; f != nil {
		var panicked error
		func() {
			defer recoverPanic(&panicked)
			f(r.ctx, err)
		}()
		if panicked == nil {
			return
		}
		err = errors.Join(err, fmt.Errorf("OnError: %w", panicked))
	}
	r.c.s.log.WarnContext(r.ctx, "consumer", "group", r.c.group, "error", err)
}

// countRunning counts a lane in or out.
func (r *run) countRunning(by int64) { r.c.s.observer.Running(int(r.runningLanes.Add(by))) }

// countHeld counts messages in memory.
func (r *run) countHeld(messages, bytes int64) {
	r.c.s.observer.Held(r.heldMessages.Add(messages), r.heldBytes.Add(bytes))
}

// Commit commits now what is finished. Without a generation it does nothing.
func (c *Consumer) Commit(ctx context.Context) error {
	s := c.currentSession.Load()
	if s == nil {
		return nil
	}
	return s.commit(ctx)
}
