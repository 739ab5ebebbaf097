package kafkawire

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/apiversions"
	"github.com/segmentio/kafka-go/protocol/saslauthenticate"
	"github.com/segmentio/kafka-go/protocol/saslhandshake"

	"github.com/outrelay/outrelay/internal/contract/sasl"

	"github.com/outrelay/outrelay/internal/kafkawire/response"
)

const (
	dialTimeout = 3 * time.Second // to a broker: TCP, TLS, versions and SASL together
	// sessionShare is the share of a session after which a link is replaced. The broker closes the connection at the end of the
	// session, and a batch in flight would then have an unknown fate.
	sessionShare = 0.8
	// linkIdle is below the broker's connections.max.idle.ms (10 min), so that the first record after a
	// pause finds an open connection.
	linkIdle = 9 * time.Minute
)

// stage is the step that a connection has reached.
type stage string

// The stages of a connection, in their order.
const (
	stageTCP      stage = "tcp"
	stageTLS      stage = "tls"
	stageVersions stage = "versions"
	stageSASL     stage = "sasl"
	stageRequest  stage = "request"
)

// connectError is the error of a connection that failed at a stage.
type connectError struct {
	addr  string
	stage stage
	err   error
}

func (e *connectError) Error() string {
	return fmt.Sprintf("connecting to %s (%s): %v", e.addr, e.stage, e.err)
}
func (e *connectError) Unwrap() error { return e.err }

// Link is one connection to a broker. Only one goroutine may use it at a time. Any goroutine may call
// Close.
type Link struct {
	addr      string
	conn      net.Conn       // with TLS, over wire
	wire      *progressConn  // TCP
	reader    *bufio.Reader  // from conn
	protoConn *protocol.Conn // over conn and reader, with checked responses
	versions  map[protocol.ApiKey]int16
	highest   map[protocol.ApiKey]int16 // of the broker, which kafka-go may not support
	clientID  string
	lastUsed  time.Time
	endsAt    time.Time // when the link must be replaced; zero: never
}

// Addr returns the address of the broker.
func (l *Link) Addr() string { return l.addr }

// IsStale reports whether the broker may close the link soon, because it was idle for long or its login expires.
func (l *Link) IsStale() bool {
	return time.Since(l.lastUsed) > linkIdle || !l.endsAt.IsZero() && time.Now().After(l.endsAt)
}

// Close closes the connection. A request in flight fails at once.
func (l *Link) Close() { _ = l.conn.Close() }

// Dial opens a link to the broker at addr: TCP, TLS, the versions of the broker, SASL. It blocks
// for at most dialTimeout.
func (c *Client) Dial(ctx context.Context, addr string) (*Link, error) {
	// A token may take longer than a connection: it may come from a program or from another server.
	login, err := c.login(ctx)
	if err != nil {
		return nil, &connectError{addr, stageSASL, err}
	}

	ctx, cancel := context.WithTimeout(ctx, max(dialTimeout, c.cfg.Patience))
	defer cancel()
	tcp, err := c.cfg.Dial(ctx, "tcp", addr)
	if err != nil {
		return nil, &connectError{addr, stageTCP, err}
	}

	// The handshake has no context.
	conn := newProgressConn(tcp, max(dialTimeout, c.cfg.Patience))
	stop := context.AfterFunc(ctx, conn.interrupt)
	link, err := c.handshake(ctx, conn, addr, login)
	// The end of ctx has interrupted the connection.
	if !stop() && err == nil {
		err = &connectError{addr, stageSASL, context.Cause(ctx)}
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return link, nil
}

// login returns the mechanism for one connection, or nil if there is no login.
func (c *Client) login(ctx context.Context) (*sasl.Login, error) {
	if c.cfg.SASL == nil {
		return nil, nil
	}
	return c.cfg.SASL.WithToken(ctx)
}

// DialChecked opens a connection with TCP and TLS, whose responses are checked. It is for libraries that
// do the rest of the handshake.
func (c *Client) DialChecked(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := c.cfg.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	secured, err := c.startTLS(ctx, conn, addr)
	if err != nil {
		_ = conn.Close()
		return nil, &connectError{addr, stageTLS, err}
	}
	return response.Check(secured, bufio.NewReader(secured), addr), nil
}

// startTLS returns conn after a TLS handshake with the current certificates. If TLS is not configured,
// it returns conn unchanged.
func (c *Client) startTLS(ctx context.Context, conn net.Conn, addr string) (net.Conn, error) {
	if c.cfg.CurrentTLS == nil {
		return conn, nil
	}

	cfg := c.cfg.CurrentTLS()
	// The certificates are shared by all connections, but each broker has its own name.
	if cfg.ServerName == "" {
		cfg = cfg.Clone()
		cfg.ServerName, _, _ = net.SplitHostPort(addr)
	}
	secured := tls.Client(conn, cfg)
	if err := secured.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return secured, nil
}

// handshake makes a link of a TCP connection. The caller closes wire after an error.
func (c *Client) handshake(ctx context.Context, wire *progressConn, addr string, login *sasl.Login) (*Link, error) {
	conn, err := c.startTLS(ctx, wire, addr)
	if err != nil {
		return nil, &connectError{addr, stageTLS, err}
	}

	link := &Link{addr: addr, conn: conn, wire: wire, reader: bufio.NewReader(conn), clientID: c.cfg.ClientID, lastUsed: time.Now()}
	link.protoConn = protocol.NewConn(response.Check(conn, link.reader, addr), c.cfg.ClientID)
	if err = link.negotiateVersions(); err != nil {
		return nil, &connectError{addr, stageVersions, err}
	}

	if login != nil {
		// The lifetime began at the broker before the response arrived. Counting from the request is on the safe side.
		began := time.Now()
		lifetime, err := authenticate(ctx, link.protoConn, login)
		if err != nil {
			return nil, &connectError{addr, stageSASL, err}
		}
		if lifetime > 0 {
			link.endsAt = began.Add(time.Duration(sessionShare * float64(lifetime)))
		}
	}
	return link, nil
}

// negotiateVersions sets the version of each request that both sides support.
func (l *Link) negotiateVersions() error {
	message, err := l.protoConn.RoundTrip(&apiversions.Request{})
	if err != nil {
		return err
	}
	res := message.(*apiversions.Response)
	if res.ErrorCode != 0 {
		return kafkago.Error(res.ErrorCode)
	}

	l.versions, l.highest = map[protocol.ApiKey]int16{}, map[protocol.ApiKey]int16{}
	for _, r := range res.ApiKeys {
		key := protocol.ApiKey(r.ApiKey)
		l.versions[key] = key.SelectVersion(r.MinVersion, r.MaxVersion)
		// callRaw sends versions that kafka-go does not support.
		l.highest[key] = r.MaxVersion
	}
	l.protoConn.SetVersions(l.versions)
	return nil
}

// authenticate runs the SASL exchange, and returns how long the broker accepts the login, or 0 for as long as the connection lasts.
// If the listener does not offer the mechanism, the error is a *mechanismError.
func authenticate(ctx context.Context, pc *protocol.Conn, login *sasl.Login) (lifetime time.Duration, err error) {
	message, err := pc.RoundTrip(&saslhandshake.Request{Mechanism: login.Name()})
	if err != nil {
		return 0, err
	}
	if hs := message.(*saslhandshake.Response); hs.ErrorCode != 0 {
		return 0, &mechanismError{login.Name(), hs.Mechanisms, kafkago.Error(hs.ErrorCode)}
	}

	session, state, err := login.Start(ctx)
	if err != nil {
		return 0, err
	}
	for done := false; !done; {
		message, err := pc.RoundTrip(&saslauthenticate.Request{AuthBytes: state})
		if err != nil {
			// A broker may reject credentials without a response.
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return 0, fmt.Errorf("%w: the broker closed the connection", kafkago.SASLAuthenticationFailed)
			}
			return 0, err
		}

		res := message.(*saslauthenticate.Response)
		if res.ErrorCode != 0 {
			err := error(kafkago.Error(res.ErrorCode))
			if res.ErrorMessage != "" {
				err = fmt.Errorf("%w: %s", err, res.ErrorMessage)
			}
			return 0, err
		}
		lifetime = time.Duration(res.SessionLifetimeMs) * time.Millisecond
		if done, state, err = session.Next(ctx, res.AuthBytes); err != nil {
			return 0, fmt.Errorf("%w: %w", kafkago.SASLAuthenticationFailed, err)
		}
	}
	return lifetime, nil
}

// mechanismError means that the listener does not offer the wanted mechanism. It has the offered ones.
type mechanismError struct {
	wanted  string
	offered []string
	code    kafkago.Error
}

func (e *mechanismError) Error() string {
	return fmt.Sprintf("mechanism %s: %v (offered: %v)", e.wanted, e.code, e.offered)
}
func (e *mechanismError) Unwrap() error { return e.code }

// exchange calls run, which sends one request and reads the response. It fails if no byte moves for timeout, and at the end
// of ctx. After an error the link must be closed.
func (l *Link) exchange(ctx context.Context, timeout time.Duration, run func(link *Link) error) error {
	l.wire.setIdle(timeout)
	// The exchange has no context.
	stop := context.AfterFunc(ctx, l.wire.interrupt)
	err := run(l)
	if !stop() && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil {
		l.lastUsed = time.Now()
	}
	return err
}

// linkPool keeps idle connections by address, for requests other than records of a sink. It also remembers which
// brokers failed lately.
type linkPool struct {
	perBroker int // the most idle links to one broker

	mu     sync.Mutex
	idle   map[string][]*Link
	failed map[string]time.Time
	closed bool

	throttled map[string]time.Time // until when a quota keeps a broker from being used
}

// noteThrottle notes that the broker should not be used for duration.
func (p *linkPool) noteThrottle(addr string, duration time.Duration) {
	if duration <= 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.throttled == nil {
		p.throttled = map[string]time.Time{}
	}
	p.throttled[addr] = time.Now().Add(min(duration, maxThrottle))
}

// throttledFor returns how long the broker should not be used.
func (p *linkPool) throttledFor(addr string) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := time.Until(p.throttled[addr])
	if left <= 0 {
		delete(p.throttled, addr)
		return 0
	}
	return left
}

// maxThrottle bounds the wait for a quota. A broker states at most quota.window.num times quota.window.size.seconds, 11 s by
// default.
const maxThrottle = 5 * time.Minute

// failedFor is how long a broker that failed is the last candidate for requests that any broker can
// serve.
const failedFor = 30 * time.Second

// markFailed notes that a broker failed.
func (p *linkPool) markFailed(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed == nil {
		p.failed = map[string]time.Time{}
	}
	p.failed[addr] = time.Now()
}

// splitByFailure splits a list of addresses into brokers that failed lately and the others. It keeps
// the order.
func (p *linkPool) splitByFailure(list []string) (healthy, failed []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, addr := range list {
		if time.Since(p.failed[addr]) < failedFor {
			failed = append(failed, addr)
		} else {
			healthy = append(healthy, addr)
		}
	}
	return healthy, failed
}

// takeIdle removes an idle link to addr from the pool and returns it. It returns nil if there is none.
// It closes links that were idle for too long.
func (p *linkPool) takeIdle(addr string) *Link {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		list := p.idle[addr]
		if len(list) == 0 {
			return nil
		}

		// The link that was used last is the least likely one to be closed by the broker.
		link := list[len(list)-1]
		p.idle[addr] = list[:len(list)-1]
		if !link.IsStale() {
			return link
		}
		link.Close()
	}
}

// putIdle adds link to the pool, or closes it if the pool is full or closed.
func (p *linkPool) putIdle(link *Link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle[link.addr]) >= p.perBroker {
		link.Close()
		return
	}
	if p.idle == nil {
		p.idle = map[string][]*Link{}
	}
	p.idle[link.addr] = append(p.idle[link.addr], link)
}

// closeAll closes the idle links, and the pool for further ones.
func (p *linkPool) closeAll() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.closeIdle()
}

func (p *linkPool) closeIdle() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, list := range p.idle {
		for _, l := range list {
			l.Close()
		}
	}
	p.idle = nil
}
