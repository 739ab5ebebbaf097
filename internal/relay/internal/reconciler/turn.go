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

// admitTopics returns the topics to which it may be published now, and tracks these publications as
// in flight. For the other topics it stops the key, because later envelopes of the key must not
// overtake this envelope. It returns no topics and a nil flight if nothing may be published.
func (x *Sender) admitTopics(p *scanPass, it *candidate, now int64) ([]string, *flight) {
	x.mu.Lock()
	defer x.mu.Unlock()

	key := it.key()
	if x.current.orderKey != key || !x.current.started {
		x.current = keyTurn{orderKey: key, started: true, stopped: map[string]struct{}{}}
		p.held, p.leftTopics = 0, 0
		// This pass finds out again whether the first envelope waits.
		delete(x.stops, key)
	}

	// The page may have been read before the outcome of this envelope was written.
	if stop, landed := x.landedIDs[it.DocumentID]; landed {
		x.current.stoppedAll = x.current.stoppedAll || stop
		return nil, nil
	}

	if _, reserved := x.reserved[it.DocumentID]; reserved {
		return nil, nil
	}
	if f := x.inFlight[it.DocumentID]; f != nil {
		// Later envelopes may follow it only to the topics to which it is in flight, and only if it is
		// not alone.
		if f.partial || f.alone {
			x.stopTopicsLocked(it.topics, f.alone, f.topics)
		}
		return nil, nil
	}

	k := x.keyStates[key]
	if x.current.stoppedAll || k != nil && k.broken {
		// The mark lasts for the rest of the key, although the last answer may end k before.
		x.current.stoppedAll = true
		return nil, nil
	}

	if !x.isReadyLocked(p, it, now) {
		if it.NextAt > now && len(x.current.stopped) == 0 {
			x.rememberStopLocked(it, it.NextAt)
		}
		x.stopTopicsLocked(it.topics, true, nil)
		return nil, nil
	}

	alone := it.Attempts > 0
	firstOfKey := len(x.current.stopped) == 0 && k == nil
	var topics []string
	for _, t := range it.topics {
		if x.mayPublishLocked(p, k, t, alone || t == allTopics) {
			topics = append(topics, t)
		} else {
			x.current.stopped[t] = struct{}{}
		}
	}

	if len(topics) == 0 {
		if firstOfKey && x.allParkedLocked(key, it.topics) {
			x.rememberStopLocked(it, untilUnparked)
		}
		return nil, nil
	}

	f := &flight{
		key:     key,
		topics:  topics,
		alone:   alone || topics[0] == allTopics,
		partial: len(topics) < len(it.topics),
	}
	x.trackLocked(it.DocumentID, f)
	if f.alone {
		x.stopTopicsLocked(topics, true, nil)
	}
	return topics, f
}

// rememberStopLocked records that the key of it waits for its first envelope. The due retry, or the pass
// that Wake requests, then reads the key again. Until then, each scan of the key would be in vain.
func (x *Sender) rememberStopLocked(it *candidate, until int64) {
	if len(x.stops) >= maxKeys {
		clear(x.stops)
	}
	x.stops[it.key()] = keyStop{until, it.topics}
}

// waitsBehindLocked reports whether e, which was just written, waits for an earlier envelope of its
// key that is published alone or waits for its next attempt. A scan of the key would publish nothing
// now, and the end of that wait causes one.
func (x *Sender) waitsBehindLocked(e *waiting.Entry) bool {
	if e.Reason != waiting.Blocked || len(e.Pending) == 0 {
		return false
	}

	key := orderKey{e.NS, e.Key}
	s := x.stops[key]
	stopped := s.until > x.config.Now().UnixMilli()

	k := x.keyStates[key]
	for _, t := range e.Pending {
		stops := stopped && slices.Contains(s.topics, t)
		if !stops && (k == nil || !k.alone[t]) {
			return false
		}
	}
	return true
}

// isReadyLocked reports whether it may be published at all. An envelope of the stream is ready only
// after the watermark has passed it, because an earlier event of its key could still come (N15). An
// exception of any other origin has no such bound (N18).
func (x *Sender) isReadyLocked(p *scanPass, it *candidate, now int64) bool {
	// An envelope at fault becomes a dead letter. It may have invented its times, so it does not wait
	// for them.
	if it.atFault {
		return true
	}

	if it.NextAt > now {
		return false
	}

	if !it.IsOfStream() || it.Pos <= p.reached {
		return true
	}

	// The key is scanned again when the watermark has passed its lowest position.
	if len(x.work.ahead) < maxKeys {
		pos, known := x.work.ahead[it.key()]
		if !known || it.Pos < pos {
			x.work.ahead[it.key()] = it.Pos
		}
	} else if x.work.aheadOverflow == "" || it.Pos < x.work.aheadOverflow {
		x.work.aheadOverflow = it.Pos
	}
	return false
}

// mayPublishLocked reports whether an envelope of the current key, whose state is k, may be published
// to topic now. If alone is set, no other envelope of the key may be in flight to the topic.
func (x *Sender) mayPublishLocked(p *scanPass, k *keyState, topic string, alone bool) bool {
	_, stopped := x.current.stopped[topic]
	_, allStopped := x.current.stopped[allTopics]
	_, skipped := p.skip[topic]
	if stopped || allStopped || skipped || x.isParkedLocked(x.current.orderKey, topic) {
		return false
	}

	// It may go to any topic. So no other envelope of the key may be in flight, and the pass must not
	// have left out an earlier envelope.
	if topic == allTopics {
		return len(x.current.stopped) == 0 && k == nil && len(p.skip) == 0
	}
	if k == nil {
		return true
	}
	if k.alone[topic] || k.alone[allTopics] {
		return false
	}
	return !alone || k.topics[topic] == 0
}

// stopTopicsLocked stops the current key for topics. Unless all is set, it leaves out the topics in
// inFlight.
func (x *Sender) stopTopicsLocked(topics []string, all bool, inFlight []string) {
	for _, t := range topics {
		if all || !slices.Contains(inFlight, t) {
			x.current.stopped[t] = struct{}{}
		}
	}
}

// trackLocked adds f to the publications in flight.
func (x *Sender) trackLocked(id docID, f *flight) {
	x.publishedCount++
	f.wakes = x.wakeCount
	x.inFlight[id] = f

	k := x.keyStates[f.key]
	if k == nil {
		k = &keyState{topics: map[string]int{}, alone: map[string]bool{}}
		x.keyStates[f.key] = k
	}

	k.count++
	for _, t := range f.topics {
		k.topics[t]++
		if f.alone {
			k.alone[t] = true
		}
	}
}

// noteAnswers stops the key of f if a topic refused or returned its record. The sink calls it before
// another envelope of the key is published, because later envelopes would overtake the returned
// envelope. It does not call the sink.
func (x *Sender) noteAnswers(f *flight, answers []record.Answer) {
	x.mu.Lock()
	defer x.mu.Unlock()

	for _, a := range answers {
		if a.Refusal == nil && a.Held == nil {
			continue
		}
		// A topic may be ready again since it returned the record. Then only the next pass would find it not parked.
		switch {
		case f.wakes != x.wakeCount:
		case errors.Is(a.Held, record.ErrPartitionParked) && len(x.parkedKeys) < maxParked:
			x.parkedKeys[keyTopic{f.key, a.Topic}] = struct{}{}
		case errors.Is(a.Held, record.ErrParked):
			x.parked[a.Topic] = struct{}{}
		}
		x.breakKeyLocked(f.key)
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
	if k := x.keyStates[key]; k != nil {
		k.broken = true
	}
	if x.current.orderKey == key {
		x.current.stoppedAll = true
	}
}

// endFlight ends the flight of a publication whose outcome is written, and queues its key if more
// envelopes of the key may be publishable now. The ledger calls it.
func (x *Sender) endFlight(id docID, f *flight, o *ledger.Outcome) {
	x.mu.Lock()

	// A page that was read before still shows this envelope. Later envelopes of the key on that page
	// may be published only if this envelope waits no more.
	waits := o.End.Waits()
	x.landedIDs[id] = waits
	if waits && x.current.orderKey == f.key {
		x.current.stoppedAll = true
	}

	k := x.keyStates[f.key]
	for _, topics := range [][]string{o.Refused, o.Held} {
		for _, t := range topics {
			if k.resume == nil {
				k.resume = map[string]struct{}{}
			}
			k.resume[t] = struct{}{}
		}
	}

	switch {
	case f.alone && !waits:
		// Envelopes that waited for this envelope may be published now.
		x.queueKeyLocked(x.work.keys, f.key)
	case f.partial && !k.broken:
		// The envelope still waits for its other topics.
		x.queueKeyLocked(x.work.nextPoll, f.key)
	}

	var resume map[string]struct{}
	x.untrackLocked(id, f)
	if k.count == 0 && k.broken {
		resume = k.resume
		// A scan at once would probably meet the same obstacle.
		x.queueKeyLocked(x.work.nextPoll, f.key)

		// A dead envelope no longer blocks its key.
		if !waits {
			x.queueKeyLocked(x.work.keys, f.key)
		}
	}

	wake := len(x.work.keys) > 0 || x.work.scanAll || x.work.moreDue && len(x.inFlight) < fewInFlight
	x.mu.Unlock()

	for t := range resume {
		x.config.Outlet.ResumeKey(f.key.ns, t, f.key.key)
	}
	retry.Signal(x.room)
	if wake {
		retry.Signal(x.wake)
	}
}

// undoFlight removes a publication that the sink did not accept. It breaks the key, so that a later
// pass starts with its first envelope.
func (x *Sender) undoFlight(id docID, f *flight) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.untrackLocked(id, f)
	x.breakKeyLocked(f.key)
}

// untrackLocked reverts trackLocked.
func (x *Sender) untrackLocked(id docID, f *flight) {
	delete(x.inFlight, id)

	k := x.keyStates[f.key]
	for _, t := range f.topics {
		k.topics[t]--
		if k.topics[t] == 0 {
			delete(k.topics, t)
		}
		if f.alone {
			delete(k.alone, t)
		}
	}

	k.count--
	if k.count == 0 {
		delete(x.keyStates, f.key)
	}
}
