package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/demo/member"
	"github.com/outrelay/outrelay/pkg/consumer"
)

var consumerScenario = Scenario{
	Name:    "consumer",
	Promise: "each event has its effect exactly once and in the order of its key, while one of two consumers is killed again and again",
	events:  9000, rate: 500, kill: 3 * time.Second,
	run: runConsumer,
}

// ConsumerFinding is what scenario consumer found. Of an effect it judges by the database alone.
type ConsumerFinding struct {
	Outcome
	Effects       int `json:"effects"`
	LostEffects   int `json:"lost_effects"`
	DoubleEffects int `json:"double_effects"`
	// OutOfOrder is of effects and stands in the place of the Outcome's, of records, which has to be none for the promise
	// to hold.
	OutOfOrder int `json:"out_of_order"`
	Strange    int `json:"strange_effects"` // of events that were never committed, or half written
	Rebalances int `json:"rebalances"`
	Kills      int `json:"kills"`
	Injected   int `json:"injected"` // records that were written to the topic once more
	Refused    int `json:"refused"`  // messages that the inbox knew; killed consumers may have forgotten some of their count
	Letters    int `json:"dead_effects"`
}

func (f *ConsumerFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("effects           %s · lost %d · double %d · out of order %d · of nothing committed, or half written %d", formatThousands(f.Effects), f.LostEffects, f.DoubleEffects, f.OutOfOrder, f.Strange),
		fmt.Sprintf("consumers         %d kill -9 · %d rebalances", f.Kills, f.Rebalances),
		fmt.Sprintf("repeated records  %s written on purpose; the inbox refused %s messages", formatThousands(f.Injected), formatThousands(f.Refused)),
	}
}

func runConsumer(ctx context.Context, s *stage) (_ Finding, err error) {
	f := &ConsumerFinding{}
	if _, err := s.startAndAwait(ctx, "owner"); err != nil {
		return f, err
	}
	c, err := s.newCrew(ctx, member.Effects, s.names.topicName(aggregate))
	if err != nil {
		return f, err
	}
	defer func() {
		if err != nil {
			c.stopAll(true)
		}
	}()
	hands, err := c.startMembers(ctx, 2)
	if err != nil {
		return f, err
	}
	r, repeated, err := s.repeatSome(ctx)
	if err != nil {
		return f, err
	}
	l, err := s.startLoad(ctx, aggregate, "customer", limitRate(s.options.Rate, s.options.Events, s.options.KillEvery), s.options.Events)
	if err != nil {
		return f, err
	}
	if err := s.disturbConsumers(ctx, c, hands, l, f); err != nil {
		return f, err
	}
	if err := errors.Join(s.awaitArrival(ctx), repeated()); err != nil {
		return f, err
	}
	f.Injected = int(r.repeated.Load())
	if err := s.awaitEffects(ctx, f); err != nil {
		var broken *brokenPromise
		if !errors.As(err, &broken) {
			return f, err
		}
		s.recordBroken("%s", broken.why) // what is missing is counted below
	}
	c.stopAll(false)
	return f, s.judgeEffects(ctx, f)
}

// disturbConsumers kills one consumer after the other, makes a third one come and go, or both, until the load has ended.
func (s *stage) disturbConsumers(ctx context.Context, c *crew, hands []*crewMember, l *load, f *ConsumerFinding) error {
	over := make(chan error, 1)
	s.loads.Go(func() { over <- l.finishLoad(false) })
	kill, swing := newTicker(s.options.KillEvery), newTicker(s.options.RebalanceEvery)
	defer kill.Stop()
	defer swing.Stop()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	var third *crewMember
	for {
		var err error
		select {
		case err := <-over:
			if third != nil {
				c.stopMember(third)
			}
			return err
		case <-kill.C:
			h := hands[f.Kills%len(hands)]
			if err = c.killMember(h); err == nil {
				hands[f.Kills%len(hands)], err = c.startMember()
			}
			f.Kills++
			s.printEvent("consumer %s is killed with -9; another one starts", h.name)
		case <-swing.C:
			if third != nil {
				c.stopMember(third)
				third = nil
				continue
			}
			third, err = c.startMember()
		case <-look.C:
			s.drawProgress()
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// newTicker is a ticker, or one that never ticks for 0.
func newTicker(d time.Duration) *time.Ticker {
	if d > 0 {
		return time.NewTicker(d)
	}
	t := time.NewTicker(time.Hour)
	t.Stop()
	return t
}

// awaitEffects waits until there is an effect for each order, and a little longer for one too many.
func (s *stage) awaitEffects(ctx context.Context, f *ConsumerFinding) error {
	want, _ := s.check.Progress()
	err := s.awaitRead(ctx, "each event has its effect", func(ctx context.Context) (bool, error) {
		n, err := member.CountEffects(ctx, s.shopDatabase())
		f.Effects = n
		return n >= want, err
	})
	if err != nil {
		return err
	}
	return s.runFor(ctx, settleTime)
}

// judgeEffects reads what became of it all.
func (s *stage) judgeEffects(ctx context.Context, f *ConsumerFinding) error {
	db := s.shopDatabase()
	r, err := member.JudgeEffects(ctx, db)
	if err != nil {
		return err
	}
	f.Effects, f.LostEffects, f.DoubleEffects, f.OutOfOrder, f.Strange = r.Effects, r.Lost, r.Double, r.OutOfOrder, r.Phantom+r.Miscounted
	if err := r.Err(); err != nil {
		s.recordBroken("%v", err)
	}
	if f.Letters, err = s.countLetters(ctx); err != nil {
		return err
	}
	if f.Refused, f.Rebalances, err = s.readMembership(ctx); err != nil {
		return err
	}
	return nil
}

// countLetters counts the events that consumers have given up, which must be none.
func (s *stage) countLetters(ctx context.Context) (int, error) {
	n, err := s.shopDatabase().Collection(consumer.DefaultLetters).CountDocuments(ctx, bson.D{})
	if err != nil {
		return 0, fmt.Errorf("counting the consumers' dead letters: %w", err)
	}
	if n > 0 {
		s.recordBroken("the consumers gave up %d events: they are in %s.%s", n, s.names.database, consumer.DefaultLetters)
	}
	return int(n), nil
}

// readMembership is what the members of the group wrote down beside their effects.
func (s *stage) readMembership(ctx context.Context) (refused, rebalances int, err error) {
	db := s.shopDatabase()
	counts, err := member.ReadCounts(ctx, db)
	if err != nil {
		return 0, 0, err
	}
	generations, err := member.Generations(ctx, db)
	return counts.Refused, max(generations-1, 0), err
}
