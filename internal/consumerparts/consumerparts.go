// Package consumerparts gives other packages of this module the parts of a consumer.Consumer that are not exported, and lets
// them replace its surroundings.
package consumerparts

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/internal/transport"
)

// Surroundings replace the surroundings of a consumer. A nil field replaces nothing.
type Surroundings struct {
	// Transport replaces Kafka. The options of Kafka then have no effect.
	Transport transport.Transport
	// Open replaces kafkago.New. It gets the options of Kafka.
	Open func(cfg transport.Config) (transport.Transport, error)
	// Inbox replaces the inbox in the database. The options of the inbox then have no effect. If it has a method
	// Waiting() setaside.Store, a consumer without a database sets messages aside there.
	Inbox Inbox
	// Transact replaces outbox.Box.Transaction on the client of the database. With Inbox and Transact, the consumer needs no
	// database.
	Transact Transactor
}

// Transactor runs fn in a transaction that commits when fn returns nil. fn may run more than once.
type Transactor = func(ctx context.Context, fn func(ctx context.Context) error) error

// Inbox is the part of an inbox that a consumer uses. If the inbox has a method EnsureIndexes(ctx) error, the consumer calls it
// when it starts.
type Inbox interface {
	Remember(ctx context.Context) context.Context
	Admit(ctx context.Context, list []inbox.Entry) (fresh []bool, err error)
	Check(ctx context.Context, list []inbox.Entry) (fresh []bool, err error)
	Pass(ctx context.Context, list []inbox.Entry) error
	Claim(ctx context.Context, e inbox.Entry, lease time.Duration) (*inbox.Claim, error)
	Attach(ctx context.Context, consumer, topic string, part int32, l inbox.Log) (inbox.Generation, error)
	Release(ctx context.Context, list ...inbox.Partition) error
	Heartbeat(ctx context.Context) error
	TopicIDs(ctx context.Context, list []inbox.Partition) (map[inbox.Partition]string, error)
	StoreTopicIDs(ctx context.Context, ids map[inbox.Partition]string) error
}

var _ Inbox = (*inbox.Inbox)(nil)

// Package consumer sets the functions: an import in the other direction would be a cycle.
var (
	// IsHeld reports whether c, which must be a *consumer.Consumer, is paused, or one of its handlers is suspended.
	IsHeld func(c any) bool
	// WaitFor is outboxtest.WaitFor. c is a *consumer.Consumer, and a message is a *consumer.Message.
	WaitFor func(ctx context.Context, c any, pattern string, cond func(m any) bool) (any, error)
	// AfterBatch lets a middleware of a batch handler observe the outcome of the batch. f is called once, before the transaction
	// commits, with the outcome of the batch that contains the message. If the batch was not run, f gets an error of
	// consumer.Discard. A middleware needs this because it runs for each message on the way into the batch: its next handler
	// returns before the batch runs. AfterBatch returns false and never calls f if ctx is not the context of a batch handler.
	AfterBatch func(ctx context.Context, f func(err error)) bool
	// Option returns a consumer.Option.
	Option func(s Surroundings) any
	// Prepared returns the consumer.Handler h with a function that creates what h needs. A consumer calls it before the
	// first message, and again if it fails. It may be called more than once.
	Prepared func(h any, prepare func(ctx context.Context) error) any
)
