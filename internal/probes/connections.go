package probes

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// connections bounds the open connections of a server. When there is one too many, it closes the one that has been without
// a request for longest: a client that opens many and leaves them idle cannot keep a probe from being answered.
type connections struct {
	mu    sync.Mutex
	most  int
	conns map[net.Conn]connection
}

type connection struct {
	idle  bool // no request is being answered
	since time.Time
}

func newConnections(most int) *connections {
	return &connections{most: most, conns: map[net.Conn]connection{}}
}

// changed is the ConnState of a server.
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateClosed, http.StateHijacked:
		delete(c.conns, conn)
		return
	case http.StateNew:
		if len(c.conns) >= c.most {
			c.closeOne()
		}
	case http.StateActive, http.StateIdle:
		if _, open := c.conns[conn]; !open {
			return // closed for another one
		}
	}
	c.conns[conn] = connection{state != http.StateActive, time.Now()}
}

// closeOne closes the connection that has been idle for longest, or, if each has a request, the oldest one.
func (c *connections) closeOne() {
	var oldest net.Conn
	for conn, v := range c.conns {
		o := c.conns[oldest]
		if oldest == nil || v.idle && !o.idle || v.idle == o.idle && v.since.Before(o.since) {
			oldest = conn
		}
	}
	delete(c.conns, oldest)
	go func() { _ = oldest.Close() }() // one with TLS says goodbye, which may take seconds
}
