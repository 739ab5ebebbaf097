package slots

import (
	"context"
	"errors"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// acquireAll pauses every slot, waits until its owner has released it, and acquires it. It calls
// keep for each lease, and returns the documents.
func (r *resliceRun) acquireAll(ctx context.Context, keep func(*lease.Held)) ([]lease.Document, error) {
	r.OnStep("pausing " + pluralize(len(r.ids), "slot"))
	for _, id := range r.ids {
		if err := r.pauseSlot(ctx, id); err != nil {
			return nil, err
		}
	}
	crash.At("reslice-paused")
	if err := r.waitForRelease(ctx); err != nil {
		return nil, err
	}

	old := make([]lease.Document, len(r.ids))
	for i, id := range r.ids {
		held, err := r.acquireSlot(ctx, id)
		if err != nil {
			return nil, err
		}
		r.held = append(r.held, held)
		keep(held)

		old[i] = held.Document()
		if err := r.checkReplaceable(&old[i]); err != nil {
			return nil, err
		}
	}
	return old, nil
}

// pauseTimeout bounds one attempt to pause a slot.
const pauseTimeout = 2 * time.Second

// pauseSlot pauses a slot. If an owner was killed within a transaction, the transaction holds the
// document: pauseSlot ends it and tries again, until the time to wait is over.
func (r *resliceRun) pauseSlot(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	for {
		call, stop := context.WithTimeout(ctx, pauseTimeout)
		err := lease.Pause(call, r.watchers, id, lease.ResliceActor)
		stop()
		if err == nil || !mongo.IsTimeout(err) && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}

		if ctx.Err() != nil {
			return rejectionf("slot %s cannot be paused: %w", id, err)
		}
		// A killed owner or command may have left a transaction open, which blocks the write for up to
		// a minute.
		if err := lease.EndTransactions(ctx, r.watchers, id); err != nil {
			r.log.Debug("cannot end the last owner's session", "slot", id, "error", err)
		}
	}
}

// waitForRelease blocks until no node owns a slot, at most for the time to wait.
func (r *resliceRun) waitForRelease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	for {
		var owners []string
		for _, id := range r.ids {
			document, now, err := lease.Read(ctx, r.watchers, id)
			if err != nil {
				owners = append(owners, "unknown: "+err.Error())
			} else if document.Owner != "" && document.ExpiresAt.After(now) {
				owners = append(owners, document.Node+" has "+id)
			}
		}
		if len(owners) == 0 {
			return nil
		}

		if retry.Sleep(ctx, 100*time.Millisecond) != nil {
			return rejectionf("owners did not drain and release within %s (%s): "+
				"wait until their targets can be written, or stop them, and try again",
				r.Wait, strings.Join(owners, ", "))
		}
	}
}

// acquireSlot acquires the lease of a paused slot.
func (r *resliceRun) acquireSlot(ctx context.Context, id string) (*lease.Held, error) {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	lease := lease.New(lease.Config{
		Collection:    r.watchers,
		ID:            id,
		Node:          "reslice-" + r.cfg.Node,
		Address:       r.cfg.Address,
		TTL:           max(r.cfg.Lease.TTL, 3*time.Second),
		Log:           r.log,
		AcquirePaused: true,
	})

	held, err := lease.Acquire(ctx)
	if err != nil {
		return nil, rejectionf("slot %s could not be acquired: %w", id, err)
	}
	return held, nil
}

// fenceAll fences every transactional id, each under its lease. It returns the senders that the new
// slots have to consider in their read-backs.
func (r *resliceRun) fenceAll(ctx context.Context, old []lease.Document) ([]record.Sender, error) {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()

	var all []record.Sender
	for i := range old {
		document := &old[i]
		_, slotRange, _ := slot.ParseID(document.ID)
		store := waiting.NewStore(r.state.Collection("waiting"), r.cfg.Watcher, slotRange)
		in := FenceInput(&r.cfg, slotRange, r.held[i], document, store)
		in.Event = fence.LogEvents(r.log, nil)
		senders, err := r.fence.FenceOff(ctx, in)
		if err != nil {
			return nil, rejectionf("slot %s: %w", document.ID, err)
		}
		all = append(all, senders...)
	}

	return all, nil
}

// restoreSlots releases the leases and resumes the old slots, except for the slots that an operator
// has paused.
func (r *resliceRun) restoreSlots(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	for _, h := range r.held {
		if err := h.Release(ctx, nil); err != nil {
			r.log.Warn("cannot release a lease; the relays of its slot wait until it expires", "error", err)
		}
	}

	if err := lease.ResumeAfterReslice(ctx, r.watchers, r.ids); err != nil {
		r.log.Error("cannot resume the slots; they stay paused", "error", err, "fix", "run `outrelay resume`")
	}
}
