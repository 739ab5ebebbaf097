package httpapi

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	maxClients = 4096 // clients whose rate is remembered
	idleClient = time.Minute
)

// rateLimiter limits the rate of each client. It remembers a bounded number of clients. A client
// that it has evicted starts again with a full burst.
type rateLimiter struct {
	mu      sync.Mutex
	rate    int
	clients map[string]*clientRate
}

type clientRate struct {
	limit *rate.Limiter
	seen  time.Time
}

func newRateLimiter(perSecond int) *rateLimiter {
	return &rateLimiter{rate: perSecond, clients: map[string]*clientRate{}}
}

// reserve counts one request. It returns how long the client must wait, or 0 if the request is
// within the rate.
func (l *rateLimiter) reserve(client string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()

	now := time.Now()
	known := l.clients[client]
	if known == nil {
		if len(l.clients) >= maxClients {
			l.evictLocked(now)
		}
		known = &clientRate{limit: rate.NewLimiter(rate.Limit(l.rate), 2*l.rate)}
		l.clients[client] = known
	}
	known.seen = now

	reservation := known.limit.ReserveN(now, 1)
	wait := reservation.DelayFrom(now)
	// A rejected request does not count, so that a client that waits for the returned time gets through.
	if wait > 0 {
		reservation.CancelAt(now)
	}
	return wait
}

// evictLocked removes idle clients. If there are still too many, it also removes the client that has
// been idle longest.
func (l *rateLimiter) evictLocked(now time.Time) {
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

// requestLimit bounds concurrent requests, in total and of each client.
type requestLimit struct {
	max, maxOfClient int

	mu       sync.Mutex
	total    int
	ofClient map[string]int
}

func newRequestLimit(total, ofClient int) *requestLimit {
	return &requestLimit{max: total, maxOfClient: ofClient, ofClient: map[string]int{}}
}

// acquire reports whether the client may start another request. If so, the caller must call release
// at its end.
func (l *requestLimit) acquire(client string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.total >= l.max || l.ofClient[client] >= l.maxOfClient {
		return false
	}
	l.total++
	l.ofClient[client]++
	return true
}

func (l *requestLimit) release(client string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.total--
	l.ofClient[client]--
	if l.ofClient[client] == 0 {
		delete(l.ofClient, client)
	}
}
