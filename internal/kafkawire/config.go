package kafkawire

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// Defaults of Config.
const (
	defaultClientID  = "outrelay"
	defaultIdleLinks = 2
	// A barrier over hundreds of fresh partitions takes seconds.
	defaultTransactionTimeout = time.Minute
)

// Config describes how the cluster is reached.
type Config struct {
	Brokers []string    // host:port of some brokers; at least one
	TLS     *tls.Config // nil: plain text. If ServerName is empty, it is the host of the address
	// CurrentTLS replaces TLS if certificates may be renewed. It is called for each connection.
	CurrentTLS func() *tls.Config
	SASL       *sasl.Login // nil: none
	// ClientID is the name that brokers use in their logs and quotas. Defaults to "outrelay".
	ClientID string
	// TransactionTimeout is the longest time for which a transaction of a takeover may stay open. If a broker allows less
	// (transaction.max.timeout.ms), it is halved until the broker accepts it. Defaults to 60 s.
	TransactionTimeout time.Duration
	// IdleLinks is the number of idle connections to a broker that are kept. Defaults to 2.
	IdleLinks int
	// Reached, if it is not nil, is called after each metadata request: with nil if a broker responded, and otherwise with an error
	// that is [ErrAway]. It may be called by several goroutines at once.
	Reached func(error)
	// Dial replaces the TCP dialer in tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Patience is the least timeout of a request. Tests set it, so that a slow server does not count as
	// failed.
	Patience time.Duration
}

// TopicCreate has the options of topics that are created on demand.
type TopicCreate struct {
	Partitions  int // 0: the broker's default
	Replication int // 0: the broker's default
	Configs     map[string]string
}

// withDefaults returns c with defaults, or an error that joins all invalid settings.
func (c Config) withDefaults() (Config, error) {
	var errs []error
	if len(c.Brokers) == 0 {
		errs = append(errs, errors.New("no brokers are given"))
	}
	for _, b := range c.Brokers {
		if _, _, err := net.SplitHostPort(b); err != nil {
			errs = append(errs, fmt.Errorf("broker %q is not host:port", b))
		}
	}

	if c.SASL != nil {
		errs = append(errs, c.SASL.Check())
	}

	c.TransactionTimeout = cmp.Or(c.TransactionTimeout, defaultTransactionTimeout)
	c.ClientID, c.IdleLinks = cmp.Or(c.ClientID, defaultClientID), cmp.Or(c.IdleLinks, defaultIdleLinks)
	if fixed := c.TLS; c.CurrentTLS == nil && fixed != nil {
		c.CurrentTLS = func() *tls.Config { return fixed }
	}
	// The dialer has its own limit: a dial must not use up the time of a whole call.
	if c.Dial == nil {
		c.Dial = (&net.Dialer{Timeout: dialTimeout}).DialContext
	}

	if err := errors.Join(errs...); err != nil {
		return c, fmt.Errorf("kafka: %w", err)
	}
	return c, nil
}
