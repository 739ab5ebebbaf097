package reconcile

import (
	"errors"
	"slices"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// everything stands for all topics, of an envelope that does not say which.
const everything = ""

// admit decides for which topics it is the envelope's turn, and notes them as in flight. For the others it stops its key: what is
// behind must not pass it.
func (x *Exceptions) admit(p *reading, it *item, now int64) ([]string, *flight) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.cur.orderKey != it.ref.orderKey || !x.cur.at {
		x.cur = turn{orderKey: it.ref.orderKey, at: true, stopped: map[string]struct{}{}}
		p.held, p.left = 0, 0
		delete(x.asleep, it.ref.orderKey)
	}
	k := x.keys[it.ref.orderKey]
	if stop, landed := x.landed[it.flyID]; landed { // the page may still show it as it was
		x.cur.all = x.cur.all || stop
		return nil, nil
	}
	if f := x.flying[it.flyID]; f != nil {
		if f.partial || f.alone {
			x.stop(it.topics, f.alone, f.topics)
		}
		return nil, nil
	}
	if x.cur.all || k != nil && k.broken {
		x.cur.all = true
		return nil, nil
	}
	if !x.ready(p, it, now) {
		if it.state == event.StateRetry && p.view.NextAt > now && len(x.cur.stopped) == 0 {
			x.sleeps(it, p.view.NextAt)
		}
		x.stop(it.topics, true, nil)
		return nil, nil
	}
	alone := it.state == event.StateRetry && p.view.Attempts > 0
	var topics []string
	first, parked := len(x.cur.stopped) == 0 && k == nil, false
	for _, t := range it.topics {
		if x.free(p, k, t, alone || t == everything) {
			topics = append(topics, t)
			continue
		}
		x.cur.stopped[t] = struct{}{}
		if _, is := x.parked[t]; is {
			parked = true
		}
	}
	if len(topics) == 0 {
		if first && parked && len(x.held) < mostKeys {
			x.held[it.ref.orderKey] = true
		}
		return nil, nil
	}
	f := &flight{ref: keyRef{it.ref.orderKey, keep(it.ref.stored)}, topics: topics, alone: alone || topics[0] == everything, partial: len(topics) < len(it.topics)}
	x.take(it.flyID, f)
	if f.alone {
		x.stop(topics, true, nil)
	}
	return topics, f
}

// sleeps remembers that a key waits for the next attempt of its first envelope, which will call.
func (x *Exceptions) sleeps(it *item, until int64) {
	if len(x.asleep) >= mostKeys {
		clear(x.asleep)
	}
	x.asleep[it.ref.orderKey] = sleeping{until, it.topics}
}

// stands reports whether an envelope that has just been written stands behind one of its key that is being tried alone, or that waits
// for its next attempt: then a look at the key would find nothing that may go, and the end of that wait will look at it.
func (x *Exceptions) stands(e *store.Exception) bool {
	if e.State != event.StateBlocked || len(e.Pending) == 0 {
		return false
	}
	s, asleep := x.asleep[orderKey{e.NS, e.Key}]
	asleep = asleep && s.until > x.Now().UnixMilli()
	k := x.keys[orderKey{e.NS, e.Key}]
	for _, t := range e.Pending {
		if !(asleep && slices.Contains(s.topics, t)) && (k == nil || !k.alone[t]) {
			return false
		}
	}
	return true
}

// ready reports whether the envelope may go at all. N15: one of the stream only once the watermark has passed it, else one
// before it could still come; N18: any other has no such bound.
func (x *Exceptions) ready(p *reading, it *item, now int64) bool {
	if it.refused { // it becomes a dead letter without waiting for a time that it may have made up
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
	if len(x.jobs.ahead) < mostKeys {
		if a, again := x.jobs.ahead[it.ref.orderKey]; !again || it.pos < a.pos {
			x.jobs.ahead[it.ref.orderKey] = ahead{keep(it.ref.stored), it.pos}
		}
	} else if x.jobs.aheadN == "" || it.pos < x.jobs.aheadN {
		x.jobs.aheadN = it.pos
	}
	return false
}

// free reports whether an envelope may go to the topic now.
func (x *Exceptions) free(p *reading, k *keyState, topic string, alone bool) bool {
	_, stopped := x.cur.stopped[topic]
	_, every := x.cur.stopped[everything]
	_, parked := x.parked[topic]
	_, skipped := p.skip[topic]
	if stopped || every || parked || skipped {
		return false
	}
	if topic == everything {
		return len(x.cur.stopped) == 0 && k == nil && !p.sparing
	}
	if p.only != nil && !slices.Contains(p.only, topic) {
		return false // what is before it for this topic may not be in this pass
	}
	if k == nil {
		return true
	}
	if k.alone[topic] || k.alone[everything] {
		return false
	}
	return !alone || k.topics[topic] == 0
}

// stop holds up what comes behind, for all topics or for those that are not among flying.
func (x *Exceptions) stop(topics []string, all bool, flying []string) {
	for _, t := range topics {
		if all || !slices.Contains(flying, t) {
			x.cur.stopped[t] = struct{}{}
		}
	}
}

func (x *Exceptions) take(id string, f *flight) {
	x.taken++
	x.flying[id] = f
	k := x.keys[f.ref.orderKey]
	if k == nil {
		k = &keyState{topics: map[string]int{}, alone: map[string]bool{}}
		x.keys[f.ref.orderKey] = k
	}
	k.n++
	for _, t := range f.topics {
		k.topics[t]++
		if f.alone {
			k.alone[t] = true
		}
	}
}

// answered looks at what came back before anything more is published: what a topic gave back, all that is behind it in its
// key would otherwise overtake. It is called by the sink and calls nothing.
func (x *Exceptions) answered(f *flight, answers []record.Answer) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, a := range answers {
		if a.Refused == nil && a.Held == nil {
			continue
		}
		if errors.Is(a.Held, record.ErrParked) {
			x.parked[a.Topic] = struct{}{}
		}
		x.spoil(f.ref.orderKey)
	}
}

func (x *Exceptions) breakKey(key orderKey) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.spoil(key)
}

func (x *Exceptions) spoil(key orderKey) {
	if k := x.keys[key]; k != nil {
		k.broken = true
	}
	if x.cur.orderKey == key {
		x.cur.all = true
	}
}

// land takes an envelope whose fate is written out of what is in flight, and decides whether its key has to be looked at
// again.
func (x *Exceptions) land(id string, f *flight, fate Fate) {
	x.mu.Lock()
	k := x.keys[f.ref.orderKey]
	waits := fate.End == Retrying || fate.End == Waiting
	// A page that was read before still shows it; what is behind it there may go on only if it is gone.
	x.landed[id] = waits
	if waits && x.cur.orderKey == f.ref.orderKey {
		x.cur.all = true
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
		x.look(x.jobs.keys, f.ref) // those that stood behind it
	case f.partial && !k.broken:
		x.look(x.jobs.later, f.ref) // the topics that it did not go to
	}
	var resume map[string]struct{}
	if x.remove(id, f); k.n == 0 && k.broken {
		resume = k.resume
		x.look(x.jobs.later, f.ref)
		if !waits { // dead: its key flows at once
			x.look(x.jobs.keys, f.ref)
		}
	}
	now := len(x.jobs.keys) > 0 || x.jobs.all || x.jobs.due && len(x.flying) < fewFlying
	x.mu.Unlock()
	for t := range resume {
		x.Outlet.Resume(f.ref.ns, t, f.ref.key)
	}
	poke(x.room)
	if now {
		poke(x.wake)
	}
}

// forget takes back what was not published after all.
func (x *Exceptions) forget(id string, f *flight) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.remove(id, f)
	x.spoil(f.ref.orderKey) // so that all of it begins anew
}

// remove undoes take.
func (x *Exceptions) remove(id string, f *flight) {
	delete(x.flying, id)
	k := x.keys[f.ref.orderKey]
	for _, t := range f.topics {
		if k.topics[t]--; k.topics[t] == 0 {
			delete(k.topics, t)
		}
		if f.alone {
			delete(k.alone, t)
		}
	}
	if k.n--; k.n == 0 {
		delete(x.keys, f.ref.orderKey)
	}
}
