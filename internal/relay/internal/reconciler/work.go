package reconciler

import (
	"context"
	"maps"
	"slices"
)

// pendingWork is the set of reasons to read the store.
type pendingWork struct {
	scanAll       bool                  // make a pass over everything
	moreDue       bool                  // there are more due envelopes than one query returns
	keys          map[orderKey]struct{} // scan these now
	nextPoll      map[orderKey]struct{} // scan these at the next poll
	ahead         map[orderKey]string   // scan these when the resolved position has passed this position
	aheadOverflow string                // lowest position that did not fit into ahead; "" for none
	owed          bool                  // make a pass over everything when it is known how far a sweep has come
}

// queueKeyLocked adds a key to one of the sets of x.work. If the set is full, it requests a scan of
// everything instead.
func (x *Sender) queueKeyLocked(set map[orderKey]struct{}, key orderKey) {
	if len(set) >= maxKeys {
		x.work.scanAll = true
		return
	}
	set[key] = struct{}{}
}

// promoteKeys queues the keys that the resolved position has passed and, if due is set, the keys that waited
// for the next poll.
func (x *Sender) promoteKeys(due bool) {
	reached, sweepReached := x.config.Outlet.Reached(), x.config.Outlet.ReachedBySweep()
	x.mu.Lock()
	defer x.mu.Unlock()

	if x.work.owed && sweepReached != "" {
		x.work.scanAll, x.work.owed = true, false
	}
	for k, pos := range x.work.ahead {
		if pos <= reached {
			delete(x.work.ahead, k)
			x.queueKeyLocked(x.work.keys, k)
		}
	}
	// Keys beyond the limit have left only their lowest position, so everything is scanned.
	if x.work.aheadOverflow != "" && x.work.aheadOverflow <= reached {
		x.work.scanAll, x.work.aheadOverflow = true, ""
	}

	if due {
		for k := range x.work.nextPoll {
			delete(x.work.nextPoll, k)
			x.queueKeyLocked(x.work.keys, k)
		}
	}
}

// takeScanReasons returns and resets the reasons to read the whole store.
func (x *Sender) takeScanReasons() (all, moreDue bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	all, x.work.scanAll = x.work.scanAll, false
	moreDue, x.work.moreDue = x.work.moreDue, false
	return all, moreDue
}

// takeQueuedKeys removes the queued keys and returns them by outbox.
func (x *Sender) takeQueuedKeys() map[string][]string {
	x.mu.Lock()
	defer x.mu.Unlock()
	keys := map[string][]string{}
	for k := range x.work.keys {
		keys[k.ns] = append(keys[k.ns], k.key)
	}
	clear(x.work.keys)
	return keys
}

// findDueKeys returns the keys with envelopes that are due, by outbox, without the keys that are in flight or
// wait for a parked topic. many reports that there may be more.
func (x *Sender) findDueKeys(ctx context.Context) (keys map[string][]string, many bool, err error) {
	x.mu.Lock()
	skip := slices.Collect(maps.Keys(x.parked))
	x.mu.Unlock()

	found, err := x.config.Store.DueKeys(ctx, x.config.Now(), skip, dueLimit)
	if err != nil {
		return nil, false, err
	}

	keys, seen := map[string][]string{}, map[orderKey]struct{}{}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, k := range found {
		key := orderKey{k.NS, k.Key}
		_, known := seen[key]
		_, reserved := x.reserved[k.DocumentID()]
		// The end of a flight, or Wake, will cause a scan of these keys. A reserved envelope is removed.
		if known || reserved || x.keyStates[key] != nil || x.stops[key].until == untilUnparked {
			continue
		}
		seen[key] = struct{}{}
		keys[k.NS] = append(keys[k.NS], k.Key)
	}
	return keys, len(found) >= dueLimit, nil
}
