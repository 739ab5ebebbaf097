package memory

import (
	"context"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/service/rates"
)

// rateStore stores the rate limits of a DB. Its zero value is ready to use.
type rateStore struct {
	mu   sync.Mutex
	next map[string]freeSlot // of each limit
}

// freeSlot is the first free slot of a limit, after a reservation with this time between calls.
type freeSlot struct {
	at    time.Time
	every time.Duration
}

// Reserve reserves slots by the clock of this process: see rates.Store.
func (s *rateStore) Reserve(_ context.Context, limit rates.Limit, n int) (time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	first := now.Add(-limit.Window())

	next := s.next[limit.Name]
	if next.every != limit.Every && next.at.After(now.Add(rates.MaxLeftover)) {
		next.at = now.Add(limit.Every)
	}
	if next.at.After(first) {
		first = next.at
	}

	if s.next == nil {
		s.next = map[string]freeSlot{}
	}
	s.next[limit.Name] = freeSlot{first.Add(time.Duration(n) * limit.Every), limit.Every}
	return first.Sub(now), nil
}
