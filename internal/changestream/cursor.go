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
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"

	"github.com/outrelay/outrelay/resume"
)

const (
	openTimeout  = 10 * time.Second
	closeTimeout = time.Second
	stopGrace    = 500 * time.Millisecond // beyond one await time, for a server that does not answer the kill
)

// cursor is one open change stream.
type cursor struct {
	s    *Stream
	cs   *mongo.ChangeStream
	sess *mongo.Session
	// base outlives the context of Run by a little: ending it in the middle of a getMore would leave the cursor behind on the server.
	base context.Context
	stop func()
	// late ends base when a reply takes too long. A timer that is set again costs nothing, whereas a context with a deadline for each
	// reply makes the driver compute its way through round-trip statistics.
	late     *time.Timer
	timedOut atomic.Bool
	id       atomic.Int64 // for the kill, which comes from another goroutine
	drop     string       // N23: events at or before this token's data were handed on; "" once one behind it was seen
	wait     time.Duration
}

// open opens the stream at the run's position.
func (r *run) open(ctx context.Context) (*cursor, error) {
	if err := r.distrust(ctx); err != nil {
		return nil, fmt.Errorf("comparing the collection with the checkpoint: %w", err)
	}
	opts := r.s.options()
	if r.byTime {
		opts.SetStartAtOperationTime(&r.at)
	} else {
		opts.SetStartAfter(bson.Raw(r.pos.Token))
	}
	pipeline := r.s.cfg.Scope.Pipeline()
	if r.slim.on {
		pipeline = append(pipeline, slimStage)
	}
	c, err := r.s.watch(ctx, pipeline, opts)
	if err != nil {
		return nil, err
	}
	c.drop = r.pos.Token.Data()
	c.cs.SetBatchSize(r.size.next(r.s.cfg.BatchSize))
	return c, nil
}

// outlive is a context that ends a grace after ctx, or with cancel. stop ends it and the waiting for ctx.
func outlive(ctx context.Context, grace time.Duration) (base context.Context, cancel, stop func()) {
	base, cancel = context.WithCancel(context.WithoutCancel(ctx))
	unhook := context.AfterFunc(ctx, func() {
		t := time.AfterFunc(grace, cancel)
		context.AfterFunc(base, func() { t.Stop() })
	})
	return base, cancel, func() { unhook(); cancel() }
}

// killWhen kills the server's cursor when ctx ends, which wakes a getMore that waits there. The returned function undoes it and joins.
func (c *cursor) killWhen(ctx context.Context, then func()) func() {
	done := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		defer close(done)
		c.kill(ctx)
	})
	return func() {
		if !unhook() {
			<-done
		}
		then()
	}
}

// kill asks the primary to kill the cursor. If the cursor lives on another member its getMore ends by its await time, for which
// a stop would wait without the kill as well.
func (c *cursor) kill(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(closeTimeout, c.s.cfg.MaxAwait))
	defer cancel()
	id := c.id.Load()
	if id == 0 {
		return
	}
	db, coll := c.s.cfg.Scope.Target()
	switch c.s.cfg.Scope.kind {
	case Database:
		coll = "$cmd.aggregate"
	case Cluster:
		db, coll = "admin", "$cmd.aggregate"
	case Collection:
	}
	_ = c.s.cfg.Client.Database(db).RunCommand(ctx, bson.D{{Key: "killCursors", Value: coll}, {Key: "cursors", Value: bson.A{id}}}).Err()
}

func (s *Stream) options() *options.ChangeStreamOptionsBuilder {
	return options.ChangeStream().SetBatchSize(0).SetMaxAwaitTime(s.cfg.MaxAwait).SetShowExpandedEvents(true)
}

// watch opens a change stream over the scope, whose cursor is killed when ctx ends. The session shows the cluster's time
// of each reply; it is not causally consistent, which would make the server wait for times that are none of this
// stream's business.
func (s *Stream) watch(ctx context.Context, pipeline mongo.Pipeline, opts *options.ChangeStreamOptionsBuilder) (*cursor, error) {
	sess, err := s.cfg.Client.StartSession(options.Session().SetCausalConsistency(false))
	if err != nil {
		return nil, err
	}
	base, cancel, stop := outlive(ctx, s.cfg.MaxAwait+stopGrace)
	base = mongo.NewSessionContext(base, sess)
	opening, opened := context.WithTimeout(base, openTimeout)
	defer opened()
	cs, err := s.aggregate(opening, pipeline, opts)
	if err != nil {
		if opening.Err() != nil {
			err = errTimeout
		}
		sess.EndSession(context.WithoutCancel(base))
		stop()
		return nil, err
	}
	c := &cursor{s: s, cs: cs, sess: sess, base: base}
	c.id.Store(cs.ID())
	c.late = time.AfterFunc(maxPatience, func() {
		c.timedOut.Store(true)
		cancel()
	})
	c.late.Stop()
	c.stop = c.killWhen(ctx, stop)
	return c, nil
}

func (s *Stream) aggregate(ctx context.Context, pipeline mongo.Pipeline, opts *options.ChangeStreamOptionsBuilder) (*mongo.ChangeStream, error) {
	db := func(name string) *mongo.Database {
		return s.cfg.Client.Database(name, options.Database().SetReadConcern(readconcern.Majority()))
	}
	scope := s.cfg.Scope
	switch scope.kind {
	case Collection:
		return db(scope.db).Collection(scope.coll).Watch(ctx, pipeline, opts)
	case Database:
		return db(scope.db).Watch(ctx, pipeline, opts)
	default: // what Client.Watch does, with our read concern
		return db("admin").Watch(ctx, pipeline, opts.SetCustomPipeline(bson.M{"allChangesForCluster": true}))
	}
}

// fetch gets one reply into b, which stays empty if there was nothing.
func (c *cursor) fetch(limit time.Duration, b *Batch) error {
	c.late.Reset(limit)
	begin := time.Now()
	ok := c.cs.TryNext(c.base)
	c.wait = time.Since(begin)
	c.late.Stop()
	c.resumed()
	if !ok {
		err := c.cs.Err()
		if err != nil && c.timedOut.Load() {
			c.kill(c.base) // the driver tried on a context that was over
			return errTimeout
		}
		return err
	}
	b.add(c.cs.Current)
	for range c.cs.RemainingBatchLength() {
		if !c.cs.TryNext(c.base) { // from memory
			return errors.Join(errors.New("reading a fetched batch"), c.cs.Err())
		}
		b.add(c.cs.Current)
	}
	return nil
}

// resumed notices that the driver has resumed by itself: the cursor is another one. It resumes between replies only, from the token of
// the last one, so nothing comes twice.
func (c *cursor) resumed() {
	id := c.cs.ID()
	if id == 0 || id == c.id.Load() {
		return
	}
	c.id.Store(id)
	c.s.cfg.Metrics.restart("driver")
	c.s.cfg.Log.Info("the driver resumed the change stream")
}

// dropKnown drops the events at or before the position that the stream was opened behind. N23
func (c *cursor) dropKnown(b *Batch) {
	var ev Event
	for i, raw := range b.Docs {
		_ = Parse(raw, &ev) // whoever reads the event finds the fault
		if string(ev.Data) > c.drop {
			c.drop = ""
			n := copy(b.Docs, b.Docs[i:])
			clear(b.Docs[n:])
			b.Docs = b.Docs[:n]
			return
		}
		b.Bytes -= len(raw)
	}
	b.reset()
}

// position is the place behind the reply, with a token of its own.
func (c *cursor) position(b *Batch) resume.Position {
	p := resume.Position{Token: resume.Token(c.cs.ResumeToken()).Clone()}
	t, ok := p.Token.ClusterTime()
	if !ok && len(b.Docs) > 0 {
		var ev Event
		if Parse(b.Docs[len(b.Docs)-1], &ev) == nil {
			t = ev.ClusterTime
		}
	}
	p.ClusterTime = t
	return p
}

// operationTime is the cluster's majority-committed time as of the last reply.
func (c *cursor) operationTime() bson.Timestamp {
	if t := c.sess.OperationTime(); t != nil {
		return *t
	}
	return bson.Timestamp{}
}

func (c *cursor) close() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.base), closeTimeout)
	defer cancel()
	_ = c.cs.Close(ctx) // kills the server's cursor unless it is gone already
	c.sess.EndSession(ctx)
	c.stop()
}
