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
	defer h.l.watchers.Wait()
	h.l.cfg.Metrics.CheckpointAge.From(func() float64 { return (h.l.clock() - time.Duration(h.saved.Load())).Seconds() })
	defer h.l.cfg.Metrics.CheckpointAge.From(nil)
	back := retry.Policy{Base: h.l.cfg.CheckpointEvery / 2, Cap: h.l.cfg.Renew}.Start()
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-h.ctx.Done():
			return h.end()
		case <-t.C:
		}
		err := h.tick(ctx)
		switch {
		case h.ctx.Err() != nil:
			return h.end()
		case err == nil:
			back.Reset()
			t.Reset(h.l.cfg.CheckpointEvery)
		default:
			wait := back.Next()
			h.complain(err, back.Attempts())
			t.Reset(wait)
		}
	}
}

func (h *Held) end() error {
	if err := context.Cause(h.ctx); !errors.Is(err, ErrReleased) {
		return err
	}
	return nil
}

// complain logs the first of a series of failures, and once the suspension that may follow.
func (h *Held) complain(err error, n int) {
	if n == 1 {
		h.log.Warn("renewing the lease", "error", err, "advice", advice(err))
	}
	if !h.Valid() && h.suspend.CompareAndSwap(false, true) {
		h.l.cfg.Metrics.LeaseSuspended.Set(1)
		h.log.Warn("the lease could not be renewed in time: work is suspended until it can", "error", err)
	}
}

// tick renews if it is time to.
func (h *Held) tick(ctx context.Context) error {
	if err := h.take(ctx); err != nil {
		return err
	}
	defer h.give()
	c := h.current()
	due := h.l.clock()-time.Duration(h.wrote.Load()) >= h.l.cfg.Renew || !h.Valid()
	if !due && c.Position.Compare(h.written) <= 0 {
		return nil
	}
	return h.checkpoint(ctx, c, nil)
}

// current is what the source says now.
func (h *Held) current() Checkpoint {
	if f := h.source.Load(); f != nil {
		return (*f)()
	}
	return Checkpoint{}
}

// checkpoint writes c, and fields, with a renewal. Call it with the turn taken.
func (h *Held) checkpoint(ctx context.Context, c Checkpoint, fields bson.D) error {
	start := h.l.clock()
	own, moved := h.fields(c)
	if moved {
		crash.At("before-checkpoint")
	}
	own = append(own, fields...)
	offsets := slices.ContainsFunc(own, func(e bson.E) bool { return e.Key == "offsets" })
	if offsets {
		h.stored = nil // unknown if the write fails
	}
	v, err := h.write(ctx, own, false)
	if err != nil {
		return err
	}
	if offsets {
		h.stored = h.offsets
	}
	took := h.l.clock() - start
	h.l.cfg.Metrics.RenewSeconds.Observe(took, 1)
	if moved {
		h.checkpointed(c.Position, start)
		h.l.cfg.Metrics.CheckpointSeconds.Observe(took, 1)
		crash.At("after-checkpoint")
	}
	if h.suspend.CompareAndSwap(true, false) {
		h.l.cfg.Metrics.LeaseSuspended.Set(0)
		h.log.Info("the lease is renewed again: work goes on")
	}
	h.obey(ctx, v)
	return nil
}

// checkpointed notes that p was written.
func (h *Held) checkpointed(p resume.Position, at time.Duration) {
	h.written = p.Clone()
	h.saved.Store(int64(at))
	h.l.cfg.Metrics.Checkpoints.Inc()
}

// fields lists what c changes. A position never goes back (I5): the stream that offers such a one is at fault, not the
// document.
func (h *Held) fields(c Checkpoint) (bson.D, bool) {
	var set bson.D
	moved := false
	switch c.Position.Compare(h.written) {
	case 1:
		moved = true
		set = append(set, bson.E{Key: "token", Value: lit(c.Position.Token)}, bson.E{Key: "clusterTime", Value: lit(c.Position.ClusterTime)})
	case -1:
		if !c.Position.IsZero() {
			h.log.Error("a checkpoint behind the stored one was refused", "offered", c.Position.Token.Data(), "stored", h.written.Token.Data())
		}
	}
	if len(c.Offsets) > 0 {
		h.offsets = mergeOffsets(h.offsets, c.Offsets)
		if !maps.EqualFunc(h.offsets, h.stored, slices.Equal) { // of 60,000 partitions they take a megabyte
			set = append(set, bson.E{Key: "offsets", Value: lit(fromMap(h.offsets))})
		}
	}
	if c.Stats != nil {
		set = append(set, bson.E{Key: "stats", Value: lit(c.Stats)})
	}
	return set, moved
}

// obey looks at what operators ask, as the renewal returned it, and passes on what is new.
func (h *Held) obey(ctx context.Context, v view) {
	c := v.Control
	if h.l.cfg.Paused {
		return
	}
	switch pinned := c.Pin != "" && c.Pin != h.l.cfg.Node; {
	case c.Paused:
		c.Yield = "paused by an operator"
	case c.stepsDown(h.l.cfg.Node, v.RenewedAt):
		c.Yield = "an operator asked this node to step down"
	case pinned && h.heeds(ctx, c.Pin):
		c.Yield = "pinned to node " + c.Pin
	case !pinned && h.Lapsed() != "":
		h.lapsed.Store(new(string))
	}
	if c.equal(h.told) {
		return
	}
	h.told = c
	if c.Yield != "" {
		h.log.Info("asked to hand the watcher over", "reason", c.Yield)
	}
	select { // the latest replaces one that nobody took
	case <-h.control:
	default:
	}
	h.control <- c
}

// heeds reports whether a pin to another node is to be obeyed: only while that node lives (N6).
func (h *Held) heeds(ctx context.Context, pin string) bool {
	if h.l.cfg.NodeAlive == nil {
		return pin != h.Lapsed()
	}
	call, cancel := context.WithTimeout(ctx, h.l.cfg.CallTimeout)
	defer cancel()
	if h.l.cfg.NodeAlive(call, pin) {
		h.lapsed.Store(new(string))
		return true
	}
	if h.Lapsed() != pin {
		h.lapsed.Store(&pin)
		h.log.Error("ALARM: the watcher is pinned to a node that gives no sign of life; it stays here", "pin", pin, "advice", "start that node, or end the pin")
	}
	return false
}
