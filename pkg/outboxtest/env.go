package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

const (
	// settleLimit is how long Settle waits.
	settleLimit = time.Minute

	// heldFor is how long Settle waits for a change while a handler takes no messages.
	heldFor = time.Second
)

// Env is everything around a service: a database, topics, and a relay between them. It ends with the test. It is safe for
// concurrent use, but methods that can fail the test must be called from its goroutine.
type Env struct {
	tb       testing.TB
	db       *memory.DB
	broker   *memory.Broker
	log      *slog.Logger // of the test, for warnings
	settings settings
	running  context.Context
	tasks    sync.WaitGroup
	ended    chan struct{} // has a value after a consumer has ended

	others *outbox.Box // of other services: see Publish

	mu        sync.Mutex
	relays    map[string]*memory.Relay
	consumers []*member
}

// member is a consumer of an Env.
type member struct {
	*consumer.Consumer
	group   string
	started bool
	err     error // of Run
}

// Option configures an Env.
type Option interface{ applyToEnv(s *settings) }

type option func(s *settings)

func (o option) applyToEnv(settings *settings) { o(settings) }

type settings struct {
	partitions int
	routes     routing.Config
	preset     string

	unpublished bool
}

// WithPartitions sets the number of partitions of each topic. Defaults to 4, so that a test fails if it relies on an order across
// keys.
func WithPartitions(n int) Option {
	return option(func(settings *settings) { settings.partitions = n })
}

// WithTopics sets the template for the names of topics, as topics.template in the configuration of the relay. Defaults to
// "outbox.event.{aggregatetype}".
func WithTopics(template string) Option {
	return option(func(settings *settings) { settings.routes.Template = template })
}

// WithPreset sets the headers and values of the records, as record.preset in the configuration of the relay. Defaults to
// "typed".
func WithPreset(name string) Option {
	return option(func(settings *settings) { settings.preset = name })
}

// WithUnpublished permits events that the relay cannot publish, such as expired ones, and logs them. By default they fail the test,
// because in production they become dead letters.
func WithUnpublished() Option {
	return option(func(settings *settings) { settings.unpublished = true })
}

// New returns an empty Env. It ends with the test: then it stops its consumers and waits for them. The test fails if the relay
// cannot publish an event: see [WithUnpublished].
func New(tb testing.TB, opts ...Option) *Env {
	tb.Helper()
	env := &Env{tb: tb, db: memory.NewDB(), relays: map[string]*memory.Relay{}, ended: make(chan struct{}, 1)}
	env.log = slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	for _, o := range opts {
		if o != nil {
			o.applyToEnv(&env.settings)
		}
	}
	env.broker = memory.NewBroker(env.settings.partitions)

	var stop context.CancelFunc
	env.running, stop = context.WithCancel(context.WithoutCancel(tb.Context()))
	tb.Cleanup(func() {
		// A failure that the test has set must not keep the consumers from ending.
		env.Fail(nil)
		stop()
		env.tasks.Wait()
		env.reportUnpublished()
	})

	// Events of other collections are appended without a transaction.
	env.others = env.Box(outbox.WithCollection("outboxtest_others"), outbox.WithoutTransaction())
	return env
}

// reportUnpublished publishes due events, also if the test has not called Settle. It fails the test if an event became a dead letter of a
// relay, unless the test expects that.
func (e *Env) reportUnpublished() {
	e.tb.Helper()
	report := e.tb.Errorf
	if e.settings.unpublished {
		report = e.tb.Logf
	}

	for name, relay := range e.relays {
		if err := relay.Flush(context.WithoutCancel(e.tb.Context())); err != nil {
			e.tb.Errorf("relay of %s: %v", name, err)
		}
		for _, d := range relay.DeadLetters() {
			report("relay of %s: event %s %s was not published: %s: %s", name, d.Type, d.ID, d.Class, d.Reason)
		}
	}
}

// Box returns an outbox. Outboxes of the same collection share their events. It fails the test if an option is wrong.
func (e *Env) Box(opts ...outbox.Option) *outbox.Box {
	e.tb.Helper()
	box, err := memory.NewOutbox(e.db, append([]outbox.Option{outbox.WithLogger(e.log)}, opts...)...)
	if err != nil {
		e.tb.Fatal(err)
	}
	e.relayEvents(box)
	return box
}

// relayEvents starts a relay for the collection of box, unless it has one.
func (e *Env) relayEvents(box *outbox.Box) {
	e.tb.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	name := box.Parts(module.Key{}).Store.Name()
	if e.relays[name] != nil {
		return
	}

	relay, err := memory.NewRelay(box, e.broker, e.settings.routes, e.settings.preset)
	if err != nil {
		e.tb.Fatal(err)
	}
	e.relays[name] = relay
	e.tasks.Go(func() {
		if err := relay.Run(e.running); err != nil {
			e.tb.Errorf("relay of %s: %v", name, err)
		}
	})
}

// Inbox returns an inbox. Inboxes of the same collection share their keys. It fails the test if an option is wrong.
func (e *Env) Inbox(opts ...inbox.Option) *inbox.Inbox {
	e.tb.Helper()
	inbox, err := memory.NewInbox(e.db, opts...)
	if err != nil {
		e.tb.Fatal(err)
	}
	return inbox.Inbox
}

// Consumer returns a member of a group. Register its handlers, and call Settle, which runs it. It commits after each
// message and logs errors to the test, unless the options set something else. It fails the test if an option is wrong.
func (e *Env) Consumer(group string, opts ...consumer.Option) *consumer.Consumer {
	e.tb.Helper()
	inbox, err := memory.NewInbox(e.db)
	if err != nil {
		e.tb.Fatal(err)
	}
	around := consumer.WithSurroundings(consuming.Surroundings{Transport: e.broker, Inbox: inbox, Transact: e.db.Transaction})
	consumer, err := consumer.New(group, nil, append([]consumer.Option{
		around,
		consumer.WithCommitCount(1), consumer.WithLogger(e.log),
	}, opts...)...)
	if err != nil {
		e.tb.Fatal(err)
	}

	e.mu.Lock()
	defer e.mu.Unlock()
	e.consumers = append(e.consumers, &member{Consumer: consumer, group: group})
	return consumer
}

// Entities returns an option for entity.New, entity.NewRecorded and entity.NewProjector. They then store in the collection name of
// e, and get a nil *mongo.Collection.
func (e *Env) Entities(name string) entity.Option { return memory.NewEntities(e.db, name) }

// DeadLetters returns the messages that the handlers of all consumers have given up. After a requeue, call Settle.
func (e *Env) DeadLetters() *deadletter.Desk {
	e.tb.Helper()
	desk, err := memory.NewLetters(e.db)
	if err != nil {
		e.tb.Fatal(err)
	}
	return desk
}

// Publish publishes events of other services, in the same way as their relay would.
func (e *Env) Publish(events ...event.Event) {
	e.tb.Helper()
	if err := e.others.Append(outbox.Outside(e.tb.Context()), events...); err != nil {
		e.tb.Fatal(err)
	}
}

// PublishRecord writes a record to a topic, as a producer without an outbox would.
func (e *Env) PublishRecord(topic string, key, value []byte, headers ...event.Header) {
	e.tb.Helper()
	record := transport.Record{Key: key, Value: value, Headers: headers}
	if err := e.broker.Publish(e.tb.Context(), topic, []transport.Record{record}); err != nil {
		e.tb.Fatal(err)
	}
}

// Published returns the records of a topic, in the order in which they were written.
func (e *Env) Published(topic string) []*consumer.Message {
	e.tb.Helper()
	var list []*consumer.Message
	for _, r := range e.broker.Records(topic) {
		message := &consumer.Message{
			Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Time: r.Time, Key: r.Key, Value: r.Value, Headers: r.Headers,
		}
		if err := consumer.Decode(context.Background(), message); err != nil {
			e.tb.Fatalf("decoding record %s: %v", record.FormatPlace(topic, r.Partition, r.Offset), err)
		}
		list = append(list, message)
	}
	return list
}

// Redeliver makes all groups read the records of a topic again from the beginning, as it may happen with Kafka.
func (e *Env) Redeliver(topic string) { e.broker.Redeliver(topic) }

// Op is an operation that Fail can make fail.
type Op = memory.Op

// Fail calls fault before each operation of kind "append", "commit" and "publish", of the service and of the consumers. If fault
// returns an error, the operation fails with it. The relay repeats a failed publish, as in an outage of Kafka. Several
// goroutines may call fault at the same time. A nil fault ends the faults.
func (e *Env) Fail(fault func(op Op) error) {
	e.db.Inject(fault)
	if fault == nil {
		e.broker.Inject(nil)
		return
	}
	e.broker.Inject(func(topic string, record *transport.Record) memory.Fault {
		name, _ := record.Header("type")
		return memory.Fault{Err: fault(Op{Kind: "publish", Name: string(name), Topic: topic})}
	})
}

// Settle runs the consumers, and blocks until all events that are due are published and handled, and all retries that are
// due are over. A message whose handler has failed waits for its next retry: see Advance. While a consumer is paused or a
// handler is suspended, Settle returns when nothing has happened for a second. It fails the test after a minute.
func (e *Env) Settle() {
	e.tb.Helper()
	e.startConsumers()
	limit := time.NewTimer(settleLimit)
	defer limit.Stop()

	for {
		// Both are read before the state, so that no change is missed.
		broker, db := e.broker.Changed(), e.db.Changed()
		left := e.describeUnsettled()
		select {
		case <-broker:
			continue
		case <-db:
			continue
		default:
		}
		if len(left) == 0 {
			return
		}

		select {
		case <-broker:
		case <-db:
		case <-e.ended:
		case <-time.After(heldFor):
			if e.isHeld() {
				return
			}
		case <-limit.C:
			e.tb.Fatalf("not settled after %v:\n%s", settleLimit, strings.Join(left, "\n"))
		case <-e.tb.Context().Done():
			e.tb.Fatalf("not settled when the context of the test has ended:\n%s", strings.Join(left, "\n"))
		}
	}
}

// Advance lets duration pass, and calls Settle. In a bubble of testing/synctest, that takes no time.
func (e *Env) Advance(duration time.Duration) {
	e.tb.Helper()
	e.Settle()
	time.Sleep(duration)
	e.Settle()
}

// isHeld reports whether a consumer is paused or one of its handlers is suspended.
func (e *Env) isHeld() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.ContainsFunc(e.consumers, func(member *member) bool { return member.IsHeld(module.Key{}) })
}

// startConsumers runs the consumers that do not run yet.
func (e *Env) startConsumers() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, m := range e.consumers {
		if m.started {
			continue
		}
		m.started = true

		e.tasks.Go(func() {
			err := m.Run(e.running)
			e.mu.Lock()
			defer e.mu.Unlock()
			m.err = err
			select {
			case e.ended <- struct{}{}:
			default:
			}
		})
	}
}

// describeUnsettled lists the work that Settle waits for. It fails the test if a consumer has ended.
func (e *Env) describeUnsettled() []string {
	e.tb.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()

	var left []string
	groups := map[string]int{}
	for _, m := range e.consumers {
		if m.err != nil && !errors.Is(m.err, consumer.ErrRunning) {
			e.tb.Fatalf("consumer of group %s: %v", m.group, m.err)
		}
		groups[m.group]++
	}
	// Before all members have joined, a partition may have no owner.
	for name, want := range groups {
		if got := e.broker.Members(name); got < want {
			left = append(left, fmt.Sprintf("group %s has %d of %d members", name, got, want))
		}
	}

	left = append(left, e.broker.Unread()...)
	retries, err := memory.DueRetries(e.running, e.db)
	if err != nil {
		e.tb.Fatal(err)
	}
	left = append(left, retries...)
	for name, relay := range e.relays {
		n, err := relay.Pending(e.running)
		if err != nil {
			e.tb.Fatal(err)
		}
		if n > 0 {
			left = append(left, fmt.Sprintf("the relay has not published %d events of %s", n, name))
		}
	}
	return left
}
