package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
)

const (
	replaysAtOnce  = 2  // of one process; each reads and writes with its own pace
	replaysWaiting = 32 // for their turn
)

// replayRunner carries out the replays that were started at a desk of this process.
type replayRunner struct {
	mu      sync.Mutex
	queue   []replayJob
	wake    chan struct{}
	under   map[string]context.CancelFunc
	running bool
}

type replayJob struct {
	id string
	of Replayer
}

// ErrReplaysFull refuses a replay because many are waiting for their turn.
var ErrReplaysFull = errors.New("too many replays wait for their turn; cancel some or wait")

// add puts a replay in line. A process without a runner refuses: the command line can carry it out.
func (r *replayRunner) add(j replayJob) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.running:
		return fmt.Errorf("replay %s is ordered and nobody carries it out: %w; run outrelay replay --resume %s", j.id, ErrUnavailable, j.id)
	case len(r.queue) >= replaysWaiting:
		return ErrReplaysFull
	}
	if _, busy := r.under[j.id]; busy {
		return nil
	}
	for _, q := range r.queue {
		if q.id == j.id {
			return nil
		}
	}
	r.queue = append(r.queue, j)
	r.signal()
	return nil
}

func (r *replayRunner) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// full reports whether one more would be refused.
func (r *replayRunner) full() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running && len(r.queue) >= replaysWaiting {
		return ErrReplaysFull
	}
	return nil
}

// stop breaks off the one of that id, if it is carried out here.
func (r *replayRunner) stop(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cancel := r.under[id]; cancel != nil {
		cancel()
	}
}

// run carries replays out until ctx ends; those under way are broken off then, and can be resumed.
func (r *replayRunner) run(ctx context.Context, d *Deployment) {
	r.mu.Lock()
	r.running, r.wake, r.under = true, make(chan struct{}, 1), map[string]context.CancelFunc{}
	r.mu.Unlock()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running, r.queue = false, nil
	}()
	for {
		for {
			j, jctx, ok := r.next(ctx)
			if !ok {
				break
			}
			wg.Go(func() {
				defer r.done(j.id)
				_, err := j.of.Run(jctx, j.id, ReplayRun{Wait: true})
				if err != nil && jctx.Err() == nil {
					d.logger().Warn("a replay broke off; it can be resumed", "replay", j.id, "reason", err)
				}
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		}
	}
}

// next takes the first of the line if there is room for it.
func (r *replayRunner) next(ctx context.Context) (replayJob, context.Context, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 || len(r.under) >= replaysAtOnce || ctx.Err() != nil {
		return replayJob{}, nil, false
	}
	j := r.queue[0]
	r.queue = r.queue[1:]
	jctx, cancel := context.WithCancel(ctx)
	r.under[j.id] = cancel
	return j, jctx, true
}

func (r *replayRunner) done(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.under[id]()
	delete(r.under, id)
	r.signal()
}

// replayer is the hand on replays. Only the configuration's watcher has rules that say where its envelopes go.
func (k Desk) replayer() (Replayer, error) {
	switch {
	case k.d.Router == nil || k.d.Compacted == nil:
		return Replayer{}, fmt.Errorf("replays: %w", ErrUnavailable)
	case k.Watcher != k.d.Watcher:
		return Replayer{}, invalid("this process knows the rules of watcher %s only; ask one of watcher %s", k.d.Watcher, k.Watcher)
	}
	return Replayer{Operator: k.Operator, Router: k.d.Router, Compacted: k.d.Compacted}, nil
}

// ReplayPlan counts what an order finds now.
func (k Desk) ReplayPlan(ctx context.Context, o ReplayOrder) (ReplayPlan, error) {
	r, err := k.replayer()
	if err != nil {
		return ReplayPlan{}, err
	}
	return r.Plan(ctx, o)
}

// ReplayStart orders a replay, which [Deployment.Run] of this process carries out. One that breaks off, because the process
// ends, is resumed by [Desk.ReplayResume] or on the command line.
func (k Desk) ReplayStart(ctx context.Context, o ReplayOrder) (ReplayInfo, error) {
	r, err := k.replayer()
	if err != nil {
		return ReplayInfo{}, err
	}
	if err := k.d.replays.full(); err != nil {
		return ReplayInfo{}, err
	}
	info, err := r.Start(ctx, o)
	if err != nil {
		return info, err
	}
	return info, k.d.replays.add(replayJob{info.ID, r})
}

// ReplayResume has this process go on with a replay that broke off.
func (k Desk) ReplayResume(ctx context.Context, id string) (ReplayInfo, error) {
	r, err := k.replayer()
	if err != nil {
		return ReplayInfo{}, err
	}
	info, err := k.ReplayGet(ctx, id)
	switch {
	case err != nil:
		return info, err
	case info.State == store.ReplayCancelled:
		return info, fmt.Errorf("replay %s was cancelled: %w", id, store.ErrReplayMoved)
	}
	if err := k.d.replays.add(replayJob{id, r}); err != nil {
		return info, err
	}
	return info, k.note(ctx, "replay_resumed", bson.D{{Key: "replay", Value: id}})
}

// ReplayList are the latest replays of the watcher.
func (k Desk) ReplayList(ctx context.Context, limit int) ([]ReplayInfo, error) {
	list, err := Replayer{Operator: k.Operator}.List(ctx, int64(pageSize(limit)))
	if list == nil {
		list = []ReplayInfo{}
	}
	return list, err
}

// ReplayGet is one replay, with how much of it is queued and not sent yet.
func (k Desk) ReplayGet(ctx context.Context, id string) (ReplayInfo, error) {
	replays := store.NewReplays(k.State)
	doc, err := replays.Get(ctx, id)
	if err != nil {
		return ReplayInfo{}, err
	}
	out := info(doc)
	if doc.Watcher != k.Watcher {
		return ReplayInfo{}, fmt.Errorf("replay %s of watcher %s: %w", id, k.Watcher, store.ErrNotFound)
	}
	out.Outstanding = 0
	for _, ns := range doc.Query.Collections {
		n, err := replays.Outstanding(ctx, id, ns, DefaultReplayOpen+1)
		if err != nil {
			return out, err
		}
		out.Outstanding += n
	}
	return out, nil
}

// ReplayCancel ends a replay that is not done: what it has queued is sent, the rest is not.
func (k Desk) ReplayCancel(ctx context.Context, id string) error {
	if _, err := k.ReplayGet(ctx, id); err != nil {
		return err
	}
	if err := (Replayer{Operator: k.Operator}).Cancel(ctx, id); err != nil {
		return err
	}
	k.d.replays.stop(id)
	return nil
}

// DeadShow is [Operator.DeadShow] by the rules of what is never shown. It writes an entry into the events log when it shows
// a payload.
func (k Desk) DeadShow(ctx context.Context, ref DeadRef, payload bool) (DeadLetter, error) {
	d, err := k.Operator.DeadShow(ctx, ref, payload)
	if err != nil {
		return d, err
	}
	d.Envelope = k.d.Redact.envelope(d.Envelope, payload)
	if payload {
		err = k.note(ctx, "payload_shown", bson.D{{Key: "collection", Value: d.Collection}, {Key: "id", Value: d.ID}, {Key: "delivery", Value: d.Delivery}})
	}
	if err != nil {
		return DeadLetter{}, fmt.Errorf("the payload is not shown, because that cannot be written down: %w", err)
	}
	return d, nil
}

// DeadEdit is [Operator.DeadEdit]. It refuses a value that stands for a hidden one: it would replace the hidden value.
func (k Desk) DeadEdit(ctx context.Context, ref DeadRef, e DeadEdit, opts DeadOptions) (DeadEdited, error) {
	if len(k.d.Redact.paths) > 0 && strings.Contains(string(e.Payload), redacted) {
		return DeadEdited{}, invalid("the new payload holds %s, which stands for a hidden value: write the value itself, or leave the payload as it is", redacted)
	}
	for _, h := range e.Headers {
		if k.d.Redact.header(h[0]) && h[1] == redacted {
			return DeadEdited{}, invalid("the new header %s is %s, which stands for a hidden value: write the value itself, or leave the headers as they are", h[0], redacted)
		}
	}
	return k.Operator.DeadEdit(ctx, ref, e, opts)
}
