package lease

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/resume"
)

// Checkpoint is the progress that a renewal saves.
type Checkpoint struct {
	// Position is saved if it is later than the saved one. A zero or earlier position changes nothing.
	Position resume.Position
	// Offsets are merged into the stored offsets, per partition. An entry that is missing or below 0
	// leaves the stored offset as it is.
	Offsets map[string][]int64
	// Stats is shown by `outrelay status`. If it is nil, the stored value stays.
	Stats any
}

// Source returns the current checkpoint. It must not block, and must not call the Held. A nil Source has none.
type Source func() Checkpoint

// current returns the checkpoint of s.
func (s Source) current() Checkpoint {
	if s == nil {
		return Checkpoint{}
	}
	return s()
}

// Run renews the lease until ctx ends or the lease is lost. Renewals save the checkpoint of source. If the lease is lost, it returns
// [ErrLeaseLost]. After a Release it returns nil. The end of ctx does not release the lease. Run saves the position of delivered events
// every CheckpointEvery, and renews at least every Renew. While the server is not
// available, it retries and the work is suspended. Only the document decides that the lease is lost (N2).
func (h *Held) Run(ctx context.Context, source Source) error {
	checkpointAge := h.lease.cfg.Metrics.CheckpointAge
	checkpointAge.SetSource(func() float64 {
		return (h.lease.clock() - time.Duration(h.lastCheckpoint.Load())).Seconds()
	})
	defer checkpointAge.SetSource(nil)

	back := retry.Policy{Base: h.lease.cfg.CheckpointEvery / 2, Cap: h.lease.cfg.Renew}.Start()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-h.ctx.Done():
			return h.endError()
		case <-timer.C:
		}

		err := h.renewIfDue(ctx, source)
		if h.ctx.Err() != nil {
			return h.endError()
		}

		if err != nil {
			wait := back.Next()
			h.logFailure(err, back.Attempts())
			timer.Reset(wait)
			continue
		}
		if back.Attempts() > 0 {
			h.log.Info("lease renewed; work continues")
		}
		back.Reset()
		timer.Reset(h.lease.cfg.CheckpointEvery)
	}
}

// endError returns the cause of the end of the ownership, or nil if it was released.
func (h *Held) endError() error {
	if err := context.Cause(h.ctx); !errors.Is(err, ErrReleased) {
		return err
	}
	return nil
}

// logFailure logs the first of a series of failures as a problem, and once the suspension that may follow from
// it. n counts the failures of the series.
func (h *Held) logFailure(err error, n int) {
	if n == 1 {
		h.log.Warn("cannot renew the lease; work stops if it expires", "error", err, "fix", fixFor(err))
	}

	if !h.Valid() && h.suspended.CompareAndSwap(false, true) {
		h.lease.cfg.Metrics.LeaseSuspended.Set(1)
		h.log.Info("the lease was not renewed in time; work is suspended until it is renewed")
	}
}

// renewIfDue renews the lease if the time has come, or if events were delivered since the last checkpoint. A position that moved without
// a delivery waits for a renewal: after a crash, only reads are repeated. Each write moves the position of an idle stream, too.
func (h *Held) renewIfDue(ctx context.Context, source Source) error {
	if err := h.acquireTurn(ctx); err != nil {
		return err
	}
	defer h.releaseTurn()

	checkpoint := source.current()
	// While work is suspended, each attempt may end the suspension.
	due := h.lease.clock()-time.Duration(h.lastWrite.Load()) >= h.lease.cfg.Renew || !h.Valid()
	if !due && (checkpoint.Position.Compare(h.savedPosition) <= 0 || !h.hasNewOffsets(checkpoint.Offsets)) {
		return nil
	}
	return h.writeCheckpoint(ctx, checkpoint, nil)
}

// hasNewOffsets reports whether offsets has a later offset than the document, or one of which that is unknown. The caller must hold the turn.
func (h *Held) hasNewOffsets(offsets map[string][]int64) bool {
	for topic, list := range offsets {
		stored := h.storedOffsets[topic]
		for i, offset := range list {
			if offset >= 0 && (i >= len(stored) || offset > stored[i]) {
				return true
			}
		}
	}
	return false
}

// writeCheckpoint saves checkpoint and fields, and renews the lease. The caller must hold the turn.
func (h *Held) writeCheckpoint(ctx context.Context, checkpoint Checkpoint, fields bson.D) error {
	start := h.lease.clock()
	set, moved := h.mergeCheckpoint(checkpoint)
	if moved {
		crash.At("before-checkpoint")
	}
	set = append(set, fields...)

	// If the write fails, the stored offsets are unknown.
	withOffsets := slices.ContainsFunc(set, func(element bson.E) bool { return element.Key == "offsets" })
	if withOffsets {
		h.storedOffsets = nil
	}
	ownerFields, err := h.writeOwnerFields(ctx, set, renewing)
	if err != nil {
		return err
	}
	if withOffsets {
		h.storedOffsets = h.offsets
	}

	took := h.lease.clock() - start
	h.lease.cfg.Metrics.RenewSeconds.Observe(took, 1)
	if moved {
		h.recordCheckpoint(start)
		h.lease.cfg.Metrics.CheckpointSeconds.Observe(took, 1)
		crash.At("after-checkpoint")
	}

	if h.suspended.CompareAndSwap(true, false) {
		h.lease.cfg.Metrics.LeaseSuspended.Set(0)
	}
	h.obeyControl(ctx, ownerFields)
	return nil
}

// recordCheckpoint records that the last position that was sent was saved at writtenAt. The caller
// must hold the turn.
func (h *Held) recordCheckpoint(writtenAt time.Duration) {
	h.savedPosition = h.sentPosition
	h.lastCheckpoint.Store(int64(writtenAt))
	h.lease.cfg.Metrics.Checkpoints.Inc()
}

// mergeCheckpoint merges checkpoint into the position and the offsets of this owner. It returns the fields that the next write
// has to change, and whether the position moves forward. The caller must hold the turn.
func (h *Held) mergeCheckpoint(checkpoint Checkpoint) (set bson.D, moved bool) {
	// A position never goes back. If the stream offers an earlier one, the stream is at fault, not
	// the document.
	if !checkpoint.Position.IsZero() && checkpoint.Position.Compare(h.savedPosition) < 0 {
		h.log.Error("rejected a checkpoint that precedes the stored one",
			"offered", checkpoint.Position.Token.Data(), "stored", h.savedPosition.Token.Data())
	}

	// The server may have applied a write whose response was lost. So the position of that write
	// counts as well, and is sent again in place of an earlier one.
	if checkpoint.Position.Compare(h.sentPosition) > 0 {
		h.sentPosition = checkpoint.Position.Clone()
	}
	if h.sentPosition.Compare(h.savedPosition) > 0 {
		moved = true
		set = append(set,
			bson.E{Key: "token", Value: mongodb.Literal(h.sentPosition.Token)},
			bson.E{Key: "clusterTime", Value: mongodb.Literal(h.sentPosition.ClusterTime)})
	}

	if len(checkpoint.Offsets) > 0 {
		h.offsets = mergeOffsets(h.offsets, checkpoint.Offsets)

		// The offsets of 60,000 partitions take a megabyte, so they are written only if they changed.
		if !maps.EqualFunc(h.offsets, h.storedOffsets, slices.Equal) {
			set = append(set, bson.E{Key: "offsets", Value: mongodb.Literal(sortedOffsets(h.offsets))})
		}
	}
	if checkpoint.Stats != nil {
		set = append(set, bson.E{Key: "stats", Value: mongodb.Literal(checkpoint.Stats)})
	}
	return set, moved
}

// obeyControl reads the requests of operators from fields, the result of a renewal, and sends the reason to the
// channel of Yield if the owner must release. The caller must hold the turn.
func (h *Held) obeyControl(ctx context.Context, fields ownerFields) {
	if h.lease.cfg.AcquirePaused {
		return
	}

	control, reason := fields.Control, ""
	pinned := control.Pin != "" && control.Pin != h.lease.cfg.Node
	switch {
	case control.Paused:
		reason = "paused by an operator"
	case control.stepsDown(h.lease.cfg.Node, fields.RenewedAt):
		reason = "an operator requested a step-down of this node"
	case pinned && h.followsPin(ctx, control.Pin):
		reason = "pinned to node " + control.Pin
	case !pinned && h.LapsedPin() != "":
		h.lapsedPin.Store(new(string))
	}

	if reason == h.yieldReason {
		return
	}
	h.yieldReason = reason

	// A request that was not received yet is out of date.
	select {
	case <-h.yield:
	default:
	}
	if reason != "" {
		h.log.Info("operator request: release the watcher", "reason", reason)
		h.yield <- reason
	}
}

// followsPin reports whether this owner must follow a pin to another node: only while that node is alive
// (N6). The caller must hold the turn.
func (h *Held) followsPin(ctx context.Context, pin string) bool {
	if h.lease.cfg.NodeAlive == nil {
		return pin != h.LapsedPin()
	}

	call, cancel := context.WithTimeout(ctx, h.lease.cfg.CallTimeout)
	defer cancel()
	if h.lease.cfg.NodeAlive(call, pin) {
		h.lapsedPin.Store(new(string))
		return true
	}

	if h.LapsedPin() != pin {
		h.lapsedPin.Store(&pin)
		h.log.Error("ALARM: the watcher is pinned to a node that is not responding; this node keeps it", "pin", pin,
			"fix", "start that node, or remove the pin")
	}
	return false
}
