package changestream

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

const (
	openTimeout  = 10 * time.Second
	closeTimeout = time.Second

	// stopGrace is added to one await time, for a server that does not react to the kill.
	stopGrace = 500 * time.Millisecond
)

// cursor is one open change stream.
type cursor struct {
	stream       *Stream
	changeStream *mongo.ChangeStream
	session      *mongo.Session

	// base ends a little later than the context of Run. If it ended in the middle of a getMore, the
	// cursor would stay open on the server.
	base         context.Context
	stopWatching func()

	// responseTimer ends base if a response takes too long. To reset a timer costs nothing. With a new
	// context with a deadline for each response, the driver would evaluate its round-trip statistics.
	responseTimer *time.Timer
	timedOut      atomic.Bool

	// serverID is the cursor's id. It is atomic because another goroutine kills the cursor.
	serverID atomic.Int64

	// dropThrough is a position with a token: events at or before it were already sent to the caller
	// (N23). It is zero once a later event was read.
	dropThrough  resume.Position
	responseWait time.Duration
}

// openCursor opens the stream at the run's position.
func (r *run) openCursor(ctx context.Context) (*cursor, error) {
	if err := r.verifyCheckpoint(ctx); err != nil {
		return nil, fmt.Errorf("comparing the collection with the checkpoint: %w", err)
	}

	opts := r.stream.streamOptions()
	if r.byTime {
		opts.SetStartAtOperationTime(&r.startTime)
	} else {
		// resumeAfter would reject the token of an invalidate event.
		opts.SetStartAfter(bson.Raw(r.position.Token))
	}

	pipeline := r.stream.pipeline()
	if r.slim.on {
		pipeline = append(pipeline, slimStage)
	}
	cursor, err := r.stream.openChangeStream(ctx, pipeline, opts)
	if err != nil {
		return nil, err
	}

	for _, position := range []resume.Position{r.delivered, r.position} {
		if position.Token.Data() != "" && position.Compare(cursor.dropThrough) > 0 {
			cursor.dropThrough = position
		}
	}
	cursor.changeStream.SetBatchSize(r.sizer.nextBatchSize(r.stream.pace.batchSize))
	return cursor, nil
}

// contextWithGrace returns a context that ends a grace period after ctx, or when cancel is called.
// stop ends the context and stops waiting for ctx.
func contextWithGrace(ctx context.Context, grace time.Duration) (base context.Context, cancel, stop func()) {
	base, cancel = context.WithCancel(context.WithoutCancel(ctx))
	unhook := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(grace, cancel)
		context.AfterFunc(base, func() { timer.Stop() })
	})
	return base, cancel, func() {
		unhook()
		cancel()
	}
}

// killCursorAfter kills the server's cursor when ctx ends, which wakes a getMore that waits there.
// The returned function disables this, waits for a kill that has begun, and then calls after.
func (c *cursor) killCursorAfter(ctx context.Context, after func()) func() {
	done := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		defer close(done)
		c.killServerCursor(ctx)
	})
	return func() {
		if !unhook() {
			<-done
		}
		after()
	}
}

// killServerCursor sends killCursors to the primary. If the cursor is on another member, its getMore
// ends after its await time, as it would without the kill.
func (c *cursor) killServerCursor(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(closeTimeout, c.stream.pace.maxAwait))
	defer cancel()

	id := c.serverID.Load()
	if id == 0 {
		return
	}

	db, coll := c.stream.cfg.Scope.Target()
	// The cursor of a stream over several collections belongs to a pseudo collection.
	switch c.stream.cfg.Scope.Kind() {
	case changes.Database:
		coll = "$cmd.aggregate"
	case changes.Cluster:
		db, coll = "admin", "$cmd.aggregate"
	case changes.Collection:
	}
	_ = c.stream.cfg.Client.Database(db).RunCommand(ctx, bson.D{
		{Key: "killCursors", Value: coll},
		{Key: "cursors", Value: bson.A{id}},
	}).Err()
}

func (s *Stream) streamOptions() *options.ChangeStreamOptionsBuilder {
	// With a first batch of size 0, the server opens the cursor before it searches the oplog. Only
	// expanded events contain the UUID of their collection.
	return options.ChangeStream().SetBatchSize(0).SetMaxAwaitTime(s.pace.maxAwait).SetShowExpandedEvents(true)
}

// openChangeStream opens a change stream over the scope. Its cursor is killed when ctx ends. The
// session shows the cluster time of each response. The session is not causally consistent, because the
// server would then wait for times that do not concern this stream.
func (s *Stream) openChangeStream(
	ctx context.Context, pipeline mongo.Pipeline, opts *options.ChangeStreamOptionsBuilder,
) (*cursor, error) {
	session, err := s.cfg.Client.StartSession(options.Session().SetCausalConsistency(false))
	if err != nil {
		return nil, err
	}

	base, cancel, stop := contextWithGrace(ctx, s.pace.maxAwait+stopGrace)
	base = mongo.NewSessionContext(base, session)

	// The limit applies only to the opening, not to the life of the cursor.
	opening, opened := context.WithTimeout(base, openTimeout)
	defer opened()
	cs, err := s.cfg.Scope.Watch(opening, s.cfg.Client, s.cfg.ReadPreference, pipeline, opts)
	if err != nil {
		// Our own limit ended the call. That is a slow server, not a broken connection.
		if opening.Err() != nil {
			err = changes.ErrTimeout
		}
		session.EndSession(context.WithoutCancel(base))
		stop()
		return nil, err
	}

	cursor := &cursor{stream: s, changeStream: cs, session: session, base: base}
	cursor.serverID.Store(cs.ID())
	cursor.responseTimer = time.AfterFunc(maxPatience, func() {
		cursor.timedOut.Store(true)
		cancel()
	})
	cursor.responseTimer.Stop()
	cursor.stopWatching = cursor.killCursorAfter(ctx, stop)
	return cursor, nil
}

// fetchResponse reads one response into batch. batch stays empty if there was nothing to read. It blocks for at most
// limit.
func (c *cursor) fetchResponse(limit time.Duration, batch *changes.Batch) error {
	c.responseTimer.Reset(limit)
	begin := time.Now()
	// Next would repeat the getMore until an event arrives, and the idle position would never be saved.
	ok := c.changeStream.TryNext(c.base)
	c.responseWait = time.Since(begin)
	c.responseTimer.Stop()
	c.noteDriverResume()

	if !ok {
		err := c.changeStream.Err()
		if err != nil && c.timedOut.Load() {
			// The driver tried to kill the cursor itself, but its context had ended.
			c.killServerCursor(c.base)
			return changes.ErrTimeout
		}
		return err
	}

	// The remaining documents of the response are in memory.
	batch.Append(c.changeStream.Current)
	for range c.changeStream.RemainingBatchLength() {
		if !c.changeStream.TryNext(c.base) {
			return errors.Join(errors.New("reading a fetched batch"), c.changeStream.Err())
		}
		batch.Append(c.changeStream.Current)
	}
	return nil
}

// noteDriverResume detects an automatic resume of the driver: the cursor has a new id. The driver
// resumes only between responses, from the token of the last response, so no event is repeated.
func (c *cursor) noteDriverResume() {
	id := c.changeStream.ID()
	if id == 0 || id == c.serverID.Load() {
		return
	}

	c.serverID.Store(id)
	c.stream.cfg.Metrics.countRestart("driver")
	c.stream.cfg.Log.Info("the driver resumed the change stream")
}

// dropDelivered removes the events at or before the position after which the stream was opened. N23
func (c *cursor) dropDelivered(batch *changes.Batch) {
	var ev changes.Event
	for i, raw := range batch.Docs {
		// The caller that reads the event reports a parse error.
		_ = changes.Parse(raw, &ev)
		if positionOf(&ev).Compare(c.dropThrough) > 0 {
			c.dropThrough = resume.Position{}
			n := copy(batch.Docs, batch.Docs[i:])
			clear(batch.Docs[n:])
			batch.Docs = batch.Docs[:n]
			return
		}
		batch.Bytes -= len(raw)
	}

	batch.Clear()
}

// positionAfter returns the position after the response. Its token is a copy.
func (c *cursor) positionAfter(batch *changes.Batch) resume.Position {
	position := resume.Position{Token: resume.Token(c.changeStream.ResumeToken()).Clone()}
	timestamp, ok := position.Token.ClusterTime()
	// The time of a token in an unknown format cannot be read.
	if !ok && len(batch.Docs) > 0 {
		var ev changes.Event
		if changes.Parse(batch.Docs[len(batch.Docs)-1], &ev) == nil {
			timestamp = ev.ClusterTime
		}
	}

	position.ClusterTime = timestamp
	return position
}

// operationTime returns the cluster's majority-committed time in the last response.
func (c *cursor) operationTime() bson.Timestamp {
	if timestamp := c.session.OperationTime(); timestamp != nil {
		return *timestamp
	}
	return bson.Timestamp{}
}

func (c *cursor) closeCursor() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.base), closeTimeout)
	defer cancel()

	// Close kills the server's cursor if it still exists.
	_ = c.changeStream.Close(ctx)
	c.session.EndSession(ctx)
	c.stopWatching()
}
