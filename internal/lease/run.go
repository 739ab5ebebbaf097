package lease

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

// Checkpoint is what a renewal writes besides the lease.
type Checkpoint struct {
	// Position is written if it is beyond the one written last; a zero one, or one that went back, leaves that as it is.
	Position resume.Position
	// Offsets are merged over those held, per partition: an entry below 0, or missing, keeps what is stored.
	Offsets map[string][]int64
	// Stats is shown by `outrelay status`; nil leaves it as it is.
	Stats bson.D
}

// Run renews until ctx ends, which is not the end of the lease (Release is), or until the lease is lost; then it returns
// [ErrLeaseLost]. After a Release it returns nil. A position that moved is written every CheckpointEvery, and whatever
// there is at least every Renew. While the server cannot be reached it goes on trying: work is suspended meanwhile, and
// the lease is lost only when the document says so (N2).
func (h *Held) Run(ctx context.Context) error {
	defer h.lease.watches.Wait()
	h.lease.cfg.Metrics.CheckpointAge.From(func() float64 { return (h.lease.clock() - time.Duration(h.lastCheckpoint.Load())).Seconds() })
	defer h.lease.cfg.Metrics.CheckpointAge.From(nil)
	back := retry.Policy{Base: h.lease.cfg.CheckpointEvery / 2, Cap: h.lease.cfg.Renew}.Start()
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-h.ctx.Done():
			return h.endError()
		case <-t.C:
		}
		err := h.renewIfDue(ctx)
		switch {
		case h.ctx.Err() != nil:
			return h.endError()
		case err == nil:
			back.Reset()
			t.Reset(h.lease.cfg.CheckpointEvery)
		default:
			wait := back.Next()
			h.logFailure(err, back.Attempts())
			t.Reset(wait)
		}
	}
}

func (h *Held) endError() error {
	if err := context.Cause(h.ctx); !errors.Is(err, ErrReleased) {
		return err
	}
	return nil
}

// logFailure logs the first of a series of failures, and once the suspension that may follow.
func (h *Held) logFailure(err error, n int) {
	if n == 1 {
		h.log.Warn("renewing the lease", "error", err, "advice", adviceFor(err))
	}
	if !h.Valid() && h.suspended.CompareAndSwap(false, true) {
		h.lease.cfg.Metrics.LeaseSuspended.Set(1)
		h.log.Warn("the lease could not be renewed in time: work is suspended until it can", "error", err)
	}
}

// renewIfDue renews if it is time to.
func (h *Held) renewIfDue(ctx context.Context) error {
	if err := h.acquireTurn(ctx); err != nil {
		return err
	}
	defer h.releaseTurn()
	c := h.currentCheckpoint()
	due := h.lease.clock()-time.Duration(h.lastWrite.Load()) >= h.lease.cfg.Renew || !h.Valid()
	if !due && c.Position.Compare(h.savedPosition) <= 0 {
		return nil
	}
	return h.writeCheckpoint(ctx, c, nil)
}

// currentCheckpoint is what the source says now.
func (h *Held) currentCheckpoint() Checkpoint {
	if f := h.source.Load(); f != nil {
		return (*f)()
	}
	return Checkpoint{}
}

// writeCheckpoint writes c, and fields, with a renewal. Call it with the turn taken.
func (h *Held) writeCheckpoint(ctx context.Context, c Checkpoint, fields bson.D) error {
	start := h.lease.clock()
	own, moved := h.changedFields(c)
	if moved {
		crash.At("before-checkpoint")
	}
	own = append(own, fields...)
	offsets := slices.ContainsFunc(own, func(e bson.E) bool { return e.Key == "offsets" })
	if offsets {
		h.storedOffsets = nil // unknown if the write fails
	}
	v, err := h.writeOwnerFields(ctx, own, false)
	if err != nil {
		return err
	}
	if offsets {
		h.storedOffsets = h.offsets
	}
	took := h.lease.clock() - start
	h.lease.cfg.Metrics.RenewSeconds.Observe(took, 1)
	if moved {
		h.recordCheckpoint(c.Position, start)
		h.lease.cfg.Metrics.CheckpointSeconds.Observe(took, 1)
		crash.At("after-checkpoint")
	}
	if h.suspended.CompareAndSwap(true, false) {
		h.lease.cfg.Metrics.LeaseSuspended.Set(0)
		h.log.Info("the lease is renewed again: work goes on")
	}
	h.obeyControl(ctx, v)
	return nil
}

// recordCheckpoint notes that p was written.
func (h *Held) recordCheckpoint(p resume.Position, at time.Duration) {
	h.savedPosition = p.Clone()
	h.lastCheckpoint.Store(int64(at))
	h.lease.cfg.Metrics.Checkpoints.Inc()
}

// changedFields lists what c changes. A position never goes back (I5): the stream that offers such a one is at fault, not the
// document.
func (h *Held) changedFields(c Checkpoint) (bson.D, bool) {
	var set bson.D
	moved := false
	switch c.Position.Compare(h.savedPosition) {
	case 1:
		moved = true
		set = append(set, bson.E{Key: "token", Value: lit(c.Position.Token)}, bson.E{Key: "clusterTime", Value: lit(c.Position.ClusterTime)})
	case -1:
		if !c.Position.IsZero() {
			h.log.Error("a checkpoint behind the stored one was refused", "offered", c.Position.Token.Data(), "stored", h.savedPosition.Token.Data())
		}
	}
	if len(c.Offsets) > 0 {
		h.offsets = mergeOffsets(h.offsets, c.Offsets)
		if !maps.EqualFunc(h.offsets, h.storedOffsets, slices.Equal) { // of 60,000 partitions they take a megabyte
			set = append(set, bson.E{Key: "offsets", Value: lit(sortedOffsets(h.offsets))})
		}
	}
	if c.Stats != nil {
		set = append(set, bson.E{Key: "stats", Value: lit(c.Stats)})
	}
	return set, moved
}

// obeyControl looks at what operators ask, as the renewal returned it, and passes on what is new.
func (h *Held) obeyControl(ctx context.Context, v ownerFields) {
	c := v.Control
	if h.lease.cfg.Paused {
		return
	}
	switch pinned := c.Pin != "" && c.Pin != h.lease.cfg.Node; {
	case c.Paused:
		c.Yield = "paused by an operator"
	case c.stepsDown(h.lease.cfg.Node, v.RenewedAt):
		c.Yield = "an operator asked this node to step down"
	case pinned && h.followsPin(ctx, c.Pin):
		c.Yield = "pinned to node " + c.Pin
	case !pinned && h.Lapsed() != "":
		h.lapsedPin.Store(new(string))
	}
	if c.equal(h.lastControl) {
		return
	}
	h.lastControl = c
	if c.Yield != "" {
		h.log.Info("asked to hand the watcher over", "reason", c.Yield)
	}
	select { // the latest replaces one that nobody took
	case <-h.control:
	default:
	}
	h.control <- c
}

// followsPin reports whether a pin to another node is to be obeyed: only while that node lives (N6).
func (h *Held) followsPin(ctx context.Context, pin string) bool {
	if h.lease.cfg.NodeAlive == nil {
		return pin != h.Lapsed()
	}
	call, cancel := context.WithTimeout(ctx, h.lease.cfg.CallTimeout)
	defer cancel()
	if h.lease.cfg.NodeAlive(call, pin) {
		h.lapsedPin.Store(new(string))
		return true
	}
	if h.Lapsed() != pin {
		h.lapsedPin.Store(&pin)
		h.log.Error("ALARM: the watcher is pinned to a node that gives no sign of life; it stays here", "pin", pin, "advice", "start that node, or end the pin")
	}
	return false
}
