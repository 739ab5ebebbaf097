package lease

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

// Update is what Save changes; a nil field leaves the stored one as it is.
type Update struct {
	Checkpoint   Checkpoint
	Current      bool // instead of Checkpoint: what the source of [Held.SetSource] says at the moment of the write
	Senders      *[]record.Sender
	Offsets      map[string][]int64 // merged per partition, as in Checkpoint; a nil list forgets the topic
	Generation   *int
	Instance     *string
	ReplicaSetID *string
	Collections  *[]Collection
	PipelineHash *string
	Dirty        []string // added to those stored
	// Gap is stored in the place of the one that began at GapSince; ClearGap removes that one. Another one in the document is
	// a sweep that an operator has ordered meanwhile: it stays, and begins no later than Gap does.
	Gap         *Gap
	GapSince    time.Time
	ClearGap    bool
	ClearPassed bool
	// Rewind writes the checkpoint's position although the stored one may be beyond it: for a stored one that turned out to
	// be of another history, so that the two have no order.
	Rewind bool
}

// Save writes u now, fenced and majority committed, and renews with it. It is tried again until it is known to be
// written, ctx ends, or the lease is lost; it needs no valid lease, because the document itself decides. When ctx ends
// first the outcome is unknown, and what was merged into the offsets is written with the next checkpoint.
func (h *Held) Save(ctx context.Context, u Update) error {
	back := retry.Policy{Base: 20 * time.Millisecond, Cap: h.lease.cfg.Renew}.Start()
	for {
		err := h.saveOnce(ctx, u)
		if err == nil || h.ctx.Err() != nil {
			return err
		}
		if ctx.Err() == nil && back.Wait(ctx) == nil {
			continue
		}
		return fmt.Errorf("saving the watcher document: %w", err)
	}
}

func (h *Held) saveOnce(ctx context.Context, u Update) error {
	if err := h.acquireTurn(ctx); err != nil {
		return err
	}
	defer h.releaseTurn()
	if u.Current { // one that was asked for before the turn could be behind what a renewal has written meanwhile
		u.Checkpoint = h.currentCheckpoint()
	}
	if u.Rewind {
		h.savedPosition = resume.Position{}
	}
	set := u.setFields()
	if len(u.Offsets) > 0 {
		h.offsets = mergeOffsets(h.offsets, u.Offsets)
		for topic, list := range u.Offsets {
			if list == nil {
				delete(h.offsets, topic)
			}
		}
		if len(u.Checkpoint.Offsets) == 0 {
			set = append(set, bson.E{Key: "offsets", Value: lit(sortedOffsets(h.offsets))})
		}
	}
	return h.writeCheckpoint(ctx, u.Checkpoint, set)
}

func (u *Update) setFields() bson.D {
	var set bson.D
	put := func(name string, v any) { set = append(set, bson.E{Key: name, Value: v}) }
	if u.Senders != nil {
		put("senders", lit(senderEntries(*u.Senders)))
	}
	if u.Generation != nil {
		put("generation", lit(*u.Generation))
	}
	if u.Instance != nil {
		put("instance", lit(*u.Instance))
	}
	if u.ReplicaSetID != nil {
		put("replicaSetId", lit(*u.ReplicaSetID))
	}
	if u.Collections != nil {
		put("collections", lit(*u.Collections))
	}
	if u.PipelineHash != nil {
		put("pipelineHash", lit(*u.PipelineHash))
	}
	if len(u.Dirty) > 0 {
		put("dirty", op("$setUnion", ifNull("$dirty", bson.A{}), lit(u.Dirty)))
	}
	if u.ClearPassed {
		put("passed", "$$REMOVE")
	}
	mine := op("$or", op("$eq", ifNull("$gap", nil), nil), op("$eq", "$gap.since", lit(u.GapSince)))
	switch {
	case u.ClearGap:
		put("gap", op("$cond", mine, "$$REMOVE", "$gap"))
	case u.Gap != nil:
		put("gap", op("$cond", mine, lit(*u.Gap), op("$mergeObjects", "$gap", bson.D{{Key: "from", Value: op("$min", "$gap.from", u.Gap.From)}})))
	}
	return set
}

// Offsets is a copy of what the document holds, or will with the next write.
func (h *Held) Offsets(ctx context.Context) (map[string][]int64, error) {
	if err := h.acquireTurn(ctx); err != nil {
		return nil, err
	}
	defer h.releaseTurn()
	out := maps.Clone(h.offsets)
	for t := range out {
		out[t] = slices.Clone(out[t])
	}
	return out, nil
}

// Release writes the final checkpoint and gives the lease up at once; a standby that watches takes it within
// milliseconds. It is tried again until ctx ends. Afterwards Context is over with cause [ErrReleased] and Run returns
// nil. A lease that was lost before is [ErrLeaseLost]; one already released is nil.
func (h *Held) Release(ctx context.Context, final Checkpoint) error {
	defer h.lease.watches.Wait()
	crash.At("before-release")
	back := retry.Policy{Base: 20 * time.Millisecond, Cap: h.lease.cfg.Renew}.Start()
	for {
		err := h.releaseOnce(ctx, final)
		if h.ctx.Err() != nil {
			return h.endError()
		}
		if ctx.Err() == nil && back.Wait(ctx) == nil {
			continue
		}
		return fmt.Errorf("releasing the lease (it expires by itself): %w", err)
	}
}

func (h *Held) releaseOnce(ctx context.Context, final Checkpoint) error {
	if err := h.acquireTurn(ctx); err != nil {
		return err
	}
	defer h.releaseTurn()
	set, moved := h.changedFields(final)
	if _, err := h.writeOwnerFields(ctx, set, true); err != nil {
		return err
	}
	if moved {
		h.recordCheckpoint(final.Position, h.lease.clock())
	}
	crash.At("after-release")
	h.deadline.Store(0)
	h.cancel(ErrReleased)
	h.lease.setStanding(Standing{Reason: "released", Epoch: h.acquired.Epoch})
	h.log.Info("lease released")
	h.endSession()
	return nil
}
