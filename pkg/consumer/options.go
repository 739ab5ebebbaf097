package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// The defaults of New.
const (
	DefaultConcurrency    = 16
	DefaultBatch          = 64
	DefaultTimeout        = 30 * time.Second
	DefaultDrain          = 10 * time.Second
	DefaultCommitInterval = time.Second
	DefaultBufferRecords  = 1000
	DefaultBufferBytes    = 8 << 20
	DefaultMaxAhead       = 10_000
)

// maxBatch keeps a transaction below the thousand documents that MongoDB recommends: each message costs a marker and
// what its handler writes.
const maxBatch = 500

// Option is an option of New.
type Option interface{ consumer(s *settings) }

// HandlerOption is an option of Handle.
type HandlerOption interface{ handler(h *handling) }

// Setting is either: given to New it holds for all handlers that do not say otherwise, given to Handle for that one.
type Setting interface {
	Option
	HandlerOption
}

type option func(s *settings)

func (o option) consumer(s *settings) { o(s) }

type handlerOption func(h *handling)

func (o handlerOption) handler(h *handling) { o(h) }

type setting func(h *handling)

func (o setting) consumer(s *settings) { o(&s.handling) }
func (o setting) handler(h *handling)  { o(h) }

// Transactor runs fn in a transaction that commits when fn returns nil. fn may run more than once.
type Transactor = func(ctx context.Context, fn func(ctx context.Context) error) error

// handling is how a handler is run.
type handling struct {
	name    string
	mode    inbox.Mode
	inTx    bool
	timeout time.Duration
	batch   int
	limit   int
	decider Decider
	mws     []Middleware

	problems []error
}

type settings struct {
	handling
	kafka       KafkaConfig
	topics      []string
	transport   Transport
	inbox       Inbox
	transact    Transactor
	decoder     Decoder
	receive     []func(ctx context.Context, m *Message) (*Message, error)
	disposer    Disposer
	onError     func(ctx context.Context, err error)
	observer    Observer
	trace       Tracer
	log         *slog.Logger
	concurrency int
	drain       time.Duration
	commits     CommitMode
	records     int
	bytes       int
	ahead       int
	strict      bool
	idle        bool
	ackUnknown  bool
	haltOnGap   bool
	dynamic     bool
	defaults    defaults
}

// Topics names the topics that the group reads.
func Topics(names ...string) Option {
	return option(func(s *settings) { s.topics = append(s.topics, names...) })
}

// WithTransport replaces Kafka. Brokers and Kafka are then without effect.
func WithTransport(t Transport) Option { return option(func(s *settings) { s.transport = t }) }

// WithInbox replaces the inbox that New makes in the database with its defaults; an *inbox.Inbox or another implementation.
func WithInbox(x Inbox) Option { return option(func(s *settings) { s.inbox = x }) }

// Transactions replaces outbox.Transaction on the database's client. With it and an inbox of its own the consumer needs no
// database.
func Transactions(f Transactor) Option { return option(func(s *settings) { s.transact = f }) }

// WithDecoder replaces Decode.
func WithDecoder(d Decoder) Option { return option(func(s *settings) { s.decoder = d }) }

// Receive adds a function that sees each message once, after it was decoded and before it is known which handlers it is
// for: it may change the message, also its Type, return another one, or ErrDrop. Any other error makes it poison, as one
// that cannot be decoded. It runs outside of any transaction, in the goroutine that reads the partition: not for what takes
// long. Several run in the order given.
func Receive(f func(ctx context.Context, m *Message) (*Message, error)) Option {
	return option(func(s *settings) { s.receive = append(s.receive, f) })
}

// WithDisposer replaces what carries out the verdicts of policies that move a message elsewhere.
func WithDisposer(d Disposer) Option { return option(func(s *settings) { s.disposer = d }) }

// OnError gets every error that the consumer meets, once, whatever it does about it. It must not block. A nil ctx is never
// passed.
func OnError(f func(ctx context.Context, err error)) Option {
	return option(func(s *settings) { s.onError = f })
}

// WithObserver gets what metrics are made of.
func WithObserver(o Observer) Option { return option(func(s *settings) { s.observer = o }) }

// WithTracer is called around each attempt.
func WithTracer(t Tracer) Option { return option(func(s *settings) { s.trace = t }) }

// WithLogger replaces slog.Default. Payloads, keys and headers are never logged.
func WithLogger(log *slog.Logger) Option { return option(func(s *settings) { s.log = log }) }

// Concurrency is how many lanes run at once, over all partitions and handlers.
func Concurrency(n int) Option { return option(func(s *settings) { s.concurrency = n }) }

// Drain is how long a stop or a rebalance waits for what is in flight before it is abandoned. It is cut to three quarters of
// what the group waits for a member, the shorter of Kafka's session and rebalance time-outs.
func Drain(d time.Duration) Option { return option(func(s *settings) { s.drain = d }) }

// Commits says when offsets are committed; default CommitInterval(DefaultCommitInterval).
func Commits(m CommitMode) Option { return option(func(s *settings) { s.commits = m }) }

// Buffer bounds what is held of one partition: messages and bytes that were fetched and are not finished. One fetch may
// exceed it.
func Buffer(records, bytes int) Option {
	return option(func(s *settings) { s.records, s.bytes = records, bytes })
}

// MaxAhead is how many offsets a partition may be handled beyond one that is not finished, before it waits for that one.
func MaxAhead(n int) Option { return option(func(s *settings) { s.ahead = n }) }

// Strict refuses a second handler for a type: Handle returns a *DuplicateHandlerError.
func Strict() Option { return option(func(s *settings) { s.strict = true }) }

// AllowIdle lets Run start without any handler.
func AllowIdle() Option { return option(func(s *settings) { s.idle = true }) }

// AckUnknown lets messages pass that no handler takes. Without it they are parked: dead letters of class no_handler, to be
// replayed when there is a handler.
func AckUnknown() Option { return option(func(s *settings) { s.ackUnknown = true }) }

// HaltOnGap makes Run return a *RangeError when a partition no longer has the records to go on from. Without it the
// consumer reports that and goes on with the first record there is.
func HaltOnGap() Option { return option(func(s *settings) { s.haltOnGap = true }) }

// Named gives the handler its name, which with the group makes its identity in the inbox: "<group>/<name>". It must stay
// the same over the life of the service. The default is made from the patterns.
func Named(name string) HandlerOption { return handlerOption(func(h *handling) { h.name = name }) }

// Exactly is the mode of the inbox; default inbox.Optimistic.
func Exactly(mode inbox.Mode) Setting { return setting(func(h *handling) { h.mode = mode }) }

// InTransaction runs handlers of mode inbox.None in a transaction too. In the other modes they always are.
func InTransaction() Setting { return setting(func(h *handling) { h.inTx = true }) }

// Timeout bounds one call of a handler by its context. Keep it well under the server's limit for a transaction, 60 s.
func Timeout(d time.Duration) Setting { return setting(func(h *handling) { h.timeout = d }) }

// Batch is how many messages of a lane share a transaction at most.
func Batch(n int) Setting { return setting(func(h *handling) { h.batch = n }) }

// Limit is how many calls of the handler run at once, over all lanes and partitions; 0 is no limit beside Concurrency.
// Given to New it limits each handler by itself.
func Limit(n int) Setting { return setting(func(h *handling) { h.limit = n }) }

// OnFailure decides about messages that fail.
func OnFailure(d Decider) Setting {
	return setting(func(h *handling) {
		if d == nil {
			h.problems = append(h.problems, errors.New("OnFailure: the policy is nil"))
		}
		if p, ok := d.(interface{ Validate() error }); ok {
			h.problems = append(h.problems, p.Validate())
		}
		h.decider = d
	})
}

// Use adds middleware. That of New is outside of that of the handler.
func Use(mws ...Middleware) Setting {
	return setting(func(h *handling) {
		h.mws = append(h.mws[:len(h.mws):len(h.mws)], mws...)
		for _, m := range mws {
			if m == nil {
				h.problems = append(h.problems, errors.New("Use: a middleware is nil"))
			}
		}
	})
}

func newSettings(opts []Option) settings {
	s := settings{
		handling:    handling{mode: inbox.Optimistic, timeout: DefaultTimeout, batch: DefaultBatch},
		decoder:     Decode,
		log:         slog.Default(),
		observer:    Unobserved{},
		concurrency: DefaultConcurrency,
		drain:       DefaultDrain,
		commits:     CommitInterval(DefaultCommitInterval),
		records:     DefaultBufferRecords,
		bytes:       DefaultBufferBytes,
		ahead:       DefaultMaxAhead,
	}
	for _, o := range opts {
		if o != nil {
			o.consumer(&s)
		}
	}
	return s
}

// check lists all that is wrong with a handler's settings.
func (h *handling) check() error {
	bad := h.problems
	if h.mode != inbox.None && h.mode != inbox.Optimistic && h.mode != inbox.Eager {
		bad = append(bad, fmt.Errorf("mode %v is none of inbox.None, inbox.Optimistic, inbox.Eager", h.mode))
	}
	if h.timeout <= 0 {
		bad = append(bad, fmt.Errorf("time-out of a handler is %v: it must be positive", h.timeout))
	}
	if h.batch < 1 || h.batch > maxBatch {
		bad = append(bad, fmt.Errorf("batch of %d messages: it must be from 1 to %d", h.batch, maxBatch))
	}
	if h.limit < 0 {
		bad = append(bad, fmt.Errorf("limit of %d calls at once: it must not be negative", h.limit))
	}
	return errors.Join(bad...)
}

func (s *settings) check() error {
	bad := []error{s.handling.check()}
	add := func(wrong bool, format string, args ...any) {
		if wrong {
			bad = append(bad, fmt.Errorf(format, args...))
		}
	}
	add(len(s.topics) == 0 && !s.dynamic, "no topics: name them with Topics")
	for _, t := range s.topics {
		add(t == "", "a topic's name is empty")
	}
	add(s.concurrency < 1, "concurrency of %d: it must be positive", s.concurrency)
	add(s.drain <= 0, "drain of %v: it must be positive", s.drain)
	add(s.records < 1 || s.bytes < 1, "buffer of %d records and %d bytes: both must be positive", s.records, s.bytes)
	add(s.ahead < s.records, "MaxAhead is %d, less than the buffer's %d records", s.ahead, s.records)
	add(s.decoder == nil, "the decoder is nil")
	add(s.log == nil, "the logger is nil")
	add(s.observer == nil, "the observer is nil")
	for _, f := range s.receive {
		add(f == nil, "Receive: the function is nil")
	}
	bad = append(bad, s.commits.validate())
	return errors.Join(bad...)
}

// transactor is outbox.Transaction on the client of the database, unless another one was given.
func (c *Consumer) transactor() Transactor {
	if c.s.transact != nil {
		return c.s.transact
	}
	client := c.db.Client()
	return func(ctx context.Context, fn func(ctx context.Context) error) error {
		return outbox.Transaction(ctx, client, fn)
	}
}
