package changestream

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// watchdog distinguishes a dead token from a quiet outbox (N26). The server accepts a token of the
// future, or of another cluster, but that token never moves. A healthy token moves with every write
// in the cluster.
//
// Only the time in a getMore with an empty response counts. The time without a request does not count
// (backpressure, a pause, a held stream). A single long getMore does not count either: the server
// may search a backlog of foreign entries before it can respond.
//
// The cluster time is taken from the same responses, at read concern majority. In a cluster without a
// majority it stands still like the token, which is not a fault of the token.
type watchdog struct {
	limit   time.Duration
	started bool

	// clusterTimeAtMove is the cluster time when the token last moved. clusterMoved reports that the
	// cluster time moved since. Responses lag by one getMore, so only later responses count.
	clusterTimeAtMove bson.Timestamp
	clusterMoved      bool

	waited  time.Duration
	strikes int
}

// verdict is the result of one observation.
type verdict uint8

const (
	verdictHealthy verdict = iota
	verdictReopen          // the first time, because the cursor may be at fault
	verdictDead            // the token stood still again after a reopening
)

func (w *watchdog) tokenMoved() { *w = watchdog{limit: w.limit} }

// streamReopened resets the wait of the old cursor, but not the strikes.
func (w *watchdog) streamReopened() { *w = watchdog{limit: w.limit, strikes: w.strikes} }

// observeEmptyResponse processes an empty response that did not move the token.
func (w *watchdog) observeEmptyResponse(wait time.Duration, cluster bson.Timestamp) verdict {
	// The first response has nothing to compare with.
	if !w.started {
		w.started, w.clusterTimeAtMove = true, cluster
		return verdictHealthy
	}
	// While the cluster time stands still, the token has no reason to move.
	if !w.clusterMoved {
		w.clusterMoved = cluster.After(w.clusterTimeAtMove)
		return verdictHealthy
	}

	w.waited += wait
	if w.waited < w.limit {
		return verdictHealthy
	}

	// A stream that was opened again and still stalls is not helped by another opening.
	w.strikes++
	if w.strikes > 1 {
		return verdictDead
	}
	return verdictReopen
}
