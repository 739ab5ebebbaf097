package admin

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// Bounds of a replay.
const (
	replayBatch       = 500 // envelopes of one transaction at most, during which the owner cannot renew
	leastBatch        = 50
	replayAhead       = 5000                  // envelopes of one read, without their payload
	shortWrite        = 50 * time.Millisecond // a transaction that is over sooner may be larger
	longWrite         = 150 * time.Millisecond
	DefaultReplayOpen = 10_000 // envelopes that may be queued and not sent
	replayPoll        = 500 * time.Millisecond
	positionPoll      = 100 * time.Millisecond
	defaultPatience   = 30 * time.Second
	maxBreath         = 100 * time.Millisecond // between two transactions
)

// ErrReplayStalled says that the watcher does not move, so what was committed lately may not be delivered yet.
var ErrReplayStalled = errors.New("the watcher does not move")

// ReplayRun is how a replay is carried out.
type ReplayRun struct {
	// Wait keeps at most Open envelopes queued that the relay has not sent, and returns when all are sent. Without it
	// everything is queued as fast as Rate allows.
	Wait bool
	Open int64 // defaults to DefaultReplayOpen
	// Patience is how long the watcher may stand still while it is waited for. Defaults to 30 s.
	Patience time.Duration
	// Progress, if not nil, is called after each batch and while it waits.
	Progress func(ReplayInfo)
}

// Run carries a replay out from where it stands, and returns when everything is queued and, with Wait, sent. It may be
// broken off at any moment, by a crash too, and run again: cursor and envelopes move in the same transaction. Of two that
// run the same replay one ends with [store.ErrReplayMoved].
//
// What was committed within the margin of a transaction's life waits for the watcher to have passed it: a stamp alone does
// not tell whether an envelope was delivered. A watcher that does not move is an [ErrReplayStalled].
func (r Replayer) Run(ctx context.Context, id string, o ReplayRun) (ReplayInfo, error) {
	replays := store.NewReplays(r.State)
	doc, err := replays.Get(ctx, id)
	if err != nil {
		return ReplayInfo{}, err
	}
	if doc.Watcher != r.Watcher {
		return info(doc), fmt.Errorf("replay %s is of watcher %s, not of %s", id, doc.Watcher, r.Watcher)
	}
	if doc.State == store.ReplayCancelled {
		return info(doc), fmt.Errorf("replay %s was cancelled; order a new one", id)
	}
	if o.Open <= 0 {
		o.Open = DefaultReplayOpen
	}
	if o.Patience <= 0 {
		o.Patience = defaultPatience
	}
	u := &replayRun{r: r, o: o, replays: replays, doc: doc, at: doc.Cursor, open: map[string]int64{}, room: -1, size: replayBatch / 4}
	for i, ns := range doc.Query.Collections {
		if i <= doc.Cursor.At {
			u.open[ns] = -1 // an earlier run may have left some there
		}
	}
	if doc.State == store.ReplayRunning {
		if err := u.queue(ctx); err != nil {
			return info(u.doc), err
		}
	}
	if o.Wait {
		if err := u.sent(ctx); err != nil {
			return info(u.doc), err
		}
	}
	out, err := replays.Get(ctx, id)
	i := info(out)
	if o.Wait {
		i.Outstanding = 0
	}
	return i, err
}

// replayRun is one run.
type replayRun struct {
	r       Replayer
	o       ReplayRun
	replays *store.Replays
	doc     store.Replay // its cursor is the stored one
	at      store.ReplayCursor
	skipped int64 // read behind the latest envelope to queue and left out

	margin time.Duration
	passed bson.Timestamp // the watcher's position, when it was asked last
	skew   time.Duration  // of this clock against the server's

	began time.Time
	size  int              // of the next batch
	n     int64            // queued by this run
	open  map[string]int64 // collections that may hold queued envelopes, with the latest count; −1: not counted
	room  int64            // how many may be queued before the next count; below 0: count now
}

func (u *replayRun) queue(ctx context.Context) error {
	u.margin = store.Margin(ctx, u.r.State.Client())
	now, err := store.ServerTime(ctx, u.r.State.Client())
	if err != nil {
		return err
	}
	u.skew, u.began = time.Until(now), time.Now()
	for u.at.At < len(u.doc.Query.Collections) {
		more, err := u.step(ctx)
		if err != nil {
			return err
		}
		if !more {
			u.at = store.ReplayCursor{At: u.at.At + 1}
		}
	}
	if err := u.replays.End(ctx, u.doc.ID, store.ReplayDone, u.skipped); err != nil {
		return err
	}
	u.doc.State = store.ReplayDone
	return u.r.note(ctx, "replay_queued", bson.D{{Key: "replay", Value: u.doc.ID}, {Key: "queued", Value: u.doc.Queued}, {Key: "skipped", Value: u.doc.Skipped + u.skipped}})
}

// step reads the next envelopes of one collection and queues them; false at its end. Much is read at a time, because what
// is young waits for the watcher once for each read.
func (u *replayRun) step(ctx context.Context) (more bool, err error) {
	ns := u.doc.Query.Collections[u.at.At]
	coll, err := store.Outboxed(u.r.State.Client(), ns)
	if err != nil {
		return false, err
	}
	ahead := replayAhead
	if u.doc.Rate > 0 {
		ahead = int(min(float64(ahead), math.Ceil(5*u.doc.Rate)))
	}
	docs, seen, err := store.ReadReplay(ctx, coll, u.doc.Query, u.at.TS, ahead)
	if err != nil || len(docs) == 0 {
		return false, err
	}
	last := stamp(docs[len(docs)-1])
	if err := u.delivered(ctx, last, seen); err != nil {
		return false, err
	}
	list := u.requeues(docs)
	for len(list) > 0 {
		part := list[:min(len(list), u.batch())]
		list = list[len(part):]
		to := store.ReplayCursor{At: u.at.At, TS: part[len(part)-1].TS}
		if len(list) > 0 && list[0].TS == to.TS {
			to = u.doc.Cursor // copied documents may share a stamp: the cursor moves with the last of them
		}
		if err := u.write(ctx, ns, part, to); err != nil {
			return false, err
		}
	}
	u.at.TS = last
	return true, nil
}

// queueing is an envelope to queue.
type queueing struct {
	store.Requeue
	skipped int64 // that were read before it and left out
}

func (u *replayRun) requeues(docs []bson.Raw) []queueing {
	list := make([]queueing, 0, len(docs))
	for _, raw := range docs {
		if q, ok := u.requeue(raw); ok {
			list = append(list, queueing{q, u.skipped})
			u.skipped = 0
		} else {
			u.skipped++
		}
	}
	return list
}

// batch is how many envelopes a transaction takes: as many as it has the time for, and at a low rate a fifth of a second's.
func (u *replayRun) batch() int {
	size := float64(u.size)
	if u.doc.Rate > 0 {
		size = min(size, math.Ceil(u.doc.Rate/5))
	}
	return int(min(int64(size), u.o.Open))
}

// requeue makes an envelope's order to be sent again, unless it cannot be: then a replay would only make a dead letter.
func (u *replayRun) requeue(raw bson.Raw) (store.Requeue, bool) {
	var v event.View
	if event.Parse(raw, &v) != nil {
		return store.Requeue{}, false
	}
	if v.HasExpiresAt && v.ExpiresAt <= time.Now().Add(u.skew).UnixMilli() {
		return store.Requeue{}, false
	}
	to := u.r.route(&v, u.doc.Query.Topics)
	if len(to.topics) == 0 {
		return store.Requeue{}, false
	}
	q := store.Requeue{ID: raw.Lookup("_id"), TS: v.TS}
	if v.Key == nil {
		q.Key = string(v.OrderingKey())
	}
	if to.part {
		q.Pending = to.topics
	}
	return q, true
}

// delivered waits until what was read is known to be delivered. A stamp is taken when a transaction inserts, and the
// watcher goes by commits: a stamp that is older than the life of a transaction was committed before the watcher's place;
// a younger one, when the watcher has passed the time at which it was seen.
func (u *replayRun) delivered(ctx context.Context, last, seen bson.Timestamp) (err error) {
	began := time.Now()
	for moved := u.passed; ; {
		old := bson.Timestamp{T: u.passed.T - uint32(min(u.margin/time.Second, time.Duration(u.passed.T))), I: u.passed.I}
		if old.After(last) || u.passed.After(seen) {
			return nil
		}
		if time.Since(began) > positionPoll {
			u.report()
			if err := retry.Sleep(ctx, positionPoll); err != nil {
				return err
			}
		}
		if u.passed, err = u.r.position(ctx); err != nil {
			return err
		}
		if u.passed != moved {
			began, moved = time.Now(), u.passed
		}
		if time.Since(began) > u.o.Patience {
			return fmt.Errorf("%w: watcher %s stands at %s, so what was committed since may not be delivered yet; see outrelay status, then go on with outrelay replay --resume %s",
				ErrReplayStalled, u.r.Watcher, time.Unix(int64(u.passed.T), 0).UTC().Format(time.RFC3339), u.doc.ID)
		}
	}
}

func (u *replayRun) write(ctx context.Context, ns string, part []queueing, to store.ReplayCursor) error {
	if err := u.pace(ctx, int64(len(part))); err != nil {
		return err
	}
	b := store.ReplayBatch{Name: uuid.NewString(), NS: ns, From: u.doc.Cursor, To: to}
	for _, q := range part {
		b.Envelopes = append(b.Envelopes, q.Requeue)
		b.Skipped += q.skipped
	}
	n, held, err := u.replays.Queue(ctx, u.doc.ID, u.r.Watcher, b)
	if err != nil {
		return err
	}
	u.doc.Cursor = to
	u.doc.Queued += n
	u.doc.Skipped += b.Skipped
	u.n, u.room = u.n+n, u.room-n
	u.open[ns] += n
	u.report()
	// While a transaction is open the owner cannot renew: it is kept short, and the owner gets as much time as the replay.
	switch {
	case held > longWrite:
		u.size = max(u.size/2, leastBatch)
	case held < shortWrite:
		u.size = min(u.size*2, replayBatch)
	}
	return retry.Sleep(ctx, min(held, maxBreath))
}

// pace waits for the rate, and for room in what may be queued at a time.
func (u *replayRun) pace(ctx context.Context, n int64) error {
	if u.doc.Rate > 0 {
		due := u.began.Add(time.Duration(float64(u.n) / u.doc.Rate * float64(time.Second)))
		if err := retry.Sleep(ctx, time.Until(due)); err != nil {
			return err
		}
	}
	for u.o.Wait && u.room < n {
		open, err := u.outstanding(ctx)
		if err != nil {
			return err
		}
		if u.room = u.o.Open - open; u.room >= n {
			break
		}
		u.report()
		if err := retry.Sleep(ctx, replayPoll); err != nil {
			return err
		}
	}
	return nil
}

// sent waits until nothing of the replay is queued any more.
func (u *replayRun) sent(ctx context.Context) error {
	for {
		open, err := u.outstanding(ctx)
		if err != nil || open == 0 {
			return err
		}
		u.report()
		if err := retry.Sleep(ctx, replayPoll); err != nil {
			return err
		}
	}
}

// outstanding counts what is queued and not sent, in the collections that may hold some; at most a little more than may
// be queued.
func (u *replayRun) outstanding(ctx context.Context) (int64, error) {
	var total int64
	for ns := range u.open {
		n, err := u.replays.Outstanding(ctx, u.doc.ID, ns, u.o.Open+1)
		if err != nil {
			return 0, err
		}
		if n == 0 {
			delete(u.open, ns)
			continue
		}
		u.open[ns] = n
		total += n
	}
	return total, nil
}

func (u *replayRun) report() {
	if u.o.Progress == nil {
		return
	}
	i := info(u.doc)
	i.Outstanding = 0
	for _, n := range u.open {
		i.Outstanding += max(n, 0)
	}
	u.o.Progress(i)
}

func stamp(raw bson.Raw) (ts bson.Timestamp) {
	ts.T, ts.I, _ = raw.Lookup("ts").TimestampOK()
	return ts
}
