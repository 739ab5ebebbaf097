package lease

import (
	"context"
	"math/rand/v2"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/retry"
)

// watchAwait bounds one getMore of a standby. The stream stops only between two of them, because an
// interrupted getMore leaves its cursor on the server for minutes.
const watchAwait = 250 * time.Millisecond

// blindPoll is how often a standby reads the document if it has no privilege to watch it.
const blindPoll = 250 * time.Millisecond

// randomDelay returns a short delay. It separates the attempts of standbys that saw the same expiry.
func randomDelay(ttl time.Duration) time.Duration {
	return time.Duration(rand.Int64N(int64(min(ttl/20, 50*time.Millisecond)) + 1))
}

// documentWatch wakes a standby when the owner or the control of the document changes. Renewals do not
// wake it.
type documentWatch struct {
	lease     *Lease
	woken     chan struct{} // 1 slot
	armed     chan struct{} // 1 slot: the standby has read the document and waits
	done      chan struct{}
	started   bool
	forbidden chan struct{} // closed when the privilege to watch is missing
}

func (l *Lease) newWatch() *documentWatch {
	return &documentWatch{
		lease:     l,
		woken:     make(chan struct{}, 1),
		armed:     make(chan struct{}, 1),
		done:      make(chan struct{}),
		forbidden: make(chan struct{}),
	}
}

// arm starts the stream on the first call. Later calls let it continue after a change.
func (w *documentWatch) arm() {
	if !w.started {
		w.started = true
		w.lease.watches.Go(w.followUntilStopped)
	}
	retry.Signal(w.armed)
}

// stop makes the stream end within watchAwait. It does not wait for the end: Lease.watches does.
func (w *documentWatch) stop() { close(w.done) }

// waitForChange blocks until the document changes, d has passed, or ctx ends.
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

func (w *documentWatch) stopped() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// followUntilStopped follows the stream, and opens it again after errors, until stop is called or the
// privilege is missing.
func (w *documentWatch) followUntilStopped() {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)

	back := retry.Policy{Base: 100 * time.Millisecond, Cap: 2 * time.Second}.Start()
	for !w.stopped() {
		err := w.followStream(ctx)
		if err == nil {
			return
		}
		// Retrying cannot help until an operator grants the privilege.
		if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
			ns := w.lease.coll.Database().Name() + "." + w.lease.coll.Name()
			w.lease.log.Warn("cannot watch the lease, so a takeover takes up to 250 ms longer",
				"advice", "grant changeStream and find on "+ns+" to the relay's user")
			close(w.forbidden)
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

// followStream wakes the standby at each change of owner or control. It returns nil when the watch is
// stopped, or the error of the stream.
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

	// The document may have changed before the stream was open.
	retry.Signal(w.woken)

	for !w.stopped() {
		call, cancel := context.WithTimeout(ctx, watchAwait+w.lease.cfg.CallTimeout)
		changed := stream.TryNext(call)
		cancel()
		if err := stream.Err(); err != nil {
			return err
		}
		if stream.ID() == 0 {
			// The server has closed the cursor. The caller opens the stream again.
			return errOutcomeUnknown
		}
		if !changed {
			continue
		}

		// A signal from before this change does not count: the standby has not read the document since.
		select {
		case <-w.armed:
		default:
		}
		retry.Signal(w.woken)

		// The standby now reads the document, and may acquire the lease and stop this watch. It would
		// then have to wait for a getMore that is under way, so there is none until it waits again.
		select {
		case <-w.armed:
		case <-w.done:
		}
	}
	return nil
}

// openStream opens a change stream that reports changes of the document's owner or control, and
// everything that is not an update.
func openStream(ctx context.Context, l *Lease) (*mongo.ChangeStream, error) {
	// Renewals change other fields every second: they must not wake the standbys.
	updated := op("$objectToArray", mongodb.IfNull("$updateDescription.updatedFields", bson.D{}))
	names := op("$concatArrays",
		bson.D{{Key: "$map", Value: bson.D{{Key: "input", Value: updated}, {Key: "in", Value: "$$this.k"}}}},
		mongodb.IfNull("$updateDescription.removedFields", bson.A{}))
	isOwnerOrControl := bson.D{{Key: "$regexMatch", Value: bson.D{
		{Key: "input", Value: "$$this"}, {Key: "regex", Value: "^(owner|control)"},
	}}}
	relevant := op("$anyElementTrue", bson.D{{Key: "$map", Value: bson.D{
		{Key: "input", Value: names}, {Key: "in", Value: isOwnerOrControl},
	}}})

	return l.coll.Watch(ctx, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{
			{Key: "documentKey._id", Value: l.cfg.ID},
			{Key: "$or", Value: bson.A{
				bson.D{{Key: "operationType", Value: bson.D{{Key: "$ne", Value: "update"}}}},
				bson.D{{Key: "$expr", Value: relevant}},
			}},
		}}},
		{{Key: "$project", Value: bson.D{{Key: "operationType", Value: 1}}}},
	}, options.ChangeStream().SetMaxAwaitTime(watchAwait).SetBatchSize(0))
}
