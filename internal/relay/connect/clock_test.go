package connect

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// testClock is a clock of a server and a clock of this machine, which a test moves.
type testClock struct {
	ServerClock
	server    time.Time
	passed    time.Duration
	roundTrip time.Duration
}

func newTestClock() *testClock {
	c := &testClock{server: time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)}
	c.elapsed = func() time.Duration { return c.passed }
	c.read = func(context.Context, *mongo.Client) (time.Time, error) {
		c.pass(c.roundTrip / 2)
		at := c.server
		c.pass(c.roundTrip - c.roundTrip/2)
		return at, nil
	}
	return c
}

func (c *testClock) pass(d time.Duration) { c.server, c.passed = c.server.Add(d), c.passed+d }

func (c *testClock) sync(t *testing.T) {
	t.Helper()
	if err := c.Sync(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
}

// off returns how far the clock is ahead of a time of the server.
func (c *testClock) off(server time.Time) time.Duration {
	return c.Now().Sub(server).Round(time.Millisecond)
}

func TestServerTimePassesByAClockThatNobodySets(t *testing.T) {
	t.Parallel()
	c := newTestClock()
	c.sync(t)
	c.pass(time.Hour)
	if off := c.off(c.server); off != 0 {
		t.Errorf("after an hour without a sample, the clock is off by %v", off)
	}

	// Small differences are corrected at once.
	c.server = c.server.Add(300 * time.Millisecond)
	c.sync(t)
	if off := c.off(c.server); off != 0 {
		t.Errorf("off by %v after a drift", off)
	}
}

func TestSlowSamplesOfServerTimeAreNotUsed(t *testing.T) {
	t.Parallel()
	c := newTestClock()
	c.sync(t)
	true1 := c.server
	c.roundTrip = 3 * time.Second
	c.read = func(context.Context, *mongo.Client) (time.Time, error) {
		// The whole round trip was the way there, so the response counts as 1.5 s older than it is.
		c.pass(c.roundTrip)
		return c.server, nil
	}
	for range 5 {
		c.sync(t)
	}
	if off := c.off(c.server); off != 0 {
		t.Errorf("off by %v after slow samples (%v)", off, true1)
	}

	// Without another sample, a slow one is used until there is a better one.
	c = newTestClock()
	c.roundTrip = 3 * time.Second
	c.sync(t)
	c.roundTrip = 0
	c.server = c.server.Add(1400 * time.Millisecond)
	c.sync(t)
	if off := c.off(c.server); off != 0 {
		t.Errorf("off by %v after the first exact sample", off)
	}
}

// A step of a primary's clock, forward or back, has no effect unless it lasts.
func TestStepOfAServersClockMustLast(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{time.Hour, -time.Hour} {
		c := newTestClock()
		c.sync(t)
		before := c.server
		began := c.passed
		c.server = c.server.Add(step)
		for c.passed-began < 50*time.Second {
			c.pass(2 * time.Second)
			c.sync(t)
			if off := c.off(before.Add(c.passed - began)); off != 0 {
				t.Fatalf("%v after a step of %v, the clock has moved by %v", c.passed-began, step, off)
			}
		}

		// The step is corrected before it was confirmed.
		c.server = c.server.Add(-step)
		c.sync(t)
		c.server = c.server.Add(step)
		for range 35 {
			c.pass(2 * time.Second)
			c.sync(t)
		}
		if off := c.off(c.server); off != 0 {
			t.Errorf("70 s after a step of %v that lasts, the clock is off by %v", step, off)
		}
	}
}

func TestServerClockOfARealServer(t *testing.T) {
	t.Parallel()
	var c ServerClock
	if off := time.Until(c.Now()).Abs(); off > time.Second {
		t.Errorf("without a sample, the clock is off by %v", off)
	}
	if err := c.Sync(t.Context(), stacktest.Client(t)); err != nil {
		t.Fatal(err)
	}
	// The server runs on this machine.
	if off := time.Until(c.Now()).Abs(); off > 5*time.Second {
		t.Errorf("the clock is off by %v", off)
	}
}
