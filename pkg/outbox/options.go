package outbox

import (
	"fmt"
	"log/slog"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.opentelemetry.io/otel/propagation"
)

// DefaultCollection is the name of the outbox collection unless WithCollection says another.
const DefaultCollection = "outbox"

const (
	// DefaultMaxSize is the largest envelope that Append takes unless WithMaxSize says another: 900 KiB, which leaves
	// room for a record's overhead below Kafka's default limit of 1 MiB.
	DefaultMaxSize = 900 << 10
	// MaxSize is the largest limit: an envelope above it may not fit a change event, which carries it in a document of
	// its own.
	MaxSize = 15 << 20
)

// Option configures a Box.
type Option func(*settings)

type settings struct {
	collection string
	maxSize    int
	plain      bool
	log        *slog.Logger
	propagator propagation.TextMapPropagator
}

// WithCollection names the outbox collection. Defaults to DefaultCollection.
func WithCollection(name string) Option { return func(s *settings) { s.collection = name } }

// WithMaxSize sets the largest envelope in bytes, all fields and headers included. Defaults to DefaultMaxSize; at most
// MaxSize.
func WithMaxSize(bytes int) Option { return func(s *settings) { s.maxSize = bytes } }

// WithoutTransaction lets Append insert also where the context has no transaction: then the event is written by itself,
// by majority, and of several events those before an error stay. A transaction that is there is used all the same.
func WithoutTransaction() Option { return func(s *settings) { s.plain = true } }

// WithLogger sets where the Box warns, once, of a transaction that commits with less than a majority. Defaults to
// slog.Default.
func WithLogger(log *slog.Logger) Option { return func(s *settings) { s.log = log } }

// WithPropagator sets what captures the trace context of the caller into the event's headers; nil captures nothing.
// Defaults to W3C trace context and baggage.
func WithPropagator(p propagation.TextMapPropagator) Option {
	return func(s *settings) { s.propagator = p }
}

func (s *settings) validate() error {
	switch {
	case s.collection == "" || strings.ContainsAny(s.collection, "$\x00") || strings.HasPrefix(s.collection, "system."):
		return fmt.Errorf("outbox: %q is not a legal collection name", s.collection)
	case s.maxSize < 1 || s.maxSize > MaxSize:
		return fmt.Errorf("outbox: a maximum size of %d bytes; 1 to %d is allowed", s.maxSize, MaxSize)
	case s.log == nil:
		return fmt.Errorf("outbox: the logger is nil")
	}
	return nil
}

// CallOption changes one call of a Box.
type CallOption interface{ call(*callSettings) }

type callSettings struct{ session *mongo.Session }

// TransactionOption changes one call of Transaction.
type TransactionOption interface{ transaction(*transactionSettings) }

type transactionSettings struct {
	session  *mongo.Session
	snapshot bool
}

// SessionOption is what WithSession returns: an option of a Box's calls and of Transaction.
type SessionOption struct{ session *mongo.Session }

// WithSession runs the call in that session, whatever session the context carries.
func WithSession(s *mongo.Session) SessionOption { return SessionOption{s} }

func (o SessionOption) call(s *callSettings)               { s.session = o.session }
func (o SessionOption) transaction(s *transactionSettings) { s.session = o.session }

type snapshotOption struct{}

func (snapshotOption) transaction(s *transactionSettings) { s.snapshot = true }

// WithSnapshot makes all reads of the transaction see one point in time, also across the shards of a cluster. Defaults to
// majority reads.
func WithSnapshot() TransactionOption { return snapshotOption{} }
