package demo

import (
	"context"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

const (
	watcherID   = watcher + "/0of1"
	followEvery = 50 * time.Millisecond
)

// ownership is the ownership in the watcher document.
type ownership struct {
	node       string // "" if there is no owner
	epoch      int64
	acquiredAt time.Time // by the server's clock, which is this machine's clock
	paused     bool
}

// follower reads the watcher document repeatedly.
type follower struct {
	coll       *mongo.Collection
	onAcquired func(ownership) // called for each new epoch, in order, from one goroutine

	mu      sync.Mutex
	current ownership
}

// Run reads the watcher document until ctx ends.
func (f *follower) Run(ctx context.Context) {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		f.readOnce(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// readOnce reads the watcher document once. If that fails, the current ownership stays as it was.
func (f *follower) readOnce(ctx context.Context) {
	doc, now, err := lease.Read(ctx, f.coll, watcherID)
	if err != nil {
		return
	}

	ownership := ownership{epoch: doc.Epoch, acquiredAt: doc.AcquiredAt, paused: doc.Control.Paused}
	// An expired lease has no owner, whichever node the document names.
	if doc.Owner != "" && doc.ExpiresAt.After(now) {
		ownership.node = doc.Node
	}

	f.mu.Lock()
	newEpoch := ownership.epoch > f.current.epoch
	f.current = ownership
	f.mu.Unlock()

	// The callback runs without the lock, so that it may call currentOwner.
	if newEpoch && f.onAcquired != nil {
		ownership.node = doc.Node
		f.onAcquired(ownership)
	}
}

// currentOwner returns the ownership that was read last.
func (f *follower) currentOwner() ownership {
	f.mu.Lock()
	defer f.mu.Unlock()

	return f.current
}
