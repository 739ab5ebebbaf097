package purge

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// PurgeBlock says why nothing of a collection may be purged.
type PurgeBlock string

// The holds.
const (
	HoldUnclaimed  PurgeBlock = "unclaimed"           // no watcher is registered for the collection
	HoldVanished   PurgeBlock = "no_watcher_document" // a registered watcher has no document
	HoldNoPosition PurgeBlock = "no_position"         // a watcher document has no position yet
	HoldGap        PurgeBlock = "gap"                 // a watcher sweeps for what the stream lost, or was told to
	HoldAhead      PurgeBlock = "ahead"               // a position is of another history: it is later than the cluster's time
	HoldUnread     PurgeBlock = "unread"              // the collection got its name behind a position, so nobody has read what it held
	HoldReplaced   PurgeBlock = "replaced"            // another collection has the name by now
)

// HeldError refuses the purge of a collection, for now. It ends by itself when its reason does.
type HeldError struct {
	NS   string
	Slot string // the watcher document, or the watcher's name, or ""
	Hold PurgeBlock
}

func (e *HeldError) Error() string {
	switch e.Hold {
	case HoldUnclaimed:
		return fmt.Sprintf("nothing of %s is purged: no watcher is registered for it, so nobody knows what of it was delivered; run a watcher that may list the collections of its database", e.NS)
	case HoldVanished:
		return fmt.Sprintf("nothing of %s is purged: watcher document %s is registered for it and is not there; run outrelay recover, or release the collection with outrelay recover --release %s", e.NS, e.Slot, e.NS)
	case HoldNoPosition:
		return fmt.Sprintf("nothing of %s is purged: watcher document %s has no position yet", e.NS, e.Slot)
	case HoldGap:
		return fmt.Sprintf("nothing of %s is purged: watcher document %s has a gap, whose envelopes are found in the collection; the purge goes on when it is swept", e.NS, e.Slot)
	case HoldAhead:
		return fmt.Sprintf("nothing of %s is purged: the position of watcher document %s lies in the future, as after a restored backup, so it says nothing about what was delivered", e.NS, e.Slot)
	case HoldUnread:
		return fmt.Sprintf("nothing of %s is purged: watcher document %s has not read yet the rename that gave the collection its name, so what the collection held before is not delivered", e.NS, e.Slot)
	case HoldReplaced:
		return fmt.Sprintf("nothing of %s is purged: another collection has got the name, and the watcher has not read it yet", e.NS)
	}
	return fmt.Sprintf("nothing of %s is purged: %s", e.NS, e.Hold)
}

// Cut is up to where a collection may be purged.
type Cut struct {
	Before bson.Timestamp // what has an older stamp is delivered and was kept long enough
	Slot   string         // the watcher document that is furthest behind
}

// SentBefore is the same boundary for envelopes without a stamp, which go by the time of their delivery.
func (c Cut) SentBefore() time.Time { return time.Unix(int64(c.Before.T), 0) }

// Watermarks are the positions of all watchers and slots as they were persisted, owned, paused or abandoned, and who is
// registered for which collection.
type Watermarks struct {
	claims map[[16]byte][]outboxes.Registration // by collection
	slots  map[string][]persisted               // by watcher
	now    time.Time                            // of the server
}

// maxAhead is how far the cluster's time may be before the server's clock: it never goes back, where clocks do.
const maxAhead = 5 * time.Minute

// persisted is what the purge needs of a watcher document.
type persisted struct {
	ID          string         `bson:"_id"`
	ClusterTime bson.Timestamp `bson:"clusterTime"`
	Gap         bson.RawValue  `bson:"gap"`
	of          int
}

// ReadWatermarks reads the registry and the watcher documents of the state database: two majority reads, because a
// position that is rolled back would have let too much go.
func ReadWatermarks(ctx context.Context, state *mongo.Database) (*Watermarks, error) {
	claims, err := outboxes.NewRegistry(state.Collection("collections")).Registrations(ctx, "")
	if err != nil {
		return nil, err
	}
	now, err := mongodb.ServerTime(ctx, state.Client())
	if err != nil {
		return nil, err
	}
	w := &Watermarks{now: now, claims: make(map[[16]byte][]outboxes.Registration), slots: make(map[string][]persisted)}
	for _, c := range claims {
		if len(c.UUID.Data) == 16 {
			w.claims[[16]byte(c.UUID.Data)] = append(w.claims[[16]byte(c.UUID.Data)], c)
		}
	}
	coll := mongodb.Majority(state.Collection("watchers"))
	cur, err := coll.Find(ctx, bson.D{}, options.Find().SetProjection(bson.D{{Key: "clusterTime", Value: 1}, {Key: "gap", Value: 1}}))
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "reading the positions of the watchers", "find", mongodb.Namespace(coll), "")
	}
	var docs []persisted
	if err := cur.All(ctx, &docs); err != nil {
		return nil, fmt.Errorf("reading the positions of the watchers: %w", err)
	}
	for _, d := range docs {
		if name, of, ok := slotOf(d.ID); ok {
			d.of = of
			w.slots[name] = append(w.slots[name], d)
		}
	}
	return w, nil
}

// slotOf takes a watcher document's id apart: "<watcher>/<i>of<N>" (N28).
func slotOf(id string) (watcher string, of int, ok bool) {
	at := strings.LastIndexByte(id, '/')
	if at < 0 {
		return "", 0, false
	}
	i, n, found := strings.Cut(id[at+1:], "of")
	of, err := strconv.Atoi(n)
	if _, e := strconv.Atoi(i); !found || err != nil || e != nil || of < 1 {
		return "", 0, false
	}
	return id[:at], of, true
}

// Cut is the least position of all slots of all watchers that are registered for the collection, less keep, which is the
// retention or the margin, whichever is longer. Its errors are [*HeldError].
//
// N25: an envelope whose stamp is older than a position less the margin was committed before that position, so its event
// is behind it: delivered, or written down as an exception, which carries a state. A slot counts whether anybody owns it
// or not; one that is missing, that has no position, or that has a gap stops the purge, for then the collection itself is
// what the undelivered envelopes will be read from.
func (w *Watermarks) Cut(o outboxes.Outbox, keep time.Duration) (Cut, error) {
	held := func(slot string, why PurgeBlock) (Cut, error) {
		return Cut{}, &HeldError{NS: o.NS(), Slot: slot, Hold: why}
	}
	claims := w.claims[o.UUID]
	if len(claims) == 0 || !o.Identified() {
		return held("", HoldUnclaimed)
	}
	least := Cut{Before: bson.Timestamp{T: math.MaxUint32, I: math.MaxUint32}}
	for _, claim := range claims {
		name, seen := claim.Watcher, make(map[int]int)
		for _, s := range w.slots[name] {
			seen[s.of]++
			switch {
			case s.ClusterTime.IsZero():
				return held(s.ID, HoldNoPosition)
			case !s.Gap.IsZero() && s.Gap.Type != bson.TypeNull:
				return held(s.ID, HoldGap)
			case time.Unix(int64(s.ClusterTime.T), 0).After(w.now.Add(maxAhead)):
				return held(s.ID, HoldAhead)
			case claim.Away(), s.ClusterTime.Before(claim.Seen):
				return held(s.ID, HoldUnread)
			case s.ClusterTime.Before(least.Before):
				least = Cut{Before: s.ClusterTime, Slot: s.ID}
			}
		}
		if len(seen) == 0 {
			return held(name, HoldVanished)
		}
		for of, n := range seen {
			if n < of {
				return held(fmt.Sprintf("%s/?of%d", name, of), HoldVanished)
			}
		}
	}
	least.Before = earlier(least.Before, keep)
	return least, nil
}

// earlier is t less d, in whole seconds and never less than d.
func earlier(t bson.Timestamp, d time.Duration) bson.Timestamp {
	if d <= 0 {
		return t
	}
	s := int64((d + time.Second - 1) / time.Second)
	if s >= int64(t.T) {
		return bson.Timestamp{}
	}
	return bson.Timestamp{T: t.T - uint32(s), I: t.I}
}
