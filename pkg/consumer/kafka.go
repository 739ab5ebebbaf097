package consumer

import (
	"context"
	"crypto/tls"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
)

// WithBrokers names Kafka servers, as host:port. Required.
func WithBrokers(addrs ...string) Option {
	return option(func(settings *settings) { settings.kafka.Brokers = append(settings.kafka.Brokers, addrs...) })
}

// WithTopics names the topics that the group reads. A topic that does not exist yet is reported and waited for. Required, unless
// WithTopicList is given.
func WithTopics(names ...string) Option {
	return option(func(settings *settings) { settings.topics = append(settings.topics, names...) })
}

// WithTLS connects to Kafka with TLS. An empty configuration trusts the roots of the system. Defaults to no TLS. If ServerName is
// empty, it is the host of the address.
func WithTLS(tlsConfig *tls.Config) Option {
	return option(func(settings *settings) { settings.kafka.TLS = tlsConfig })
}

// WithSASL logs in to Kafka. Defaults to no login.
func WithSASL(login SASL) Option {
	return option(func(settings *settings) {
		sasl := transport.SASL(login)
		settings.kafka.SASL = &sasl
	})
}

// SASL is a login to Kafka.
type SASL struct {
	Mechanism string // "plain", "scram-sha-256", "scram-sha-512" or "oauthbearer"; required

	// Username and Password are required, except for "oauthbearer". Use "plain" only with WithTLS: it sends the password as it is.
	Username, Password string

	// Token returns a bearer token, for "oauthbearer". It is called for each connection. Package bearer has sources.
	Token func(ctx context.Context) (string, error)

	// Extensions are sent with the token. Confluent Cloud needs logicalCluster and identityPoolId.
	Extensions map[string]string
}

// WithClientID names this client in the logs and quotas of the brokers. Defaults to "outrelay".
func WithClientID(id string) Option {
	return option(func(settings *settings) { settings.kafka.ClientID = id })
}

// WithRack lets the consumer read from a replica in this rack, or availability zone. The brokers need broker.rack and
// replica.selector.class. Defaults to none: the consumer reads from leaders. If a replica fails, it reads from the leader for a
// minute.
func WithRack(rack string) Option {
	return option(func(settings *settings) { settings.kafka.Rack = rack })
}

// WithSessionTimeout sets how long the group waits for a member that does not respond. Defaults to 30 s: with a longer time, the
// others take over later after a crash, and with a shorter time, a pause of a busy machine looks like a crash. Brokers accept at
// least 6 s, unless their configuration permits less.
func WithSessionTimeout(timeout time.Duration) Option {
	return option(func(settings *settings) { settings.kafka.SessionTimeout = timeout })
}

// Start is the place at which a group without offsets begins.
type Start int

const (
	// Earliest begins with the first record.
	Earliest Start = iota
	// Latest begins with the records that are written from then on.
	Latest
)

// WithStart sets where a group without offsets begins. Defaults to Earliest: events that were published before the first start
// would otherwise be lost. A topic or a partition that is new to the group begins there too. With Latest, what is written to it
// before a member finds it, within ten seconds, is skipped. A topic that was deleted and created again is read from its first
// record. Retry topics are always read from their first record.
func WithStart(start Start) Option {
	return option(func(settings *settings) {
		settings.kafka.FromEnd = start == Latest
		if start != Earliest && start != Latest {
			settings.problems = append(settings.problems, fmt.Errorf("WithStart: %d is neither Earliest nor Latest", start))
		}
	})
}

// WithExclusive gives all partitions to one member of the group: the one with the highest priority. The others wait until it
// leaves. All members of the group need this option. Without it they share the partitions.
func WithExclusive(priority int) Option {
	return option(func(settings *settings) { settings.kafka.Exclusive, settings.kafka.Priority = true, int32(priority) })
}

// openKafka returns the default transport.
func openKafka(cfg transport.Config) (transport.Transport, error) {
	transport, err := kafkago.New(cfg)
	if err != nil {
		return nil, err
	}
	return transport, nil
}
