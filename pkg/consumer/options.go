package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/consumer/topics"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// Defaults of the options of New.
const (
	defaultConcurrency    = 16
	defaultShared         = 1
	defaultBatch          = 100
	defaultTimeout        = 30 * time.Second
	defaultDrain          = 10 * time.Second
	defaultCommitInterval = time.Second
	defaultBuffer         = 8 << 20
	defaultMaxOutage      = 5 * time.Minute
)

const (
	// maxBufferedRecords bounds the messages of one partition that are fetched and not finished, in addition to their bytes.
	maxBufferedRecords = 1000
	// maxAhead is how many messages of a partition may follow an unfinished one before the partition stops fetching.
	maxAhead = 10_000
)

// maxBatch keeps a transaction below the thousand documents that MongoDB recommends. Each message
// writes a marker and the documents of its handler.
const maxBatch = 500

// Option is an option of New.
type Option interface{ applyToConsumer(s *settings) }

// HandlerOption is an option of Handle. As an option of New, it sets the default of all handlers.
type HandlerOption interface {
	Option
	applyToHandler(h *handling)
}

type option func(s *settings)

func (o option) applyToConsumer(settings *settings) { o(settings) }

type handlerOption func(h *handling)

func (o handlerOption) applyToConsumer(settings *settings) { o(&settings.handling) }
func (o handlerOption) applyToHandler(handling *handling)  { o(handling) }

// handling has the settings of one handler.
type handling struct {
	name        string
	mode        Mode
	timeout     time.Duration
	batchSize   int
	limit       int
	rate        Rate
	retry       Retry
	retryRules  []retryRule
	retryTopics []time.Duration
	middlewares []Middleware

	problems []error
}

// settings has the options of New.
type settings struct {
	handling
	kafka         transport.Config
	topics        []string
	transport     transport.Transport // nil: opened with kafka
	open          func(cfg transport.Config) (transport.Transport, error)
	inbox         inboxSettings
	transact      consuming.Transactor
	decoder       func(ctx context.Context, m *Message) error // nil: Decode
	disposer      messageDisposer                             // of tests
	onError       func(ctx context.Context, err error)
	onGivenUp     func(GivenUp)
	telemetry     telemetry.Sink
	log           *slog.Logger
	concurrency   int
	drain         time.Duration
	maxOutage     time.Duration
	commitMode    commitMode
	bufferRecords int
	bufferBytes   int
	maxAhead      int
	skip          []string // types that the group does not need
	topicList     *topics.List
	letters       []deadletter.Option
}

// WithErrorHook sets a function that is called once with each error of the consumer, also with errors
// that the consumer handles without help. It must not block. ctx is never nil.
func WithErrorHook(hook func(ctx context.Context, err error)) Option {
	return option(func(settings *settings) { settings.onError = hook })
}

// WithGivenUpHook calls hook after a handler, or the consumer for it, has given up a message and the dead letter is stored, for
// example to alert the owner of an order. The calls come from one goroutine, in order. No lock is held, and the consumer does
// not wait: if 1,000 calls wait, further ones are left out, and the log says so. A panic is logged, and the consumer continues.
// Run waits for the calls before its end for at most five seconds. A process that dies between the letter and the call makes no
// call: the dead letters themselves are complete.
func WithGivenUpHook(hook func(GivenUp)) Option {
	return option(func(settings *settings) { settings.onGivenUp = hook })
}

// WithTelemetry sets where metrics and spans go. Defaults to telemetry.OTel(), which does nothing in a program without
// providers of OpenTelemetry.
func WithTelemetry(sink telemetry.Sink) Option {
	return option(func(settings *settings) { settings.telemetry = sink })
}

// WithLogger replaces slog.Default. Payloads, keys and headers are never logged.
func WithLogger(log *slog.Logger) Option {
	return option(func(settings *settings) { settings.log = cmp.Or(log, slog.Default()) })
}

// WithConcurrency sets how many lanes run at once, over all partitions and handlers. Each runs one handler at a time, with one
// transaction. Defaults to 16: a handler waits for MongoDB most of its time, and 16 transactions use a small part of the
// driver's default pool of 100 connections.
func WithConcurrency(n int) Option {
	return option(func(settings *settings) { settings.concurrency = cmp.Or(n, defaultConcurrency) })
}

// WithDrain sets how long a stop or a rebalance waits for running handlers before it abandons them. Defaults to
// 10 s, which fits into the 30 s that Kubernetes waits for a pod. It is limited to three quarters of WithSessionTimeout, and to
// 22 s, because the group removes a member that does not rejoin in time. A negative limit means that nothing waits.
func WithDrain(limit time.Duration) Option {
	return option(func(settings *settings) { settings.drain = cmp.Or(limit, defaultDrain) })
}

// WithBuffer limits the memory for the messages of one partition that are fetched and not finished. Defaults to 8 MiB:
// several fetches of 1 MiB, so that reading does not wait for handlers, while a member with 50 partitions stays below 400 MiB.
// One fetch may exceed the limit. A negative number means no limit of bytes: 1,000 messages are the limit.
func WithBuffer(bytes int) Option {
	return option(func(settings *settings) {
		settings.bufferBytes = cmp.Or(bytes, defaultBuffer)
		if bytes < 0 {
			settings.bufferBytes = math.MaxInt
		}
	})
}

// WithSkip names the types of messages that the group does not need. They pass, and are counted. In a name, * stands for any
// characters and ? for one character; "*" skips every type that no handler takes. A type that a handler takes is not skipped.
//
// Defaults to none: a message whose type no handler takes becomes a dead letter of class unknown, and each such type is reported
// at once, then at most once a minute. So a misspelled name, a handler that is not deployed yet, and a member of the old version
// during a rolling update lose no message: requeue the dead letters to the handler when it exists. Name the types of a shared topic
// that the service does not take, because each dead letter is a document in inbox_dead.
func WithSkip(names ...string) Option {
	return option(func(settings *settings) { settings.skip = append(settings.skip, names...) })
}

// WithHaltOnLoss makes Run return ErrGap if records are lost: retention has removed the next record of a
// partition, a partition has lost records that were read, or a topic was deleted and created again. Without it the consumer
// reports the loss and goes on: after the gap, or at the start of the new topic. To go on after a halt, run once without it.
func WithHaltOnLoss() Option {
	return option(func(settings *settings) { settings.inbox.settings.HaltOnRecreated = true })
}

// haltsOnLoss reports whether WithHaltOnLoss is set.
func (s *settings) haltsOnLoss() bool { return s.inbox.settings.HaltOnRecreated }

// WithMode sets the mode of the inbox. Defaults to Transactional.
func WithMode(mode Mode) HandlerOption {
	return handlerOption(func(handling *handling) { handling.mode = mode })
}

// WithTimeout bounds one call of a handler by its context. Defaults to 30 s: half of the server's limit for a transaction, 60 s,
// which leaves time for the inbox and the commit. Keep it well below that limit. A negative timeout means none.
func WithTimeout(timeout time.Duration) HandlerOption {
	return handlerOption(func(handling *handling) { handling.timeout = cmp.Or(timeout, defaultTimeout) })
}

// WithSharedTransaction sets how many messages that wait may share a transaction, at most 500. Defaults to 1: a failure then repeats no
// other message. More is much faster for handlers that only write to MongoDB. If a transaction fails, its messages are tried
// again one by one. A negative n means that none is shared. A Batch has its own size.
func WithSharedTransaction(n int) HandlerOption {
	return handlerOption(func(handling *handling) { handling.batchSize = max(cmp.Or(n, defaultShared), 1) })
}

// WithLimit sets how many calls of the handler run at once, over all lanes and partitions. Defaults to no
// limit other than WithConcurrency, because only you know which handlers share a scarce resource. A negative n means none. As an
// option of New it limits each handler separately.
func WithLimit(n int) HandlerOption {
	return handlerOption(func(handling *handling) { handling.limit = n })
}

// WithMiddleware adds middlewares. The middlewares of New are outside those of the handler.
func WithMiddleware(mws ...Middleware) HandlerOption {
	return handlerOption(func(handling *handling) {
		handling.middlewares = append(handling.middlewares[:len(handling.middlewares):len(handling.middlewares)], mws...)
		for _, m := range mws {
			if m == nil {
				handling.problems = append(handling.problems, errors.New("WithMiddleware: a middleware is nil"))
			}
		}
	})
}

// newSettings returns the defaults with opts applied.
func newSettings(opts []Option) settings {
	settings := settings{
		handling:      handling{mode: Transactional, timeout: defaultTimeout, batchSize: defaultShared},
		log:           slog.Default(),
		concurrency:   defaultConcurrency,
		drain:         defaultDrain,
		maxOutage:     defaultMaxOutage,
		commitMode:    commitMode{every: defaultCommitInterval},
		bufferRecords: maxBufferedRecords,
		bufferBytes:   defaultBuffer,
		maxAhead:      maxAhead,
		open:          openKafka,
	}

	for _, o := range opts {
		if o != nil {
			o.applyToConsumer(&settings)
		}
	}
	if settings.telemetry == nil {
		settings.telemetry = telemetry.OTel()
	}
	return settings
}

// validate returns all problems of a handler's settings.
func (h *handling) validate() error {
	bad := h.problems
	if h.mode < Transactional || h.mode > AtLeastOnceInTransaction {
		bad = append(bad, fmt.Errorf("WithMode: %v is not one of Transactional, Claimed, AtLeastOnce, AtLeastOnceInTransaction", h.mode))
	}
	if h.batchSize > maxBatch {
		bad = append(bad, fmt.Errorf("WithSharedTransaction: %d messages: it must be at most %d", h.batchSize, maxBatch))
	}
	if rate := h.rate.PerSecond; rate > maxRate || math.IsNaN(rate) {
		bad = append(bad, fmt.Errorf("WithRate: %v messages per second: it must be at most %d", rate, int(maxRate)))
	}
	return errors.Join(bad...)
}

// validate returns all problems of the options of New.
func (s *settings) validate() error {
	bad := []error{s.handling.validate()}
	add := func(wrong bool, format string, args ...any) {
		if wrong {
			bad = append(bad, fmt.Errorf(format, args...))
		}
	}

	add(len(s.topics) == 0 && s.topicList == nil, "no topics: name them with WithTopics")
	for _, t := range s.topics {
		add(t == "", "a topic's name is empty")
	}
	add(slices.Contains(s.skip, ""), "WithSkip: the name of a type is empty: \"*\" matches every name")
	add(s.concurrency < 1, "WithConcurrency: %d lanes: it must be positive", s.concurrency)

	return errors.Join(bad...)
}

// transactor returns outbox.Box.Transaction in the sessions of the consumer, or the function that replaces it. The next owner
// of a partition may end a transaction of this consumer on the server, and must not end other work of the service.
func (c *Consumer) transactor() consuming.Transactor {
	if c.s.transact != nil {
		return c.s.transact
	}

	return c.sessions.Run
}
