// Package franz makes a consumer join its group with the library franz-go instead of kafka-go. Only programs that import this
// package link franz-go for it.
//
//	c, err := consumer.New("shipping", db, consumer.WithBrokers("kafka:9092"), consumer.WithTopics("outbox.event.order"),
//		franz.Use(franz.WithInstanceID(os.Getenv("POD_NAME"))))
//
// A rebalance is cooperative: it stops only the partitions that move to another member. With kafka-go, each rebalance stops all
// partitions of the group for a moment. A static member (see WithInstanceID) that restarts causes no rebalance.
//
// All members of a group must use the same library. To change it, stop all members, then start the new ones. Only groups of
// consumer.WithExclusive may have members of both, and their rebalances move all partitions.
//
// Records are read, published and checked by the same code with both libraries. So the promises of package consumer about
// transactions, lost and damaged records, and brokers that send wrong bytes do not depend on this choice. Of franz-go, only the
// protocol of groups is used: joins, heartbeats, commits.
package franz

import (
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/franz"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// Option is an option of Use.
type Option interface{ apply(s *settings) }

type option func(s *settings)

func (o option) apply(settings *settings) { o(settings) }

type settings struct {
	instanceID string
}

// WithInstanceID makes the consumer a static member of its group: if it restarts within consumer.WithSessionTimeout, its
// partitions wait for it, and the group is not rebalanced. A member that stops for good keeps its partitions for that time too.
// The id must be unique in the group and the same after a restart, for example the name of the pod of a StatefulSet. Defaults to
// none.
func WithInstanceID(id string) Option {
	return option(func(settings *settings) { settings.instanceID = id })
}

// Use makes the consumer join its group with franz-go. The options of package consumer about Kafka apply.
func Use(opts ...Option) consumer.Option {
	var settings settings
	for _, o := range opts {
		if o != nil {
			o.apply(&settings)
		}
	}

	open := func(cfg transport.Config) (transport.Transport, error) {
		cfg.InstanceID = settings.instanceID
		transport, err := franz.New(cfg)
		if err != nil {
			return nil, err
		}
		return transport, nil
	}

	return consumer.WithSurroundings(consuming.Surroundings{Open: open})
}
