package consumer

import (
	"context"
	"errors"
	"reflect"
	"time"

	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// Internals that the tests of the package use.
type (
	Verdict  = verdict
	Failures = failures
	Disposer = messageDisposer

	TimeoutError   = timeoutError
	PanicError     = panicError
	NotDueError    = notDueError
	LifetimeError  = lifetimeError
	SuspendedError = suspendedError
	OutageError    = outageError
	ExpiredError   = expiredError
)

const (
	ActRetry      = actRetry
	ActRetryTopic = actRetryTopic
	ActDiscard    = actDiscard
	ActDeadLetter = actDeadLetter

	MaxHistory = maxHistory

	ClassDuplicate = classDuplicate
	ClassNotDue    = classNotDue
)

var (
	IsTransient = isTransient
	ClassOf     = classOf

	ErrAbandoned = errAbandoned

	CheckTimes      = checkTimes
	WrapDecodeError = wrapDecodeError
)

// Note counts one more failure.
func (a failures) Note(err error, m *Message, at time.Time) failures { return a.note(err, m, at) }

// NewDisposer returns the disposer of a consumer.
func NewDisposer(letters *deadletter.Desk, p transport.Publisher, report func(err error)) Disposer {
	return &disposer{letters: letters, publisher: p, report: func(_ string, err error, _ ...any) { report(err) }}
}

// WithDisposer replaces the disposer.
func WithDisposer(d Disposer) Option { return option(func(s *settings) { s.disposer = d }) }

// WithTransport replaces Kafka.
func WithTransport(t transport.Transport) Option {
	return option(func(s *settings) { s.transport = t })
}

// WithInbox replaces the inbox in the database.
func WithInbox(x consuming.Inbox) Option {
	return option(func(s *settings) { s.inbox.replacement = x })
}

// Transactions replaces the transactions of the database.
func Transactions(f consuming.Transactor) Option {
	return option(func(s *settings) { s.transact = f })
}

// WithKafka sets all options of Kafka.
func WithKafka(cfg transport.Config) Option { return option(func(s *settings) { s.kafka = cfg }) }

// WithBufferedRecords sets how many messages of a partition are fetched and not finished.
func WithBufferedRecords(n int) Option { return option(func(s *settings) { s.bufferRecords = n }) }

// WithMaxAhead sets how many messages of a partition may follow an unfinished one.
func WithMaxAhead(n int) Option { return option(func(s *settings) { s.maxAhead = n }) }

// HasDefaults reports whether o changes no setting of New.
func HasDefaults(o Option) bool {
	got, want := newSettings([]Option{o}), newSettings(nil)
	// Functions cannot be compared, except with nil.
	if errors.Join(got.problems...) != nil || (got.decoder == nil) != (want.decoder == nil) || (got.onError == nil) != (want.onError == nil) {
		return false
	}
	for _, s := range []*settings{&got, &want} {
		s.decoder, s.onError, s.open = nil, nil, nil
		s.retry, s.problems = s.retry.withDefaults(), nil
	}
	return reflect.DeepEqual(got, want) //nolint:govet // errors are compared by their values
}

// Commit commits the offsets of the finished messages now.
func (c *Consumer) Commit(ctx context.Context) error {
	if s := c.currentSession.Load(); s != nil {
		return s.commitOffsets(ctx)
	}
	return nil
}

// SetNow replaces the clock that decides how long trouble lasts.
func (c *Consumer) SetNow(now func() time.Time) {
	c.health.mu.Lock()
	defer c.health.mu.Unlock()
	c.health.now = now
}

// QuickAttempts returns how many attempts a message has in its lane.
func QuickAttempts(r Retry) int {
	d := decider{retry: r.withDefaults()}
	n := 1
	for d.chooseByRetry(&d.retry, &Message{}, failures{Failed: n, Total: n, Since: time.Now()}).Action == actRetry {
		n++
	}
	return n
}
