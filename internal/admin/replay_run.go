package admin

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/retry"
)

// Bounds of a replay.
const (
	maxReplayBatch    = 500 // envelopes in one transaction, during which the owner cannot renew
	minReplayBatch    = 50
	maxReplayRead     = 5000                  // envelopes in one read, without their payload
	fastWrite         = 50 * time.Millisecond // after a faster transaction, the next one may be larger
	slowWrite         = 150 * time.Millisecond
	DefaultReplayOpen = 10_000 // envelopes that may be queued and not sent
	replayPoll        = 500 * time.Millisecond
	positionPoll      = 100 * time.Millisecond
	defaultPatience   = 30 * time.Second
	maxPause          = 100 * time.Millisecond // between two transactions
)

// ErrReplayStalled is returned if the watcher does not move. Envelopes that were committed recently
// may not be delivered.
var ErrReplayStalled = errors.New("the watcher does not move")

// ReplayRun are the options of a run of a replay.
type ReplayRun struct {
	// Wait keeps at most Open envelopes queued that the relay has not sent, and makes Run return
	// when all are sent. Without Wait, everything is queued as fast as Rate allows.
	Wait bool
	Open int64 // defaults to DefaultReplayOpen
	// Patience is how long Run waits for a watcher that does not move. Defaults to 30 s.
	Patience time.Duration
	// Progress, if not nil, is called after each batch and while Run waits.
	Progress func(ReplayInfo)
}

// Run continues a replay from its cursor, and returns when everything is queued and, with Wait,
// sent. Run may be interrupted at any moment, also by a crash, and repeated: the cursor and the
// envelopes change in the same transaction. If two processes run the same replay, one of them gets
// [ErrReplayMoved].
//
// The timestamp alone does not show whether a recent envelope was delivered. So envelopes that are
// younger than the margin, the longest life of a transaction, have to wait until the watcher has
// passed them. If the watcher does not move, Run returns [ErrReplayStalled].
func (r Replays) Run(ctx context.Context, id string, o ReplayRun) (ReplayInfo, error) {
	doc, err := r.stored.Get(ctx, id)
	if err != nil {
		return ReplayInfo{}, err
	}
	if doc.Watcher != r.op.Watcher {
		return newReplayInfo(doc), fmt.Errorf("replay %s belongs to watcher %s, not to %s", id, doc.Watcher, r.op.Watcher)
	}
	if doc.State == replayCancelled {
		return newReplayInfo(doc), fmt.Errorf("replay %s was cancelled; order a new one", id)
	}
	if o.Open <= 0 {
		o.Open = DefaultReplayOpen
	}
	if o.Patience <= 0 {
		o.Patience = defaultPatience
	}

	run := &replayRun{
		replays:    r,
		options:    o,
		doc:        doc,
		cursor:     doc.Cursor,
		openCounts: map[string]int64{},
		room:       -1,
		batchSize:  maxReplayBatch / 4,
	}

	// An earlier run may have left queued envelopes in these collections.
	for i, ns := range doc.Query.Collections {
		if i <= doc.Cursor.At {
			run.openCounts[ns] = -1
		}
	}

	if doc.State == ReplayRunning {
		if err := run.queueAll(ctx); err != nil {
			return newReplayInfo(run.doc), err
		}
	}
	if o.Wait {
		if err := run.waitSent(ctx); err != nil {
			return newReplayInfo(run.doc), err
		}
	}

	doc, err = r.stored.Get(ctx, id)
	info := newReplayInfo(doc)
	if o.Wait {
		info.Outstanding = 0
	}
	return info, err
}

// replayRun is the state of one run.
type replayRun struct {
	options ReplayRun
	replays Replays
	doc     storedReplay // its cursor is the stored one
	cursor  replayCursor
	skipped int64 // envelopes read after the last queued one and left out

	margin time.Duration
	passed bson.Timestamp // the last known position of the watcher
	skew   time.Duration  // server time minus local time

	began      time.Time
	batchSize  int              // of the next batch
	queued     int64            // by this run
	openCounts map[string]int64 // last count of queued envelopes by collection; −1 means not counted
	room       int64            // envelopes that may be queued before the next count; negative means count now
}

// queueAll queues the rest of the replay, and marks it as done.
func (u *replayRun) queueAll(ctx context.Context) error {
	client := u.replays.op.State.Client()
	u.margin = mongodb.Margin(ctx, client)
	now, err := mongodb.ServerTime(ctx, client)
	if err != nil {
		return err
	}
	// Expiry is judged by the server's clock, as in the relay.
	u.skew = time.Until(now)
	u.began = time.Now()

	// A cursor at the end of the collections means that everything is queued, also after a resume.
	for u.cursor.At < len(u.doc.Query.Collections) {
		more, err := u.queueNext(ctx)
		if err != nil {
			return err
		}
		if !more {
			u.cursor = replayCursor{At: u.cursor.At + 1}
		}
	}

	if err := u.replays.stored.End(ctx, u.doc.ID, ReplayDone, u.skipped); err != nil {
		return err
	}
	u.doc.State = ReplayDone
	return u.replays.op.logAction(ctx, "replay_queued", bson.D{
		{Key: "replay", Value: u.doc.ID},
		{Key: "queued", Value: u.doc.Queued},
		{Key: "skipped", Value: u.doc.Skipped + u.skipped},
	})
}

// queueNext reads the next envelopes of one collection and queues them. It returns false at the end
// of the collection.
func (u *replayRun) queueNext(ctx context.Context) (more bool, err error) {
	ns := u.doc.Query.Collections[u.cursor.At]
	coll := outboxes.CollectionOf(u.replays.op.State.Client(), ns)

	// One read is large, because each read may have to wait for the watcher once. At a low rate it
	// is limited to the envelopes of five seconds.
	limit := maxReplayRead
	if u.doc.Rate > 0 {
		limit = int(min(float64(limit), math.Ceil(5*u.doc.Rate)))
	}
	docs, seen, err := readEnvelopes(ctx, coll, u.replays.complete(u.doc.Query), u.cursor.TS, limit)
	if err != nil || len(docs) == 0 {
		return false, err
	}
	last := parseStamp(docs[len(docs)-1])
	if err := u.waitDelivered(ctx, last, seen); err != nil {
		return false, err
	}

	rest := u.buildRequeues(docs)
	for len(rest) > 0 {
		part := rest[:min(len(rest), u.nextBatchSize())]
		rest = rest[len(part):]

		// Copied documents may share a timestamp. The cursor moves with the last of them.
		to := replayCursor{At: u.cursor.At, TS: part[len(part)-1].TS}
		if len(rest) > 0 && rest[0].TS == to.TS {
			to = u.doc.Cursor
		}
		if err := u.writeBatch(ctx, ns, part, to); err != nil {
			return false, err
		}
	}
	u.cursor.TS = last
	return true, nil
}

// queuedEnvelope is an envelope to be queued.
type queuedEnvelope struct {
	requeue
	skipped int64 // envelopes that were read before it and left out
}

// buildRequeues returns the envelopes in docs that can be sent again, and counts the others as
// skipped.
func (u *replayRun) buildRequeues(docs []bson.Raw) []queuedEnvelope {
	list := make([]queuedEnvelope, 0, len(docs))
	for _, raw := range docs {
		q, ok := u.buildRequeue(raw)
		if !ok {
			u.skipped++
			continue
		}
		list = append(list, queuedEnvelope{q, u.skipped})
		u.skipped = 0
	}
	return list
}

// nextBatchSize returns the number of envelopes of the next transaction. At a low rate it is
// limited to the envelopes of a fifth of a second.
func (u *replayRun) nextBatchSize() int {
	size := float64(u.batchSize)
	if u.doc.Rate > 0 {
		size = min(size, math.Ceil(u.doc.Rate/5))
	}
	return int(min(int64(size), u.options.Open))
}

// buildRequeue returns the write that queues an envelope. It returns false for an envelope that
// cannot be sent: the replay would only create a dead letter.
func (u *replayRun) buildRequeue(raw bson.Raw) (requeue, bool) {
	var v envelope.View
	if u.replays.op.Mapping.Parse(raw, &v) != nil {
		return requeue{}, false
	}
	// An expired envelope would become a dead letter at its next delivery.
	if v.HasExpiresAt && v.ExpiresAt <= time.Now().Add(u.skew).UnixMilli() {
		return requeue{}, false
	}
	target := u.replays.routeEnvelope(u.doc.Query.Collections[u.cursor.At], &v, u.doc.Query.Topics)
	if len(target.topics) == 0 {
		return requeue{}, false
	}

	q := requeue{ID: raw.Lookup("_id"), TS: v.TS}
	// The relay orders by the field key, which is text.
	if key := envelope.CanonicalText(raw.Lookup("key")); key == "" || key != string(v.OrderingKey()) {
		q.Key = string(v.OrderingKey())
	}

	// Without pending topics, the relay sends the envelope to all topics that it routes to.
	if target.partial {
		q.Pending = target.topics
	}
	return q, true
}

// waitDelivered blocks until all envelopes that were read are known to be delivered. last is the
// latest timestamp of them, and seen is the cluster time of the read.
//
// A timestamp is set when a transaction inserts the document, but the watcher follows the commits.
// An envelope older than the life of a transaction was committed before the watcher's position. For
// a younger envelope, the watcher must have passed the time of the read.
func (u *replayRun) waitDelivered(ctx context.Context, last, seen bson.Timestamp) (err error) {
	lastMove := time.Now()
	lastPassed := u.passed
	for {
		// The position may still be zero, and must not become negative.
		margin := uint32(min(u.margin/time.Second, time.Duration(u.passed.T)))
		settled := bson.Timestamp{T: u.passed.T - margin, I: u.passed.I}
		if settled.After(last) || u.passed.After(seen) {
			return nil
		}

		// There is no pause before the first look, nor while the watcher moves.
		if time.Since(lastMove) > positionPoll {
			u.reportProgress()
			if err := retry.Sleep(ctx, positionPoll); err != nil {
				return err
			}
		}
		if u.passed, err = u.replays.op.lowestPosition(ctx); err != nil {
			return err
		}

		if u.passed != lastPassed {
			lastMove = time.Now()
			lastPassed = u.passed
		}
		if time.Since(lastMove) > u.options.Patience {
			position := time.Unix(int64(u.passed.T), 0).UTC().Format(time.RFC3339)
			return fmt.Errorf("%w: watcher %s is at %s, so later events may not be delivered yet; "+
				"run outrelay status, then continue with outrelay replay --resume %s",
				ErrReplayStalled, u.replays.op.Watcher, position, u.doc.ID)
		}
	}
}

// writeBatch queues the envelopes in part and moves the stored cursor, in one transaction. It
// blocks until the rate and the number of queued envelopes allow it.
func (u *replayRun) writeBatch(ctx context.Context, ns string, part []queuedEnvelope, to replayCursor) error {
	// The rate is respected before the write, so an interruption leaves no debt.
	if err := u.waitForRoom(ctx, int64(len(part))); err != nil {
		return err
	}

	b := replayBatch{Name: uuid.NewString(), NS: ns, From: u.doc.Cursor, To: to}
	for _, q := range part {
		b.Envelopes = append(b.Envelopes, q.requeue)
		b.Skipped += q.skipped
	}
	n, held, err := u.replays.stored.Queue(ctx, u.doc.ID, u.replays.op.Watcher, b)
	if err != nil {
		return err
	}

	u.doc.Cursor = to
	u.doc.Queued += n
	u.doc.Skipped += b.Skipped
	u.queued += n
	u.room -= n
	u.openCounts[ns] += n
	u.reportProgress()

	// The owner cannot renew during a transaction. So transactions are short, and the pause after
	// each is as long.
	switch {
	case held > slowWrite:
		u.batchSize = max(u.batchSize/2, minReplayBatch)
	case held < fastWrite:
		u.batchSize = min(u.batchSize*2, maxReplayBatch)
	}
	return retry.Sleep(ctx, min(held, maxPause))
}

// waitForRoom blocks until the rate allows further envelopes and, with Wait, until n more envelopes
// may be queued.
func (u *replayRun) waitForRoom(ctx context.Context, n int64) error {
	// The rate counts from the beginning, so the run catches up after a slow batch.
	if u.doc.Rate > 0 {
		due := u.began.Add(time.Duration(float64(u.queued) / u.doc.Rate * float64(time.Second)))
		if err := retry.Sleep(ctx, time.Until(due)); err != nil {
			return err
		}
	}

	for u.options.Wait && u.room < n {
		open, err := u.countOutstanding(ctx)
		if err != nil {
			return err
		}
		u.room = u.options.Open - open
		if u.room >= n {
			break
		}

		u.reportProgress()
		if err := retry.Sleep(ctx, replayPoll); err != nil {
			return err
		}
	}
	return nil
}

// waitSent blocks until no envelope of the replay is queued.
func (u *replayRun) waitSent(ctx context.Context) error {
	for {
		open, err := u.countOutstanding(ctx)
		if err != nil || open == 0 {
			return err
		}

		u.reportProgress()
		if err := retry.Sleep(ctx, replayPoll); err != nil {
			return err
		}
	}
}

// countOutstanding counts the envelopes that are queued and not sent, in the collections that may
// contain any. In each collection it counts at most one more than may be queued.
func (u *replayRun) countOutstanding(ctx context.Context) (int64, error) {
	var total int64
	for ns := range u.openCounts {
		n, err := u.replays.stored.Outstanding(ctx, u.doc.ID, ns, u.options.Open+1)
		if err != nil {
			return 0, err
		}

		// The relay has sent all of this collection, so later counts leave it out.
		if n == 0 {
			delete(u.openCounts, ns)
			continue
		}
		u.openCounts[ns] = n
		total += n
	}
	return total, nil
}

func (u *replayRun) reportProgress() {
	if u.options.Progress == nil {
		return
	}

	info := newReplayInfo(u.doc)
	info.Outstanding = 0
	for _, n := range u.openCounts {
		info.Outstanding += max(n, 0)
	}
	u.options.Progress(info)
}

func parseStamp(raw bson.Raw) (ts bson.Timestamp) {
	ts.T, ts.I, _ = raw.Lookup("ts").TimestampOK()
	return ts
}
