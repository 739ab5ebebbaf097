package demo

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

var outageScenario = Scenario{
	Name:       "broker-outage",
	Promise:    "Kafka is stopped for half a minute under load: no attempts are spent, nothing is dead, and all arrives in order once it is back",
	events:     30 * 400,
	rate:       400,
	ownServers: true,
	run:        runOutage,
}

// OutageFinding is the result of scenario broker-outage.
type OutageFinding struct {
	Outcome
	OutageS    float64 `json:"outage_s"`    // from the stop of the broker to its return
	Backlog    int     `json:"backlog"`     // waiting events at its return
	RecoveredS float64 `json:"recovered_s"` // from its return until the lag was below one second
	Attempts   int     `json:"attempts"`    // attempts that all envelopes have used
	Takeovers  int     `json:"takeovers"`   // an outage must not cause any
}

func (f *OutageFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("outage            %.1f s, %s events waited at its end", f.OutageS, formatThousands(f.Backlog)),
		fmt.Sprintf("recovered         lag below one second %.1f s after Kafka was back", f.RecoveredS),
		fmt.Sprintf("attempts spent    %d · takeovers %d", f.Attempts, f.Takeovers),
	}
}

// warmUp is how long a load runs before the fault.
const warmUp = 3 * time.Second

func runOutage(ctx context.Context, s *stage) (Finding, error) {
	f := &OutageFinding{}
	if _, err := s.startAndAwait(ctx, "owner"); err != nil {
		return f, err
	}
	epoch := s.follow.currentOwner().epoch
	l, err := s.startLoad(ctx, aggregate, "customer", s.options.Rate, 0)
	if err != nil {
		return f, err
	}
	if err := s.runFor(ctx, warmUp); err != nil {
		return f, err
	}

	broker := s.stack.Kafkas()[0]
	began := time.Now()
	if err := broker.Shutdown(); err != nil {
		return f, err
	}
	s.printEvent("Kafka is stopped; the service still appends %d events/s", s.options.Rate)
	if err := s.runFor(ctx, s.durationOf(s.options.Events)); err != nil {
		return f, err
	}

	if err := broker.Restart(ctx); err != nil {
		return f, err
	}
	back := time.Now()
	committed, delivered := s.check.Progress()
	f.OutageS = roundSeconds(back.Sub(began))
	f.Backlog = committed - delivered
	s.printEvent("Kafka is back; %s events wait", formatThousands(f.Backlog))
	// A relay that halted instead of waiting would never catch up.
	err = s.awaitCondition(ctx, "a lag below one second", patience, func() bool { return s.currentLag() < time.Second })
	if err != nil {
		return f, err
	}
	f.RecoveredS = roundSeconds(time.Since(back))
	s.printEvent("the lag is below one second, %.1f s later", f.RecoveredS)

	if err := s.runFor(ctx, warmUp); err != nil {
		return f, err
	}
	if err := l.finishLoad(true); err != nil {
		return f, err
	}
	if err := s.awaitArrival(ctx); err != nil {
		return f, err
	}

	// The outage must cost neither attempts of envelopes nor the lease.
	f.Takeovers = int(s.follow.currentOwner().epoch - epoch)
	if f.Attempts, err = s.sumAttempts(ctx); err != nil {
		return f, err
	}
	if f.Attempts > 0 {
		s.recordBroken("the outage cost %d attempts", f.Attempts)
	}
	if f.Takeovers > 0 {
		s.recordBroken("the outage of Kafka cost the lease %d times", f.Takeovers)
	}
	return f, nil
}

// sumAttempts returns the number of attempts that the envelopes in the outbox have used.
func (s *stage) sumAttempts(ctx context.Context) (int, error) {
	cur, err := s.outboxCollection().Aggregate(ctx, bson.A{
		bson.D{{Key: "$match", Value: bson.D{{Key: "attempts", Value: bson.D{{Key: "$gt", Value: 0}}}}}},
		bson.D{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: nil},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: "$attempts"}}},
		}}},
	})
	if err != nil {
		return 0, fmt.Errorf("adding up attempts: %w", err)
	}

	var sums []struct {
		N int `bson:"n"`
	}
	if err := cur.All(ctx, &sums); err != nil || len(sums) == 0 {
		return 0, err
	}
	return sums[0].N, nil
}
