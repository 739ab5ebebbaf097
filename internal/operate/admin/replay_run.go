package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Bounds of a replay.
const (
	maxReplayBatch    = 500    // envelopes in one transaction
	maxReplayRead     = 5000   // envelopes in one read, without their payload
	DefaultReplayOpen = 10_000 // envelopes that may be queued and not sent
	replayPoll        = 500 * time.Millisecond
	positionPoll      = 100 * time.Millisecond
	defaultPatience   = 30 * time.Second
)

// ErrReplayStalled is returned if the watcher does not move. Envelopes that were committed recently
// may not be delivered.
var ErrReplayStalled = errors.New("the watcher does not move")

// ReplayWait names the event for which a run of a replay waits.
type ReplayWait int

const (
	// WaitForNothing queues everything as fast as the rate of the replay allows.
	WaitForNothing ReplayWait = iota
	// WaitForRoom keeps at most ReplayRun.Open envelopes queued that the relay has not sent.
	WaitForRoom
	// WaitUntilSent is WaitForRoom, and Run returns when all envelopes are sent.
	WaitUntilSent
)

// ReplayRun are the options of a run of a replay.
type ReplayRun struct {
	Wait ReplayWait
	Open int64 // defaults to DefaultReplayOpen
	// Patience is how long Run waits for a watcher that does not move. Defaults to 30 s.
	Patience time.Duration
	// Progress, if not nil, is called after each batch and while Run waits.
	Progress func(ReplayInfo)
}

// Run continues a replay from its cursor, and returns when everything is queued and, with WaitUntilSent,
// sent. Run may be interrupted at any moment, also by a crash, and repeated: the cursor and the
// envelopes change in the same transaction. If two processes run the same replay, one of them gets
// [ErrReplayMoved].
//
// The timestamp alone does not show whether a recent envelope was delivered. So envelopes that are
// younger than the margin, the longest life of a transaction, have to wait until the watcher has
// passed them. If the watcher does not move, Run returns [ErrReplayStalled].
func (r Replays) Run(ctx context.Context, id string, order ReplayRun) (ReplayInfo, error) {
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
	if order.Open <= 0 {
		order.Open = DefaultReplayOpen
	}
	if order.Patience <= 0 {
		order.Patience = defaultPatience
	}

	run := &replayRun{
		replays: r,
		options: order,
		doc:     doc,
		cursor:  doc.Cursor,
		room:    -1,
	}

	if doc.State == ReplayRunning {
		if err := run.queueAll(ctx); err != nil {
			return newReplayInfo(run.doc), err
		}
	}
	if order.Wait == WaitUntilSent {
		if err := run.waitSent(ctx); err != nil {
			return newReplayInfo(run.doc), err
		}
	}

	doc, err = r.stored.Get(ctx, id)
	info := newReplayInfo(doc)
	if order.Wait == WaitUntilSent {
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

	began  time.Time
	queued int64 // by this run
	open   int64 // last count of queued envelopes that are not sent
	room   int64 // envelopes that may be queued before the next count; negative means count now
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
	after := u.cursor.TS
	if u.cursor.Place != "" {
		after = mongodb.Preceding(after)
	}
	query := u.replays.completeQuery(u.doc.Query)
	docs, seen, err := readEnvelopes(ctx, coll, query, after, limit)
	if err != nil || len(docs) == 0 {
		return false, err
	}
	last := parseStamp(docs[len(docs)-1])
	// The cursor would go back, and the replay would never end.
	if !last.After(after) {
		return false, fmt.Errorf("replaying %s: the envelope %s was read after the stamp %v, but has the stamp %v; "+
			"outrelay replay cancel %s ends the replay", ns, docs[len(docs)-1].Lookup("_id"), after, last, u.doc.ID)
	}
	if err := u.waitDelivered(ctx, last, seen); err != nil {
		return false, err
	}

	items, err := u.selectItems(ctx, ns, docs, query)
	if err != nil {
		return false, err
	}
	for len(items) > 0 {
		n := mongodb.CountFitting(items, u.nextBatchSize(), func(item *replayItem) int { return item.size })
		part := items[:n]
		items = items[n:]

		// Copied documents may share a timestamp.
		to := replayCursor{At: u.cursor.At, TS: part[n-1].stamp}
		if len(items) > 0 && items[0].stamp == to.TS {
			to.Place = placeOf(part[n-1].id)
		}
		if err := u.writeBatch(ctx, coll, part, to); err != nil {
			return false, err
		}
	}
	u.cursor = replayCursor{At: u.cursor.At, TS: last}
	return true, nil
}

// selectItems returns the items of the documents that can be sent again, in the order of stamp and place, and counts the others as
// skipped.
func (u *replayRun) selectItems(ctx context.Context, ns string, docs []bson.Raw, query replayQuery) ([]replayItem, error) {
	var items []replayItem
	var skipped int64
	now := time.Now().Add(u.skew).UnixMilli()
	for _, raw := range docs {
		// An earlier run has sent it.
		if parseStamp(raw) == u.cursor.TS && placeOf(raw.Lookup("_id")) <= u.cursor.Place {
			continue
		}
		it, ok := u.replays.newItem(ns, raw, query)
		// The replay of an expired envelope would only create a dead letter.
		if !ok || it.expiresAt > 0 && it.expiresAt <= now {
			skipped++
			continue
		}
		items = append(items, it)
	}
	slices.SortStableFunc(items, func(a, b replayItem) int {
		return cmp.Or(a.stamp.Compare(b.stamp), strings.Compare(placeOf(a.id), placeOf(b.id)))
	})

	var out []replayItem
	for part := range slices.Chunk(items, mongodb.MaxDocuments) {
		sent, more, err := u.replays.delivered(ctx, ns, part)
		if err != nil {
			return nil, err
		}
		skipped += more
		out = append(out, sent...)
	}
	u.skipped += skipped
	return out, nil
}

// nextBatchSize returns the number of envelopes of the next transaction. At a low rate it is
// limited to the envelopes of a fifth of a second.
func (u *replayRun) nextBatchSize() int {
	size := float64(maxReplayBatch)
	if u.doc.Rate > 0 {
		size = min(size, math.Ceil(u.doc.Rate/5))
	}
	return int(min(int64(size), u.options.Open))
}

// newEntries reads the envelopes of the items and returns them as waiting. It leaves out an envelope that was removed or replaced
// since it was selected.
func (u *replayRun) newEntries(ctx context.Context, coll *mongo.Collection, items []replayItem) ([]waiting.Entry, error) {
	ids := make([]bson.RawValue, len(items))
	for i := range items {
		ids[i] = items[i].id
	}
	whole := make(map[string]bson.Raw, len(items))
	err := mongodb.FetchMany(ctx, mongodb.Majority(coll), ids, func(raw bson.Raw) error {
		whole[mongodb.ValueKey(raw.Lookup("_id"))] = append(bson.Raw{}, raw...)
		return nil
	})
	if err != nil {
		return nil, err
	}

	now := time.Now().Add(u.skew)
	entries := make([]waiting.Entry, 0, len(items))
	for _, it := range items {
		raw := whole[mongodb.ValueKey(it.id)]
		var view envelope.View
		if raw == nil || parseStamp(raw) != it.stamp || u.replays.op.Mapping.Parse(raw, &view) != nil {
			continue
		}
		entry := waiting.Entry{
			Watcher:  u.replays.op.Watcher,
			NS:       mongodb.Namespace(coll),
			Raw:      raw,
			Delivery: u.doc.Delivery,
			Key:      string(view.OrderingKey()),
			Slot:     waiting.SlotOf(raw),
			// The envelopes of a key follow each other as they were first committed.
			Pos:      outboxes.PosAt(it.stamp),
			Reason:   waiting.Queued,
			Origin:   waiting.OriginReplay,
			NextAt:   now,
			ReplayOf: u.doc.ID,
		}
		// Without pending topics, the relay sends the envelope to all topics that it routes to.
		if it.partial {
			entry.Pending = it.topics
		}
		entries = append(entries, entry)
	}
	return entries, nil
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

// writeBatch queues the envelopes of the items and moves the stored cursor, in one transaction. It
// blocks until the rate and the number of queued envelopes allow it. An envelope that MongoDB rejects as a waiting envelope, because
// it would be too large, is skipped.
func (u *replayRun) writeBatch(ctx context.Context, coll *mongo.Collection, items []replayItem, next replayCursor) error {
	// The rate is respected before the write, so an interruption leaves no debt.
	if err := u.waitForRoom(ctx, int64(len(items))); err != nil {
		return err
	}
	entries, err := u.newEntries(ctx, coll, items)
	if err != nil {
		return err
	}
	err = u.queueBatch(ctx, entries, int64(len(items)), next)
	if err == nil || !mongodb.IsRejection(err) {
		return err
	}

	// The cursor moves with each part, so an interruption in between does no harm.
	if n := len(items); n > 1 {
		middle := replayCursor{At: next.At, TS: items[n/2-1].stamp, Place: placeOf(items[n/2-1].id)}
		if err := u.writeBatch(ctx, coll, items[:n/2], middle); err != nil {
			return err
		}
		return u.writeBatch(ctx, coll, items[n/2:], next)
	}
	return u.queueBatch(ctx, nil, 1, next)
}

// queueBatch writes a batch of entries that were made of so many items.
func (u *replayRun) queueBatch(ctx context.Context, entries []waiting.Entry, items int64, next replayCursor) error {
	n := int64(len(entries))
	batch := replayBatch{Name: uuid.NewString(), From: u.doc.Cursor, To: next, Entries: entries, Skipped: u.skipped + items - n}
	if err := u.replays.stored.Queue(ctx, u.doc.ID, batch); err != nil {
		return err
	}

	u.skipped = 0
	u.doc.Cursor = next
	u.doc.Queued += n
	u.doc.Skipped += batch.Skipped
	u.queued += n
	u.room -= n
	u.open += n
	u.reportProgress()
	return nil
}

// waitForRoom blocks until the rate allows further envelopes and, unless the run waits for nothing, until n more
// envelopes may be queued.
func (u *replayRun) waitForRoom(ctx context.Context, n int64) error {
	// The rate counts from the beginning, so the run catches up after a slow batch.
	if u.doc.Rate > 0 {
		due := u.began.Add(time.Duration(float64(u.queued) / u.doc.Rate * float64(time.Second)))
		if err := retry.Sleep(ctx, time.Until(due)); err != nil {
			return err
		}
	}

	for u.options.Wait != WaitForNothing && u.room < n {
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

// countOutstanding counts the envelopes that are queued and not sent, up to one more than may be queued.
func (u *replayRun) countOutstanding(ctx context.Context) (n int64, err error) {
	n, err = u.replays.stored.Outstanding(ctx, u.doc.ID, u.options.Open+1)
	u.open = n
	return n, err
}

func (u *replayRun) reportProgress() {
	if u.options.Progress == nil {
		return
	}

	info := newReplayInfo(u.doc)
	info.Outstanding = u.open
	u.options.Progress(info)
}

func parseStamp(raw bson.Raw) (ts bson.Timestamp) {
	ts.T, ts.I, _ = raw.Lookup("ts").TimestampOK()
	return ts
}
