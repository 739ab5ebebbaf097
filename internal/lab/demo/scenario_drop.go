package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

var dropScenario = Scenario{
	Name:    "drop",
	Promise: "the outbox is dropped and created again under load: later events arrive, nothing is repeated, nothing halts",
	events:  (drops + 1) * 900,
	rate:    300,
	run:     runDrop,
}

// DropFinding is the result of scenario drop.
type DropFinding struct {
	Outcome
	Drops      int     `json:"drops"`
	Gone       int     `json:"gone"`        // events that were dropped with the collection before they were delivered
	ResumedS   float64 `json:"resumed_s"`   // longest time from a drop until the lag was below one second again
	Redelivery int     `json:"redelivered"` // repeated records with the redelivered header
	Takeovers  int     `json:"takeovers"`
}

func (f *DropFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("drops             %d; lag below one second at most %.2f s later", f.Drops, f.ResumedS),
		fmt.Sprintf("gone              %d events went with the collection before they were delivered", f.Gone),
		fmt.Sprintf("redelivered       %d · takeovers %d", f.Redelivery, f.Takeovers),
	}
}

const (
	drops        = 3
	settleWithin = 10 * time.Second // for a state that the relay reports from time to time
)

func runDrop(ctx context.Context, stage *stage) (Finding, error) {
	finding := &DropFinding{}
	if _, err := stage.startAndAwait(ctx, "owner"); err != nil {
		return finding, err
	}
	epoch := stage.follow.currentOwner().epoch
	load, err := stage.startLoad(ctx, aggregate, "customer", stage.options.Rate, 0)
	if err != nil {
		return finding, err
	}

	between := stage.durationOf(stage.options.Events / (drops + 1))
	for finding.Drops < drops {
		if err := stage.runFor(ctx, between); err != nil {
			return finding, err
		}
		if err := stage.dropOutbox(ctx, finding); err != nil {
			return finding, err
		}
	}
	if err := stage.runFor(ctx, between); err != nil {
		return finding, err
	}
	if err := load.finishLoad(true); err != nil {
		return finding, err
	}
	if err := stage.awaitArrival(ctx); err != nil {
		return finding, err
	}

	// Events that a drop has removed before their delivery are excused.
	report := stage.check.Report()
	finding.Gone = report.Excused
	finding.Redelivery = report.Repeated
	finding.Takeovers = int(stage.follow.currentOwner().epoch - epoch)
	if finding.Redelivery > 0 {
		stage.recordBroken("%d delivered events were delivered again", finding.Redelivery)
	}
	noticed, err := stage.countLogged(ctx, string(nodes.Invalidated))
	if err == nil && noticed < finding.Drops {
		stage.recordBroken("the relay noticed %d of %d drops", noticed, finding.Drops)
	}
	return finding, errors.Join(err, stage.notHalted(ctx))
}

// dropOutbox drops the collection and creates it again while the load runs.
func (s *stage) dropOutbox(ctx context.Context, finding *DropFinding) error {
	if err := s.outboxCollection().Drop(ctx); err != nil {
		return fmt.Errorf("dropping the outbox: %w", err)
	}
	// The drop removes events that were committed and not delivered.
	s.check.Excuse()
	began := time.Now()
	finding.Drops++

	err := s.outboxCollection().Database().CreateCollection(ctx, outboxName)
	if err != nil && !collectionExists(err) {
		return fmt.Errorf("creating the outbox again: %w", err)
	}
	// Events before the drop may still arrive: only an increase from here on proves that the relay goes on.
	before, _ := s.check.Progress()
	s.printEvent("the outbox is dropped and created again")

	err = s.awaitCondition(ctx, "events after the drop are delivered", patience, func() bool {
		committed, delivered := s.check.Progress()
		return delivered > before && committed > before && s.currentLag() < time.Second
	})
	finding.ResumedS = max(finding.ResumedS, roundSeconds(time.Since(began)))
	return err
}

// collectionExists reports whether err means that the collection exists, for example because an
// append created it.
func collectionExists(err error) bool {
	const namespaceExists = 48
	var commandErr mongo.CommandError
	return errors.As(err, &commandErr) && commandErr.Code == namespaceExists
}

// notHalted blocks until the relay reports that it is live, which it does from time to time. It
// records a broken promise if the relay has halted.
func (s *stage) notHalted(ctx context.Context) error {
	reported := ""
	var readErr error
	err := s.awaitCondition(ctx, "the relay is live", settleWithin, func() bool {
		var status admin.Status
		status, readErr = admin.ReadStatus(ctx, s.stateDatabase())
		if readErr != nil {
			return true
		}
		if len(status.Slots) != 1 {
			return false
		}
		slot := &status.Slots[0]
		reported = fmt.Sprintf("%s (%s)", slot.State, slot.Reason)
		return slot.State == "live"
	})
	var broken *brokenPromise
	if errors.As(err, &broken) {
		s.recordBroken("the relay is %s", reported)
		err = nil
	}

	n, logErr := s.countLogged(ctx, string(nodes.Halted))
	if logErr == nil && n > 0 {
		s.recordBroken("the relay halted %d times", n)
	}
	return errors.Join(err, readErr, logErr)
}
