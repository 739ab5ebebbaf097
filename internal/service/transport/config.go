package transport

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// Config describes how Kafka is reached. Only Brokers is required. A zero value of another field means its default.
type Config struct {
	Brokers  []string // host:port
	ClientID string   // defaults to "outrelay"
	TLS      *tls.Config
	SASL     *SASL // nil: none

	// InstanceID makes the member a static one. Package franz uses it.
	InstanceID string
	// Rack is where the member runs. It reads from a replica there, if the brokers select one. Defaults to none: it reads from
	// leaders.
	Rack string

	// SessionTimeout is how long the group waits for a member that does not respond. Defaults to 30 s.
	SessionTimeout time.Duration
	// HeartbeatInterval must be at most half of SessionTimeout. It is also how soon a rebalance is noticed. Defaults to 3 s, or
	// to a third of a shorter SessionTimeout.
	HeartbeatInterval time.Duration
	// RebalanceTimeout is how long the group waits for a member to give its partitions back. It must be above the consumer's
	// Drain. Defaults to 30 s.
	RebalanceTimeout time.Duration
	// JoinBackoff is the wait after a failed join. Defaults to 1 s.
	JoinBackoff time.Duration
	// MaxWait is how long a broker holds a fetch that finds nothing. Defaults to 500 ms.
	MaxWait time.Duration
	// FromEnd makes a group without offsets start with the records that are written from now on. Without it the group starts
	// with all records of the topics.
	FromEnd bool
	// Exclusive assigns all partitions of a topic to one member of the group, the one with the highest Priority. The others
	// stand by. All members of the group must set it.
	Exclusive bool
	Priority  int32
	// WatchPartitions is the interval at which topics are checked for new partitions. Defaults to 10 s.
	WatchPartitions time.Duration

	// Dial replaces the TCP dialer in tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// SASL is a login. Its fields are those of consumer.SASL.
type SASL struct {
	Mechanism          string
	Username, Password string
	Token              func(ctx context.Context) (string, error)
	Extensions         map[string]string
}

// WithDefaults returns c with defaults. The error joins all invalid settings, by the names of the options of package consumer.
func (c Config) WithDefaults() (Config, error) {
	c.SessionTimeout = cmp.Or(c.SessionTimeout, 30*time.Second)
	c.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, min(3*time.Second, c.SessionTimeout/3))
	c.RebalanceTimeout = cmp.Or(c.RebalanceTimeout, 30*time.Second)
	c.JoinBackoff = cmp.Or(c.JoinBackoff, time.Second)
	c.MaxWait = cmp.Or(c.MaxWait, 500*time.Millisecond)
	c.WatchPartitions = cmp.Or(c.WatchPartitions, 10*time.Second)

	var errs []error
	if len(c.Brokers) == 0 {
		errs = append(errs, errors.New("no brokers: name them with WithBrokers"))
	}
	for _, b := range c.Brokers {
		if _, _, err := net.SplitHostPort(b); err != nil {
			errs = append(errs, fmt.Errorf("WithBrokers: %q is not host:port: %w", b, err))
		}
	}
	if c.SASL != nil {
		errs = append(errs, c.SASL.validate())
	}

	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"WithSessionTimeout", c.SessionTimeout},
		{"heartbeat interval", c.HeartbeatInterval},
		{"rebalance timeout", c.RebalanceTimeout},
		{"join backoff", c.JoinBackoff},
		{"longest wait of a fetch", c.MaxWait},
		{"interval of checks for partitions", c.WatchPartitions},
	} {
		if d.value <= 0 {
			errs = append(errs, fmt.Errorf("%s is %v: it must be positive", d.name, d.value))
		}
	}
	if c.HeartbeatInterval*2 > c.SessionTimeout {
		errs = append(errs, fmt.Errorf("heartbeat interval %v: it must be at most half of the session timeout %v",
			c.HeartbeatInterval, c.SessionTimeout))
	}
	return c, errors.Join(errs...)
}

// validate returns all problems of the login.
func (s *SASL) validate() error {
	var errs []error
	add := func(wrong bool, text string) {
		if wrong {
			errs = append(errs, errors.New("WithSASL: "+text))
		}
	}

	mechanism, known := sasl.Find(s.Mechanism)
	switch {
	// Services sign tokens for AWS with a source of package bearer.
	case !known || mechanism.Credential == sasl.AWS:
		return fmt.Errorf("WithSASL: mechanism %q is unknown: use %s", s.Mechanism, strings.Join(sasl.Names(sasl.Password, sasl.Token), ", "))
	case mechanism.Credential == sasl.Token:
		add(s.Token == nil, "mechanism "+s.Mechanism+" needs a Token")
		add(s.Username != "" || s.Password != "", "mechanism "+s.Mechanism+" uses no Username and no Password: remove them")
	default:
		add(s.Username == "" || s.Password == "", "mechanism "+s.Mechanism+" needs a Username and a Password")
		add(s.Token != nil, "mechanism "+s.Mechanism+" uses no Token: remove it, or use mechanism "+sasl.OAuth)
	}
	return errors.Join(errs...)
}
