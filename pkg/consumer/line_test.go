package consumer_test

import (
	"context"
	"errors"
	"net"
	"sync"
)

// line is the network between a member and its servers. It can be cut: its connections break, and new ones are rejected.
type line struct {
	mu    sync.Mutex
	off   bool
	conns map[net.Conn]struct{}
}

func newLine() *line { return &line{conns: map[net.Conn]struct{}{}} }

// DialContext opens a connection.
func (l *line) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.off {
		return nil, errors.Join(c.Close(), errors.New("the line is cut"))
	}
	l.conns[c] = struct{}{}
	return &lineConn{c, l}, nil
}

// cut breaks the connections and rejects new ones.
func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.off = true
	for c := range l.conns {
		_ = c.Close()
	}
}

func (l *line) restore() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.off = false
}

func (l *line) isCut() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.off
}

type lineConn struct {
	net.Conn
	line *line
}

// Close closes the connection.
func (c *lineConn) Close() error {
	c.line.mu.Lock()
	delete(c.line.conns, c.Conn)
	c.line.mu.Unlock()
	return c.Conn.Close()
}
