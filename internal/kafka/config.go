package kafka

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/metrics"
)

// Defaults of Config.
const (
	DefaultMaxBatchBytes   = 1<<20 - 1024 // below Kafka's default max.message.bytes, 1 MiB + 12
	DefaultMaxRequestBytes = 4 << 20
	DefaultRequestTimeout  = 10 * time.Second
	DefaultClientID        = "outrelay"
	DefaultParkAfter       = 5 * time.Second
	DefaultParkBytes       = 32 << 20
)

// Config is what a Client needs to know of the cluster.
type Config struct {
	Brokers []string    // host:port of some brokers; at least one
	TLS     *tls.Config // nil: plain text. An empty ServerName is the host that is dialled
	// TLSNow replaces TLS where it may change: it is asked for each connection, so that renewed certificates are picked up.
	TLSNow func() *tls.Config
	SASL   *SASL // nil: none
	// ClientID is what brokers see in their logs and quotas. Defaults to "outrelay".
	ClientID string
	// Compression is none, gzip, snappy, lz4 or zstd. Defaults to none.
	Compression string
	// RequestTimeout is how long a broker may take for a produce request. Defaults to 10 s.
	RequestTimeout time.Duration
	// MaxBatchBytes and MaxRequestBytes bound what is sent at once, before compression; a topic's max.message.bytes
	// lowers the first. A record larger than the first goes alone. Default to 1 MiB − 1 KiB and 4 MiB.
	MaxBatchBytes, MaxRequestBytes int
	// Lanes is the number of connections to a broker that carry records. Defaults to 1, which is enough behind one
	// change stream.
	Lanes int
	// Create says how a missing topic is created. nil: it is not; its records wait.
	Create *TopicCreate
	// ParkAfter is how long a target may be impossible to write before its records are given back (N11).
	// Defaults to 5 s.
	ParkAfter time.Duration
	// ParkBytes is the memory that all records share. A target that cannot be written and holds more than a quarter of it
	// is parked at once. Defaults to 32 MiB.
	ParkBytes int64

	Log     *slog.Logger // Defaults to slog.Default
	Metrics *metrics.Set // Defaults to one that nobody reads
	// Dial replaces the TCP dialer; for tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// TopicCreate describes topics that are created on demand.
type TopicCreate struct {
	Partitions  int // 0: the broker's default
	Replication int // 0: the broker's default
	Configs     map[string]string
}

// SASL is a user and how to prove to be it.
type SASL struct {
	Mechanism string // PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, in any case
	User      string
	// Password is asked for each connection, so that a rotated secret is picked up.
	Password func() (string, error)
}

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
	if _, err := batch.ParseCodec(c.Compression); err != nil {
		errs = append(errs, err)
	}
	if c.SASL != nil {
		if _, err := c.SASL.algorithm(); err != nil {
			errs = append(errs, err)
		}
		if c.SASL.Password == nil {
			errs = append(errs, errors.New("SASL needs a password"))
		}
	}
	if c.MaxBatchBytes < 0 || c.MaxRequestBytes < 0 || c.Lanes < 0 || c.RequestTimeout < 0 || c.ParkAfter < 0 || c.ParkBytes < 0 {
		errs = append(errs, errors.New("sizes, lanes and time-outs must not be negative"))
	}
	def(&c.ClientID, DefaultClientID)
	def(&c.RequestTimeout, DefaultRequestTimeout)
	def(&c.MaxBatchBytes, DefaultMaxBatchBytes)
	def(&c.MaxRequestBytes, DefaultMaxRequestBytes)
	def(&c.Lanes, 1)
	def(&c.ParkAfter, DefaultParkAfter)
	def(&c.ParkBytes, DefaultParkBytes)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	c.Metrics = metrics.OrNew(c.Metrics)
	if fixed := c.TLS; c.TLSNow == nil && fixed != nil {
		c.TLSNow = func() *tls.Config { return fixed }
	}
	if c.Dial == nil {
		c.Dial = (&net.Dialer{Timeout: dialTimeout}).DialContext
	}
	if err := errors.Join(errs...); err != nil {
		return c, fmt.Errorf("kafka: %w", err)
	}
	return c, nil
}

func def[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// algorithm is nil for PLAIN.
func (s *SASL) algorithm() (scram.Algorithm, error) {
	switch strings.ToUpper(s.Mechanism) {
	case "PLAIN":
		return nil, nil
	case "SCRAM-SHA-256":
		return scram.SHA256, nil
	case "SCRAM-SHA-512":
		return scram.SHA512, nil
	}
	return nil, fmt.Errorf("SASL mechanism %q is not one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512", s.Mechanism)
}

// Name implements sasl.Mechanism.
func (s *SASL) Name() string { return strings.ToUpper(s.Mechanism) }

// Start implements sasl.Mechanism.
func (s *SASL) Start(ctx context.Context) (sasl.StateMachine, []byte, error) {
	password, err := s.Password()
	if err != nil {
		return nil, nil, fmt.Errorf("reading the SASL password: %w", err)
	}
	algo, err := s.algorithm()
	if err != nil {
		return nil, nil, err
	}
	if algo == nil {
		return plain.Mechanism{Username: s.User, Password: password}.Start(ctx)
	}
	m, err := scram.Mechanism(algo, s.User, password)
	if err != nil {
		return nil, nil, fmt.Errorf("preparing %s: %w", s.Name(), err)
	}
	return m.Start(ctx)
}
