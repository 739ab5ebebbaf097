package demo

import (
	"context"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lease"
)

const (
	watcherID   = watcher + "/0of1"
	followEvery = 50 * time.Millisecond
)

// ownership is what the watcher document says.
type ownership struct {
	node       string // "" while nobody owns it
	epoch      int64
	acquiredAt time.Time // by the server's clock, which is this machine's
	paused     bool
}

// follower reads the watcher document, again and again.
type follower struct {
	coll     *mongo.Collection
	acquired func(ownership) // each new epoch, in order, from one goroutine

	mu  sync.Mutex
	now ownership
}

// Run follows until ctx ends.
func (f *follower) Run(ctx context.Context) {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		f.look(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look reads once. What goes wrong is seen by its effect: the owner stays as it was.
func (f *follower) look(ctx context.Context) {
	doc, now, err := lease.Read(ctx, f.coll, watcherID)
	if err != nil {
		return
	}
	o := ownership{epoch: doc.Epoch, acquiredAt: doc.AcquiredAt, paused: doc.Control.Paused}
	if doc.Owner != "" && doc.ExpiresAt.After(now) {
		o.node = doc.Node
	}
	f.mu.Lock()
	fresh := o.epoch > f.now.epoch
	f.now = o
	f.mu.Unlock()
	if fresh && f.acquired != nil {
		o.node = doc.Node
		f.acquired(o)
	}
}

// owner is the last that was read.
func (f *follower) owner() ownership {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now
}
