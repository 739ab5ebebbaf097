package purge

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// Block is the reason why no envelope of a collection may be purged.
type Block string

// The reasons.
const (
	HoldUnclaimed  Block = "unclaimed"           // no watcher is registered for the collection
	HoldVanished   Block = "no_watcher_document" // a registered watcher has no document
	HoldNoPosition Block = "no_position"         // a watcher document has no position yet
	HoldGap        Block = "gap"                 // a watcher sweeps a gap, or an operator ordered a sweep
	HoldAhead      Block = "ahead"               // a position is later than the time of the cluster, so it belongs to another history
	HoldUnread     Block = "unread"              // the collection got its name after a position, so its earlier envelopes are unread
	HoldReplaced   Block = "replaced"            // another collection has the name now
	HoldDivided    Block = "configuration"       // the slots of a watcher have different configurations, so one may not read the collection
)

// holdTexts explains the reasons, with placeholders for the namespace and the slot.
var holdTexts = map[Block]string{
	HoldUnclaimed: "no watcher is registered for it, so its delivered envelopes are unknown; " +
		"run a watcher that may list the collections of its database",
	HoldVanished: "its watcher document {slot} is missing; " +
		"run outrelay recover, or release the collection with outrelay recover --release {ns}",
	HoldNoPosition: "watcher document {slot} has no position yet",
	HoldGap:        "watcher document {slot} has a gap, and its sweep reads the collection; the purge continues after the sweep",
	HoldAhead: "the position of watcher document {slot} lies in the future, as after a restored backup, " +
		"so it does not show which envelopes were delivered",
	HoldUnread: "watcher document {slot} has not read the rename that gave the collection its name, " +
		"so its earlier envelopes are not delivered yet",
	HoldDivided: "the streams of its watcher documents include different collections, so {slot} may not have read it; " +
		"restart every node with the same watch",
	HoldReplaced: "another collection has its name now, and the watcher has not read that collection yet",
}

// HeldError means that a collection must not be purged now. It no longer occurs when its reason is gone.
type HeldError struct {
	NS   string
	Slot string // the watcher document, or the watcher's name, or ""
	Hold Block
}

func (e *HeldError) Error() string {
	text := strings.NewReplacer("{ns}", e.NS, "{slot}", e.Slot).Replace(holdTexts[e.Hold])
	return "nothing of " + e.NS + " is purged: " + text
}

// Cut is the boundary up to which a collection may be purged.
type Cut struct {
	UUID     [16]byte       // of the collection, or zero if it is not known
	Before   bson.Timestamp // envelopes with an older stamp are delivered, and older than the retention
	Position bson.Timestamp // the earliest position
	Slot     string         // the watcher document with the earliest position
	// IrregularIDs is set if the times in the ids of the collection must not be used.
	IrregularIDs bool
}

// Time returns Before as a time of a clock.
func (c Cut) Time() time.Time { return time.Unix(int64(c.Before.T), 0).UTC() }

// positions holds the saved positions of all watchers and slots, and the registry of collections. A position counts
// even if no node owns the watcher, or if the watcher is paused.
type positions struct {
	claims map[[16]byte][]outboxes.Registration // by collection
	slots  map[string][]slotPosition            // by watcher
	now    time.Time                            // of the server
}

// maxAhead is how far the time of the cluster may be ahead of the server's clock. The time of the cluster never goes
// back, but a clock may.
const maxAhead = 5 * time.Minute

// slotPosition is the part of a watcher document that the purge needs.
type slotPosition struct {
	ID          string         `bson:"_id"`
	ClusterTime bson.Timestamp `bson:"clusterTime"`
	Gap         bson.RawValue  `bson:"gap"`
	Stream      string         `bson:"pipelineHash"`
	of          int            // number of slots of the watcher, from the id
}

// readPositions reads the registry and the watcher documents of the state database. It makes two majority reads: if a
// position were rolled back after the purge, too many envelopes would be gone.
func readPositions(ctx context.Context, state state.Database) (*positions, error) {
	claims, err := outboxes.NewRegistry(state.Collection("collections")).Registrations(ctx, "")
	if err != nil {
		return nil, err
	}
	now, err := mongodb.ServerTime(ctx, state.Client())
	if err != nil {
		return nil, err
	}

	positions := &positions{now: now, claims: make(map[[16]byte][]outboxes.Registration), slots: make(map[string][]slotPosition)}
	for _, c := range claims {
		if len(c.UUID.Data) == 16 {
			positions.claims[[16]byte(c.UUID.Data)] = append(positions.claims[[16]byte(c.UUID.Data)], c)
		}
	}

	coll := mongodb.Majority(state.Collection("watchers"))
	fields := options.Find().SetProjection(mongodb.Fields("clusterTime", "gap", "pipelineHash"))
	docs, err := mongodb.FindAll[slotPosition](ctx, coll, "reading the positions of the watchers", bson.D{}, fields)
	if err != nil {
		return nil, err
	}

	for _, d := range docs {
		if name, slotRange, ok := slot.ParseID(d.ID); ok {
			d.of = slotRange.N
			positions.slots[name] = append(positions.slots[name], d)
		}
	}
	return positions, nil
}

// Cut returns the earliest position of all slots of all watchers that are registered for the collection, less keep. keep
// is the retention or the margin, whichever is longer. Its errors are [*HeldError].
//
// N25: if the stamp of an envelope is older than a position less the margin, the envelope was committed before that
// position. So its event is before the position: it was delivered, or stored as waiting or dead in the state database. A slot
// counts whether a node owns it or not. A slot that is missing, has no position, or has a gap stops the purge, because
// the undelivered envelopes will then be read from the collection itself.
func (w *positions) Cut(outbox outboxes.Outbox, keep time.Duration) (Cut, error) {
	held := func(slot string, why Block) (Cut, error) {
		return Cut{}, &HeldError{NS: outbox.NS(), Slot: slot, Hold: why}
	}
	claims := w.claims[outbox.UUID]
	if len(claims) == 0 || !outbox.Identified() {
		return held("", HoldUnclaimed)
	}

	earliest := Cut{UUID: outbox.UUID, Before: bson.Timestamp{T: math.MaxUint32, I: math.MaxUint32}}
	for _, claim := range claims {
		name, seen := claim.Watcher, make(map[int]int)
		earliest.IrregularIDs = earliest.IrregularIDs || claim.IrregularIDs
		for _, s := range w.slots[name] {
			seen[s.of]++
			switch {
			case s.ClusterTime.IsZero():
				return held(s.ID, HoldNoPosition)
			case !s.Gap.IsZero() && s.Gap.Type != bson.TypeNull:
				return held(s.ID, HoldGap)
			case time.Unix(int64(s.ClusterTime.T), 0).After(w.now.Add(maxAhead)):
				return held(s.ID, HoldAhead)
			case s.Stream != w.slots[name][0].Stream:
				return held(s.ID, HoldDivided)
			case claim.Away(), s.ClusterTime.Before(claim.Seen):
				return held(s.ID, HoldUnread)
			case s.ClusterTime.Before(earliest.Before):
				earliest.Before, earliest.Slot = s.ClusterTime, s.ID
			}
		}

		// While the number of slots changes, a watcher has documents of two numbers. Each must be complete.
		if len(seen) == 0 {
			return held(name, HoldVanished)
		}
		for of, n := range seen {
			if n < of {
				return held(fmt.Sprintf("%s/?of%d", name, of), HoldVanished)
			}
		}
	}

	earliest.Position = earliest.Before
	earliest.Before = mongodb.Earlier(earliest.Before, keep)
	return earliest, nil
}
