package changestream

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// watchdog tells a dead token from a quiet outbox (N26). A token of the future, or of another cluster, is accepted and then
// stands still for ever, while a healthy one moves with whatever is written anywhere in the cluster.
//
// Only time spent in a getMore that came back empty counts: neither the time in which nobody asked (backpressure, a pause,
// a held stream) nor a single long getMore, in which the server searches a backlog of foreign entries before it can answer.
// The cluster's time is that of the same replies, at read concern majority: on a cluster without a majority it stands still like the
// token, which is no fault of the token.
type watchdog struct {
	limit   time.Duration
	begun   bool
	first   bson.Timestamp // cluster time when the token was last seen to move
	moving  bool           // the cluster moved on since; replies lag by one getMore, so only those after that count
	waited  time.Duration
	strikes int
}

// verdict of one observation.
type verdict uint8

const (
	healthy verdict = iota
	reopen          // first time: the cursor may be at fault
	dead            // it stood still again after a reopening
)

func (w *watchdog) moved() { *w = watchdog{limit: w.limit} }

// reopened forgets the waiting of the old cursor, not that it stood still.
func (w *watchdog) reopened() { *w = watchdog{limit: w.limit, strikes: w.strikes} }

// empty takes an empty reply that left the token where it was.
func (w *watchdog) empty(wait time.Duration, cluster bson.Timestamp) verdict {
	if !w.begun {
		w.begun, w.first = true, cluster
		return healthy
	}
	if !w.moving {
		w.moving = cluster.After(w.first)
		return healthy
	}
	if w.waited += wait; w.waited < w.limit {
		return healthy
	}
	w.strikes++
	if w.strikes > 1 {
		return dead
	}
	return reopen
}
