package httpapi

import (
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
