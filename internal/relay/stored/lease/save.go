package lease

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/resume"
)

// Update lists the fields that Save changes. A nil field leaves the stored one as it is.
type Update struct {
	Checkpoint   Checkpoint
	Current      Source // if not nil: its checkpoint at the moment of the write is saved, not Checkpoint
	Senders      *[]record.Sender
	Offsets      map[string][]int64 // merged per partition, as in Checkpoint; a nil list removes the topic
	Collections  *[]Collection
	PipelineHash *string

	// Gap replaces the stored gap that began at GapSince. ClearGap removes that gap. Any other gap in the
	// document is a sweep that an operator has requested in the meantime. It stays, and starts no later
	// than Gap.
	Gap         *Gap
	GapSince    time.Time
	ClearGap    bool
	ClearPassed bool
	Swept       *Swept
	Incident    *Incident // added to the document

	// Rewind saves the position of the checkpoint although the stored one may be later. It is for a
	// stored position of another history, which has no order relative to the new one.
	Rewind bool
}

// Save writes update now, fenced and majority committed, and renews the lease with the same write. It retries
// until the write is confirmed, ctx ends, or the lease is lost. It does not need a valid lease, because
// the document decides. If ctx ends first, the outcome is unknown, and the next checkpoint writes the
// merged offsets. It logs a write that fails again and again.
func (h *Held) Save(ctx context.Context, update Update) error {
	return h.retryWrite(ctx, "saving the watcher document", func() error { return h.saveOnce(ctx, update) })
}

// retryWrite calls write until it succeeds, ctx ends, or the ownership ends.
func (h *Held) retryWrite(ctx context.Context, doing string, write func() error) error {
	back := retry.Policy{Base: 20 * time.Millisecond, Cap: h.lease.cfg.Renew}.Start()
	for {
		err := write()
		if err == nil || h.ctx.Err() != nil {
			return err
		}

		if ctx.Err() != nil || back.Wait(ctx) != nil {
			return fmt.Errorf("%s: %w", doing, err)
		}
		// A renewal may succeed in the meantime, because it writes fewer fields.
		if back.Attempts()%warnEvery == 0 {
			h.log.Warn("cannot write the watcher document; trying again", "doing", doing, "error", err, "fix", fixFor(err))
		}
	}
}

// SaveSenders implements sink.Claims.
func (h *Held) SaveSenders(ctx context.Context, senders []record.Sender, offsets map[string][]int64) error {
	update := Update{Offsets: offsets}
	if senders != nil {
		update.Senders = &senders
	}
	return h.Save(ctx, update)
}

func (h *Held) saveOnce(ctx context.Context, update Update) error {
	if err := h.acquireTurn(ctx); err != nil {
		return err
	}
	defer h.releaseTurn()

	// Read under the turn. A checkpoint read earlier could precede one that a renewal has saved since.
	if update.Current != nil {
		update.Checkpoint = update.Current()
	}
	// Positions of two histories cannot be compared, so the new one has to follow none.
	if update.Rewind {
		h.sentPosition, h.savedPosition = resume.Position{}, resume.Position{}
	}

	set := update.setFields()
	if len(update.Offsets) > 0 {
		h.offsets = mergeOffsets(h.offsets, update.Offsets)
		for topic, list := range update.Offsets {
			if list == nil {
				delete(h.offsets, topic)
			}
		}

		// If the checkpoint has offsets, writeCheckpoint writes the merged ones.
		if len(update.Checkpoint.Offsets) == 0 {
			set = append(set, bson.E{Key: "offsets", Value: mongodb.Literal(sortedOffsets(h.offsets))})
		}
	}
	return h.writeCheckpoint(ctx, update.Checkpoint, set)
}

// setFields returns the fields that u sets, without the checkpoint and the offsets.
func (u *Update) setFields() bson.D {
	var set bson.D
	add := func(name string, value any) { set = append(set, bson.E{Key: name, Value: value}) }

	if u.Senders != nil {
		add("senders", mongodb.Literal(newSenderTable(*u.Senders)))
	}
	if u.Collections != nil {
		add("collections", mongodb.Literal(*u.Collections))
	}
	if u.PipelineHash != nil {
		add("pipelineHash", mongodb.Literal(*u.PipelineHash))
	}
	if u.Swept != nil {
		add("swept", mongodb.Literal(*u.Swept))
	}
	if u.ClearPassed {
		add("passed", "$$REMOVE")
	}

	// A gap that is not the owner's was requested by an operator in the meantime, and must stay.
	ownGap := op("$or", op("$eq", mongodb.IfNull("$gap", nil), nil), op("$eq", "$gap.since", mongodb.Literal(u.GapSince)))
	if u.ClearGap {
		add("gap", op("$cond", ownGap, "$$REMOVE", "$gap"))
	} else if u.Gap != nil {
		earlier := bson.D{{Key: "from", Value: op("$min", "$gap.from", u.Gap.From)}}
		add("gap", op("$cond", ownGap, mongodb.Literal(*u.Gap), op("$mergeObjects", "$gap", earlier)))
	}
	if u.Incident != nil {
		add("incidents", u.Incident.appendTo("$incidents"))
	}
	return set
}

// appendTo returns the expression of a list with the incident at its end, unless it contains one with the same id. Each kind has its own bound, so that the drops of many
// collections do not replace lost history.
func (i *Incident) appendTo(list string) bson.D {
	filter := func(condition bson.D) bson.D {
		return bson.D{{Key: "$filter", Value: bson.D{{Key: "input", Value: mongodb.IfNull(list, bson.A{})}, {Key: "cond", Value: condition}}}}
	}
	isLost := op("$ne", op("$type", "$$this.lost"), "missing")
	isSameKind := op("$eq", isLost, i.Lost != nil)

	newest := op("$slice", op("$concatArrays", filter(isSameKind), bson.A{mongodb.Literal(*i)}), -mostIncidents)
	added := op("$concatArrays", filter(op("$not", isSameKind)), newest)
	// A repeated write must not add it twice.
	return op("$cond", op("$in", i.ID, mongodb.IfNull(list+".id", bson.A{})), list, added)
}

// Release saves the checkpoint of source and releases the lease. A standby takes over within
// [pollEvery]. Release retries until ctx ends. After it, Context has ended with cause
// [ErrReleased] and Run returns nil. If the lease was lost before, it returns [ErrLeaseLost]. If the
// lease was released before, it returns nil.
func (h *Held) Release(ctx context.Context, source Source) error {
	crash.At("before-release")

	err := h.retryWrite(ctx, "releasing the lease (it expires after its ttl)", func() error { return h.releaseOnce(ctx, source) })
	if h.ctx.Err() != nil {
		return h.endError()
	}
	return err
}

func (h *Held) releaseOnce(ctx context.Context, source Source) error {
	if err := h.acquireTurn(ctx); err != nil {
		return err
	}
	defer h.releaseTurn()

	set, moved := h.mergeCheckpoint(source.current())
	if _, err := h.writeOwnerFields(ctx, set, releasing); err != nil {
		return err
	}
	if moved {
		h.recordCheckpoint(h.lease.clock())
	}
	crash.At("after-release")

	// Goroutines that have not seen the end of the context must not work either.
	h.deadline.Store(0)
	h.cancel(ErrReleased)
	h.lease.noteStandingBy("released", h.acquired.Epoch)
	h.log.Info("lease released")
	h.endSession()
	return nil
}
