package app

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/nodes"
)

const (
	beatEvery = nodes.BeatEvery
	// staleAfter is the silence after which a node counts as dead.
	staleAfter = nodes.StaleAfter
	// nodeCheckEvery is how often a node looks whether others have fallen silent.
	nodeCheckEvery = nodes.StaleAfter / 2
	// leaveTimeout bounds the last word at a stop: a node that stays listed keeps the others waiting until it is stale.
	leaveTimeout = 3 * time.Second
	// oplogWindowEvery is how often the oplog's window is asked for; a server that does not allow it is not asked again soon.
	oplogWindowEvery = 30 * time.Second
)

// runHeartbeat tells the other nodes that this one lives and whether it reaches Kafka (N6), and keeps the clock and the metrics of
// what it cannot count itself.
func (r *Relay) runHeartbeat(ctx context.Context) error {
	t := time.NewTicker(beatEvery)
	defer t.Stop()
	var window, tidied, looked time.Time
	defer r.state.endPulse("heartbeat")
	for {
		r.state.recordPulse("heartbeat")
		r.sendHeartbeat(ctx)
		now := time.Now()
		if now.Sub(window) > oplogWindowEvery {
			window = now
			r.readOplogWindow(ctx)
		}
		if now.Sub(looked) > nodeCheckEvery {
			looked = now
			r.checkOtherNodes(ctx)
		}
		if now.Sub(tidied) > nodes.TidyEvery {
			tidied = now
			r.tidyNodes(ctx)
		}
		select {
		case <-ctx.Done():
			r.leaveNodes(ctx)
			return nil
		case <-t.C:
		}
	}
}

func (r *Relay) sendHeartbeat(ctx context.Context) {
	ask, stop := context.WithTimeout(ctx, beatEvery/2) // a mute broker must not cost this node its sign of life
	_, err := r.kafka.Health(ask)
	stop()
	if ctx.Err() != nil {
		return
	}
	reachable := err == nil
	r.kafkaReachable.Store(reachable)
	r.metrics.KafkaReachable.Set(boolGauge(reachable))
	text := ""
	if err != nil {
		text = err.Error()
	}
	r.state.setProblem("kafka reachable", text, false)
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	err = r.member.Beat(ctx, r.vitalSigns())
	if err == nil {
		err = r.clock.sync(ctx, r.mongo.state)
	}
	r.metrics.MongoReachable.Set(boolGauge(err == nil))
	if err != nil && ctx.Err() == nil {
		r.state.setProblem("mongodb reachable", err.Error(), false)
	} else if err == nil {
		r.state.setProblem("mongodb reachable", "", false)
	}
}

func (r *Relay) leaveNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if err := r.member.Leave(ctx); err != nil {
		r.log.Info("the node stays listed until it is stale", "reason", err)
	}
}

// tidyNodes removes nodes that were silent for long, and old entries of the events log. What cannot be removed now is tried again
// in an hour.
func (r *Relay) tidyNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	if err := r.member.Tidy(ctx); err != nil {
		r.log.Debug("what is too old stays listed", "reason", err)
	}
}

func (r *Relay) readOplogWindow(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	oldest, newest, err := changestream.OplogWindow(ctx, r.mongo.state)
	if err == nil {
		r.metrics.OplogWindow.Set(float64(newest.T - oldest.T))
	}
}

func boolGauge(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
