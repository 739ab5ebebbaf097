package consumer

import (
	"context"
	"time"
)

// Commit commits the offsets of the finished messages now.
func (c *Consumer) Commit(ctx context.Context) error {
	if s := c.currentSession.Load(); s != nil {
		return s.commitOffsets(ctx)
	}
	return nil
}

// SetNow replaces the clock that decides how long trouble lasts.
func (c *Consumer) SetNow(now func() time.Time) {
	c.health.mu.Lock()
	defer c.health.mu.Unlock()
	c.health.now = now
}
