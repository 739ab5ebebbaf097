package sasl

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
)

// Login is the login of a user. It implements the interface of kafka-go.
type Login struct {
	Mechanism string // a name of the table, in any case
	User      string
	// Password is called for each connection, so that a rotated secret is picked up.
	Password func() (string, error)
	// Token returns a bearer token. It is called for each connection.
	Token func(ctx context.Context) (string, error)
	// Extensions are sent with the token.
	Extensions map[string]string
}

// Session is the exchange of one connection.
type Session = sasl.StateMachine

// Check returns an error for an unknown mechanism, and for one without its credential.
func (l *Login) Check() error {
	mechanism, known := Find(l.Mechanism)
	switch {
	case !known && l.Password == nil && l.Token == nil:
		return fmt.Errorf("SASL mechanism %q is not one of %s, and there is no password and no token", l.Mechanism, strings.Join(Names(), ", "))
	case !known:
		return fmt.Errorf("SASL mechanism %q is not one of %s", l.Mechanism, strings.Join(Names(), ", "))
	case mechanism.Credential == Password && l.Password == nil:
		return errors.New("SASL " + mechanism.Name + " needs a password")
	case mechanism.Credential != Password && l.Token == nil:
		return errors.New("SASL " + mechanism.Name + " needs a token")
	}
	return nil
}

// Name implements sasl.Mechanism: it returns the name in the protocol.
func (l *Login) Name() string {
	mechanism, _ := Find(l.Mechanism)
	return cmp.Or(mechanism.wire, mechanism.Listener)
}

// Fixes returns the fixes of the mechanism.
func (l *Login) Fixes() Fixes {
	mechanism, _ := Find(l.Mechanism)
	return mechanism.Fixes
}

// Start implements sasl.Mechanism.
func (l *Login) Start(ctx context.Context) (Session, []byte, error) {
	if err := l.Check(); err != nil {
		return nil, nil, err
	}
	mechanism, _ := Find(l.Mechanism)
	return mechanism.start(ctx, l)
}

// WithToken returns a copy of l whose token is fixed. Without a token it returns l.
func (l *Login) WithToken(ctx context.Context) (*Login, error) {
	if l.Token == nil {
		return l, nil
	}
	token, err := l.Token(ctx)
	if err != nil {
		return nil, &TokenError{err}
	}

	fixed := *l
	fixed.Token = func(context.Context) (string, error) { return token, nil }
	return &fixed, nil
}

// TokenError means that there is no token to send.
type TokenError struct{ Err error }

func (e *TokenError) Error() string { return "no token: " + e.Err.Error() }
func (e *TokenError) Unwrap() error { return e.Err }

// RejectedTokenError means that the broker does not accept the token.
type RejectedTokenError struct{ response string }

func (e *RejectedTokenError) Error() string {
	return fmt.Sprintf("the broker rejects the token: %q", e.response)
}

// readPassword reads the password for one connection, so a rotated secret applies without a restart.
func (l *Login) readPassword() (string, error) {
	password, err := l.Password()
	if err != nil {
		return "", fmt.Errorf("reading the SASL password: %w", err)
	}
	return password, nil
}

func startPlain(ctx context.Context, login *Login) (Session, []byte, error) {
	password, err := login.readPassword()
	if err != nil {
		return nil, nil, err
	}
	return plain.Mechanism{Username: login.User, Password: password}.Start(ctx)
}

func startScram(algorithm scram.Algorithm) func(context.Context, *Login) (Session, []byte, error) {
	return func(ctx context.Context, login *Login) (Session, []byte, error) {
		password, err := login.readPassword()
		if err != nil {
			return nil, nil, err
		}
		mechanism, err := scram.Mechanism(algorithm, login.User, password)
		if err != nil {
			return nil, nil, fmt.Errorf("preparing %s: %w", login.Mechanism, err)
		}
		session, first, err := mechanism.Start(ctx)
		return scramSession{session}, first, err
	}
}

// maxIterations is the largest number of iterations of the password's hash that a login computes, about a second of a
// processor. Kafka's default is 4,096, and its maximum 16,384.
const maxIterations = 1_000_000

// scramSession bounds the work that the server of a SCRAM login can request. The server is not authenticated yet, and the
// computation does not watch a context.
type scramSession struct{ Session }

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
	return s.Session.Next(ctx, challenge)
}

// startToken sends the bearer token.
func startToken(ctx context.Context, login *Login) (Session, []byte, error) {
	token, err := login.Token(ctx)
	if err != nil {
		return nil, nil, &TokenError{err}
	}

	var message strings.Builder
	message.WriteString("n,,\x01auth=Bearer " + token + "\x01")
	for _, name := range slices.Sorted(maps.Keys(login.Extensions)) {
		message.WriteString(name + "=" + login.Extensions[name] + "\x01")
	}
	message.WriteString("\x01")
	return tokenSession{}, []byte(message.String()), nil
}

// tokenSession waits for the response to the bearer token.
type tokenSession struct{}

// Next ends the session. The response to a valid token is empty. Another one has the reason of the failure.
func (tokenSession) Next(_ context.Context, challenge []byte) (done bool, response []byte, err error) {
	if len(challenge) > 0 {
		return false, nil, &RejectedTokenError{string(challenge[:min(len(challenge), 500)])}
	}
	return true, nil, nil
}
