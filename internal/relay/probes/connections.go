package probes

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// connections bounds the open connections of a server. If there are too many, it closes one: the connection that has been
// idle longest, or else the oldest one of the callers with the lowest rank. So a client that opens many connections can
// neither block probes nor end the requests of callers that have proved who they are. If all connections belong to callers
// of the highest rank, the new connection is closed.
type connections struct {
	mu    sync.Mutex
	most  int
	conns map[net.Conn]connection
}

type connection struct {
	idle  bool // it has no request in progress
	rank  Rank
	since time.Time
}

// Rank is how much a server prefers to keep the connection of a caller.
type Rank uint8

// The ranks, from the lowest to the highest.
const (
	Unknown Rank = iota // the caller has not proved who it is
	Known               // it may read
	Trusted             // it may act
)

func newConnections(most int) *connections {
	return &connections{most: most, conns: map[net.Conn]connection{}}
}

type connKey struct{}

// connContext is the ConnContext function of a server.
func (c *connections) connContext(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, func(rank Rank) { c.setRank(conn, rank) })
}

// SetRank sets the rank of the connection on which a request arrived, for the time of the request.
func SetRank(request *http.Request, rank Rank) {
	if set, ok := request.Context().Value(connKey{}).(func(Rank)); ok {
		set(rank)
	}
}

func (c *connections) setRank(conn net.Conn, rank Rank) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if connection, open := c.conns[conn]; open {
		connection.rank = rank
		c.conns[conn] = connection
	}
}

// trackState is the ConnState function of a server.
func (c *connections) trackState(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()

	switch state {
	case http.StateClosed, http.StateHijacked:
		delete(c.conns, conn)
		return
	case http.StateNew:
		if len(c.conns) >= c.most && !c.closeOneLocked() {
			go func() { _ = conn.Close() }()
			return
		}
	case http.StateActive, http.StateIdle:
		if _, open := c.conns[conn]; !open {
			// closeOneLocked has closed it.
			return
		}
	}

	// Each request proves anew who its caller is.
	c.conns[conn] = connection{state != http.StateActive, Unknown, time.Now()}
}

// closeOneLocked closes the connection that the server prefers least. It returns false if none may be closed.
func (c *connections) closeOneLocked() bool {
	var last net.Conn
	for conn, v := range c.conns {
		if !v.idle && v.rank == Trusted {
			continue
		}
		if last == nil || v.goesBefore(c.conns[last]) {
			last = conn
		}
	}
	if last == nil {
		return false
	}
	delete(c.conns, last)

	// The close of a TLS connection sends a message, which may take seconds.
	go func() { _ = last.Close() }()
	return true
}

// goesBefore reports whether v is closed before connection: idle connections first, then those of the lowest rank, then the oldest.
func (v connection) goesBefore(connection connection) bool {
	switch {
	case v.idle != connection.idle:
		return v.idle
	case v.rank != connection.rank:
		return v.rank < connection.rank
	}
	return v.since.Before(connection.since)
}
