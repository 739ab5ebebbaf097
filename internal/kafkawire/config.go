package kafkawire

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
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
	SASL       sasl.Mechanism // nil: none
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

// SASL authenticates a user. It implements sasl.Mechanism.
type SASL struct {
	Mechanism string // PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER, in any case
	User      string
	// Password is called for each connection, so that a rotated secret is picked up.
	Password func() (string, error)
	// Token returns a bearer token, for OAUTHBEARER. It is called for each connection.
	Token func(ctx context.Context) (string, error)
	// Extensions are sent with the token, for OAUTHBEARER.
	Extensions map[string]string
	// Advice replaces the fixes of a diagnosis that concern the token.
	Advice TokenAdvice
}

// TokenAdvice has the fixes for a token that is missing, and for one that the broker rejects. An empty text is the usual fix.
type TokenAdvice struct{ Missing, Rejected string }

// withToken returns a copy of s whose token is fixed. Without OAUTHBEARER it returns s.
func (s *SASL) withToken(ctx context.Context) (*SASL, error) {
	if s.Name() != mechanismOAuth {
		return s, nil
	}
	token, err := s.Token(ctx)
	if err != nil {
		return nil, &tokenError{err}
	}

	fixed := *s
	fixed.Token = func(context.Context) (string, error) { return token, nil }
	return &fixed, nil
}

// tokenError means that there is no token to send.
type tokenError struct{ err error }

func (e *tokenError) Error() string { return "no token: " + e.err.Error() }
func (e *tokenError) Unwrap() error { return e.err }

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

	// Other mechanisms check themselves.
	if s, ok := c.SASL.(*SASL); ok {
		if _, err := s.scramAlgorithm(); err != nil {
			errs = append(errs, err)
		}
		switch {
		case s.Name() == mechanismOAuth && s.Token == nil:
			errs = append(errs, errors.New("SASL OAUTHBEARER needs a token"))
		case s.Name() != mechanismOAuth && s.Password == nil:
			errs = append(errs, errors.New("SASL needs a password"))
		}
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

// mechanismOAuth is the mechanism of RFC 7628.
const mechanismOAuth = "OAUTHBEARER"

// scramAlgorithm returns the SCRAM algorithm of the mechanism, nil for PLAIN and OAUTHBEARER, or an error for an
// unknown mechanism.
func (s *SASL) scramAlgorithm() (scram.Algorithm, error) {
	switch strings.ToUpper(s.Mechanism) {
	case "PLAIN", mechanismOAuth:
		return nil, nil
	case "SCRAM-SHA-256":
		return scram.SHA256, nil
	case "SCRAM-SHA-512":
		return scram.SHA512, nil
	}
	return nil, fmt.Errorf("SASL mechanism %q is not one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER", s.Mechanism)
}

// Name implements sasl.Mechanism.
func (s *SASL) Name() string { return strings.ToUpper(s.Mechanism) }

// Start implements sasl.Mechanism.
func (s *SASL) Start(ctx context.Context) (sasl.StateMachine, []byte, error) {
	if s.Name() == mechanismOAuth {
		return s.startOAuth(ctx)
	}
	// The password is read for each connection, so a rotated secret applies without a restart.
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
	session, first, err := m.Start(ctx)
	return scramSession{session}, first, err
}

// maxIterations is the largest number of iterations of the password's hash that a login computes, about a second of a
// processor. Kafka's default is 4,096, and its maximum 16,384.
const maxIterations = 1_000_000

// scramSession bounds the work that the server of a SCRAM login can request. The server is not authenticated yet, and the
// computation does not watch a context.
type scramSession struct{ sasl.StateMachine }

// Next checks the number of iterations in a message of the server.
func (s scramSession) Next(ctx context.Context, challenge []byte) (done bool, response []byte, err error) {
	for part := range bytes.SplitSeq(challenge, []byte(",")) {
		digits, ok := bytes.CutPrefix(part, []byte("i="))
		if !ok {
			continue
		}
		// The library reads the first one, and a second one is not valid.
		if n, err := strconv.ParseUint(string(digits), 10, 64); err != nil || n > maxIterations {
			return false, nil, fmt.Errorf("the server requests %.20s iterations of the password's hash; at most %d are computed", digits, maxIterations)
		}
	}
	return s.StateMachine.Next(ctx, challenge)
}

// startOAuth sends the bearer token.
func (s *SASL) startOAuth(ctx context.Context) (sasl.StateMachine, []byte, error) {
	token, err := s.Token(ctx)
	if err != nil {
		return nil, nil, &tokenError{err}
	}

	var message strings.Builder
	message.WriteString("n,,\x01auth=Bearer " + token + "\x01")
	for _, name := range slices.Sorted(maps.Keys(s.Extensions)) {
		message.WriteString(name + "=" + s.Extensions[name] + "\x01")
	}
	message.WriteString("\x01")
	return oauthSession{}, []byte(message.String()), nil
}

// oauthSession waits for the response to the bearer token.
type oauthSession struct{}

// Next ends the session. The response to a valid token is empty. Another one has the reason of the failure.
func (oauthSession) Next(_ context.Context, challenge []byte) (done bool, response []byte, err error) {
	if len(challenge) > 0 {
		return false, nil, &rejectedTokenError{string(challenge[:min(len(challenge), 500)])}
	}
	return true, nil, nil
}

// rejectedTokenError means that the broker does not accept the token.
type rejectedTokenError struct{ answer string }

func (e *rejectedTokenError) Error() string {
	return fmt.Sprintf("the broker rejects the token: %q", e.answer)
}
