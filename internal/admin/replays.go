package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
)

const (
	maxConcurrentReplays = 2  // of one process; each reads and writes at its own rate
	maxQueuedReplays     = 32 // replays that wait until another one ends
)

// replayRunner runs the replays that were started at a desk of this process.
type replayRunner struct {
	mu      sync.Mutex
	queue   []replayJob
	wake    chan struct{}
	active  map[string]context.CancelFunc // by the id of the replay
	running bool                          // runJobs is running
}

type replayJob struct {
	id       string
	replayer Replayer
}

// ErrReplaysFull is returned for a replay if the queue of replays is full.
var ErrReplaysFull = errors.New("too many replays are queued; cancel some or wait")

// enqueueJob queues a replay, unless it is queued or active already. It returns an error if the
// queue is full, or if this process does not run replays. The command line can then run it.
func (r *replayRunner) enqueueJob(j replayJob) error {
	r.mu.Lock()
	defer r.mu.Unlock()

	if !r.running {
		return fmt.Errorf("replay %s is ordered, but this process does not run replays: %w; run outrelay replay --resume %s",
			j.id, ErrUnavailable, j.id)
	}
	if len(r.queue) >= maxQueuedReplays {
		return ErrReplaysFull
	}

	if _, active := r.active[j.id]; active {
		return nil
	}
	for _, q := range r.queue {
		if q.id == j.id {
			return nil
		}
	}

	r.queue = append(r.queue, j)
	r.wakeRunner()
	return nil
}

func (r *replayRunner) wakeRunner() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// checkCapacity returns [ErrReplaysFull] if the queue is full.
func (r *replayRunner) checkCapacity() error {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.running && len(r.queue) >= maxQueuedReplays {
		return ErrReplaysFull
	}
	return nil
}

// cancelJob stops the replay with this id if it is active in this process.
func (r *replayRunner) cancelJob(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if cancel := r.active[id]; cancel != nil {
		cancel()
	}
}

// runJobs runs replays until ctx ends. It then interrupts the active replays, which can be resumed,
// and waits for them.
func (r *replayRunner) runJobs(ctx context.Context, d *Deployment) {
	r.mu.Lock()
	r.running = true
	r.wake = make(chan struct{}, 1)
	r.active = map[string]context.CancelFunc{}
	r.mu.Unlock()

	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running = false
		r.queue = nil
	}()

	for {
		for {
			job, jobCtx, ok := r.startNextJob(ctx)
			if !ok {
				break
			}
			wg.Go(func() {
				defer r.finishJob(job.id)
				_, err := job.replayer.Run(jobCtx, job.id, ReplayRun{Wait: true})
				if err != nil && jobCtx.Err() == nil {
					d.logger().Warn("replay is interrupted; it can be resumed", "replay", job.id, "reason", err)
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

// startNextJob removes the first replay from the queue, and returns it with its context. It returns
// false if the queue is empty, or if enough replays are active.
func (r *replayRunner) startNextJob(ctx context.Context) (replayJob, context.Context, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if len(r.queue) == 0 || len(r.active) >= maxConcurrentReplays || ctx.Err() != nil {
		return replayJob{}, nil, false
	}
	job := r.queue[0]
	r.queue = r.queue[1:]

	jobCtx, cancel := context.WithCancel(ctx)
	r.active[job.id] = cancel
	return job, jobCtx, true
}

func (r *replayRunner) finishJob(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.active[id]()
	delete(r.active, id)
	r.wakeRunner()
}

// newReplayer returns a Replayer for the desk's watcher. That must be the configured watcher,
// because this process knows only its routing rules.
func (k Desk) newReplayer() (Replayer, error) {
	if k.d.Router == nil || k.d.Compacted == nil {
		return Replayer{}, fmt.Errorf("replays: %w", ErrUnavailable)
	}
	if k.Watcher != k.d.Watcher {
		return Replayer{}, invalidRequest("this process has the routing rules of watcher %s only; "+
			"use a process of watcher %s",
			k.d.Watcher, k.Watcher)
	}
	return Replayer{Operator: k.Operator, Router: k.d.Router, Compacted: k.d.Compacted}, nil
}

// ReplayPlan counts the envelopes that an order matches now.
func (k Desk) ReplayPlan(ctx context.Context, o ReplayOrder) (ReplayPlan, error) {
	r, err := k.newReplayer()
	if err != nil {
		return ReplayPlan{}, err
	}
	return r.Plan(ctx, o)
}

// ReplayStart orders a replay, which [Deployment.Run] of this process runs. If it is interrupted
// because the process ends, [Desk.ReplayResume] or the command line can resume it.
func (k Desk) ReplayStart(ctx context.Context, o ReplayOrder) (ReplayInfo, error) {
	r, err := k.newReplayer()
	if err != nil {
		return ReplayInfo{}, err
	}
	if err := k.d.replays.checkCapacity(); err != nil {
		return ReplayInfo{}, err
	}

	info, err := r.Start(ctx, o)
	if err != nil {
		return info, err
	}
	return info, k.d.replays.enqueueJob(replayJob{info.ID, r})
}

// ReplayResume continues an interrupted replay in this process.
func (k Desk) ReplayResume(ctx context.Context, id string) (ReplayInfo, error) {
	r, err := k.newReplayer()
	if err != nil {
		return ReplayInfo{}, err
	}
	info, err := k.ReplayGet(ctx, id)
	if err != nil {
		return info, err
	}
	if info.State == ReplayCancelled {
		return info, fmt.Errorf("replay %s was cancelled: %w", id, ErrReplayMoved)
	}

	if err := k.d.replays.enqueueJob(replayJob{id, r}); err != nil {
		return info, err
	}
	return info, k.logAction(ctx, "replay_resumed", bson.D{{Key: "replay", Value: id}})
}

// ReplayList returns the latest replays of the watcher.
func (k Desk) ReplayList(ctx context.Context, limit int) ([]ReplayInfo, error) {
	list, err := Replayer{Operator: k.Operator}.List(ctx, int64(pageSize(limit)))
	if list == nil {
		list = []ReplayInfo{}
	}
	return list, err
}

// ReplayGet returns one replay with the number of envelopes that are queued and not sent yet.
func (k Desk) ReplayGet(ctx context.Context, id string) (ReplayInfo, error) {
	replays := newReplayStore(k.State)
	doc, err := replays.Get(ctx, id)
	if err != nil {
		return ReplayInfo{}, err
	}
	if doc.Watcher != k.Watcher {
		return ReplayInfo{}, fmt.Errorf("replay %s of watcher %s: %w", id, k.Watcher, mongodb.ErrNotFound)
	}

	info := newReplayInfo(doc)
	info.Outstanding = 0
	for _, ns := range doc.Query.Collections {
		n, err := replays.Outstanding(ctx, id, ns, DefaultReplayOpen+1)
		if err != nil {
			return info, err
		}
		info.Outstanding += n
	}
	return info, nil
}

// ReplayCancel ends a replay that is not done. Envelopes that are already queued are still sent.
func (k Desk) ReplayCancel(ctx context.Context, id string) error {
	if _, err := k.ReplayGet(ctx, id); err != nil {
		return err
	}
	if err := (Replayer{Operator: k.Operator}).Cancel(ctx, id); err != nil {
		return err
	}
	k.d.replays.cancelJob(id)
	return nil
}

// DeadShow is [Operator.DeadShow] with the redaction rules applied. If it shows a payload, it
// writes an entry to the events log first, and returns an error if that fails.
func (k Desk) DeadShow(ctx context.Context, ref DeadRef, payload bool) (DeadLetter, error) {
	d, err := k.Operator.DeadShow(ctx, ref, payload)
	if err != nil {
		return d, err
	}

	d.Envelope = k.d.Redact.redactEnvelope(d.Envelope, payload)
	if payload {
		err = k.logAction(ctx, "payload_shown", bson.D{
			{Key: "collection", Value: d.Collection},
			{Key: "id", Value: d.ID},
			{Key: "delivery", Value: d.Delivery},
		})
	}
	if err != nil {
		return DeadLetter{}, fmt.Errorf("the payload is not shown, because the events log cannot be written: %w", err)
	}
	return d, nil
}

// DeadEdit is [Operator.DeadEdit]. It rejects the placeholder of a hidden value, which would
// replace the value itself.
func (k Desk) DeadEdit(ctx context.Context, ref DeadRef, e DeadEdit, opts DeadOptions) (DeadEdited, error) {
	if len(k.d.Redact.paths) > 0 && strings.Contains(string(e.Payload), placeholder) {
		return DeadEdited{}, invalidRequest("the new payload contains %s, which stands for a hidden value: "+
			"write the value itself, or leave the payload as it is", placeholder)
	}
	for _, h := range e.Headers {
		if k.d.Redact.hidesHeader(h[0]) && h[1] == placeholder {
			return DeadEdited{}, invalidRequest("the new header %s is %s, which stands for a hidden value: "+
				"write the value itself, or leave the headers as they are", h[0], placeholder)
		}
	}
	return k.Operator.DeadEdit(ctx, ref, e, opts)
}
