package reconciler

import (
	"errors"
	"slices"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// allTopics stands for all topics of an envelope that does not list its targets.
const allTopics = ""

// admitTopics returns the topics to which candidate may be published now, and tracks these publications as
// in flight. For the other topics it stops the key, because later envelopes of the key must not
// overtake this envelope. It returns no topics and a nil flight if nothing may be published.
func (x *Sender) admitTopics(pass *scanPass, candidate *candidate, now int64) ([]string, *flight) {
	owed := x.isOwed(candidate.Document)
	x.mu.Lock()
	defer x.mu.Unlock()

	key := candidate.key()
	if x.current.orderKey != key || !x.current.started {
		x.current = keyTurn{orderKey: key, started: true, stopped: map[string]struct{}{}}
		pass.held, pass.leftTopics = 0, 0
		// This pass finds out again whether the first envelope waits.
		delete(x.stops, key)
	}

	// The page may have been read before the outcome of this envelope was written.
	if stop, landed := x.landedIDs[candidate.DocumentID]; landed {
		x.current.stoppedAll = x.current.stoppedAll || stop
		return nil, nil
	}

	if _, reserved := x.reserved[candidate.DocumentID]; reserved {
		return nil, nil
	}
	if flight := x.inFlight[candidate.DocumentID]; flight != nil {
		// Later envelopes may follow it only to the topics to which it is in flight, and only if it is
		// not alone.
		if flight.partial || flight.alone {
			inFlight := flight.topics
			if flight.alone {
				inFlight = nil
			}
			x.stopTopicsLocked(candidate.topics, inFlight)
		}
		return nil, nil
	}

	keyState := x.keyStates[key]
	if x.current.stoppedAll || keyState != nil && keyState.broken {
		// The mark lasts for the rest of the key, although the last result may end keyState before.
		x.current.stoppedAll = true
		return nil, nil
	}

	if !x.isReadyLocked(pass, candidate, owed, now) {
		if candidate.NextAt > now && len(x.current.stopped) == 0 {
			x.rememberStopLocked(candidate, candidate.NextAt)
		}
		x.stopTopicsLocked(candidate.topics, nil)
		return nil, nil
	}

	alone := candidate.Attempts > 0
	firstOfKey := len(x.current.stopped) == 0 && keyState == nil
	var topics []string
	for _, t := range candidate.topics {
		if x.mayPublishLocked(pass, keyState, t, alone || t == allTopics) {
			topics = append(topics, t)
		} else {
			x.current.stopped[t] = struct{}{}
		}
	}

	if len(topics) == 0 {
		if firstOfKey && x.allParkedLocked(key, candidate.topics) {
			x.rememberStopLocked(candidate, untilUnparked)
		}
		return nil, nil
	}

	flight := &flight{
		key:     key,
		topics:  topics,
		alone:   alone || topics[0] == allTopics,
		partial: len(topics) < len(candidate.topics),
	}
	x.trackLocked(candidate.DocumentID, flight)
	if flight.alone {
		x.stopTopicsLocked(topics, nil)
	}
	return topics, flight
}

// rememberStopLocked records that the key of candidate waits for its first envelope. The due retry, or the pass
// that Wake requests, then reads the key again. Until then, each scan of the key would be in vain.
func (x *Sender) rememberStopLocked(candidate *candidate, until int64) {
	if len(x.stops) >= maxKeys {
		clear(x.stops)
	}
	x.stops[candidate.key()] = keyStop{until, candidate.topics}
}

// waitsForEarlierLocked reports whether entry, which was just written, waits for an earlier envelope of its
// key that is published alone or waits for its next attempt. A scan of the key would publish nothing
// now, and the end of that wait causes one.
func (x *Sender) waitsForEarlierLocked(entry *waiting.Entry) bool {
	if entry.Reason != waiting.Blocked || len(entry.Pending) == 0 {
		return false
	}

	key := orderKey{entry.NS, entry.Key}
	stop := x.stops[key]
	stopped := stop.until > x.config.Now().UnixMilli()

	keyState := x.keyStates[key]
	for _, t := range entry.Pending {
		stops := stopped && slices.Contains(stop.topics, t)
		if !stops && (keyState == nil || !keyState.alone[t]) {
			return false
		}
	}
	return true
}

// isOwed reports whether a sweep may still owe the envelope of document to other topics than those for which it waits. Its end would be
// recorded in the outbox, where a later owner that repeats the sweep would not find it (N22). Other envelopes are in the stream.
func (x *Sender) isOwed(document *waiting.Document) bool {
	return document.Origin == waiting.OriginSweep && document.Pos > x.config.Outlet.ReachedBySweep()
}

// isReadyLocked reports whether candidate may be published at all. An envelope of the stream is ready only if the resolved position had passed it
// before the pass began, because an earlier event of its key could still come, or be stored after the pass has read the key (N15). A
// waiting envelope of any other origin has no such bound (N18).
func (x *Sender) isReadyLocked(pass *scanPass, candidate *candidate, owed bool, now int64) bool {
	// An envelope at fault becomes a dead letter. It may have invented its times, so it does not wait
	// for them.
	if candidate.malformed != nil && !owed {
		return true
	}

	if candidate.NextAt > now {
		return false
	}

	if !candidate.IsOfStream() || candidate.Pos <= pass.reached {
		x.work.owed = x.work.owed || owed
		return !owed
	}

	// The key is scanned again when the resolved position has passed its lowest position.
	if len(x.work.ahead) < maxKeys {
		pos, known := x.work.ahead[candidate.key()]
		if !known || candidate.Pos < pos {
			x.work.ahead[candidate.key()] = candidate.Pos
		}
	} else if x.work.aheadOverflow == "" || candidate.Pos < x.work.aheadOverflow {
		x.work.aheadOverflow = candidate.Pos
	}
	return false
}

// mayPublishLocked reports whether an envelope of the current key, whose state is keyState, may be published
// to topic now. If alone is set, no other envelope of the key may be in flight to the topic. If only these flights prevent it, the end of the
// last one causes a scan of the key.
func (x *Sender) mayPublishLocked(pass *scanPass, keyState *keyState, topic string, alone bool) bool {
	_, stopped := x.current.stopped[topic]
	_, allStopped := x.current.stopped[allTopics]
	_, skipped := pass.skip[topic]
	if stopped || allStopped || skipped || x.isParkedLocked(x.current.orderKey, topic) {
		return false
	}

	// The envelope may go to any topic. So the pass must not have left out an earlier envelope.
	if topic == allTopics && (len(x.current.stopped) > 0 || len(pass.skip) > 0) {
		return false
	}
	if keyState == nil {
		return true
	}

	// The envelope may go to any topic, or others in flight are or must be alone.
	free := topic != allTopics && !keyState.alone[topic] && !keyState.alone[allTopics] && (!alone || keyState.topics[topic] == 0)
	keyState.again = keyState.again || !free
	return free
}

// stopTopicsLocked stops the current key for topics, without those in flight.
func (x *Sender) stopTopicsLocked(topics, inFlight []string) {
	for _, t := range topics {
		if !slices.Contains(inFlight, t) {
			x.current.stopped[t] = struct{}{}
		}
	}
}

// trackLocked adds flight to the publications in flight.
func (x *Sender) trackLocked(id docID, flight *flight) {
	x.publishedCount++
	flight.wakes = x.wakeCount
	x.inFlight[id] = flight

	state := x.keyStates[flight.key]
	if state == nil {
		state = &keyState{topics: map[string]int{}, alone: map[string]bool{}}
		x.keyStates[flight.key] = state
	}

	state.count++
	for _, t := range flight.topics {
		state.topics[t]++
		if flight.alone {
			state.alone[t] = true
		}
	}
}

// noteResults stops the key of flight if a topic rejected or returned its record. The sink calls it before
// another envelope of the key is published, because later envelopes would overtake the returned
// envelope. It does not call the sink.
func (x *Sender) noteResults(flight *flight, results []record.Result) {
	x.mu.Lock()
	defer x.mu.Unlock()

	for _, a := range results {
		if a.Rejection == nil && a.Held == nil {
			continue
		}
		// A topic may be ready again since it returned the record. Then only the next pass would find it not parked.
		switch {
		case flight.wakes != x.wakeCount:
		case errors.Is(a.Held, record.ErrPartitionParked) && len(x.parkedKeys) < maxParked:
			x.parkedKeys[keyTopic{flight.key, a.Topic}] = struct{}{}
		case errors.Is(a.Held, record.ErrParked):
			x.parked[a.Topic] = struct{}{}
		}
		x.breakKeyLocked(flight.key)
	}
}

// breakKey is breakKeyLocked for callers without the lock.
func (x *Sender) breakKey(key orderKey) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.breakKeyLocked(key)
}

// breakKeyLocked stops key until all of its publications in flight have ended.
func (x *Sender) breakKeyLocked(key orderKey) {
	if keyState := x.keyStates[key]; keyState != nil {
		keyState.broken = true
	}
	if x.current.orderKey == key {
		x.current.stoppedAll = true
	}
}

// endFlight ends the flight of a publication whose outcome is written, and queues its key if more
// envelopes of the key may be publishable now. The ledger calls it.
func (x *Sender) endFlight(id docID, flight *flight, outcome *ledger.Outcome) {
	x.mu.Lock()

	// A page that was read before still shows this envelope. Later envelopes of the key on that page
	// may be published only if this envelope waits no more.
	waits := outcome.End.Waits()
	x.landedIDs[id] = waits
	if waits && x.current.orderKey == flight.key {
		x.current.stoppedAll = true
	}

	keyState := x.keyStates[flight.key]
	for _, t := range slices.Concat(topicsOf(outcome.Rejected), outcome.Held) {
		if keyState.resume == nil {
			keyState.resume = map[string]struct{}{}
		}
		keyState.resume[t] = struct{}{}
	}

	switch {
	case flight.alone && !waits:
		// Envelopes that waited for this envelope may be published now.
		x.queueKeyLocked(x.work.keys, flight.key)
	case flight.partial && !keyState.broken:
		// The envelope still waits for its other topics.
		x.queueKeyLocked(x.work.nextPoll, flight.key)
	}

	var resume map[string]struct{}
	x.untrackLocked(id, flight)
	if keyState.count == 0 && keyState.broken {
		resume = keyState.resume
		// A scan at once would probably meet the same obstacle.
		x.queueKeyLocked(x.work.nextPoll, flight.key)

		// A dead envelope no longer blocks its key.
		if !waits {
			x.queueKeyLocked(x.work.keys, flight.key)
		}
	}

	if keyState.count == 0 && keyState.again {
		x.queueKeyLocked(x.work.keys, flight.key)
	}

	wake := len(x.work.keys) > 0 || x.work.scanAll || x.work.moreDue && len(x.inFlight) < fewInFlight
	x.mu.Unlock()

	for t := range resume {
		x.config.Outlet.ResumeKey(flight.key.ns, t, flight.key.key)
	}
	retry.Signal(x.room)
	if wake {
		retry.Signal(x.wake)
	}
}

// undoFlight removes a publication that the sink did not accept. It breaks the key, so that a later
// pass starts with its first envelope.
func (x *Sender) undoFlight(id docID, flight *flight) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.untrackLocked(id, flight)
	x.breakKeyLocked(flight.key)
}

// untrackLocked reverts trackLocked.
func (x *Sender) untrackLocked(id docID, flight *flight) {
	delete(x.inFlight, id)

	keyState := x.keyStates[flight.key]
	for _, t := range flight.topics {
		keyState.topics[t]--
		if keyState.topics[t] == 0 {
			delete(keyState.topics, t)
		}
		if flight.alone {
			delete(keyState.alone, t)
		}
	}

	keyState.count--
	if keyState.count == 0 {
		delete(x.keyStates, flight.key)
	}
}
