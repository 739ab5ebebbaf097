package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/demo/member"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

var consumerScenario = Scenario{
	Name:    "consumer",
	Promise: "each event has its effect exactly once and in the order of its key, while one of two consumers is killed again and again",
	events:  9000,
	rate:    500,
	kill:    3 * time.Second,
	run:     runConsumer,
}

// ConsumerFinding is the result of scenario consumer. The database alone decides about effects.
type ConsumerFinding struct {
	Outcome
	Effects       int `json:"effects"`
	LostEffects   int `json:"lost_effects"`
	DoubleEffects int `json:"double_effects"`
	// OutOfOrder counts effects. In JSON it replaces the field of the Outcome, which counts records
	// and is 0 if the promise held.
	OutOfOrder int `json:"out_of_order"`
	Strange    int `json:"strange_effects"` // of events that were never committed, or half written
	Rebalances int `json:"rebalances"`
	Kills      int `json:"kills"`
	Injected   int `json:"injected"` // records that were written to the topic once more
	Rejected   int `json:"rejected"` // messages that had a mark in the inbox; killed consumers may have lost some counts
	Letters    int `json:"dead_effects"`
}

func (f *ConsumerFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("effects           %s · lost %d · double %d · out of order %d · "+
			"of no committed event, or half written %d",
			formatThousands(f.Effects), f.LostEffects, f.DoubleEffects, f.OutOfOrder, f.Strange),
		fmt.Sprintf("consumers         %d kill -9 · %d rebalances", f.Kills, f.Rebalances),
		fmt.Sprintf("repeated records  %s written on purpose; the inbox rejected %s messages",
			formatThousands(f.Injected), formatThousands(f.Rejected)),
	}
}

func runConsumer(ctx context.Context, stage *stage) (_ Finding, err error) {
	finding := &ConsumerFinding{}
	if _, err := stage.startAndAwait(ctx, "owner"); err != nil {
		return finding, err
	}
	crew, err := stage.newCrew(ctx, member.Effects, stage.names.topicName(aggregate))
	if err != nil {
		return finding, err
	}
	// After an error, consumers must not stay behind as processes.
	defer func() {
		if err != nil {
			crew.stopAll(true)
		}
	}()
	members, err := crew.startMembers(ctx, 2)
	if err != nil {
		return finding, err
	}
	repeater, stopRepeater, err := stage.repeatSome(ctx)
	if err != nil {
		return finding, err
	}

	rate := limitRate(stage.options.Rate, stage.options.Events, stage.options.KillEvery)
	load, err := stage.startLoad(ctx, aggregate, "customer", rate, stage.options.Events)
	if err != nil {
		return finding, err
	}
	if err := stage.disturbConsumers(ctx, crew, members, load, finding); err != nil {
		return finding, err
	}
	if err := errors.Join(stage.awaitArrival(ctx), stopRepeater()); err != nil {
		return finding, err
	}
	finding.Injected = int(repeater.repeated.Load())

	// Missing effects break the promise. judgeEffects counts them.
	if err := stage.awaitEffects(ctx, finding); err != nil {
		var broken *brokenPromise
		if !errors.As(err, &broken) {
			return finding, err
		}
		stage.recordBroken("%s", broken.why)
	}
	crew.stopAll(false)
	return finding, stage.judgeEffects(ctx, finding)
}

// disturbConsumers kills the consumers in turn, or starts and stops a third one, or both, until the
// load has ended.
func (s *stage) disturbConsumers(
	ctx context.Context, crew *crew, members []*crewMember, load *load, finding *ConsumerFinding,
) error {
	// The faults run as long as the load, so every moment of it is disturbed.
	over := make(chan error, 1)
	s.loads.Go(func() { over <- load.finishLoad(false) })
	kill := newTicker(s.options.KillEvery)
	defer kill.Stop()
	rebalance := newTicker(s.options.RebalanceEvery)
	defer rebalance.Stop()
	draw := time.NewTicker(lookEvery)
	defer draw.Stop()

	var third *crewMember
	for {
		var err error
		select {
		case err := <-over:
			if third != nil {
				crew.stopMember(third)
			}
			return err

		case <-kill.C:
			i := finding.Kills % len(members)
			member := members[i]
			if err = crew.killMember(member); err == nil {
				members[i], err = crew.startMember()
			}
			finding.Kills++
			s.printEvent("consumer %s is killed with -9; another one starts", member.name)

		case <-rebalance.C:
			if third != nil {
				crew.stopMember(third)
				third = nil
				continue
			}
			third, err = crew.startMember()

		case <-draw.C:
			s.drawProgress()

		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// newTicker returns a ticker, which never ticks if duration is 0.
func newTicker(duration time.Duration) *time.Ticker {
	if duration > 0 {
		return time.NewTicker(duration)
	}
	ticker := time.NewTicker(time.Hour)
	ticker.Stop()
	return ticker
}

// awaitEffects blocks until there is an effect for each order, and then for the settle time, in
// which a surplus effect would appear.
func (s *stage) awaitEffects(ctx context.Context, finding *ConsumerFinding) error {
	want, _ := s.check.Progress()
	err := s.awaitRead(ctx, "each event has its effect", func(ctx context.Context) (bool, error) {
		n, err := member.CountEffects(ctx, s.shopDatabase())
		finding.Effects = n
		return n >= want, err
	})
	if err != nil {
		return err
	}
	return s.runFor(ctx, settleTime)
}

// judgeEffects checks the stored effects, and reads the counts of the members.
func (s *stage) judgeEffects(ctx context.Context, finding *ConsumerFinding) error {
	report, err := member.JudgeEffects(ctx, s.shopDatabase())
	if err != nil {
		return err
	}
	finding.Effects = report.Effects
	finding.LostEffects = report.Lost
	finding.DoubleEffects = report.Double
	finding.OutOfOrder = report.OutOfOrder
	finding.Strange = report.Phantom + report.Miscounted
	if err := report.Err(); err != nil {
		s.recordBroken("%v", err)
	}

	if finding.Letters, err = s.countLetters(ctx); err != nil {
		return err
	}
	finding.Rejected, finding.Rebalances, err = s.readMembership(ctx)
	return err
}

// countLetters counts the events that consumers gave up. Any such event breaks the promise.
func (s *stage) countLetters(ctx context.Context) (int, error) {
	n, err := s.shopDatabase().Collection(deadletter.DefaultCollection).CountDocuments(ctx, bson.D{})
	if err != nil {
		return 0, fmt.Errorf("counting the consumers' dead letters: %w", err)
	}
	if n > 0 {
		s.recordBroken("the consumers gave up %d events: they are in %s.%s", n, s.names.database, deadletter.DefaultCollection)
	}
	return int(n), nil
}

// readMembership returns the counts and the rebalances that the members of the group have stored.
func (s *stage) readMembership(ctx context.Context) (rejected, rebalances int, err error) {
	db := s.shopDatabase()
	counts, err := member.ReadCounts(ctx, db)
	if err != nil {
		return 0, 0, err
	}
	generations, err := member.Generations(ctx, db)
	return counts.Rejected, max(generations-1, 0), err
}
