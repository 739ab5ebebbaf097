package kafka

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/record"
)

// N11: a target that nobody can write for a while is parked instead of holding the stream. Its queued records are given
// back to the Holder, in order, and Send takes no more of them until it is well again.
//
// The batch at the head may be in the log, though nobody has acknowledged it. Then nothing more is sent to its partition in
// this term: where the records stand that were given back is not known, nor which sequence comes next. The stored offset
// stays before them. As soon as the partition has a leader the sink ends with ErrReopen, and the read-back of the next one
// finds what is there. That happens at most once in reopenEvery; until then the partition waits, and all others flow.

// reopenEvery bounds how often a sink ends of its own accord, for a read-back or for another transactional id: a partition
// that is sick again and again stops the others for one take-over in this time.
const reopenEvery = 30 * time.Second

// mayReopen reports whether a sink may end of its own accord, and counts it.
func (c *Client) mayReopen(now time.Time) bool {
	last := c.reopened.Load()
	return now.Sub(time.Unix(0, last)) >= c.reopenEvery && c.reopened.CompareAndSwap(last, now.UnixNano())
}

// parks reports whether an obstacle of a partition parks it in time: nobody can write there now. A broker that cannot be
// reached, or answers that it is not ready, is an outage that is waited for.
func (o obstacle) parks() bool {
	switch o.kind {
	case kindMissing, kindForbidden, kindNoLeader, kindQuarantined:
		return true
	}
	return false
}

// parksTopic reports the same of a topic that is not adopted; one that Kafka refuses by its name is as good as missing.
func (o obstacle) parksTopic() bool { return o.parks() || o.kind == kindRefused }

// share is how much an obstructed target may hold.
func (s *Sink) share() int { return int(s.c.cfg.ParkBytes / 4) }

// load is what the records of batches have reserved.
func load(q []*pending) int {
	n := 0
	for _, b := range q {
		n += b.bytes
	}
	return n
}

// load is what the records that wait in obstructed partitions have reserved.
func (t *topic) load() int {
	n := 0
	for _, p := range t.parts {
		if !p.why.none() {
			n += load(p.q)
		}
	}
	return n
}

// parker parks what cannot be written.
func (s *Sink) parker(ctx context.Context) error {
	tick := time.NewTicker(min(max(s.c.cfg.ParkAfter/8, 5*time.Millisecond), time.Second))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-s.park:
		}
		s.parkAll(time.Now())
	}
}

func (s *Sink) parkAll(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	full := s.inTheWay(now)
	for _, t := range s.topics {
		parted := false
		for _, p := range t.parts {
			if s.ended != nil {
				return
			}
			if !p.busy && s.hopeless(p, now, full) {
				s.parkPart(p, now)
			}
			if p.unread && p.lane != nil && s.c.mayReopen(now) {
				s.end(fmt.Errorf("%w: a batch may be in %s-%d, which could not be written", ErrReopen, p.tp.Topic, p.tp.Partition))
			}
			parted = parted || p.parked
		}
		if !t.parked && !t.ready() && s.ended == nil && s.hopelessTopic(t, parted, now) {
			s.parkTopic(t)
		}
	}
}

// inTheWay reports whether everything would soon stop for partitions that brokers only put off: the memory or the window is
// nearly full, and one of them holds its low end. The lock is held.
func (s *Sink) inTheWay(now time.Time) bool {
	low, stream, side := s.holder.Pressed()
	if !stream && !side {
		return false
	}
	for _, t := range s.topics {
		for _, p := range t.parts {
			if s.putOff(p, now) && slices.ContainsFunc(p.q[0].tickets, func(k record.Ticket) bool { return stream && k == low || side && k.IsSide() }) {
				return true
			}
		}
	}
	return false
}

// putOff reports whether brokers have put off what is queued for a partition for as long as it may be. The lock is held.
func (s *Sink) putOff(p *part, now time.Time) bool {
	return p.why.kind == kindRefused && now.Sub(p.since) >= s.c.cfg.ParkAfter && len(p.q) > 0
}

// hopeless reports whether what is queued for a partition is to be given back. One that brokers only put off waits, unless
// its topic takes more than its share of the memory, or full says that the others would stop. The lock is held.
func (s *Sink) hopeless(p *part, now time.Time, full bool) bool {
	switch {
	case p.parked:
		return s.failed(p, now)
	case p.why.parks():
		return now.Sub(p.bad) >= s.c.cfg.ParkAfter || p.t.load() > s.share()
	}
	return s.putOff(p, now) && (full || p.t.load() > s.share())
}

// failed reports whether what was let through to a parked partition is to be given back: at once if it was certainly not
// appended. The lock is held.
func (s *Sink) failed(p *part, now time.Time) bool {
	switch {
	case len(p.q) == 0:
		return false
	case p.quarantine || p.unread:
		return true
	case !p.q[0].unsure:
		return p.q[0].frozen || p.lane == nil
	}
	return p.why.kind != kindUnreachable && now.Sub(p.tried) >= s.c.cfg.ParkAfter
}

// asking reports whether a record may be let through to a parked partition: one at a time, to learn from its answer
// whether the partition can be written again. The lock is held.
func (s *Sink) asking(p *part, now time.Time) bool {
	if !p.asks || p.unread || p.quarantine || p.lane == nil || p.busy || len(p.q) > 0 || now.Sub(p.tried) < min(heldEvery, s.c.cfg.ParkAfter) {
		return false
	}
	p.tried = now
	return true
}

// hopelessTopic reports whether a topic is to be parked that takes no records: it is not adopted, or it grows and an old
// partition, parked itself, does not drain. The lock is held.
func (s *Sink) hopelessTopic(t *topic, parted bool, now time.Time) bool {
	if t.why.parksTopic() {
		return now.Sub(t.bad) >= s.c.cfg.ParkAfter || load(t.waiting) > s.share()
	}
	return t.grows && parted
}

// parkPart gives back what is queued for a partition. The lock is held, and the head is not in flight.
func (s *Sink) parkPart(p *part, now time.Time) {
	if len(p.q) > 0 && p.q[0].unsure {
		p.unread = true
	}
	if p.quarantine && (s.replay || p.kept) { // also what the replay has left in the queue when it ended
		p.keep()
	}
	q := p.q
	p.q, p.open = nil, nil
	s.unlist(p)
	n, stream := s.giveBack(p.t, q)
	if !p.parked {
		p.parked = true
		s.log.Warn("a partition is parked: its records are given back and follow when it can be written", "topic", p.tp.Topic, "partition", p.tp.Partition, "reason", p.why.text, "records", n)
	}
	// Without a lane its leader says when it is well again.
	p.asks, p.tried = p.asks || p.lane != nil && !p.quarantine, now
	p.turned += stream
}

// parkTopic gives back what waits for a topic. The lock is held.
func (s *Sink) parkTopic(t *topic) {
	q := t.waiting
	t.waiting, t.parked = nil, true
	if s.replay || t.hits > 0 { // none of it was looked up
		for _, p := range t.parts {
			p.keep()
		}
	}
	n, stream := s.giveBack(t, q)
	s.log.Warn("a topic is parked: its records are given back and follow when it can be written", "topic", t.name, "reason", t.why.text, "records", n)
	t.turned = stream
}

// giveBack gives the records of batches back to the Holder. It returns how many there are, and how many of the stream. The
// lock is held.
func (s *Sink) giveBack(t *topic, q []*pending) (n, stream int) {
	var list []record.Withdrawn
	for _, b := range q {
		err := each(b, func(i int, rec *record.Record) {
			list = append(list, withdrawn(t, rec, b.tickets[i], nil, record.ErrParked))
		})
		if err != nil {
			s.end(fmt.Errorf("%w: reading records that are parked of topic %q: %w", ErrBroken, t.name, err))
			return 0, 0
		}
	}
	for _, b := range q {
		s.tickets.put(b.tickets)
		s.discard(b)
	}
	s.hand(list)
	for i := range list {
		if !list[i].Ticket.IsSide() {
			stream++
		}
	}
	return len(list), stream
}

// withdrawn is what the Holder gets of a record, in memory of its own.
func withdrawn(t *topic, rec *record.Record, k record.Ticket, why *record.Refusal, held error) record.Withdrawn {
	_, size := sizes(rec)
	return record.Withdrawn{
		Ticket: k, Topic: t.name, Key: bytes.Clone(rec.Key), Why: why, Held: held, Bytes: size,
		ID: bytes.Clone(rec.Header(record.HeaderID)), NS: bytes.Clone(rec.Header(record.HeaderNamespace)),
		StringID: string(rec.Header(record.HeaderIDType)) == "string",
	}
}

// hand gives records back. The lock is held.
func (s *Sink) hand(list []record.Withdrawn) {
	if len(list) == 0 {
		return
	}
	total := 0
	for i := range list {
		total += list[i].Bytes
	}
	s.holder.Withdrawn(list)
	s.resolved(len(list), total)
}

// closed says why a record may not be queued, before its partition is known. The lock is held.
func (s *Sink) closed(t *topic, rec *record.Record, k record.Ticket) error {
	err := s.holder.Closed(rec, k.IsSide()) // N15
	if err == nil && t.parked {
		err = record.ErrParked
	}
	if err != nil && !k.IsSide() {
		s.countTurned(t, rec)
	}
	return err
}

// countTurned counts a record of the stream that is not taken, where its target is parked. The lock is held.
func (s *Sink) countTurned(t *topic, rec *record.Record) {
	if t.parked {
		t.turned++
		return
	}
	if !t.ready() {
		return
	}
	if p, why := t.target(rec); why == nil && p.parked {
		p.turned++
	}
}

// turnAway counts a record that a parked partition does not take. The lock is held.
func (s *Sink) turnAway(p *part) {
	p.turned++
	if s.replay && p.quarantine {
		p.keep()
	}
}

// lift lets a parked partition take records again, once nothing is in its way. The lock is held.
func (s *Sink) lift(p *part) {
	if !p.parked || p.quarantine || p.unread || p.asks || p.lane == nil || len(p.q) > 0 {
		return
	}
	p.parking = parking{}
	p.moves()
	s.log.Info("a parked partition can be written again", "topic", p.tp.Topic, "partition", p.tp.Partition)
	s.holder.Ready(p.tp.Topic)
}

// liftTopic is lift for a topic that was adopted. The lock is held.
func (s *Sink) liftTopic(t *topic) {
	if !t.parked {
		return
	}
	t.parking = parking{}
	s.holder.Ready(t.name)
}

// keep lets what was read back of a partition outlast the replay. The lock is held.
func (p *part) keep() { p.kept, p.t.kept = true, true }

// keepUnread is keep for the partitions of a topic that were not read back at the end of the replay, or whose records were
// not looked up: deliveries outside of the stream's order, of this term and earlier ones, may stand there. The lock is held.
func (s *Sink) keepUnread(t *topic) {
	for _, p := range t.parts {
		if p.quarantine || t.parked {
			p.keep()
		}
	}
}
