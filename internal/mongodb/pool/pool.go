// Package pool observes the connection pools of a client for MongoDB.
//
// Blocking: a monitor holds a lock while it counts, and calls to MongoDB wait for that.
package pool

import (
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/event"
)

// Figures are the figures of the connection pools of a client, over all members of the replica set.
type Figures struct {
	Open    int64 // connections, also those that are being established
	InUse   int64 // connections that a call uses
	Waiting int64 // calls that wait for a connection
}

// Checkout is the end of a call's wait for a connection.
type Checkout struct {
	Took   time.Duration
	Failed string // why the call got no connection: timeout, poolClosed or connectionError; "" if it got one
}

// Monitor returns a monitor of the pools of a client that calls observe with each change of the figures. ended is not nil if a
// call has ended its wait. Calls of observe do not overlap, and observe must not block: calls to MongoDB wait for it. next gets
// every event first. It may be nil.
func Monitor(next *event.PoolMonitor, observe func(figures Figures, ended *Checkout)) *event.PoolMonitor {
	var mu sync.Mutex
	var figures Figures
	return &event.PoolMonitor{Event: func(occurred *event.PoolEvent) {
		if next != nil && next.Event != nil {
			next.Event(occurred)
		}

		mu.Lock()
		defer mu.Unlock()
		before, ended := figures, (*Checkout)(nil)
		switch occurred.Type {
		case event.ConnectionCreated:
			figures.Open++
		case event.ConnectionClosed:
			figures.Open--
		case event.ConnectionCheckOutStarted:
			figures.Waiting++
		case event.ConnectionCheckedOut:
			figures.Waiting--
			figures.InUse++
			ended = &Checkout{Took: occurred.Duration}
		case event.ConnectionCheckOutFailed:
			figures.Waiting--
			ended = &Checkout{Took: occurred.Duration, Failed: occurred.Reason}
		case event.ConnectionCheckedIn:
			figures.InUse--
		}
		if figures != before || ended != nil {
			observe(figures, ended)
		}
	}}
}
