package waiting

import (
	"context"
	"maps"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// pendingWork is the set of reasons to read exceptions.
type pendingWork struct {
	scanAll       bool                       // make a pass over everything
	moreDue       bool                       // there are more due retries than one query returns
	keys          map[orderKey]bson.RawValue // scan these now
	nextPoll      map[orderKey]bson.RawValue // scan these at the next poll
	ahead         map[orderKey]keyAhead      // scan these when the watermark has passed their position
	aheadOverflow string                     // lowest position that did not fit into ahead; "" for none
}

// keyAhead is a key whose first envelope the watermark has not passed yet.
type keyAhead struct {
	stored bson.RawValue
	pos    string
}

// queueKeyLocked adds a key to one of the sets of x.work. If the set is full, it requests a scan of
// everything instead.
func (x *Exceptions) queueKeyLocked(set map[orderKey]bson.RawValue, ref keyRef) {
	if len(set) >= maxKeys {
		x.work.scanAll = true
		return
	}
	set[ref.orderKey] = mongodb.CloneValue(ref.stored)
}

// promoteKeys queues the keys that the watermark has passed and, if due is set, the keys that waited
// for the next poll.
func (x *Exceptions) promoteKeys(due bool) {
	reached := x.config.Outlet.Reached()
	x.mu.Lock()
	defer x.mu.Unlock()

	for k, a := range x.work.ahead {
		if a.pos <= reached {
			delete(x.work.ahead, k)
			x.queueKeyLocked(x.work.keys, keyRef{k, a.stored})
		}
	}
	// Keys beyond the limit have left only their lowest position, so everything is scanned.
	if x.work.aheadOverflow != "" && x.work.aheadOverflow <= reached {
		x.work.scanAll, x.work.aheadOverflow = true, ""
	}

	if due {
		for k, stored := range x.work.nextPoll {
			delete(x.work.nextPoll, k)
			x.queueKeyLocked(x.work.keys, keyRef{k, stored})
		}
	}
}

// takeScanReasons returns and resets the reasons to read whole collections.
func (x *Exceptions) takeScanReasons() (all, moreDue bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	all, x.work.scanAll = x.work.scanAll, false
	moreDue, x.work.moreDue = x.work.moreDue, false
	return all, moreDue
}

// takeQueuedKeys returns the queued keys of a collection and removes them from the queue.
func (x *Exceptions) takeQueuedKeys(ns string) []bson.RawValue {
	x.mu.Lock()
	defer x.mu.Unlock()
	var refs []bson.RawValue
	for k, stored := range x.work.keys {
		if k.ns == ns {
			delete(x.work.keys, k)
			refs = append(refs, stored)
		}
	}
	return refs
}

// findDueKeys returns the keys of c with retries that are due, without the keys that are in flight or
// wait for a parked topic. many reports that there may be more.
func (x *Exceptions) findDueKeys(ctx context.Context, c outboxes.Outbox) (refs []bson.RawValue, many bool, err error) {
	x.mu.Lock()
	skip := slices.Collect(maps.Keys(x.parked))
	x.mu.Unlock()

	coll := mongodb.Database(x.config.Client, c.DB).Collection(c.Coll)
	found, err := DueRetries(ctx, coll, x.config.Now(), skip, dueLimit, c.Slot)
	if err != nil {
		return nil, false, err
	}

	seen := map[string]struct{}{}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, k := range found {
		stored := mongodb.CloneValue(k.Key)
		key := orderKey{c.NS(), keyText(k.Key, k.AggregateID)}
		_, known := seen[mongodb.ValueKey(stored)]
		// The end of a flight, or Wake, will cause a scan of these keys.
		if known || x.keyStates[key] != nil || x.stops[key].until == untilUnparked {
			continue
		}
		seen[mongodb.ValueKey(stored)] = struct{}{}
		refs = append(refs, stored)
	}
	return refs, len(found) >= dueLimit, nil
}
