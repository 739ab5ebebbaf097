package changestream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

const (
	idleEvery       = 400 * time.Millisecond // between the empty batches of an idle stream
	unknownAttempts = 5                      // without progress, at least, before an unclassified error is a gap
	maxPatience     = time.Hour
	settled         = 2 * time.Second // a term this old is a recovery
)

// run is the supervisor's state through the terms of one Run: a term is one open cursor.
type run struct {
	s   *Stream
	out chan<- *Batch

	pos resume.Position // everything up to here was handed on, or is known to hold no event
	// byTime opens at a cluster time rather than by the token of pos; at is that time. It ends with the first progress.
	byTime bool
	at     bson.Timestamp
	// checks of the first opening (N23)
	hash string
	uuid [16]byte

	backoff  *retry.Backoff
	unknown  int           // errors without a class since the last progress
	puzzled  time.Time     // when the first of them came
	patience time.Duration // for one reply
	opened   bool          // the last term came as far as asking for events
	dog      watchdog
	size     sizer
	slim     slim
	lastIdle time.Time
	unsent   bool      // pos moved without a batch that says so
	since    time.Time // when the term began
	ddl      Op        // the kind of the last event handed on: what an invalidate event tells the end of
}

// Errors with which a term asks for the next one.
var (
	errTimeout  = errors.New("the server did not answer in time")
	errClosed   = errors.New("the server closed the stream")
	errStalled  = errors.New("the resume token does not move although the cluster does")
	errPastSlim = errors.New("past the events that were too large")
)

// begin turns the start into a position, waiting out faults where that needs the server.
func (s *Stream) begin(ctx context.Context, start Start, out chan<- *Batch) (*run, error) {
	r := &run{
		s: s, out: out, pos: start.Position.Clone(), hash: start.PipelineHash, backoff: s.cfg.Backoff.Start(),
		patience: s.cfg.Patience, dog: watchdog{limit: s.cfg.Watchdog},
	}
	_, hasTime := start.Position.Time()
	if !r.pos.Sound() {
		// Not even tried: a server that took it for one of this stream would go on at another place, and what it says is
		// behind may never have been read.
		r.pos.Token = nil
		r.startAt(r.pos.ClusterTime)
		s.cfg.Log.Warn("the stored token does not belong to the time beside it; starting by time", "token", start.Position.Token.Data(), "time", r.pos.ClusterTime.T)
	}
	switch {
	case start.Now && (start.At != nil || !start.Position.IsZero()):
		return nil, fmt.Errorf("%w: both a position and the present are asked for", ErrNoStart)
	case start.At != nil:
		r.startAt(*start.At)
	case start.Now:
		err := retry.Do(ctx, s.cfg.Backoff, func(ctx context.Context) error {
			now, err := mongodb.ClusterTime(ctx, s.cfg.Client)
			r.startAt(now)
			return err
		}, func(err error, wait time.Duration) { s.report(err, wait) })
		if err != nil {
			return nil, err
		}
	case !r.pos.Token.IsZero():
	case hasTime:
		r.startAt(start.Position.ClusterTime)
	default:
		return nil, ErrNoStart
	}
	for _, c := range start.Collections {
		if s.cfg.Scope.kind == Collection && c.NS == s.cfg.Scope.String() {
			r.uuid = c.UUID
		}
	}
	return r, nil
}

func (r *run) startAt(t bson.Timestamp) { r.byTime, r.at = true, t }

// distrust checks, once, whether the token belongs to the stream of today (N23).
func (r *run) distrust(ctx context.Context) error {
	if r.hash == "" && r.uuid == [16]byte{} {
		return nil
	}
	scope := r.s.cfg.Scope
	why := ""
	if r.hash != "" && r.hash != scope.PipelineHash() {
		why = "what is watched has changed since the checkpoint"
	}
	if r.uuid != [16]byte{} {
		now, found, err := CollectionUUID(ctx, r.s.cfg.Client, scope.db, scope.coll)
		if err != nil {
			return err
		}
		if found && now != r.uuid {
			why = "the collection was made anew since the checkpoint"
		}
	}
	r.hash, r.uuid = "", [16]byte{}
	if t, ok := r.pos.Time(); why != "" && ok && !r.byTime {
		r.startAt(t)
		r.s.cfg.Log.Info("starting by time instead of by token", "reason", why, "time", t.T)
	}
	return nil
}

// term opens the stream and reads until something ends it. It never returns nil unless ctx has ended.
func (r *run) term(ctx context.Context) error {
	r.opened, r.since = false, time.Now()
	c, err := r.open(ctx)
	if err != nil {
		return fmt.Errorf("opening stream: %w", err)
	}
	defer c.close()
	crash.At("after-open")
	r.dog.reopened()
	for ctx.Err() == nil {
		b := newBatch()
		err := c.fetch(r.s.cfg.MaxAwait+r.patience, b)
		crash.At("after-getmore")
		r.opened = true
		if err == nil {
			err = r.take(ctx, c, b)
		} else {
			b.Release()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// take judges a reply, hands it on, and decides whether the term goes on.
func (r *run) take(ctx context.Context, c *cursor, b *Batch) error {
	r.answered()
	silent := len(b.Docs) == 0
	r.size.observe(len(b.Docs), b.Bytes)
	c.cs.SetBatchSize(r.size.next(r.s.cfg.BatchSize))
	if c.drop != "" {
		c.dropKnown(b)
	}
	next, invalid, err := r.lookAtEnd(c, b)
	if err == nil && r.slim.on {
		err = r.restore(ctx, b)
	}
	if err != nil {
		b.Release()
		return err
	}
	full, moved := len(b.Docs) > 0, next.Compare(r.pos) > 0
	if full {
		r.s.cfg.Metrics.batch(len(b.Docs), b.Bytes, c.wait)
	}
	if err := r.hand(ctx, b, next, moved); err != nil {
		return err
	}
	r.progress(full, moved)
	switch {
	case invalid != nil:
		return invalid
	case c.cs.ID() == 0:
		return errClosed
	case r.slim.on && r.slim.passed(r.pos, silent):
		return errPastSlim
	case silent && !moved:
		return r.watch(c)
	}
	return nil
}

// answered says that the server gives answers.
func (r *run) answered() {
	if r.slim.on {
		r.s.enter(Oversize, 0, "reading around documents that are too large for a change event")
	} else {
		r.s.enter(Live, 0, "")
	}
}

// lookAtEnd finds the position behind the batch, and whether its last event ends the stream. The position of an
// invalidate event is given to nobody but the error: stored by a checkpoint it would let the next start pass over the end of the
// collection without asking anyone.
func (r *run) lookAtEnd(c *cursor, b *Batch) (resume.Position, *InvalidateError, error) {
	next, n := c.position(b), len(b.Docs)
	if n == 0 {
		return next, nil, nil
	}
	var ev Event
	if err := Parse(b.Docs[n-1], &ev); err != nil {
		return next, nil, err
	}
	if ev.Op != Invalidate {
		r.ddl = ev.Op
		return next, nil, nil
	}
	end := &InvalidateError{Position: positionOf(&ev), Op: r.ddl, NS: r.s.cfg.Scope.String()}
	next = r.pos
	if n > 1 {
		if err := Parse(b.Docs[n-2], &ev); err != nil {
			return next, nil, err
		}
		end.Op, next = ev.Op, positionOf(&ev)
	}
	if end.Op == Insert {
		end.Op = Other
	}
	return next, end, nil
}

func positionOf(ev *Event) resume.Position {
	return resume.Position{Token: resume.Token(ev.Token).Clone(), ClusterTime: ev.ClusterTime}
}

// hand sends the batch on if it says anything new, and remembers the position.
func (r *run) hand(ctx context.Context, b *Batch, next resume.Position, moved bool) error {
	if moved {
		r.pos, r.unsent = next, true
	}
	b.Position = r.pos
	if len(b.Docs) == 0 && (!r.unsent || time.Since(r.lastIdle) < idleEvery) {
		b.Release()
		return nil
	}
	if len(b.Docs) == 0 {
		r.lastIdle = time.Now()
	}
	r.unsent = false
	if ctx.Err() != nil { // select would choose at random
		return context.Cause(ctx)
	}
	select {
	case r.out <- b:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// progress forgets the faults behind the position. A term that breaks off again at once is no recovery, although the token
// moves with the cluster: only events, or a while of quiet, make the next wait short again.
func (r *run) progress(full, moved bool) {
	if full || moved && time.Since(r.since) > settled {
		r.backoff.Reset()
		r.unknown = 0
	}
	if moved {
		r.patience, r.byTime = r.s.cfg.Patience, false
		r.dog.moved()
	}
}

// watch asks the watchdog about an empty reply that did not move the token (N26).
func (r *run) watch(c *cursor) error {
	switch r.dog.empty(c.wait, c.operationTime()) {
	case dead:
		at, _ := r.pos.Time()
		return &GapError{Reason: GapStalled, Position: r.pos, Ahead: at.After(c.operationTime()), Err: errStalled}
	case reopen:
		return errStalled
	case healthy:
	}
	return nil
}

// decide chooses what follows the error of a term: nil to open the next one, else the end of Run.
func (r *run) decide(ctx context.Context, err error) error {
	var gap *GapError
	var invalid *InvalidateError
	log := r.s.cfg.Log
	switch {
	case errors.As(err, &gap), errors.As(err, &invalid):
		return err
	case errors.Is(err, errPastSlim):
		r.slim = slim{}
		r.s.cfg.Metrics.restart("oversize")
		log.Info("past the documents that were too large; reading whole events again")
		return nil
	case errors.Is(err, errTimeout):
		return r.timeout(ctx, err)
	case errors.Is(err, errStalled):
		return r.again(ctx, "watchdog", err)
	case errors.Is(err, errClosed):
		return r.unexplained(ctx, 0, "closed", err)
	}
	class, code, reason := classify(err)
	switch class {
	case classResume:
		return r.again(ctx, reason, err)
	case classGap:
		return &GapError{Code: code, Reason: gapReason(code), Position: r.pos, Err: err}
	case classConfig:
		return r.misconfigured(ctx, code)
	case classOversize:
		return r.oversize(ctx, code, err)
	case classFatal:
		return err
	case classUnknown:
	}
	return r.unexplained(ctx, code, reason, err)
}

// again waits and lets the next term begin.
func (r *run) again(ctx context.Context, reason string, err error) error {
	r.s.cfg.Metrics.restart(reason)
	wait := r.backoff.Next()
	r.s.report(err, wait)
	_ = retry.Sleep(ctx, wait) // the end of ctx is seen by the loop
	return nil
}

// timeout is a reply that did not come. If the server had opened the stream and the position has not moved since the last
// time-out, it may be searching: give it longer each time, or it would begin the search anew for ever.
func (r *run) timeout(ctx context.Context, err error) error {
	if r.opened {
		r.patience = min(2*r.patience, maxPatience)
	}
	return r.again(ctx, "timeout", fmt.Errorf("%w; allowing %s from now on", err, r.patience))
}

// unexplained is a fault without a class: passing at first, a gap when it does not pass. Attempts alone would not do: the
// first five are over within a second, and a gap costs a sweep or a halt.
func (r *run) unexplained(ctx context.Context, code int, reason string, err error) error {
	if r.unknown++; r.unknown == 1 {
		r.puzzled = time.Now()
	}
	if r.unknown >= unknownAttempts && time.Since(r.puzzled) >= r.s.cfg.Unexplained {
		return &GapError{Code: code, Reason: GapUnexplained, Position: r.pos, Err: err}
	}
	return r.again(ctx, reason, err)
}

// misconfigured waits for somebody to change something.
func (r *run) misconfigured(ctx context.Context, code int) error {
	words := advice(code, r.s.cfg.Scope)
	if r.s.State().Reason != words {
		r.s.cfg.Log.Error(words, "retry", r.s.cfg.ConfigRetry)
	}
	r.s.enter(ConfigError, code, words)
	r.s.cfg.Metrics.restart("config")
	_ = retry.Sleep(ctx, r.s.cfg.ConfigRetry)
	return nil
}

// report tells status and log of a fault that is being waited out. Of a server's error only code and name are told.
func (s *Stream) report(err error, wait time.Duration) {
	words := err.Error()
	code := 0
	var ce mongo.CommandError
	if errors.As(err, &ce) && ce.Code != 0 {
		code = int(ce.Code)
		words = fmt.Sprintf("MongoDB answered %s (%d)", ce.Name, ce.Code)
	}
	level := slog.LevelWarn
	if st := s.State(); st.Phase == Reopening && st.Reason == words {
		level = slog.LevelDebug // the same again: told once
	}
	s.cfg.Log.Log(context.Background(), level, "change stream broken off; reopening from the last position", "reason", words, "wait", wait)
	s.enter(Reopening, code, words)
}
