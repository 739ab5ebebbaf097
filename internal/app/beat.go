package app

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/store"
)

const (
	beatEvery = 2 * time.Second
	// staleAfter is the silence after which a node counts as dead.
	staleAfter = 5 * beatEvery
	// windowEvery is how often the oplog's window is asked for; a server that does not allow it is not asked again soon.
	windowEvery = 30 * time.Second
	// forgetAfter is the silence after which a node is not listed any more: one that was killed cannot leave by itself, and
	// the next process may have another name.
	forgetAfter = 14 * 24 * time.Hour
	forgetEvery = time.Hour
)

// beat tells the other nodes that this one lives and whether it reaches Kafka (N6), and keeps the clock and the metrics of
// what it cannot count itself.
func (r *Relay) beat(ctx context.Context) error {
	t := time.NewTicker(beatEvery)
	defer t.Stop()
	var window, forgot time.Time
	defer r.state.rest("heartbeat")
	for {
		r.state.pulse("heartbeat")
		r.sign(ctx)
		now := time.Now()
		if now.Sub(window) > windowEvery {
			window = now
			r.readWindow(ctx)
		}
		if now.Sub(forgot) > forgetEvery {
			forgot = now
			r.forget(ctx)
		}
		select {
		case <-ctx.Done():
			r.leave(ctx)
			return nil
		case <-t.C:
		}
	}
}

func (r *Relay) sign(ctx context.Context) {
	ask, stop := context.WithTimeout(ctx, beatEvery/2) // a mute broker must not cost this node its sign of life
	_, err := r.kafka.Health(ask)
	stop()
	if ctx.Err() != nil {
		return
	}
	reachable := err == nil
	r.reachable.Store(reachable)
	r.metrics.KafkaReachable.Set(number(reachable))
	text := ""
	if err != nil {
		text = err.Error()
	}
	r.state.set("kafka reachable", text, false)
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	since := time.Duration(-1)
	if at := r.acked.Load(); at > 0 {
		since = time.Since(time.Unix(0, at))
	}
	err = r.nodes.Heartbeat(ctx, store.Sign{
		Node: r.cfg.Node, Address: r.cfg.Address, Version: r.version, Watchers: []string{r.cfg.Watcher},
		KafkaReachable: reachable, SinceAck: since,
	})
	if err == nil {
		err = r.clock.sync(ctx, r.mongo.state)
	}
	r.metrics.MongoReachable.Set(number(err == nil))
	if err != nil && ctx.Err() == nil {
		r.state.set("mongodb reachable", err.Error(), false)
	} else if err == nil {
		r.state.set("mongodb reachable", "", false)
	}
}

func (r *Relay) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := r.nodes.Leave(ctx, r.cfg.Node); err != nil {
		r.log.Debug("the node stays listed until it is stale", "reason", err)
	}
}

// forget removes the nodes that were silent for long. What cannot be removed now is tried again in an hour.
func (r *Relay) forget(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	if n, err := r.nodes.Forget(ctx, forgetAfter); err != nil {
		r.log.Debug("nodes that are gone stay listed", "reason", err)
	} else if n > 0 {
		r.log.Debug("nodes that are gone are listed no longer", "count", n)
	}
}

func (r *Relay) readWindow(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	oldest, newest, err := changestream.OplogWindow(ctx, r.mongo.state)
	if err == nil {
		r.metrics.OplogWindow.Set(float64(newest.T - oldest.T))
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
