package consumer

import "context"

// Commit commits the offsets of the finished messages now.
func (c *Consumer) Commit(ctx context.Context) error {
	if s := c.currentSession.Load(); s != nil {
		return s.commitOffsets(ctx)
	}
	return nil
}
