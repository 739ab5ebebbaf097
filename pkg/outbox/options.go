package outbox

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/outrelay/outrelay/internal/service/appending"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// Option configures a Box. See New.
type Option interface{ applyTo(s *settings) }

type settings struct {
	events appending.Settings
	plain  bool // events may be appended without a transaction
	log    *slog.Logger
}

// newSettings returns the settings with their defaults. The error joins all problems.
func newSettings(opts []Option) (settings, error) {
	var chosen settings
	for _, o := range opts {
		o.applyTo(&chosen)
	}
	if err := chosen.events.Complete(); err != nil {
		return settings{}, fmt.Errorf("outbox: %w", err)
	}
	if chosen.log == nil {
		chosen.log = slog.Default()
	}
	return chosen, nil
}

type option func(s *settings)

func (o option) applyTo(settings *settings) { o(settings) }

// WithCollection sets the name of the outbox collection. Defaults to "outbox".
func WithCollection(name string) Option {
	return option(func(settings *settings) { settings.events.Collection = name })
}

// WithMaxSize sets the size limit of an envelope in bytes, including all fields and headers. At most
// 15 MiB. Defaults to 900 KiB, which leaves room for the overhead of a record below Kafka's default
// limit of 1 MiB.
func WithMaxSize(bytes int) Option {
	return option(func(settings *settings) { settings.events.MaxSize = bytes })
}

// WithoutTransaction allows Append in a context without a transaction. The event is then inserted
// separately, with majority write concern. After an error, a part of several events may be stored: see Append.
// If the context has a transaction, it is used. On a standalone server, Append works and logs a warning once: no relay can read the
// events, because it needs the change streams of a replica set.
func WithoutTransaction() Option { return option(func(settings *settings) { settings.plain = true }) }

// WithMiddleware adds middleware. The first one is the outermost.
func WithMiddleware(ms ...Middleware) Option {
	return option(func(settings *settings) {
		for _, m := range ms {
			settings.events.Middleware = append(settings.events.Middleware, appending.AsMiddleware(m))
		}
	})
}

// WithTelemetry sets where the headers for the trace context of the caller come from, and where events
// are counted. The headers are added to each event that does not have them yet. Defaults to
// telemetry.OTel(): the global propagator, or W3C trace context and baggage.
func WithTelemetry(sink telemetry.Sink) Option {
	return option(func(settings *settings) { settings.events.Telemetry = sink })
}

// WithLogger sets the logger. A Box logs a warning, once, if a transaction commits with a write
// concern below majority, and if WithoutTransaction appends on a standalone server. A cron.Cron logs its failures. Payloads and keys are never logged.
// Defaults to slog.Default.
func WithLogger(log *slog.Logger) Option {
	return option(func(settings *settings) { settings.log = log })
}

// AppendFunc appends one event.
type AppendFunc func(ctx context.Context, ev event.Event) error

// Middleware wraps the way of each event into the outbox. It may change the event with Event.With,
// call next several times with events of different ids, or not call it, which leaves the event out.
// All events of a call of Append are stored together, after the middleware: next does not store. If
// the middleware returns an error, Append stores nothing and returns that error.
//
// The context of an event is the context of Append, so writes with it are part of the transaction. A
// Box calls the Middleware itself once for each call of Append.
type Middleware func(next AppendFunc) AppendFunc

// TransactionOption configures one call of Box.Transaction.
type TransactionOption interface{ applyTo(s *transactionSettings) }

type transactionSettings struct{ snapshot bool }

type transactionOption func(s *transactionSettings)

func (o transactionOption) applyTo(settings *transactionSettings) { o(settings) }

// WithSnapshot makes all reads of the transaction see the same point in time, also across the
// shards of a cluster. By default, the reads see majority-committed data.
func WithSnapshot() TransactionOption {
	return transactionOption(func(settings *transactionSettings) { settings.snapshot = true })
}
