package app

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/nodes"
)

const (
	beatEvery = nodes.BeatEvery
	// staleAfter is the time without a heartbeat after which a node counts as dead.
	staleAfter = nodes.StaleAfter
	// nodeCheckEvery is the interval at which a node checks whether other nodes have stopped their
	// heartbeats.
	nodeCheckEvery = nodes.StaleAfter / 2
	// leaveTimeout bounds the removal of a stopping node from the list of nodes. While the node
	// stays listed, the other nodes wait until it is stale.
	leaveTimeout = 3 * time.Second
	// oplogWindowEvery is the interval at which the window of the oplog is read. After a failure
	// the next attempt is one interval later, too: the server may not allow the read.
	oplogWindowEvery = 30 * time.Second
)

// runHeartbeat publishes that this node is alive and whether it reaches Kafka (N6), until ctx ends.
// It also updates the clock and the metrics that need a query, checks the other nodes, and removes
// old entries.
func (r *Relay) runHeartbeat(ctx context.Context) error {
	t := time.NewTicker(beatEvery)
	defer t.Stop()
	var windowReadAt, tidiedAt, checkedAt time.Time
	defer r.state.endPulse("heartbeat")

	for {
		r.state.recordPulse("heartbeat")
		r.sendHeartbeat(ctx)

		now := time.Now()
		if now.Sub(windowReadAt) > oplogWindowEvery {
			windowReadAt = now
			r.readOplogWindow(ctx)
		}
		if now.Sub(checkedAt) > nodeCheckEvery {
			checkedAt = now
			r.checkOtherNodes(ctx)
		}
		if now.Sub(tidiedAt) > nodes.TidyEvery {
			tidiedAt = now
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

// sendHeartbeat checks whether Kafka is reachable and stores the heartbeat of this node.
func (r *Relay) sendHeartbeat(ctx context.Context) {
	// A broker that does not reply must not delay the heartbeat.
	call, stop := context.WithTimeout(ctx, beatEvery/2)
	_, err := r.kafka.Metadata(call, nil)
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
	err = r.member.SendHeartbeat(ctx, r.vitalSigns())
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

// leaveNodes removes this node from the list of nodes.
func (r *Relay) leaveNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if err := r.member.Leave(ctx); err != nil {
		r.log.Info("the node stays listed until it is stale", "reason", err)
	}
}

// tidyNodes removes nodes that have been stale for long, and old entries of the events log. After a
// failure the next attempt is an hour later.
func (r *Relay) tidyNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	if err := r.member.RemoveOld(ctx); err != nil {
		r.log.Debug("cannot remove old nodes and events", "reason", err)
	}
}

// readOplogWindow updates the metric of the oplog window.
func (r *Relay) readOplogWindow(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	oldest, newest, err := changestream.OplogWindow(ctx, r.mongo.state)
	if err == nil {
		r.metrics.OplogWindow.Set(float64(newest.T - oldest.T))
	}
}

// boolGauge returns the value of a gauge: 1 for true, 0 for false.
func boolGauge(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
