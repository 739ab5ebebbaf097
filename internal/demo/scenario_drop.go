package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var dropScenario = Scenario{
	Name:    "drop",
	Promise: "the outbox is dropped and made again under load: what is appended from then on arrives, nothing is repeated, nothing halts",
	events:  (drops + 1) * 900, rate: 300,
	run: runDrop,
}

// DropFinding is what scenario drop found.
type DropFinding struct {
	Outcome
	Drops      int     `json:"drops"`
	Gone       int     `json:"gone"`        // events that were dropped with the collection before they were delivered
	ResumedS   float64 `json:"resumed_s"`   // longest time from a drop until the lag was below one second again
	Redelivery int     `json:"redelivered"` // records that say that they may repeat an earlier one
	Takeovers  int     `json:"takeovers"`
}

func (f *DropFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("drops             %d; lag below one second at most %.2f s later", f.Drops, f.ResumedS),
		fmt.Sprintf("gone              %d events went with the collection before they were delivered", f.Gone),
		fmt.Sprintf("redelivered       %d · take-overs %d", f.Redelivery, f.Takeovers),
	}
}

const (
	drops        = 3
	settleWithin = 10 * time.Second // for what the relay says of itself
)

func runDrop(ctx context.Context, s *stage) (Finding, error) {
	f := &DropFinding{}
	if _, err := s.startAndAwait(ctx, "owner"); err != nil {
		return f, err
	}
	epoch := s.follow.currentOwner().epoch
	l, err := s.startLoad(ctx, aggregate, "customer", s.options.Rate, 0)
	if err != nil {
		return f, err
	}
	for f.Drops < drops {
		if err := s.runFor(ctx, s.durationOf(s.options.Events/(drops+1))); err != nil {
			return f, err
		}
		if err := s.dropOutbox(ctx, f); err != nil {
			return f, err
		}
	}
	if err := s.runFor(ctx, s.durationOf(s.options.Events/(drops+1))); err != nil {
		return f, err
	}
	if err := l.finishLoad(true); err != nil {
		return f, err
	}
	if err := s.awaitArrival(ctx); err != nil {
		return f, err
	}
	r := s.check.Report()
	f.Gone, f.Redelivery, f.Takeovers = r.Excused, r.Repeated, int(s.follow.currentOwner().epoch-epoch)
	if f.Redelivery > 0 {
		s.recordBroken("%d events that had been delivered were delivered again", f.Redelivery)
	}
	noticed, err := s.countLogged(ctx, string(store.Invalidated))
	if err == nil && noticed < f.Drops {
		s.recordBroken("the relay noticed %d of %d drops", noticed, f.Drops)
	}
	return f, errors.Join(err, s.notHalted(ctx))
}

// dropOutbox drops the collection and makes it again while the load goes on.
func (s *stage) dropOutbox(ctx context.Context, f *DropFinding) error {
	if err := s.outboxCollection().Drop(ctx); err != nil {
		return fmt.Errorf("dropping the outbox: %w", err)
	}
	s.check.Excuse()
	began := time.Now()
	f.Drops++
	if err := s.outboxCollection().Database().CreateCollection(ctx, outbox.DefaultCollection); err != nil && !collectionExists(err) {
		return fmt.Errorf("making the outbox again: %w", err)
	}
	before, _ := s.check.Progress()
	s.printEvent("the outbox is dropped and made again")
	err := s.awaitCondition(ctx, "what is appended after the drop arrives", patience, func() bool {
		committed, delivered := s.check.Progress()
		return delivered > before && committed > before && s.currentLag() < time.Second
	})
	f.ResumedS = max(f.ResumedS, roundSeconds(time.Since(began)))
	return err
}

// collectionExists reports whether somebody, for example an append, has made the collection already.
func collectionExists(err error) bool {
	const namespaceExists = 48
	var e mongo.CommandError
	return errors.As(err, &e) && e.Code == namespaceExists
}

// notHalted waits until the relay says that it works, for it says so from time to time only, and notes one that has halted.
func (s *stage) notHalted(ctx context.Context) error {
	said := ""
	var failed error
	err := s.awaitCondition(ctx, "the relay is live", settleWithin, func() bool {
		st, err := admin.ReadStatus(ctx, s.stateDatabase())
		if failed = err; err != nil || len(st.Watchers) != 1 {
			return err != nil
		}
		said = fmt.Sprintf("%s (%s)", st.Watchers[0].State, st.Watchers[0].Reason)
		return st.Watchers[0].State == "live"
	})
	var broken *brokenPromise
	if errors.As(err, &broken) {
		s.recordBroken("the relay is %s", said)
		err = nil
	}
	n, logged := s.countLogged(ctx, string(store.Halted))
	if logged == nil && n > 0 {
		s.recordBroken("the relay halted %d times", n)
	}
	return errors.Join(err, failed, logged)
}
