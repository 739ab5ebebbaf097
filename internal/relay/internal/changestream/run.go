package changestream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

const (
	// idleInterval is the least time between the empty batches of an idle stream.
	idleInterval = 400 * time.Millisecond

	// oversizeAttempts is the number of unclassified errors of the server without progress after which the stream is read
	// without large documents: the next event may be the reason.
	oversizeAttempts = 3
	// unknownAttempts is the least number of attempts without progress before an unclassified error
	// is a gap.
	unknownAttempts = 5
	maxPatience     = time.Hour

	// recoveryTime is the age at which a session without events counts as a recovery.
	recoveryTime = 2 * time.Second
)

// run is the state of one Run through its sessions. A session is the life of one open cursor.
type run struct {
	stream *Stream
	out    chan<- *changes.Batch

	// position: every event up to it was sent to the caller. It may be after the last event.
	position resume.Position

	// byTime opens the stream at startTime instead of at the token of position. It is reset by the
	// first progress.
	byTime    bool
	startTime bson.Timestamp

	// delivered is a position of another stream, up to which the caller has the events of the present stream too (N23).
	delivered resume.Position

	// checkpointHash and checkpointUUID are checked at the first opening (N23).
	checkpointHash string
	checkpointUUID [16]byte

	backoff *retry.Backoff

	// unexplainedErrors counts the errors without a class since the last progress. firstUnexplained
	// is the time of the first one.
	unexplainedErrors int
	firstUnexplained  time.Time

	patience     time.Duration // for one response
	cursorOpened bool          // the last session sent at least one getMore
	sessionStart time.Time
	watchdog     watchdog
	sizer        batchSizer
	slim         slimMode

	lastIdle time.Time

	// lastOp is the kind of the last event, which is the cause of a following invalidate event.
	lastOp changes.Op
}

// Errors that end a session.
var (
	errClosed   = errors.New("the server closed the stream")
	errStalled  = errors.New("the resume token does not move, although the cluster time does")
	errPastSlim = errors.New("past the events that were too large")
)

// newRun determines the start position.
func (s *Stream) newRun(start changes.Start, out chan<- *changes.Batch) (*run, error) {
	run := &run{
		stream: s, out: out, position: start.Position.Clone(), checkpointHash: start.PipelineHash,
		backoff:  s.pace.backoff.Start(),
		patience: s.pace.patience, watchdog: watchdog{limit: s.pace.watchdog},
	}

	_, hasTime := start.Position.Time()
	if !run.position.Sound() {
		// Such a token is not even tried. If the server accepted it, the stream would continue at
		// another place, and earlier events might be lost.
		run.position.Token = nil
		run.startAt(run.position.ClusterTime)
		s.cfg.Log.Warn("the stored token does not belong to its cluster time; starting by time",
			"token", start.Position.Token.Data(), "cluster_time", run.position.ClusterTime.T)
	}

	switch {
	case start.At != nil:
		run.startAt(*start.At)

	case !run.position.Token.IsZero():
		// openCursor starts after the token.

	case hasTime:
		run.startAt(start.Position.ClusterTime)

	default:
		return nil, errNoStart
	}

	for _, c := range start.Collections {
		if s.cfg.Scope.Kind() == changes.Collection && c.NS == s.cfg.Scope.String() {
			run.checkpointUUID = c.UUID
		}
	}
	return run, nil
}

func (r *run) startAt(timestamp bson.Timestamp) { r.byTime, r.startTime = true, timestamp }

// verifyCheckpoint checks, once, that the token belongs to the present stream. If it does not, the
// stream starts by time (N23).
func (r *run) verifyCheckpoint(ctx context.Context) error {
	if r.checkpointHash == "" && r.checkpointUUID == [16]byte{} {
		return nil
	}

	scope := r.stream.cfg.Scope
	why := ""
	if r.checkpointHash != "" && r.checkpointHash != scope.PipelineHash() {
		why = "the checkpoint belongs to other collections or slots, or to another publisher"
	}
	if r.checkpointUUID != [16]byte{} {
		// A user without listCollections gets no UUID here. Then only the events show it.
		db, coll := scope.Target()
		now, err := mongodb.CollectionUUID(ctx, r.stream.cfg.Client, db, coll)
		if err != nil && !mongodb.HasCode(err, mongodb.CodeUnauthorized) {
			return err
		}
		if now != [16]byte{} && now != r.checkpointUUID {
			why = "the collection was dropped and created again since the checkpoint"
		}
	}

	r.checkpointHash, r.checkpointUUID = "", [16]byte{}
	timestamp, ok := r.position.Time()
	if why != "" && ok && !r.byTime {
		r.startAt(timestamp)
		// The stream need not contain the event of the token, so no position of the stream may have it.
		r.delivered, r.position.Token = r.position.Clone(), nil
		r.stream.cfg.Log.Info("starting by time instead of by token", "error", why, "cluster_time", timestamp.T)
	}
	return nil
}

// readSession opens the stream and reads until an error ends the session. It returns nil only if ctx
// has ended.
func (r *run) readSession(ctx context.Context) error {
	r.cursorOpened, r.sessionStart = false, time.Now()
	cursor, err := r.openCursor(ctx)
	if err != nil {
		return fmt.Errorf("opening stream: %w", err)
	}
	defer cursor.closeCursor()
	crash.At("after-open")

	r.watchdog.streamReopened()
	for ctx.Err() == nil {
		batch := changes.NewBatch()
		err := cursor.fetchResponse(r.stream.pace.maxAwait+r.patience, batch)
		crash.At("after-getmore")
		r.cursorOpened = true
		if err == nil {
			err = r.handleResponse(ctx, cursor, batch)
		} else {
			batch.Release()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// handleResponse processes a response and sends it to the caller. It returns an error if the session must
// end.
func (r *run) handleResponse(ctx context.Context, cursor *cursor, batch *changes.Batch) error {
	r.reportLive()
	silent := len(batch.Docs) == 0

	// The size includes the events that are dropped below, because the server sent them too.
	r.sizer.observeResponse(len(batch.Docs), batch.Bytes)
	cursor.changeStream.SetBatchSize(r.sizer.nextBatchSize(r.stream.pace.batchSize))
	if !cursor.dropThrough.IsZero() {
		cursor.dropDelivered(batch)
	}

	next, invalid, err := r.inspectLastEvent(cursor, batch)
	if err == nil && r.slim.on {
		err = r.restoreDocuments(ctx, batch)
	}
	if err != nil {
		batch.Release()
		return err
	}

	full, moved := len(batch.Docs) > 0, next.Compare(r.position) > 0
	if full {
		r.stream.cfg.Metrics.countBatch(len(batch.Docs), batch.Bytes, cursor.responseWait)
	}
	if err := r.sendBatch(ctx, batch, next, moved); err != nil {
		return err
	}
	r.recordProgress(full, moved)

	switch {
	case invalid != nil:
		return invalid
	case cursor.changeStream.ID() == 0:
		return errClosed
	case r.slim.on && r.slim.hasPassed(r.position, silent):
		return errPastSlim
	case silent && !moved:
		return r.checkWatchdog(cursor)
	}
	return nil
}

// reportLive sets the state after a response of the server.
func (r *run) reportLive() {
	if r.slim.on {
		r.stream.setState(Oversize, 0, "reading around documents that are too large for a change event")
	} else {
		r.stream.setState(Live, 0, "")
	}
}

// inspectLastEvent returns the position after the batch. If the last event ends the stream, it also
// returns the error for Run.
//
// Only the error contains the position of an invalidate event. If a checkpoint stored that position,
// the next start would skip the end of the collection without a decision of the caller.
func (r *run) inspectLastEvent(cursor *cursor, batch *changes.Batch) (resume.Position, *changes.InvalidateError, error) {
	next, n := cursor.positionAfter(batch), len(batch.Docs)
	if n == 0 {
		return next, nil, nil
	}

	var ev changes.Event
	if err := changes.Parse(batch.Docs[n-1], &ev); err != nil {
		return next, nil, err
	}
	if ev.Op != changes.Invalidate {
		r.lastOp = ev.Op
		return next, nil, nil
	}

	// The event before the invalidate event is its cause.
	end := &changes.InvalidateError{Position: positionOf(&ev), Op: r.lastOp, NS: r.stream.cfg.Scope.String()}
	next = r.position
	if n > 1 {
		if err := changes.Parse(batch.Docs[n-2], &ev); err != nil {
			return next, nil, err
		}
		end.Op, next = ev.Op, positionOf(&ev)
	}
	// An insert does not end a stream, so the cause was not read.
	if end.Op == changes.Insert {
		end.Op = changes.Other
	}
	return next, end, nil
}

func positionOf(ev *changes.Event) resume.Position {
	return resume.Position{Token: resume.Token(ev.Token).Clone(), ClusterTime: ev.ClusterTime}
}

// sendBatch sends the batch to the caller, and stores the position in r. It leaves out an empty batch soon after another one. The others
// show the caller that the server responds, also if its position stands, as that of a secondary does that replicates nothing. It blocks
// until the caller receives the batch.
func (r *run) sendBatch(ctx context.Context, batch *changes.Batch, next resume.Position, moved bool) error {
	if moved {
		r.position = next
	}
	batch.Position = r.position

	if len(batch.Docs) == 0 && time.Since(r.lastIdle) < idleInterval {
		batch.Release()
		return nil
	}
	if len(batch.Docs) == 0 {
		r.lastIdle = time.Now()
	}

	// If both cases are ready, select chooses at random.
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case r.out <- batch:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// recordProgress resets the fault counters. A session that fails again at once is not a recovery,
// although its token moves with the cluster. So only events, or a session that lasts for a while,
// reset the backoff.
func (r *run) recordProgress(full, moved bool) {
	if full || moved && time.Since(r.sessionStart) > recoveryTime {
		r.backoff.Reset()
		r.unexplainedErrors = 0
	}
	if full || moved {
		r.stream.noteProgress()
	}
	if moved {
		r.patience, r.byTime = r.stream.pace.patience, false
		r.watchdog.tokenMoved()
	}
}

// checkWatchdog processes an empty response that did not move the token (N26).
func (r *run) checkWatchdog(cursor *cursor) error {
	switch r.watchdog.observeEmptyResponse(cursor.responseWait, cursor.operationTime()) {
	case verdictDead:
		at, _ := r.position.Time()
		return &changes.GapError{Reason: changes.GapStalled, Position: r.position, Ahead: at.After(cursor.operationTime()), Err: errStalled}
	case verdictReopen:
		return errStalled
	case verdictHealthy:
	}
	return nil
}

// handleError decides what follows the error of a session. It returns nil to open the next session,
// and an error to end Run.
func (r *run) handleError(ctx context.Context, err error) error {
	r.stream.noteReopening()
	var gap *changes.GapError
	var invalid *changes.InvalidateError
	switch {
	case errors.As(err, &gap), errors.As(err, &invalid):
		return err

	case errors.Is(err, errPastSlim):
		r.stream.noteProgress()
		r.slim = slimMode{}
		r.stream.cfg.Metrics.countRestart("oversize")
		r.stream.cfg.Log.Info("past the documents that were too large; reading whole events again")
		return nil

	case errors.Is(err, changes.ErrTimeout):
		return r.retryTimeout(ctx, err)
	case errors.Is(err, errStalled):
		return r.retryLater(ctx, "watchdog", err)
	case errors.Is(err, errClosed):
		return r.retryUnexplained(ctx, 0, "closed", err)
	}

	class, code, reason := classifyError(err)
	switch class {
	case classResume:
		return r.retryLater(ctx, reason, err)
	case classGap:
		return &changes.GapError{Code: code, Reason: gapReason(code), Position: r.position, Err: err}
	case classConfig:
		return r.retryMisconfigured(ctx, code)
	case classOversize:
		return r.readAroundOversize(ctx, code, err)
	case classFatal:
		return err
	case classUnknown:
	}
	return r.retryUnexplained(ctx, code, reason, err)
}

// retryLater waits for the backoff. It returns nil, so that the next session begins.
func (r *run) retryLater(ctx context.Context, reason string, err error) error {
	r.stream.cfg.Metrics.countRestart(reason)
	wait := r.backoff.Next()
	r.stream.reportFault(err, wait)

	// The loop of Run checks ctx.
	_ = retry.Sleep(ctx, wait)
	return nil
}

// retryTimeout handles a response that did not arrive in time. If the server had opened the stream, it
// may be searching a backlog. Each timeout without progress doubles the limit. With a fixed limit,
// the server would begin its search again forever.
func (r *run) retryTimeout(ctx context.Context, err error) error {
	if r.cursorOpened {
		r.patience = min(2*r.patience, maxPatience)
	}
	return r.retryLater(ctx, "timeout", fmt.Errorf("%w; allowing %s from now on", err, r.patience))
}

// retryUnexplained handles an error without a class: temporary at first, and a gap if it persists.
// A limit on attempts alone is not enough: the first five end within a second, and a gap costs a
// sweep or a halt.
func (r *run) retryUnexplained(ctx context.Context, code int, reason string, err error) error {
	r.unexplainedErrors++
	if r.unexplainedErrors == 1 {
		r.firstUnexplained = time.Now()
	}
	if r.unexplainedErrors >= unknownAttempts && time.Since(r.firstUnexplained) >= r.stream.pace.unexplained {
		return &changes.GapError{Code: code, Reason: changes.GapUnexplained, Position: r.position, Err: err}
	}
	// Whatever its code means, an error that the server repeats at the same token may come from the next event.
	if code != 0 && r.unexplainedErrors >= oversizeAttempts {
		r.omitLargeDocuments()
	}
	return r.retryLater(ctx, reason, err)
}

// retryMisconfigured waits for an operator to change the configuration, and tries again.
func (r *run) retryMisconfigured(ctx context.Context, code int) error {
	problem := describeMisconfiguration(code, r.stream.cfg.Scope)
	if r.stream.State().Reason != problem {
		r.stream.cfg.Log.Error(problem, "retry", r.stream.pace.configRetry)
	}
	r.stream.setState(ConfigError, code, problem)
	r.stream.cfg.Metrics.countRestart("config")
	_ = retry.Sleep(ctx, r.stream.pace.configRetry)
	return nil
}

// reportFault writes a fault that is retried to the state and to the log. Of a server's error it uses
// only the code and the name.
func (s *Stream) reportFault(err error, wait time.Duration) {
	reason, logged := err.Error(), any(err)
	code := 0
	var ce mongo.CommandError
	if errors.As(err, &ce) && ce.Code != 0 {
		code = int(ce.Code)
		reason = fmt.Sprintf("MongoDB returned %s (%d)", ce.Name, ce.Code)
		logged = reason
	}

	// A fault that is repeated without progress is logged only once, although the stream may look alive in between.
	level := slog.LevelWarn
	if s.State().Fault == reason {
		level = slog.LevelDebug
	}
	s.cfg.Log.Log(context.Background(), level, "change stream interrupted; reopening from the last position",
		"error", logged, "wait", wait)
	s.setState(Reopening, code, reason)
}
