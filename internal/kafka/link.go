package kafka

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

	"github.com/outrelay/outrelay/internal/kafka/reply"
)

const (
	dialTimeout = 3 * time.Second // to a broker: TCP, TLS, versions and SASL together
	// linkIdle is below the broker's connections.max.idle.ms (10 min): the first record after a pause finds a live one.
	linkIdle = 9 * time.Minute
)

// stage is how far a connection got.
type stage string

// The stages of a connection, in their order.
const (
	stageTCP      stage = "tcp"
	stageTLS      stage = "tls"
	stageVersions stage = "versions"
	stageSASL     stage = "sasl"
	stageRequest  stage = "request"
)

// connectError says at which stage a connection was lost.
type connectError struct {
	addr  string
	stage stage
	err   error
}

func (e *connectError) Error() string {
	return fmt.Sprintf("connecting to %s (%s): %v", e.addr, e.stage, e.err)
}
func (e *connectError) Unwrap() error { return e.err }

// link is one connection to a broker. It is used by one goroutine at a time; close may come from any.
type link struct {
	addr      string
	conn      net.Conn
	reader    *bufio.Reader  // from nc: pc reads from it, and so does a lane
	protoConn *protocol.Conn // with checked replies
	versions  map[protocol.ApiKey]int16
	lastUsed  time.Time
}

func (l *link) close() { _ = l.conn.Close() }

// dialBroker opens a link: TCP, TLS, the broker's versions, SASL.
func (c *Client) dialBroker(ctx context.Context, addr string) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, max(dialTimeout, c.patience))
	defer cancel()
	nc, err := c.cfg.Dial(ctx, "tcp", addr)
	if err != nil {
		return nil, &connectError{addr, stageTCP, err}
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Unix(1, 0)) })
	l, err := c.handshake(ctx, nc, addr)
	if !stop() && err == nil {
		err = &connectError{addr, stageSASL, context.Cause(ctx)}
	}
	if err != nil {
		_ = nc.Close()
		return nil, err
	}
	return l, nil
}

// dialTransport is a connection as kafka-go's Transport wants it: TCP and TLS, with checked replies.
func (c *Client) dialTransport(ctx context.Context, network, addr string) (net.Conn, error) {
	nc, err := c.cfg.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	secured, err := c.startTLS(ctx, nc, addr)
	if err != nil {
		_ = nc.Close()
		return nil, &connectError{addr, stageTLS, err}
	}
	return reply.Check(secured, bufio.NewReader(secured), addr), nil
}

// startTLS is the TLS handshake, with the certificates of this moment; without TLS it is nc itself.
func (c *Client) startTLS(ctx context.Context, nc net.Conn, addr string) (net.Conn, error) {
	if c.cfg.TLSNow == nil {
		return nc, nil
	}
	cfg := c.cfg.TLSNow()
	if cfg.ServerName == "" {
		cfg = cfg.Clone()
		cfg.ServerName, _, _ = net.SplitHostPort(addr)
	}
	t := tls.Client(nc, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return t, nil
}

func (c *Client) handshake(ctx context.Context, nc net.Conn, addr string) (*link, error) {
	nc, err := c.startTLS(ctx, nc, addr)
	if err != nil {
		return nil, &connectError{addr, stageTLS, err}
	}
	l := &link{addr: addr, conn: nc, reader: bufio.NewReader(nc), lastUsed: time.Now()}
	l.protoConn = protocol.NewConn(reply.Check(nc, l.reader, addr), c.cfg.ClientID)
	if l.versions, err = negotiateVersions(l.protoConn); err != nil {
		return nil, &connectError{addr, stageVersions, err}
	}
	l.protoConn.SetVersions(l.versions)
	if c.cfg.SASL != nil {
		if err := authenticate(ctx, l.protoConn, c.cfg.SASL); err != nil {
			return nil, &connectError{addr, stageSASL, err}
		}
	}
	return l, nil
}

// negotiateVersions agrees with the broker on the version of each request.
func negotiateVersions(pc *protocol.Conn) (map[protocol.ApiKey]int16, error) {
	m, err := pc.RoundTrip(&apiversions.Request{})
	if err != nil {
		return nil, err
	}
	res := m.(*apiversions.Response)
	if res.ErrorCode != 0 {
		return nil, kafkago.Error(res.ErrorCode)
	}
	versions := map[protocol.ApiKey]int16{}
	for _, r := range res.ApiKeys {
		key := protocol.ApiKey(r.ApiKey)
		versions[key] = key.SelectVersion(r.MinVersion, r.MaxVersion)
	}
	return versions, nil
}

func authenticate(ctx context.Context, pc *protocol.Conn, s *SASL) error {
	m, err := pc.RoundTrip(&saslhandshake.Request{Mechanism: s.Name()})
	if err != nil {
		return err
	}
	if hs := m.(*saslhandshake.Response); hs.ErrorCode != 0 {
		return &mechanismError{s.Name(), hs.Mechanisms, kafkago.Error(hs.ErrorCode)}
	}
	session, state, err := s.Start(ctx)
	if err != nil {
		return err
	}
	for done := false; !done; {
		m, err := pc.RoundTrip(&saslauthenticate.Request{AuthBytes: state})
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return fmt.Errorf("%w: the broker closed the connection", kafkago.SASLAuthenticationFailed)
			}
			return err
		}
		res := m.(*saslauthenticate.Response)
		if res.ErrorCode != 0 {
			return kafkago.Error(res.ErrorCode)
		}
		if done, state, err = session.Next(ctx, res.AuthBytes); err != nil {
			return fmt.Errorf("%w: %w", kafkago.SASLAuthenticationFailed, err)
		}
	}
	return nil
}

// mechanismError says which mechanisms the listener offers instead.
type mechanismError struct {
	wanted  string
	offered []string
	code    kafkago.Error
}

func (e *mechanismError) Error() string {
	return fmt.Sprintf("mechanism %s: %v (offered: %v)", e.wanted, e.code, e.offered)
}
func (e *mechanismError) Unwrap() error { return e.code }

// roundTrip sends one request and reads its answer. After an error the link is of no use.
func (l *link) roundTrip(ctx context.Context, timeout time.Duration, req protocol.Message) (protocol.Message, error) {
	deadline := time.Now().Add(timeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = l.conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = l.conn.SetDeadline(time.Unix(1, 0)) })
	m, err := l.protoConn.RoundTrip(req)
	if !stop() && ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, err
	}
	l.lastUsed = time.Now()
	return m, nil
}

// linkPool keeps idle connections for requests other than records, by address, and which brokers failed lately.
type linkPool struct {
	mu     sync.Mutex
	idle   map[string][]*link
	failed map[string]time.Time
	closed bool
}

const (
	idlePerBroker = 2
	// failedFor is how long a broker that failed comes last where any broker may be asked.
	failedFor = 30 * time.Second
)

// markFailed notes that a broker failed.
func (p *linkPool) markFailed(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed == nil {
		p.failed = map[string]time.Time{}
	}
	p.failed[addr] = time.Now()
}

// splitByFailure splits a list of addresses: those that failed lately, and the others. It keeps the order.
func (p *linkPool) splitByFailure(list []string) (trusted, doubted []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, addr := range list {
		if time.Since(p.failed[addr]) < failedFor {
			doubted = append(doubted, addr)
		} else {
			trusted = append(trusted, addr)
		}
	}
	return trusted, doubted
}

func (p *linkPool) takeIdle(addr string) *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		list := p.idle[addr]
		if len(list) == 0 {
			return nil
		}
		l := list[len(list)-1]
		p.idle[addr] = list[:len(list)-1]
		if time.Since(l.lastUsed) < linkIdle {
			return l
		}
		l.close()
	}
}

func (p *linkPool) putIdle(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle[l.addr]) >= idlePerBroker {
		l.close()
		return
	}
	if p.idle == nil {
		p.idle = map[string][]*link{}
	}
	p.idle[l.addr] = append(p.idle[l.addr], l)
}

func (p *linkPool) closeAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, list := range p.idle {
		for _, l := range list {
			l.close()
		}
	}
	p.idle = nil
}
