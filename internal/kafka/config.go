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

// Config describes the cluster and the limits of a Client.
type Config struct {
	Brokers []string    // host:port of some brokers; at least one
	TLS     *tls.Config // nil: plain text. If ServerName is empty, it is the host of the address
	// CurrentTLS replaces TLS if certificates may be renewed. It is called for each connection.
	CurrentTLS func() *tls.Config
	SASL       *SASL // nil: none
	// ClientID is the name that brokers use in their logs and quotas. Defaults to "outrelay".
	ClientID string
	// Compression is none, gzip, snappy, lz4 or zstd. Defaults to none.
	Compression string
	// RequestTimeout is how long a broker may take for a produce request. Defaults to 10 s.
	RequestTimeout time.Duration
	// MaxBatchBytes and MaxRequestBytes bound the size of a batch and of a request, before
	// compression. A topic's max.message.bytes lowers MaxBatchBytes. A record larger than MaxBatchBytes
	// gets a batch without other records. They default to 1 MiB − 1 KiB and 4 MiB.
	MaxBatchBytes, MaxRequestBytes int
	// Lanes is the number of connections to a broker that carry records. Defaults to 1, which is
	// enough for one change stream.
	Lanes int
	// Create has the options of missing topics, which are then created. If it is nil, they are not
	// created, and their records wait.
	Create *TopicCreate
	// ParkAfter is the time after which the records of a target that cannot be written are given back
	// (N11). Defaults to 5 s.
	ParkAfter time.Duration
	// ParkBytes is the memory that all records share. If a target cannot be written and its records
	// hold more than a quarter of it, the target is parked at once. Defaults to 32 MiB.
	ParkBytes int64

	Log     *slog.Logger // Defaults to slog.Default
	Metrics *metrics.Set // Defaults to a set that is not exported
	// Dial replaces the TCP dialer in tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// TopicCreate has the options of topics that are created on demand.
type TopicCreate struct {
	Partitions  int // 0: the broker's default
	Replication int // 0: the broker's default
	Configs     map[string]string
}

// SASL authenticates a user. It implements sasl.Mechanism.
type SASL struct {
	Mechanism string // PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, in any case
	User      string
	// Password is called for each connection, so that a rotated secret is picked up.
	Password func() (string, error)
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

	if _, err := batch.ParseCodec(c.Compression); err != nil {
		errs = append(errs, err)
	}
	if c.SASL != nil {
		if _, err := c.SASL.scramAlgorithm(); err != nil {
			errs = append(errs, err)
		}
		if c.SASL.Password == nil {
			errs = append(errs, errors.New("SASL needs a password"))
		}
	}

	negativeSize := c.MaxBatchBytes < 0 || c.MaxRequestBytes < 0 || c.ParkBytes < 0
	if negativeSize || c.Lanes < 0 || c.RequestTimeout < 0 || c.ParkAfter < 0 {
		errs = append(errs, errors.New("sizes, lanes and time-outs must not be negative"))
	}

	setDefault(&c.ClientID, DefaultClientID)
	setDefault(&c.RequestTimeout, DefaultRequestTimeout)
	setDefault(&c.MaxBatchBytes, DefaultMaxBatchBytes)
	setDefault(&c.MaxRequestBytes, DefaultMaxRequestBytes)
	setDefault(&c.Lanes, 1)
	setDefault(&c.ParkAfter, DefaultParkAfter)
	setDefault(&c.ParkBytes, DefaultParkBytes)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	c.Metrics = metrics.OrNew(c.Metrics)
	if fixed := c.TLS; c.CurrentTLS == nil && fixed != nil {
		c.CurrentTLS = func() *tls.Config { return fixed }
	}
	if c.Dial == nil {
		c.Dial = (&net.Dialer{Timeout: dialTimeout}).DialContext
	}

	if err := errors.Join(errs...); err != nil {
		return c, fmt.Errorf("kafka: %w", err)
	}
	return c, nil
}

// setDefault sets *p to v if it is the zero value.
func setDefault[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// scramAlgorithm returns the SCRAM algorithm of the mechanism, nil for PLAIN, or an error for an
// unknown mechanism.
func (s *SASL) scramAlgorithm() (scram.Algorithm, error) {
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
	algorithm, err := s.scramAlgorithm()
	if err != nil {
		return nil, nil, err
	}

	if algorithm == nil {
		return plain.Mechanism{Username: s.User, Password: password}.Start(ctx)
	}
	m, err := scram.Mechanism(algorithm, s.User, password)
	if err != nil {
		return nil, nil, fmt.Errorf("preparing %s: %w", s.Name(), err)
	}
	return m.Start(ctx)
}
