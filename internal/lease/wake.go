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

// jitter keeps standbys that saw the same expiry apart.
func jitter(ttl time.Duration) time.Duration {
	return time.Duration(rand.Int64N(int64(min(ttl/20, 50*time.Millisecond)) + 1))
}

// watch wakes a standby when the owner, or control, of the document changes; renewals it does not hear of.
type watch struct {
	l     *Lease
	woken chan struct{} // 1 slot
	again chan struct{} // 1 slot: the standby has looked and waits
	done  chan struct{}
	begun bool
	blind chan struct{} // closed when watching is not allowed
}

func (l *Lease) watch() *watch {
	return &watch{l: l, woken: make(chan struct{}, 1), again: make(chan struct{}, 1), done: make(chan struct{}), blind: make(chan struct{})}
}

// arm starts the stream at the first call, and lets it go on at the later ones.
func (w *watch) arm() {
	if !w.begun {
		w.begun = true
		w.l.watchers.Go(w.run)
	}
	notify(w.again)
}

// stop makes the stream end at its next chance, within watchAwait; Lease.watchers knows when it has.
func (w *watch) stop() { close(w.done) }

// wait returns when woken, after d, or when ctx ends.
func (w *watch) wait(ctx context.Context, d time.Duration) {
	select {
	case <-w.blind:
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

func (w *watch) stopped() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

func (w *watch) run() {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	back := retry.Policy{Base: 100 * time.Millisecond, Cap: 2 * time.Second}.Start()
	for !w.stopped() {
		err := w.follow(ctx)
		if hasCode(err, codeUnauthorized) {
			w.l.log.Warn("the lease cannot be watched, so a hand-over takes up to a quarter of a second longer; grant changeStream and find on " + w.l.coll.Database().Name() + "." + w.l.coll.Name() + " to the relay's user")
			close(w.blind)
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

// follow watches until it is stopped or the stream fails.
func (w *watch) follow(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, w.l.cfg.CallTimeout)
	stream, err := openWatch(call, w.l)
	cancel()
	if err != nil {
		return err
	}
	defer func() {
		call, cancel := context.WithTimeout(ctx, w.l.cfg.CallTimeout)
		defer cancel()
		_ = stream.Close(call)
	}()
	notify(w.woken) // what changed before the stream was open
	for !w.stopped() {
		call, cancel := context.WithTimeout(ctx, watchAwait+w.l.cfg.CallTimeout)
		changed := stream.TryNext(call)
		cancel()
		if err := stream.Err(); err != nil {
			return err
		}
		if stream.ID() == 0 {
			return errUnknown // dropped: open it again
		}
		if !changed {
			continue
		}
		select { // forget an older permit: the standby has not looked since this change
		case <-w.again:
		default:
		}
		notify(w.woken)
		// The standby is about to look, and may acquire and leave: it would wait for a getMore under way.
		select {
		case <-w.again:
		case <-w.done:
		}
	}
	return nil
}

func openWatch(ctx context.Context, l *Lease) (*mongo.ChangeStream, error) {
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
