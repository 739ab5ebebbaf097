package connect

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

const (
	// maxRoundTrip is the longest round trip of a sample of the server's time that is used. The time may be wrong by half of it.
	maxRoundTrip = time.Second
	// maxDrift is the largest difference that is not a step of a clock.
	maxDrift = time.Second
	// stepConfirmed is how long the server must show the time after a step before the clock follows.
	stepConfirmed = time.Minute
)

// ServerClock follows the clock of the server. It is a time of the server plus the time that has passed since by a clock of
// this machine that nobody sets, so a step of this machine's time has no effect. Due times and expiries are compared with
// it. The zero value has the time of this machine until the first Sync. It is safe for concurrent use.
//
// A step of the server's clock is followed only after a minute of samples that agree with it. So an election that makes a
// member with a wrong clock primary for a moment neither expires events nor delays scheduled ones.
type ServerClock struct {
	// elapsed and read are replaced by tests.
	elapsed func() time.Duration // since a fixed moment, including the time that the machine was suspended
	read    func(ctx context.Context, client *mongo.Client) (time.Time, error)

	mu    sync.RWMutex
	known bool
	rough bool      // base comes from a sample with a long round trip
	base  time.Time // server time at the moment 0 of elapsed
	// step is the base that the samples since stepAt agree on, if it differs from base by more than maxDrift.
	step   time.Time
	stepAt time.Duration
}

// Now returns the time of the server.
func (c *ServerClock) Now() time.Time {
	c.mu.RLock()
	known, base := c.known, c.base
	c.mu.RUnlock()
	if !known {
		return time.Now()
	}
	return base.Add(c.now())
}

// Ahead returns by how much the time of this machine is ahead of the server's; 0 if it is not known yet.
func (c *ServerClock) Ahead() time.Duration {
	c.mu.RLock()
	known := c.known
	c.mu.RUnlock()
	if !known {
		return 0
	}
	return time.Since(c.Now().Round(0))
}

func (c *ServerClock) now() time.Duration {
	if c.elapsed != nil {
		return c.elapsed()
	}
	return lease.BootClock()
}

// Sync reads the time of the server. It assumes that the response took half of the round trip. A response that took longer than a
// second is used only if there is no other.
func (c *ServerClock) Sync(ctx context.Context, client *mongo.Client) error {
	read := c.read
	if read == nil {
		read = mongodb.ServerTime
	}
	sent := c.now()
	server, err := read(ctx, client)
	if err != nil {
		return fmt.Errorf("synchronizing with the server's clock: %w", err)
	}
	at := c.now()
	c.addSample(server.Add(-(sent + (at-sent)/2)), at, at-sent)
	return nil
}

// addSample adds a sample of the server's time: the base that follows from it, when it was received, and its round trip.
func (c *ServerClock) addSample(base time.Time, sampledAt, roundTrip time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	inexact := roundTrip > maxRoundTrip
	switch {
	// Without another, an inexact time is better than that of this machine. The first exact one replaces it.
	case !c.known, c.rough && !inexact:
		c.base, c.known, c.rough = base, true, inexact
		return
	case inexact:
		return
	}

	if base.Sub(c.base).Abs() <= maxDrift {
		c.base, c.step = base, time.Time{}
		return
	}
	if c.step.IsZero() || base.Sub(c.step).Abs() > maxDrift {
		c.step, c.stepAt = base, sampledAt
	}
	if sampledAt-c.stepAt >= stepConfirmed {
		c.base, c.step = base, time.Time{}
	}
}
