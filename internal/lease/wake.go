package lease

import (
	"context"
	"math/rand/v2"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/retry"
)

// watchAwait bounds one getMore of a standby. The stream is left between two of them only: a getMore that is cut off
// leaves its cursor on the server for minutes.
const watchAwait = 250 * time.Millisecond

// blindPoll is how often a standby looks when it may not watch.
const blindPoll = 250 * time.Millisecond

// randomDelay keeps standbys that saw the same expiry apart.
func randomDelay(ttl time.Duration) time.Duration {
	return time.Duration(rand.Int64N(int64(min(ttl/20, 50*time.Millisecond)) + 1))
}

// documentWatch wakes a standby when the owner, or control, of the document changes; renewals it does not hear of.
type documentWatch struct {
	lease     *Lease
	woken     chan struct{} // 1 slot
	armed     chan struct{} // 1 slot: the standby has looked and waits
	done      chan struct{}
	started   bool
	forbidden chan struct{} // closed when watching is not allowed
}

func (l *Lease) newWatch() *documentWatch {
	return &documentWatch{lease: l, woken: make(chan struct{}, 1), armed: make(chan struct{}, 1), done: make(chan struct{}), forbidden: make(chan struct{})}
}

// arm starts the stream at the first call, and lets it go on at the later ones.
func (w *documentWatch) arm() {
	if !w.started {
		w.started = true
		w.lease.watches.Go(w.followUntilStopped)
	}
	notify(w.armed)
}

// stop makes the stream end at its next chance, within watchAwait; Lease.watchers knows when it has.
func (w *documentWatch) stop() { close(w.done) }

// waitForChange returns when woken, after d, or when ctx ends.
func (w *documentWatch) waitForChange(ctx context.Context, d time.Duration) {
	select {
	case <-w.forbidden:
		d = min(d, blindPoll)
	default:
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-w.woken:
	case <-t.C:
	case <-ctx.Done():
	}
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (w *documentWatch) stopped() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

func (w *documentWatch) followUntilStopped() {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	back := retry.Policy{Base: 100 * time.Millisecond, Cap: 2 * time.Second}.Start()
	for !w.stopped() {
		err := w.followStream(ctx)
		if hasCode(err, codeUnauthorized) {
			w.lease.log.Warn("the lease cannot be watched, so a hand-over takes up to a quarter of a second longer; grant changeStream and find on " + w.lease.coll.Database().Name() + "." + w.lease.coll.Name() + " to the relay's user")
			close(w.forbidden)
			return
		}
		if err == nil {
			return
		}
		t := time.NewTimer(back.Next())
		select {
		case <-t.C:
		case <-w.done:
		}
		t.Stop()
	}
}

// followStream watches until it is stopped or the stream fails.
func (w *documentWatch) followStream(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, w.lease.cfg.CallTimeout)
	stream, err := openStream(call, w.lease)
	cancel()
	if err != nil {
		return err
	}
	defer func() {
		call, cancel := context.WithTimeout(ctx, w.lease.cfg.CallTimeout)
		defer cancel()
		_ = stream.Close(call)
	}()
	notify(w.woken) // what changed before the stream was open
	for !w.stopped() {
		call, cancel := context.WithTimeout(ctx, watchAwait+w.lease.cfg.CallTimeout)
		changed := stream.TryNext(call)
		cancel()
		if err := stream.Err(); err != nil {
			return err
		}
		if stream.ID() == 0 {
			return errOutcomeUnknown // dropped: open it again
		}
		if !changed {
			continue
		}
		select { // forget an older permit: the standby has not looked since this change
		case <-w.armed:
		default:
		}
		notify(w.woken)
		// The standby is about to look, and may acquire and leave: it would wait for a getMore under way.
		select {
		case <-w.armed:
		case <-w.done:
		}
	}
	return nil
}

func openStream(ctx context.Context, l *Lease) (*mongo.ChangeStream, error) {
	changed := op("$objectToArray", ifNull("$updateDescription.updatedFields", bson.D{}))
	names := op("$concatArrays",
		bson.D{{Key: "$map", Value: bson.D{{Key: "input", Value: changed}, {Key: "in", Value: "$$this.k"}}}},
		ifNull("$updateDescription.removedFields", bson.A{}))
	ours := bson.D{{Key: "$anyElementTrue", Value: bson.A{bson.D{{Key: "$map", Value: bson.D{
		{Key: "input", Value: names},
		{Key: "in", Value: bson.D{{Key: "$regexMatch", Value: bson.D{{Key: "input", Value: "$$this"}, {Key: "regex", Value: "^(owner|control)"}}}}},
	}}}}}}
	return l.coll.Watch(ctx, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{
			{Key: "documentKey._id", Value: l.cfg.ID},
			{Key: "$or", Value: bson.A{
				bson.D{{Key: "operationType", Value: bson.D{{Key: "$ne", Value: "update"}}}},
				bson.D{{Key: "$expr", Value: ours}},
			}},
		}}},
		{{Key: "$project", Value: bson.D{{Key: "operationType", Value: 1}}}},
	}, options.ChangeStream().SetMaxAwaitTime(watchAwait).SetBatchSize(0))
}
