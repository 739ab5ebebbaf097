package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// watcherChecks check the documents of the watcher.
type watcherChecks struct{ *examination }

// checkWatcher checks the watcher documents and the reports of their owners.
func (x watcherChecks) checkWatcher(ctx context.Context) finding {
	// Another number of slots means other documents, so the division comes first.
	parts := slot.Ranges(x.cfg.Slots)
	v, err := divisions.New(state.Open(x.mongo.client, x.cfg.State)).Read(ctx, x.cfg.Watcher)
	if err == nil && v.Of != len(parts) {
		return failed(fmt.Sprintf("set slots: %d, or: outrelay reslice --slots %d", v.Of, len(parts)),
			"watcher %q has %d slots, but the configuration sets %d", x.cfg.Watcher, v.Of, len(parts))
	}
	if len(parts) == 1 {
		return x.checkSlot(ctx, parts[0])
	}

	all := passed("")
	for i, p := range parts {
		f := x.checkSlot(ctx, p)
		if i > 0 {
			all.detail += "; "
		}
		all.detail += p.String() + ": " + f.detail
		// The most severe status counts.
		if f.status == Fail || all.status == OK {
			all.status = f.status
		}
		if f.fix != "" && all.fix == "" {
			all.fix = f.fix
		}
	}
	return all
}

// checkSlot checks one slot of the watcher.
func (x watcherChecks) checkSlot(ctx context.Context, p slot.Range) finding {
	state := state.Open(x.mongo.client, x.cfg.State)
	id := p.ID(x.cfg.Watcher)
	var doc lease.Document
	err := mongodb.Majority(state.Collection("watchers")).FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&doc)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return x.checkLostWatcher(ctx, state, p)
	}

	if err != nil {
		return x.mongo.access.explainRefusal(err)
	}

	// A copied state would continue at positions of another oplog.
	here, err := lease.ReplicaSetID(ctx, x.mongo.client)
	known := err == nil && here != "" && doc.ReplicaSetID != ""
	if known && here != doc.ReplicaSetID {
		return failed("outrelay recover --accept-copy",
			"the state was copied from another replica set (written on %s, this is %s)", doc.ReplicaSetID, here)
	}

	status, err := admin.ReadStatus(ctx, state)
	if err != nil {
		return x.mongo.access.explainRefusal(err)
	}

	at := slices.IndexFunc(status.Slots, func(w admin.SlotStatus) bool { return w.Name+"/"+w.Slot == id })
	if at < 0 {
		return passed("no process runs the watcher")
	}
	return judgeWatcher(status.Slots[at], doc.Gap)
}

func judgeWatcher(w admin.SlotStatus, gap *lease.Gap) finding {
	who := fmt.Sprintf("%s owns the watcher, epoch %d, lag %.1f s", w.Node, w.Epoch, w.LagS)
	switch {
	case w.Paused:
		return warned("outrelay resume", "an operator paused the watcher")
	case w.State == "no-owner":
		return passed("no process runs the watcher; its last epoch is %d", w.Epoch)
	case w.State == "halted":
		return failed("fix the reason; then restart the owner, or run: outrelay step-down", "%s, and has halted: %s", who, w.Reason)
	case len(w.Unwritable) > 0:
		b := w.Unwritable[0]
		return warned("", "%s; %d topics cannot be written, such as %s with %d waiting envelopes: %s", who, len(w.Unwritable), b.Topic,
			b.Count, b.Reason)
	case w.Reason != "":
		return warned("", "%s; state %s: %s", who, w.State, w.Reason)
	case gap != nil:
		return warned("", "%s, and sweeps a gap in its history (%s)", who, gap.Reason)
	}

	return passed("%s", who)
}

// checkLostWatcher distinguishes a first start from a lost watcher document.
func (x watcherChecks) checkLostWatcher(ctx context.Context, state state.Database, p slot.Range) finding {
	if !p.Whole() {
		if had, err := divisions.New(state).Begun(ctx, x.cfg.Watcher, p); err == nil && had {
			return failed("outrelay recover --slot "+p.String(),
				"the document of the slot is missing, and with it the position in the change stream; nothing else is lost")
		}

		return passed("the slot has never run")
	}

	// Registrations outlive the document, so they show that the watcher has run.
	claims, err := outboxes.NewRegistry(state.Collection("collections")).Registrations(ctx, x.cfg.Watcher)
	if err == nil && len(claims) > 0 {
		return failed("outrelay recover",
			"the document of watcher %q is missing, and with it the position in the change stream; nothing else is lost",
			x.cfg.Watcher)
	}
	return passed("watcher %q has never run; it will start with %s", x.cfg.Watcher, x.cfg.Start)
}
