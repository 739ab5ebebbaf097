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
	division, err := divisions.New(state.Open(x.mongo.client, x.cfg.State)).Read(ctx, x.cfg.Watcher)
	if err == nil && division.Of != len(parts) {
		return failed(fmt.Sprintf("set slots: %d, or: outrelay reslice --slots %d", division.Of, len(parts)),
			"watcher %q has %d slots, but the configuration sets %d", x.cfg.Watcher, division.Of, len(parts))
	}
	if len(parts) == 1 {
		return x.checkSlot(ctx, parts[0])
	}

	all := passed("")
	for i, p := range parts {
		finding := x.checkSlot(ctx, p)
		if i > 0 {
			all.detail += "; "
		}
		all.detail += p.String() + ": " + finding.detail
		// The most severe status counts.
		if finding.status == Fail || all.status == OK {
			all.status = finding.status
		}
		if finding.fix != "" && all.fix == "" {
			all.fix = finding.fix
		}
	}
	return all
}

// checkSlot checks one slot of the watcher.
func (x watcherChecks) checkSlot(ctx context.Context, slot slot.Range) finding {
	state := state.Open(x.mongo.client, x.cfg.State)
	id := slot.ID(x.cfg.Watcher)
	var doc lease.Document
	err := mongodb.Majority(state.Collection("watchers")).FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&doc)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return x.checkLostWatcher(ctx, state, slot)
	}

	if err != nil {
		return x.mongo.access.explainRejection(err)
	}

	// A copied state would continue at positions of another oplog.
	here, err := lease.ReplicaSetID(ctx, x.mongo.client)
	if err == nil && doc.CheckHome(here) != nil {
		return failed("outrelay recover --accept-copy",
			"the state was copied from another replica set (written on %s, this is %s)", doc.ReplicaSetID, here)
	}

	status, err := admin.ReadStatus(ctx, state)
	if err != nil {
		return x.mongo.access.explainRejection(err)
	}

	at := slices.IndexFunc(status.Slots, func(listed admin.SlotStatus) bool { return listed.Name+"/"+listed.Slot == id })
	if at < 0 {
		return passed("no process runs the watcher")
	}
	return judgeWatcher(status.Slots[at], doc.Gap)
}

func judgeWatcher(slot admin.SlotStatus, gap *lease.Gap) finding {
	who := fmt.Sprintf("%s owns the watcher, epoch %d", slot.Node, slot.Epoch)
	if slot.LagS != nil {
		who += fmt.Sprintf(", lag %.1f s", *slot.LagS)
	}
	switch {
	case slot.Paused:
		return warned("outrelay resume", "an operator paused the watcher")
	case slot.State == "no-owner":
		return passed("no process runs the watcher; its last epoch is %d", slot.Epoch)
	case slot.State == "halted":
		return failed("fix the reason; then restart the owner, or run: outrelay step-down", "%s, and has halted: %s", who, slot.Reason)
	case len(slot.Unwritable) > 0:
		topic := slot.Unwritable[0]
		return warned("", "%s; %d topics cannot be written, such as %s with %d waiting envelopes: %s", who, len(slot.Unwritable), topic.Topic,
			topic.Count, topic.Reason)
	case slot.Reason != "":
		return warned("", "%s; state %s: %s", who, slot.State, slot.Reason)
	case gap != nil:
		return warned("", "%s, and sweeps a gap in its history (%s)", who, gap.Reason)
	}

	return passed("%s", who)
}

// checkLostWatcher distinguishes a first start from a lost watcher document.
func (x watcherChecks) checkLostWatcher(ctx context.Context, state state.Database, slot slot.Range) finding {
	if !slot.Whole() {
		if had, err := divisions.New(state).Begun(ctx, x.cfg.Watcher, slot); err == nil && had {
			return failed("outrelay recover --slot "+slot.String(),
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
