package kafka

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// Size is what a record takes of the memory budget: an upper bound of its encoding. Acks report the same number.
func (s *Sink) Size(rec *record.Record) int {
	_, size := sizes(rec)
	return size
}

// sizes returns what a record takes of a batch, and of the memory budget. They differ by a flag at its end: whoever reserved
// the memory did so before we added it.
func sizes(rec *record.Record) (need, size int) {
	need = batch.Size(rec)
	n := len(rec.Headers)
	if n == 0 || !isFlag(rec.Headers[n-1]) {
		return need, need
	}
	bare := *rec
	bare.Headers = rec.Headers[:n-1]
	return need, batch.Size(&bare)
}

// Send encodes rec into the open batch of its partition; rec may be reused at once. It never blocks. It returns a
// *record.Refusal when the record itself is at fault, or the error that ended the sink. Whatever else stands in the way
// (topic or leader missing, quarantine) the record is kept and sent later, in order. A record that a read-back has found
// is not sent: its ticket is acked, from within this call, at the offset where it stands.
//
// A record that has to be held is not queued: Send returns record.ErrBlocked for what the Holder closes, and
// record.ErrParked for a target that is parked, and for a delivery outside of the stream's order (t.IsSide) also where it
// is not known yet what stands in the partition. Such deliveries are looked up in what was read back whenever there is any.
func (s *Sink) Send(rec *record.Record, t record.Ticket) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return s.ended
	}
	top := s.last
	if top == nil || top.name != rec.Topic {
		top = s.topicOf(rec.Topic)
	}
	need, size := sizes(rec)
	// What an earlier owner has sent needs no gate: it would be held, and sent again when nothing is known of it any more.
	if tp, at, ok := s.sentBefore(top, rec, t); ok {
		s.hit(tp, at, t, size)
		return nil
	}
	if err := s.closed(top, rec, t); err != nil {
		return err
	}
	if !top.ready() {
		s.await(top, rec, t, size, need)
		return nil
	}
	p, why := top.target(rec)
	if why != nil {
		return why
	}
	side := t.IsSide()
	again := s.replay || side // it may have been sent before
	if side && p.quarantine || again && s.unreadBefore(p, rec) {
		return record.ErrParked
	}
	if p.parked && !s.asking(p, time.Now()) {
		if !side {
			s.turnAway(p)
		}
		return record.ErrParked
	}
	if again && !p.quarantine {
		if tp, at, ok := s.known(p, rec, side); ok {
			s.hit(tp, at, t, size)
			return nil
		}
	}
	s.enqueue(p, rec, t, size, need, again)
	return nil
}

// sentBefore looks a record of the stream up in what was read back, before anything may hold it. The lock is held.
func (s *Sink) sentBefore(t *topic, rec *record.Record, k record.Ticket) (record.TopicPartition, int64, bool) {
	if !s.replay || k.IsSide() || t.hits == 0 || !t.ready() {
		return record.TopicPartition{}, 0, false
	}
	p, why := t.target(rec)
	if why != nil || p.quarantine {
		return record.TopicPartition{}, 0, false
	}
	return s.look(p, rec, false)
}

// topicOf finds or begins a topic. The lock is held.
func (s *Sink) topicOf(name string) *topic {
	t := s.topics[name]
	if t == nil {
		t = s.newTopic(name)
		s.topics[t.name] = t
	}
	s.last = t
	return t
}

// await keeps a record of a topic that cannot take it yet. The lock is held.
func (s *Sink) await(t *topic, rec *record.Record, k record.Ticket, size, need int) {
	var b *pending
	if n := len(t.waiting); n > 0 && t.waiting[n-1].b.Len()+need <= s.c.cfg.MaxBatchBytes {
		b = t.waiting[n-1]
	} else {
		b = s.newBatch(batch.Need(need))
		t.waiting = append(t.waiting, b)
	}
	s.put(b, rec, k, size, need)
	b.parts = append(b.parts, rec.Partition)
	if t.why.none() {
		t.hold(obstacle{kindAdopting, fmt.Sprintf("topic %q is being adopted", t.name)}, time.Now())
		wake(s.adopt)
	}
	if t.why.parksTopic() && load(t.waiting) > s.share() {
		wake(s.park)
	}
}

// target is the partition of a record: the one it asks for, or Java's choice by key. A record without a key goes by its
// first header, the event's id, so that a read-back finds it where it was sent. Only Kafka's answer says that a record is too large:
// the limit of the topic may have been raised since it was read. The lock is held.
func (t *topic) target(rec *record.Record) (*part, *record.Refusal) {
	n := int32(len(t.parts))
	id := rec.Partition
	if id == record.AnyPartition {
		id = choose(rec, n)
	}
	if id < 0 || id >= n {
		return nil, &record.Refusal{Class: record.PartitionOutOfRange, Reason: fmt.Sprintf("partition %d was asked for; topic %q has %d, numbered from 0", id, t.name, n)}
	}
	return t.parts[id], nil
}

func choose(rec *record.Record, n int32) int32 {
	key := rec.Key
	if key == nil && len(rec.Headers) > 0 {
		key = rec.Headers[0].Value
	}
	return int32(event.Murmur2(key)&0x7fffffff) % n
}

func tooLarge(t *topic, size int) *record.Refusal {
	limit := "the limit of the topic"
	if t.max > 0 && t.max < size {
		limit = fmt.Sprintf("max.message.bytes of the topic, %d", t.max)
	}
	return &record.Refusal{Class: record.MessageTooLarge, Reason: fmt.Sprintf("the record takes %d bytes alone in a batch, above %s (topic %q)", size, limit, t.name)}
}

// unreadBefore reports whether an earlier attempt at a record may stand in a partition that was not read: where its key had
// its place before the topic grew. Then it must not be sent anywhere yet. The lock is held.
func (s *Sink) unreadBefore(p *part, rec *record.Record) bool {
	if rec.Partition != record.AnyPartition {
		return false
	}
	for _, n := range p.t.counts {
		if old := p.t.parts[choose(rec, int32(n))]; old != p && (old.quarantine || old.unread) {
			if old.quarantine {
				old.keep()
			}
			return true
		}
	}
	return false
}

// known looks a record up in what was read back (N7), and remembers what is sent instead.
//
// N10: after one record of a key was sent in this replay, nothing later of that key in that topic is skipped: in a
// compacted topic the later value must stand behind the earlier one again. Deliveries outside of the stream's order keep
// theirs among themselves alone: what they send says nothing about the events of the stream, which wait behind those that
// matter to them (N15), nor the other way round. Other topics lose nothing of a key, so nothing is remembered of them. The
// lock is held.
func (s *Sink) known(p *part, rec *record.Record, side bool) (record.TopicPartition, int64, bool) {
	tp, at, ok := s.look(p, rec, side)
	if !ok && p.t.compacted && p.t.hits > 0 && rec.Key != nil {
		p.t.remember(rec.Key, side)
	}
	return tp, at, ok
}

// look is known for a record that is not sent if it is not found. The lock is held.
func (s *Sink) look(p *part, rec *record.Record, side bool) (record.TopicPartition, int64, bool) {
	t := p.t
	if t.hits == 0 {
		return p.tp, 0, false
	}
	id, ok := fence.IdentityOf(rec.Headers)
	if !ok {
		return p.tp, 0, false
	}
	if _, again := t.sent[sentKey{side, string(rec.Key)}]; rec.Key != nil && (again || t.all) {
		return p.tp, 0, false
	}
	at, ok := p.hits.Take(id)
	if !ok && rec.Partition == record.AnyPartition {
		// The topic may have grown since, also before the last checkpoint: another partition was that of this key.
		if p = t.standing(id); p != nil {
			at, ok = p.hits.Take(id)
		}
	}
	if !ok {
		return record.TopicPartition{}, 0, false
	}
	t.hits--
	return p.tp, at, true
}

// maxSent bounds the keys that a topic remembers during a replay.
const maxSent = 100_000

// sentKey is a key of which something was sent in a replay, by the stream or beside it.
type sentKey struct {
	side bool
	key  string
}

// remember notes that something of a key was sent in this replay (N10). When there are too many of them every key counts
// as one: nothing of any is skipped until the replay ends, and what is sent is flagged, for it may be a second copy.
func (t *topic) remember(key []byte, side bool) {
	if t.sent == nil {
		t.sent = map[sentKey]struct{}{}
	}
	t.sent[sentKey{side, string(key)}] = struct{}{}
	if len(t.sent) >= maxSent {
		t.sent, t.all = nil, true
	}
}

// hit acks a record that stands in the topic already. The lock is held.
func (s *Sink) hit(tp record.TopicPartition, at int64, t record.Ticket, size int) {
	s.c.cfg.Metrics.ReadBackHits.Inc()
	s.c.cfg.Metrics.ObservePublish(tp.Topic, metrics.Skipped, 1)
	s.acks.Acked(tp, at, append(s.tickets.get(), t), size)
}

// redelivered flags a record of which a copy may stand in a stretch that was not read back (N8).
var redelivered = record.Header{Key: []byte(record.HeaderRedelivered), Value: []byte("true")}

func isFlag(h record.Header) bool { return bytes.Equal(h.Key, redelivered.Key) }

// enqueue encodes a record into the open batch of its partition; size and need are its sizes, second says whether it may be a second copy where something was not read back.
// The lock is held.
func (s *Sink) enqueue(p *part, rec *record.Record, t record.Ticket, size, need int, second bool) {
	if (p.flag || p.t.all) && second && !slices.ContainsFunc(rec.Headers, isFlag) {
		s.flagged = append(append(s.flagged[:0], rec.Headers...), redelivered)
		flagged := *rec
		flagged.Headers = s.flagged
		rec, need = &flagged, batch.Size(&flagged)
	}
	b := p.open
	if b == nil || b.b.Len()+need > p.t.limit {
		b = s.newBatch(max(batch.Need(need), min(p.hint, s.hintRoom())))
		b.hint = p.hint
		p.q = append(p.q, b)
		p.open = b
	}
	s.put(b, rec, t, size, need)
	p.sends++
	s.list(p)
	if !p.why.none() && load(p.q) > s.share() {
		wake(s.park)
	}
}

// put appends one record to a batch, in a larger buffer if need be. The lock is held.
func (s *Sink) put(b *pending, rec *record.Record, t record.Ticket, size, need int) {
	if b.b.Room() < need {
		n := len(b.b.Buffer())
		s.free.put(b.b.Move(s.free.get(max(n+need, min(b.hint, hintGrowth*n)))))
	}
	b.b.Append(rec)
	if b.tickets == nil {
		b.tickets = s.tickets.get()
	}
	b.tickets = append(b.tickets, t)
	b.bytes += size
	s.count++
	s.queued += int64(size)
}

const (
	// hintLimit bounds the buffer that a batch begins with: what a partition has once filled is no claim on as much memory
	// for each record that follows.
	hintLimit = 64 << 10
	// hintGrowth is the step towards the hint, in place of the next size: a full batch is copied by a third, not once.
	hintGrowth = 4
)

// hintRoom is the most that the next batch begins with beyond what its first record needs. All batches together get a quarter of
// the memory for records: where many partitions wait, batches begin small. The lock is held.
func (s *Sink) hintRoom() int {
	if int64(s.batches+1)*hintLimit > s.c.cfg.ParkBytes/4 {
		return 0
	}
	return hintLimit
}

// newBatch is an open batch in a buffer of at least that size. The lock is held.
func (s *Sink) newBatch(size int) *pending {
	var b *pending
	if n := len(s.spare); n > 0 {
		b = s.spare[n-1]
		s.spare = s.spare[:n-1]
	} else {
		b = &pending{}
	}
	b.b.Reset(s.free.get(size))
	s.batches++
	return b
}

// discard gives a batch's memory back; its tickets were given away. The lock is held.
func (s *Sink) discard(b *pending) {
	s.batches--
	if b.b.Buffer() != nil {
		s.free.put(b.b.Buffer())
	}
	if b.zipped != nil {
		s.free.put(b.zipped)
	}
	*b = pending{parts: b.parts[:0]}
	if len(s.spare) < keepLists {
		s.spare = append(s.spare, b)
	}
}

// list puts a partition that has something to send into its lane. The lock is held.
func (s *Sink) list(p *part) {
	if p.busy || p.listed || p.later || p.quarantine || p.unread || p.lane == nil || len(p.q) == 0 {
		return
	}
	p.listed = true
	p.lane.ready = append(p.lane.ready, p)
}

// Flush wakes the idle lanes that have something to send.
func (s *Sink) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.lanes {
		if len(l.ready) > 0 {
			wake(l.wake)
		}
	}
}
