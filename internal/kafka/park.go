package kafka

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
)

// N11: a target that nobody can write for a while is parked instead of holding the stream. Its queued records are given
// back to the Holder, in order, and Send takes no more of them until it is well again.
//
// What was handed to Kafka cannot be taken back: the batch at the head whose fate is unknown, or which is what asks
// whether the partition can be written again, stays as a ghost. The same bytes go on being sent, for nobody: their tickets
// were given back. If they are appended after all, the deliveries that follow for the same envelopes find them there, in
// `mine`, and are acked where the records stand. Until a ghost is resolved the partition stays parked, so nothing passes it.

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

// parker parks what cannot be written.
func (s *Sink) parker(ctx context.Context) error {
	if s.holder == nil {
		return nil
	}
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
	for _, t := range s.topics {
		parted := false
		for _, p := range t.parts {
			if s.ended != nil {
				return
			}
			if !p.busy && (!p.parked && s.hopeless(p, now) || p.parked && load(p.q) > 0) {
				s.parkPart(p)
			}
			parted = parted || p.parked
		}
		if !t.parked && !t.ready() && s.ended == nil && s.hopelessTopic(t, parted, now) {
			s.parkTopic(t)
		}
	}
}

// hopeless reports whether a partition is to be parked. One that brokers only put off waits, unless it takes more than its
// share of the memory. The lock is held.
func (s *Sink) hopeless(p *part, now time.Time) bool {
	if p.why.parks() {
		return now.Sub(p.bad) >= s.c.cfg.ParkAfter || load(p.q) > s.share()
	}
	return p.why.kind == kindRefused && now.Sub(p.since) >= s.c.cfg.ParkAfter && load(p.q) > s.share()
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
func (s *Sink) parkPart(p *part) {
	var list []record.Withdrawn
	unread := p.quarantine && (s.replay || p.kept) // also what the replay has left in the queue when it ended
	for _, b := range p.q {
		err := each(b, func(i int, rec *record.Record) {
			if b.ghost {
				return
			}
			list = append(list, withdrawn(p.t, rec, b.tickets[i], b.reserved(i, rec), nil, record.ErrParked))
			if unread {
				p.owes(rec)
			}
		})
		if err != nil {
			s.end(fmt.Errorf("%w: %s-%d: reading records that are parked: %w", ErrBroken, p.tp.Topic, p.tp.Partition, err))
			return
		}
	}
	rest := p.q[:0]
	for i, b := range p.q {
		if b.tickets != nil {
			s.tickets.put(b.tickets)
		}
		b.tickets, b.bytes = nil, 0
		// Without a lane its leader or its release says when the partition is well again; with one, only an answer does.
		if i == 0 && b.frozen && (b.ghost || b.unsure || p.lane != nil && !p.quarantine) {
			b.ghost = true
			rest = append(rest, b)
			continue
		}
		s.discard(b) // its sequence was not used, and is the next batch's
	}
	clear(p.q[len(rest):])
	p.q, p.open = rest, nil
	if len(p.q) == 0 {
		s.unlist(p)
	}
	if unread {
		p.keep()
	}
	if !p.parked {
		p.parked = true
		s.log.Warn("a partition is parked: its records are given back and follow when it can be written", "topic", p.tp.Topic, "partition", p.tp.Partition, "reason", p.why.text, "records", len(list))
	}
	p.turned += ofStream(list)
	s.hand(list)
}

// parkTopic gives back what waits for a topic. The lock is held.
func (s *Sink) parkTopic(t *topic) {
	var list []record.Withdrawn
	for _, b := range t.waiting {
		err := each(b, func(i int, rec *record.Record) {
			list = append(list, withdrawn(t, rec, b.tickets[i], batch.Size(rec), nil, record.ErrParked))
		})
		if err != nil {
			s.end(fmt.Errorf("%w: reading records that waited for topic %q: %w", ErrBroken, t.name, err))
			return
		}
	}
	for _, b := range t.waiting {
		s.tickets.put(b.tickets)
		s.discard(b)
	}
	t.waiting, t.parked = nil, true
	if s.replay || t.hits > 0 { // none of it was looked up
		for _, p := range t.parts {
			p.keep()
		}
	}
	s.log.Warn("a topic is parked: its records are given back and follow when it can be written", "topic", t.name, "reason", t.why.text, "records", len(list))
	t.turned = ofStream(list)
	s.hand(list)
}

// withdrawn is what the Holder gets of a record, in memory of its own.
func withdrawn(t *topic, rec *record.Record, k record.Ticket, size int, why *record.Refusal, held error) record.Withdrawn {
	w := record.Withdrawn{Ticket: k, Topic: t.name, Key: bytes.Clone(rec.Key), Why: why, Bytes: size}
	w.ID, w.NS = identity(rec)
	if why == nil {
		w.Held = held
	} else {
		why.ID, why.NS = w.ID, w.NS
	}
	for i := range rec.Headers {
		if string(rec.Headers[i].Key) == "outrelay-id-type" {
			w.StringID = string(rec.Headers[i].Value) == "string"
			break
		}
	}
	return w
}

func ofStream(list []record.Withdrawn) int {
	n := 0
	for i := range list {
		if !list[i].Ticket.IsSide() {
			n++
		}
	}
	return n
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
func (s *Sink) turnAway(p *part, rec *record.Record) {
	p.turned++
	if s.replay && p.quarantine {
		p.keep()
		p.owes(rec)
	}
}

// lift lets a parked partition take records again, once nothing is in its way and no ghost is left. The lock is held.
func (s *Sink) lift(p *part) {
	if !p.parked || p.quarantine || p.lane == nil || len(p.q) > 0 {
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

// appeared notes where the records of a ghost stand: the deliveries that follow for their envelopes are acked there, and
// until then a successor has to find them (N8). The lock is held.
func (s *Sink) appeared(p *part, b *pending, base int64) {
	if !p.held || p.mine.Len() == 0 && len(p.owed) == 0 {
		p.held = true
		s.holder.Hold(p.tp, base)
	}
	if p.mine == nil {
		p.mine = &fence.Known{}
	}
	err := each(b, func(i int, rec *record.Record) {
		if id, ok := fence.IdentityOf(rec.Headers); ok {
			p.mine.Add(id, base+int64(i))
		}
	})
	if err != nil {
		s.end(fmt.Errorf("%w: %s-%d: reading a batch of our own: %w", ErrBroken, p.tp.Topic, p.tp.Partition, err))
	}
	s.unhold(p)
}

// dropGhost forgets a ghost that was certainly not appended; its sequence is the next batch's. The lock is held.
func (s *Sink) dropGhost(p *part) {
	b := p.q[0]
	s.unlist(p)
	p.pop()
	p.moves()
	s.discard(b)
	s.lift(p)
}

// anew forgets what stood in a partition: its topic is another one now. The lock is held.
func (s *Sink) anew(p *part) {
	p.mine, p.owed = nil, nil
	s.unhold(p)
}

// keep lets what was read back of a partition outlast the replay. The lock is held.
func (p *part) keep() { p.kept, p.t.kept = true, true }

// keepUnread is keep for the partitions of a topic that were not read back at the end of the replay, or whose records were
// not looked up: deliveries outside of the stream's order, of this term and earlier ones, may stand there. The lock is held.
func (s *Sink) keepUnread(t *topic) {
	if s.holder == nil {
		return
	}
	for _, p := range t.parts {
		if p.quarantine || t.parked {
			p.keep()
		}
	}
}

// owes notes a record that was turned away before its partition was read. Beyond the bound, one that an earlier owner has
// sent may come twice if this one crashes between finding it and saying so. The lock is held.
func (p *part) owes(rec *record.Record) {
	id, ok := fence.IdentityOf(rec.Headers)
	if !ok || len(p.owed) >= maxSent {
		return
	}
	if p.owed == nil {
		p.owed = map[fence.Identity]struct{}{}
	}
	p.owed[id] = struct{}{}
}

// owe is the end of a release: what stands in the partition of records that were given back is found by the deliveries that
// follow, and holds the stored offset until then (N8). found is what earlier ghosts have left, own that `mine` is now what
// this term has sent, ghost that the head was one, so that what was found of it is left for them. The lock is held.
func (s *Sink) owe(p *part, tail *fence.Tail, found *fence.Known, own, ghost bool) {
	if s.holder == nil {
		p.mine = nil
		return
	}
	if tail.OutOfRange {
		found = nil // it is read again, or gone
	}
	switch {
	case !own:
		p.mine = found
		p.keep() // ghosts, and what an earlier owner has sent outside of the stream's order, are among the hits
		if low := p.hits.Lowest(); low >= 0 {
			s.holder.Found(p.tp, low) // N8: nobody looks the latter up before their turn, which may be late
		}
	case ghost && found.Len() > 0:
		found.Merge(p.mine)
		p.mine = found
	case !ghost:
		p.mine = found
	}
	for id := range p.owed {
		if !p.hits.Has(id) {
			delete(p.owed, id)
		}
	}
	from := p.mine.Lowest()
	if low := p.hits.Lowest(); len(p.owed) > 0 && (from < 0 || low < from) {
		from = low
	}
	if from >= 0 && !p.held {
		p.held = true
		s.holder.Hold(p.tp, from)
	}
	s.unhold(p)
}

// toldHit follows the ack of a record that stood there already. The lock is not held.
func (s *Sink) toldHit(tp record.TopicPartition) {
	if s.holder == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.part(tp)
	p.hitting--
	s.unhold(p)
}

// unhold lets the stored offset go when everything that was to be found is told. The lock is held.
func (s *Sink) unhold(p *part) {
	if p.held && p.hitting == 0 && p.mine.Len() == 0 && len(p.owed) == 0 {
		p.held, p.mine, p.owed = false, nil, nil
		s.holder.Unhold(p.tp)
	}
}
