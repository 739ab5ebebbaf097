package probes

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// connections bounds the open connections of a server. If there are too many, it closes the connection that has been idle
// longest. So a client that opens many connections and leaves them idle cannot block probes.
type connections struct {
	mu    sync.Mutex
	most  int
	conns map[net.Conn]connection
}

type connection struct {
	idle  bool // it has no request in progress
	since time.Time
}

func newConnections(most int) *connections {
	return &connections{most: most, conns: map[net.Conn]connection{}}
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
		if len(c.conns) >= c.most {
			c.closeOldestLocked()
		}
	case http.StateActive, http.StateIdle:
		if _, open := c.conns[conn]; !open {
			// closeOldestLocked has closed it.
			return
		}
	}

	c.conns[conn] = connection{state != http.StateActive, time.Now()}
}

// closeOldestLocked closes the connection that has been idle longest. If no connection is idle, it closes the one with
// the oldest request.
func (c *connections) closeOldestLocked() {
	var oldest net.Conn
	for conn, v := range c.conns {
		o := c.conns[oldest]
		isOlder := v.since.Before(o.since)
		// Idle connections go first.
		if v.idle != o.idle {
			isOlder = v.idle
		}
		if oldest == nil || isOlder {
			oldest = conn
		}
	}
	delete(c.conns, oldest)

	// The close of a TLS connection sends a message, which may take seconds.
	go func() { _ = oldest.Close() }()
}
