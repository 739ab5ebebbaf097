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
	next map[string]time.Time // the first free slot of each limit
}

// Reserve reserves slots by the clock of this process: see rates.Store.
func (s *rateStore) Reserve(_ context.Context, limit rates.Limit, n int) (time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	first := now.Add(-limit.Window())
	if next := s.next[limit.Name]; next.After(first) {
		first = next
	}
	if s.next == nil {
		s.next = map[string]time.Time{}
	}
	s.next[limit.Name] = first.Add(time.Duration(n) * limit.Every)
	return first.Sub(now), nil
}
