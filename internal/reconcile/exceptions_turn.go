package reconcile

import (
	"errors"
	"slices"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// allTopics stands for all topics, of an envelope that does not say which.
const allTopics = ""

// admitTopics decides for which topics it is the envelope's turn, and notes them as in flight. For the others it stops its key: what is
// behind must not pass it.
func (x *Exceptions) admitTopics(p *scanPass, it *candidate, now int64) ([]string, *flight) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.current.orderKey != it.ref.orderKey || !x.current.started {
		x.current = keyTurn{orderKey: it.ref.orderKey, started: true, stopped: map[string]struct{}{}}
		p.held, p.leftTopics = 0, 0
		delete(x.sleepingKeys, it.ref.orderKey)
	}
	k := x.keyStates[it.ref.orderKey]
	if stop, landed := x.landedIDs[it.flightID]; landed { // the page may still show it as it was
		x.current.stoppedAll = x.current.stoppedAll || stop
		return nil, nil
	}
	if f := x.inFlight[it.flightID]; f != nil {
		if f.partial || f.alone {
			x.stopTopicsLocked(it.topics, f.alone, f.topics)
		}
		return nil, nil
	}
	if x.current.stoppedAll || k != nil && k.broken {
		x.current.stoppedAll = true
		return nil, nil
	}
	if !x.isReadyLocked(p, it, now) {
		if it.state == event.StateRetry && p.view.NextAt > now && len(x.current.stopped) == 0 {
			x.rememberSleepingLocked(it, p.view.NextAt)
		}
		x.stopTopicsLocked(it.topics, true, nil)
		return nil, nil
	}
	alone := it.state == event.StateRetry && p.view.Attempts > 0
	var topics []string
	first, parked := len(x.current.stopped) == 0 && k == nil, false
	for _, t := range it.topics {
		if x.mayPublishLocked(p, k, t, alone || t == allTopics) {
			topics = append(topics, t)
			continue
		}
		x.current.stopped[t] = struct{}{}
		if _, is := x.parked[t]; is {
			parked = true
		}
	}
	if len(topics) == 0 {
		if first && parked && len(x.heldKeys) < maxKeys {
			x.heldKeys[it.ref.orderKey] = true
		}
		return nil, nil
	}
	f := &flight{ref: keyRef{it.ref.orderKey, copyValue(it.ref.stored)}, topics: topics, alone: alone || topics[0] == allTopics, partial: len(topics) < len(it.topics)}
	x.trackLocked(it.flightID, f)
	if f.alone {
		x.stopTopicsLocked(topics, true, nil)
	}
	return topics, f
}

// rememberSleepingLocked remembers that a key waits for the next attempt of its first envelope, which will call.
func (x *Exceptions) rememberSleepingLocked(it *candidate, until int64) {
	if len(x.sleepingKeys) >= maxKeys {
		clear(x.sleepingKeys)
	}
	x.sleepingKeys[it.ref.orderKey] = sleepingKey{until, it.topics}
}

// waitsBehindLocked reports whether an envelope that has just been written stands behind one of its key that is being tried alone, or that waits
// for its next attempt: then a look at the key would find nothing that may go, and the end of that wait will look at it.
func (x *Exceptions) waitsBehindLocked(e *store.Exception) bool {
	if e.State != event.StateBlocked || len(e.Pending) == 0 {
		return false
	}
	s, asleep := x.sleepingKeys[orderKey{e.NS, e.Key}]
	asleep = asleep && s.until > x.Now().UnixMilli()
	k := x.keyStates[orderKey{e.NS, e.Key}]
	for _, t := range e.Pending {
		if !(asleep && slices.Contains(s.topics, t)) && (k == nil || !k.alone[t]) {
			return false
		}
	}
	return true
}

// isReadyLocked reports whether the envelope may go at all. N15: one of the stream only once the watermark has passed it, else one
// before it could still come; N18: any other has no such bound.
func (x *Exceptions) isReadyLocked(p *scanPass, it *candidate, now int64) bool {
	if it.atFault { // it becomes a dead letter without waiting for a time that it may have made up
		return true
	}
	if it.state == event.StateRetry && p.view.NextAt > now {
		return false
	}
	switch it.origin {
	case store.OriginScheduled, store.OriginRequeue, store.OriginReplay:
		return true
	}
	if it.pos <= p.reached {
		return true
	}
	if len(x.work.ahead) < maxKeys {
		if a, again := x.work.ahead[it.ref.orderKey]; !again || it.pos < a.pos {
			x.work.ahead[it.ref.orderKey] = keyAhead{copyValue(it.ref.stored), it.pos}
		}
	} else if x.work.aheadOverflow == "" || it.pos < x.work.aheadOverflow {
		x.work.aheadOverflow = it.pos
	}
	return false
}

// mayPublishLocked reports whether an envelope may go to the topic now.
func (x *Exceptions) mayPublishLocked(p *scanPass, k *keyState, topic string, alone bool) bool {
	_, stopped := x.current.stopped[topic]
	_, every := x.current.stopped[allTopics]
	_, parked := x.parked[topic]
	_, skipped := p.skip[topic]
	if stopped || every || parked || skipped {
		return false
	}
	if topic == allTopics {
		return len(x.current.stopped) == 0 && k == nil && !p.skipParked
	}
	if p.onlyTopics != nil && !slices.Contains(p.onlyTopics, topic) {
		return false // what is before it for this topic may not be in this pass
	}
	if k == nil {
		return true
	}
	if k.alone[topic] || k.alone[allTopics] {
		return false
	}
	return !alone || k.topics[topic] == 0
}

// stopTopicsLocked holds up what comes behind, for all topics or for those that are not among flying.
func (x *Exceptions) stopTopicsLocked(topics []string, all bool, flying []string) {
	for _, t := range topics {
		if all || !slices.Contains(flying, t) {
			x.current.stopped[t] = struct{}{}
		}
	}
}

func (x *Exceptions) trackLocked(id string, f *flight) {
	x.publishedCount++
	x.inFlight[id] = f
	k := x.keyStates[f.ref.orderKey]
	if k == nil {
		k = &keyState{topics: map[string]int{}, alone: map[string]bool{}}
		x.keyStates[f.ref.orderKey] = k
	}
	k.count++
	for _, t := range f.topics {
		k.topics[t]++
		if f.alone {
			k.alone[t] = true
		}
	}
}

// noteAnswers looks at what came back before anything more is published: what a topic gave back, all that is behind it in its
// key would otherwise overtake. It is called by the sink and calls nothing.
func (x *Exceptions) noteAnswers(f *flight, answers []record.Answer) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, a := range answers {
		if a.Refused == nil && a.Held == nil {
			continue
		}
		if errors.Is(a.Held, record.ErrParked) {
			x.parked[a.Topic] = struct{}{}
		}
		x.breakKeyLocked(f.ref.orderKey)
	}
}

func (x *Exceptions) breakKey(key orderKey) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.breakKeyLocked(key)
}

func (x *Exceptions) breakKeyLocked(key orderKey) {
	if k := x.keyStates[key]; k != nil {
		k.broken = true
	}
	if x.current.orderKey == key {
		x.current.stoppedAll = true
	}
}

// endFlight takes an envelope whose fate is written out of what is in flight, and decides whether its key has to be looked at
// again.
func (x *Exceptions) endFlight(id string, f *flight, fate Fate) {
	x.mu.Lock()
	k := x.keyStates[f.ref.orderKey]
	waits := fate.End == Retrying || fate.End == Waiting
	// A page that was read before still shows it; what is behind it there may go on only if it is gone.
	x.landedIDs[id] = waits
	if waits && x.current.orderKey == f.ref.orderKey {
		x.current.stoppedAll = true
	}
	for _, topics := range [][]string{fate.Refused, fate.Held} {
		for _, t := range topics {
			if k.resume == nil {
				k.resume = map[string]struct{}{}
			}
			k.resume[t] = struct{}{}
		}
	}
	switch {
	case f.alone && !waits:
		x.queueKeyLocked(x.work.keys, f.ref) // those that stood behind it
	case f.partial && !k.broken:
		x.queueKeyLocked(x.work.nextPoll, f.ref) // the topics that it did not go to
	}
	var resume map[string]struct{}
	if x.untrackLocked(id, f); k.count == 0 && k.broken {
		resume = k.resume
		x.queueKeyLocked(x.work.nextPoll, f.ref)
		if !waits { // dead: its key flows at once
			x.queueKeyLocked(x.work.keys, f.ref)
		}
	}
	now := len(x.work.keys) > 0 || x.work.scanAll || x.work.moreDue && len(x.inFlight) < fewInFlight
	x.mu.Unlock()
	for t := range resume {
		x.Outlet.Resume(f.ref.ns, t, f.ref.key)
	}
	poke(x.room)
	if now {
		poke(x.wake)
	}
}

// undoFlight takes back what was not published after all.
func (x *Exceptions) undoFlight(id string, f *flight) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.untrackLocked(id, f)
	x.breakKeyLocked(f.ref.orderKey) // so that all of it begins anew
}

// untrackLocked undoes take.
func (x *Exceptions) untrackLocked(id string, f *flight) {
	delete(x.inFlight, id)
	k := x.keyStates[f.ref.orderKey]
	for _, t := range f.topics {
		if k.topics[t]--; k.topics[t] == 0 {
			delete(k.topics, t)
		}
		if f.alone {
			delete(k.alone, t)
		}
	}
	if k.count--; k.count == 0 {
		delete(x.keyStates, f.ref.orderKey)
	}
}
