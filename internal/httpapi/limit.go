package httpapi

import (
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	maxClients = 4096 // that are remembered
	idleClient = time.Minute
)

// limiter holds the rate of each client. It remembers a bounded number of them; one that is forgotten begins anew.
type limiter struct {
	mu      sync.Mutex
	rate    int
	clients map[string]*clientRate
}

type clientRate struct {
	limit *rate.Limiter
	seen  time.Time
}

func newLimiter(perSecond int) *limiter {
	return &limiter{rate: perSecond, clients: map[string]*clientRate{}}
}

// take counts one request; it returns how long the client has to wait, 0 if it need not.
func (l *limiter) take(name string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	c := l.clients[name]
	if c == nil {
		if len(l.clients) >= maxClients {
			l.forget(now)
		}
		c = &clientRate{limit: rate.NewLimiter(rate.Limit(l.rate), 2*l.rate)}
		l.clients[name] = c
	}
	c.seen = now
	r := c.limit.ReserveN(now, 1)
	if wait := r.DelayFrom(now); wait > 0 {
		r.CancelAt(now)
		return wait
	}
	return 0
}

// forget drops who was silent for long, and if that is nobody, whoever was silent longest.
func (l *limiter) forget(now time.Time) {
	oldest := ""
	for name, c := range l.clients {
		if now.Sub(c.seen) > idleClient {
			delete(l.clients, name)
		} else if oldest == "" || c.seen.Before(l.clients[oldest].seen) {
			oldest = name
		}
	}
	if len(l.clients) >= maxClients {
		delete(l.clients, oldest)
	}
}

// room bounds the requests under way, in all and of one client.
type room struct {
	mu          sync.Mutex
	most, ofOne int
	under       int
	clients     map[string]int
}

func newRoom(most, ofOne int) *room {
	return &room{most: most, ofOne: ofOne, clients: map[string]int{}}
}

func (m *room) enter(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.under >= m.most || m.clients[name] >= m.ofOne {
		return false
	}
	m.under++
	m.clients[name]++
	return true
}

func (m *room) leave(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.under--
	if m.clients[name]--; m.clients[name] == 0 {
		delete(m.clients, name)
	}
}

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
