package admin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"

	"go.mongodb.org/mongo-driver/v2/bson"
)

const (
	maxConcurrentReplays = 2  // of one process; each reads and writes at its own rate
	maxQueuedReplays     = 32 // replays that wait until another one ends
)

// replayRunner runs the replays that were started by operators of this process.
type replayRunner struct {
	mu      sync.Mutex
	queue   []replayJob
	wake    chan struct{}
	active  map[string]context.CancelFunc // by the id of the replay
	running bool                          // runJobs is running
}

type replayJob struct {
	id      string
	replays Replays
}

func newReplayRunner() *replayRunner {
	return &replayRunner{wake: make(chan struct{}, 1), active: map[string]context.CancelFunc{}}
}

// ErrReplaysFull is returned for a replay if the queue of replays is full.
var ErrReplaysFull = errors.New("too many replays are queued; cancel some or wait")

// enqueueJob queues a replay, unless it is queued or active already. It returns an error if the
// queue is full, or if this process does not run replays. The command line can then run it.
func (r *replayRunner) enqueueJob(j replayJob) error {
	r.mu.Lock()
	defer r.mu.Unlock()

	if !r.running {
		return fmt.Errorf("this process does not run replays: %w; run outrelay replay --resume %s", ErrUnavailable, j.id)
	}
	if len(r.queue) >= maxQueuedReplays {
		return r.describeFullLocked()
	}

	// An order that is active or queued would run twice.
	if _, active := r.active[j.id]; active {
		return nil
	}
	if slices.ContainsFunc(r.queue, func(queued replayJob) bool { return queued.id == j.id }) {
		return nil
	}

	r.queue = append(r.queue, j)
	r.wakeRunner()
	return nil
}

func (r *replayRunner) wakeRunner() {
	retry.Signal(r.wake)
}

// checkCapacity returns [ErrReplaysFull] if the queue is full.
func (r *replayRunner) checkCapacity() error {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.running && len(r.queue) >= maxQueuedReplays {
		return r.describeFullLocked()
	}
	return nil
}

// describeFullLocked returns [ErrReplaysFull] with the active replays, for which the others wait.
func (r *replayRunner) describeFullLocked() error {
	return fmt.Errorf("%w: %s active", ErrReplaysFull, strings.Join(slices.Sorted(maps.Keys(r.active)), ", "))
}

// cancelJob stops the replay with this id if it is active in this process, and removes it from the queue.
func (r *replayRunner) cancelJob(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.queue = slices.DeleteFunc(r.queue, func(job replayJob) bool { return job.id == id })
	if cancel := r.active[id]; cancel != nil {
		cancel()
	}
}

// begin reports whether the caller may run the jobs: another call may be running.
func (r *replayRunner) begin() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running {
		return false
	}
	r.running = true
	return true
}

// runJobs runs replays until ctx ends. It then interrupts the active replays, which can be resumed,
// and waits for them. It returns an error if another call runs.
func (r *replayRunner) runJobs(ctx context.Context, log *slog.Logger) error {
	if !r.begin() {
		return errors.New("another call of Run runs the replays of this operator")
	}

	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running = false
		r.queue = nil
	}()

	for {
		// Each wake-up may stand for several jobs, so all that have room are started.
		for {
			job, jobCtx, ok := r.startNextJob(ctx)
			if !ok {
				break
			}
			wg.Go(func() {
				defer r.finishJob(job.id)
				// A job does not wait until all envelopes are sent: others would wait for a topic that cannot be written. Only a
				// replay of more than DefaultReplayOpen envelopes waits for it. Then an operator has to cancel that replay.
				_, err := job.replays.Run(jobCtx, job.id, ReplayRun{Wait: WaitForRoom})
				if err != nil && jobCtx.Err() == nil {
					log.Warn("replay is interrupted; it can be resumed", "replay", job.id, "error", err)
				}
			})
		}

		select {
		case <-ctx.Done():
			return nil
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

// checkRouting returns an error if this process does not have the routing rules of the watcher.
func (r Replays) checkRouting() error {
	if r.op.Router == nil || r.op.Compacted == nil {
		return fmt.Errorf("replays: %w", ErrUnavailable)
	}
	if !r.op.isConfigured() {
		return invalidRequest("this process has the routing rules of watcher %s only; "+
			"use a process of watcher %s",
			r.op.configured, r.op.Watcher)
	}
	return nil
}

// Start orders a replay, which [Operator.Run] of this process runs. If it is interrupted because the
// process ends, [Replays.Resume] or the command line can resume it.
func (r Replays) Start(ctx context.Context, order ReplayOrder) (ReplayInfo, error) {
	if err := r.checkRouting(); err != nil {
		return ReplayInfo{}, err
	}
	if err := r.op.replays.checkCapacity(); err != nil {
		return ReplayInfo{}, err
	}

	plan, err := r.Plan(ctx, order)
	if err != nil {
		return ReplayInfo{}, err
	}
	info, err := r.Order(ctx, plan, order)
	if info.ID == "" {
		return info, err
	}

	// A stored replay runs, even if the audit log lacks it. A caller that gets only the error needs the id to follow or cancel it.
	if err = errors.Join(err, r.op.replays.enqueueJob(replayJob{info.ID, r})); err != nil {
		err = fmt.Errorf("replay %s is ordered: %w", info.ID, err)
	}
	return info, err
}

// Resume continues an interrupted replay in this process.
func (r Replays) Resume(ctx context.Context, id string) (ReplayInfo, error) {
	if err := r.checkRouting(); err != nil {
		return ReplayInfo{}, err
	}
	info, err := r.Get(ctx, id)
	if err != nil {
		return info, err
	}
	if info.State == replayCancelled {
		return info, fmt.Errorf("replay %s was cancelled: %w", id, ErrReplayMoved)
	}

	if err := r.op.replays.enqueueJob(replayJob{id, r}); err != nil {
		return info, err
	}
	return info, r.op.logAction(ctx, "replay_resumed", bson.D{{Key: "replay", Value: id}})
}

// List returns the latest replays of the watcher.
func (r Replays) List(ctx context.Context, limit int) ([]ReplayInfo, error) {
	list := []ReplayInfo{}
	docs, err := r.stored.List(ctx, r.op.Watcher, int64(pageSize(limit)))
	for _, d := range docs {
		list = append(list, newReplayInfo(d))
	}
	return list, err
}

// find returns the document of a replay of the watcher.
func (r Replays) find(ctx context.Context, id string) (storedReplay, error) {
	doc, err := r.stored.Get(ctx, id)
	if err == nil && doc.Watcher != r.op.Watcher {
		err = fmt.Errorf("replay %s of watcher %s: %w; outrelay replay list lists the replays", id, r.op.Watcher, mongodb.ErrNotFound)
	}
	return doc, err
}

// Get returns one replay with the number of envelopes that are queued and not sent yet.
func (r Replays) Get(ctx context.Context, id string) (ReplayInfo, error) {
	doc, err := r.find(ctx, id)
	if err != nil {
		return ReplayInfo{}, err
	}

	info := newReplayInfo(doc)
	info.Outstanding, err = r.stored.Outstanding(ctx, id, DefaultReplayOpen+1)
	return info, err
}

// Cancel ends a replay that is not done. Envelopes that are already queued are still sent.
func (r Replays) Cancel(ctx context.Context, id string) error {
	if _, err := r.find(ctx, id); err != nil {
		return err
	}
	if err := r.stored.End(ctx, id, replayCancelled, 0); err != nil {
		return err
	}

	r.op.replays.cancelJob(id)
	return r.op.logAction(ctx, "replay_cancelled", bson.D{{Key: "replay", Value: id}})
}
