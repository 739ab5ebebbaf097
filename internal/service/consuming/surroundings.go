// Package consuming has the types with which packages of this module replace the surroundings of a consumer.Consumer: see
// consumer.WithSurroundings.
package consuming

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
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
	AdmitNew(ctx context.Context, list []inbox.Entry) (fresh []bool, err error)
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
