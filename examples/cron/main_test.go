package main

import (
	"context"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/servertest"
)

func TestTwoInstancesScheduleOneEvent(t *testing.T) {
	t.Parallel()
	env := servertest.Start(t)
	for range 2 {
		env.Run(func(ctx context.Context) error { return run(ctx, env.DB) })
	}
	box, err := outbox.New(env.DB)
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		times := map[time.Time]int{}
		for ev, err := range box.Scheduled(ctx, outbox.ScheduledQuery{All: true}) {
			if err != nil {
				t.Fatal(err)
			}
			times[ev.DueAt]++
		}
		for at, n := range times {
			if n != 1 {
				t.Fatalf("events at %v: got %d, want 1", at, n)
			}
		}
		if len(times) > 0 {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("no event was scheduled")
		}
	}
}
