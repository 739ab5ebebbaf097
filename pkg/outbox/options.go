package outbox

import (
	"fmt"
	"log/slog"
	"strings"

	"go.opentelemetry.io/otel/propagation"
)

// DefaultCollection is the default name of the outbox collection. WithCollection changes it.
const DefaultCollection = "outbox"

const (
	// DefaultMaxSize is the default size limit of an envelope in bytes: 900 KiB. This leaves room
	// for the overhead of a record below Kafka's default limit of 1 MiB. WithMaxSize changes it.
	DefaultMaxSize = 900 << 10

	// MaxSize is the upper bound of WithMaxSize, in bytes. A change event carries the envelope
	// inside another document, so a larger envelope may exceed the size limit of MongoDB.
	MaxSize = 15 << 20
)

// Option configures a Box. See New.
type Option func(*settings)

type settings struct {
	collection string
	maxSize    int
	plain      bool
	log        *slog.Logger
	propagator propagation.TextMapPropagator
}

// WithCollection sets the name of the outbox collection. Defaults to DefaultCollection.
func WithCollection(name string) Option { return func(s *settings) { s.collection = name } }

// WithMaxSize sets the size limit of an envelope in bytes, including all fields and headers.
// Defaults to DefaultMaxSize. The limit must be between 1 and MaxSize.
func WithMaxSize(bytes int) Option { return func(s *settings) { s.maxSize = bytes } }

// WithoutTransaction allows Append in a context without a transaction. The event is then inserted
// separately, with majority write concern. If one of several events fails, the events before it
// stay stored. If the context has a transaction, it is used.
func WithoutTransaction() Option { return func(s *settings) { s.plain = true } }

// WithLogger sets the logger. A Box logs a warning, once, if a transaction commits with a write
// concern below majority. A cron.Cron logs its failures. Defaults to slog.Default.
func WithLogger(log *slog.Logger) Option { return func(s *settings) { s.log = log } }

// WithPropagator sets the propagator that copies the trace context of the caller into the headers
// of the event. If p is nil, no trace context is copied. Defaults to W3C trace context and baggage.
func WithPropagator(p propagation.TextMapPropagator) Option {
	return func(s *settings) { s.propagator = p }
}

// validate returns the first problem of the options.
func (s *settings) validate() error {
	switch {
	case s.collection == "" || strings.ContainsAny(s.collection, "$\x00") || strings.HasPrefix(s.collection, "system."):
		return fmt.Errorf("outbox: invalid collection name %q", s.collection)
	case s.maxSize < 1 || s.maxSize > MaxSize:
		return fmt.Errorf("outbox: invalid maximum size of %d bytes: it must be between 1 and %d", s.maxSize, MaxSize)
	case s.log == nil:
		return fmt.Errorf("outbox: the logger is nil")
	}
	return nil
}

// TransactionOption configures one call of Box.Transaction.
type TransactionOption interface{ applyTo(s *transactionSettings) }

type transactionSettings struct{ snapshot bool }

type transactionOption func(s *transactionSettings)

func (o transactionOption) applyTo(s *transactionSettings) { o(s) }

// WithSnapshot makes all reads of the transaction see the same point in time, also across the
// shards of a cluster. By default, the reads see majority-committed data.
func WithSnapshot() TransactionOption {
	return transactionOption(func(s *transactionSettings) { s.snapshot = true })
}
