package bench

import "context"

func (b *bench) failover(ctx context.Context) (*Failover, error) { return nil, ctx.Err() }
