package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/config"
)

const (
	failoverRate = 200 // events per second while owners end
	steady       = 500 * time.Millisecond
	idleRestarts = 5 // at most, and no more than failovers
)

// pair is an owner and its standby under load, with a consumer that checks their records.
type pair struct {
	*bench
	setting  setting
	owner    *relay
	standby  *relay
	consumer *tailer
	ledger   *ledger
	started  int
}

// measureFailover ends owners that have a standby, first with kill -9 and then with SIGTERM. It checks that
// no event is lost, duplicated or out of order.
func (b *bench) measureFailover(ctx context.Context) (res *Failover, err error) {
	ttl := b.TTL
	if ttl == 0 {
		ttl = config.Default().Lease.TTL
	}

	pair, err := b.startPair(ctx, ttl)
	if err != nil {
		return nil, fmt.Errorf("failover: %w", err)
	}
	defer func() { err = errors.Join(err, pair.stopAll()) }()

	traffic, stopTraffic := context.WithCancel(ctx)

	defer stopTraffic()
	coll := b.client.Database(b.db).Collection(pair.setting.watch)
	ended := make(chan error, 1)
	go func() {
		ended <- pair.ledger.insertLoad(traffic, b.Payload, func(ctx context.Context, doc any) error {
			_, err := coll.InsertOne(ctx, doc)
			return err
		})
	}()

	res = &Failover{TTLMS: float64(ttl.Milliseconds())}
	// Both ways run under the same traffic, one after the other.
	kill, err := pair.endOwners(ctx, "kill -9", (*relay).kill)
	if err != nil {
		return nil, err
	}
	term, err := pair.endOwners(ctx, "SIGTERM", (*relay).sendTerminate)
	if err != nil {
		return nil, err
	}
	stopTraffic()
	if err := <-ended; err != nil {
		return nil, err
	}
	if err := pair.ledger.awaitArrivals(ctx, pair.consumer.failure); err != nil {
		return nil, err
	}

	res.Kill, res.Term = newGaps(kill), newGaps(term)
	res.Events, res.Lost, res.Duplicates, res.OutOfOrder = pair.ledger.countErrors()
	// After a loss, the figures of the restarts below would mean nothing.
	if res.Lost > 0 {
		return res, nil
	}

	idle, err := pair.measureIdleRestarts(ctx, func(doc any) error {
		_, err := coll.InsertOne(ctx, doc)
		return err
	})
	res.IdleRestartMS = round(median(idle), 1)
	if err != nil {
		return res, err
	}
	return res, pair.measureIdle(ctx, res)
}

// measureIdle measures memory and CPU of the owner while nothing is appended, for as long as a rate.
func (p *pair) measureIdle(ctx context.Context, res *Failover) error {
	before, _ := processUsage(p.owner.pid())
	if err := retry.Sleep(ctx, p.Duration); err != nil {
		return err
	}
	after, known := processUsage(p.owner.pid())
	if !known {
		res.IdleRSS, res.IdleCPUPct = -1, -1
		return p.owner.checkRunning()
	}

	res.IdleRSS = round(after.rss, 1)
	res.IdleCPUPct = round(100*(after.cpu-before.cpu)/p.Duration.Seconds(), 2)
	return nil
}

func newGaps(ms []float64) Gaps {
	gaps := Gaps{N: len(ms), P50: round(median(ms), 1)}
	for _, v := range ms {
		gaps.Max = max(gaps.Max, round(v, 1))
	}
	return gaps
}

func (b *bench) startPair(ctx context.Context, ttl time.Duration) (started *pair, err error) {
	const name = "failover"
	if _, err := b.newOutbox(ctx, name); err != nil {
		return nil, err
	}

	setting := setting{watch: name, state: b.newStateDB(name), start: "now", ttl: ttl}
	started = &pair{bench: b, ledger: newLedger(), setting: setting}

	if started.setting.topic, err = b.newTopic(ctx, name); err != nil {
		return nil, err
	}
	if started.consumer, err = b.startConsumer(ctx, started.setting.topic, started.ledger.recordArrival); err != nil {
		return nil, err
	}

	if started.owner, err = started.startPhase(ctx, "owner"); err == nil {
		started.standby, err = started.startPhase(ctx, "standby")
	}
	if err != nil {
		return nil, errors.Join(err, started.stopAll())
	}
	return started, nil
}

// startPhase starts a relay and blocks until it reports the phase.
func (p *pair) startPhase(ctx context.Context, phase string) (*relay, error) {
	p.started++
	p.setting.node = fmt.Sprintf("bench-%d", p.started)
	relay, err := p.startRelay(p.setting)
	if err != nil {
		return nil, err
	}

	if err := p.awaitPhase(ctx, relay, phase); err != nil {
		relay.kill()
		return nil, err
	}
	return relay, nil
}

// awaitPhase blocks until relay reports the phase.
func (p *pair) awaitPhase(ctx context.Context, relay *relay, phase string) error {
	deadline := time.Now().Add(stall)
	for relay.readPhase(ctx) != phase {
		if err := relay.checkRunning(); err != nil {
			return err
		}

		if time.Now().After(deadline) {
			return fmt.Errorf("a relay has not become %s within %s; end of its log: %s", phase, stall, relay.words)
		}
		if err := retry.Sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

func (p *pair) stopAll() error {
	var errs []error
	for _, r := range []*relay{p.standby, p.owner} {
		if r != nil {
			errs = append(errs, r.stopProcess())
		}
	}
	p.consumer.stopReading()
	return errors.Join(errs...)
}

// endOwners ends the owner Failover times, and returns the times until the first delivery of the standby in
// milliseconds.
func (p *pair) endOwners(ctx context.Context, how string, end func(*relay)) ([]float64, error) {
	var out []float64
	for i := range p.Failover {
		if err := retry.Sleep(ctx, steady); err != nil {
			return nil, err
		}

		// On a busy machine the owner may have lost its lease in the meantime.
		if p.standby.readPhase(ctx) == "owner" {
			p.owner, p.standby = p.standby, p.owner
		}
		if err := p.awaitPhase(ctx, p.owner, "owner"); err != nil {
			return nil, err
		}

		// The sender of a record shows which owner has sent it.
		next := p.ledger.awaitNewSender()
		at := time.Now()
		end(p.owner)
		old := p.owner
		p.owner, p.standby = p.standby, nil

		var gap time.Duration
		select {
		case moment := <-next:
			gap = moment.Sub(at)
		case <-time.After(p.setting.ttl + stall):
			return nil, fmt.Errorf("nothing was delivered for %s after %s of the owner; end of the standby's log: %s",
				p.setting.ttl+stall, how, p.owner.words)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}

		// The old process must be gone before another one gets its address.
		<-old.Done()
		out = append(out, float64(gap.Microseconds())/1000)
		p.logProgress("failover %d of %d: %s, next delivery after %.0f ms", i+1, p.Failover, how, out[len(out)-1])

		if err := p.awaitPhase(ctx, p.owner, "owner"); err != nil {
			return nil, err
		}
		var err error
		if p.standby, err = p.startPhase(ctx, "standby"); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// measureIdleRestarts stops both relays gracefully, and measures how long a new process takes until its first
// delivery.
func (p *pair) measureIdleRestarts(ctx context.Context, insert func(doc any) error) ([]float64, error) {
	standby := p.standby
	p.standby = nil
	if err := standby.stopProcess(); err != nil {
		return nil, err
	}

	var out []float64
	restarts := min(idleRestarts, p.Failover)
	for i := range restarts {
		owner := p.owner
		p.owner = nil
		if err := owner.stopProcess(); err != nil {
			return nil, err
		}

		doc, err := newEnvelope(p.reserveNumbers(1), p.Payload)
		if err != nil {
			return nil, err
		}
		if err := insert(doc); err != nil {
			return nil, fmt.Errorf("inserting: %w", err)
		}

		next := p.ledger.awaitNewSender()
		at := time.Now()
		if p.owner, err = p.startRelay(p.setting); err != nil {
			return nil, err
		}

		select {
		case moment := <-next:
			out = append(out, float64(moment.Sub(at).Microseconds())/1000)
		case <-time.After(stall):
			return nil, fmt.Errorf("nothing was delivered for %s after a restart; end of the relay's log: %s",
				stall, p.owner.words)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		p.logProgress("restart while idle %d of %d: first delivery after %.0f ms", i+1, restarts, out[i])
	}
	return out, nil
}
