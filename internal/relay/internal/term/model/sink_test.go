package model

import (
	"errors"
	"hash/fnv"
	"slices"
	"strconv"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// errEnded is the error of a sink whose owner has ended.
var errEnded = errors.New("the sink has ended")

// partition is a partition of a sink.
type partition struct {
	tp         record.TopicPartition
	queue      []*sent
	inFlight   *request
	parked     bool
	quarantine bool // not read back
	mustReopen bool // a batch that was given back may be in the log (N11)
	hits       *fence.Known
}

// sink models the sink of one term. Nothing in it blocks.
type sink struct {
	w       *world
	term    *term
	parts   map[record.TopicPartition]*partition
	adopted map[string]bool
	waiting []*sent // of topics that are not adopted
	dead    bool
}

func (s *sink) Size(rec *record.Record) int { return len(rec.Value) + 1 }

// forIdentity returns a record with the parts of rec that identify its delivery (N7).
func (s *sink) forIdentity(rec *record.Record) record.Record {
	headers := rec.Headers
	if s.w.undo == equalNamespaces {
		headers = slices.DeleteFunc(slices.Clone(headers), func(header record.Header) bool { return string(header.Key) == record.HeaderNamespace })
	}
	if s.w.undo == positionless {
		headers = slices.DeleteFunc(slices.Clone(headers), func(header record.Header) bool { return string(header.Key) == record.HeaderPosition })
		return record.Record{Headers: headers, Sent: record.Sent{AnyTime: true}}
	}
	return record.Record{Headers: headers, TimeMS: rec.TimeMS, Sent: rec.Sent}
}

// identify returns the identity of a record (N7).
func (s *sink) identify(rec *record.Record) fence.Identity {
	id, _ := fence.IdentityOf(s.forIdentity(rec).Headers)
	return id
}

// findHit returns the identity, the time and the offset with which the read-back has found a record in its partition.
func (s *sink) findHit(part *partition, rec *record.Record) (hit fence.Identity, timeMS, offset int64, found bool) {
	wanted := s.forIdentity(rec)
	fence.EachHit(&wanted, func(id fence.Identity, at int64) bool {
		hit, timeMS = id, at
		offset, found = part.hits.At(id, at)
		return found
	})
	return hit, timeMS, offset, found
}

// choose returns the partition of a record, by its key.
func (s *sink) choose(rec *record.Record) *partition {
	hash := fnv.New32a()
	_, _ = hash.Write(rec.Key)
	return s.parts[record.TopicPartition{Topic: rec.Topic, Partition: int32(hash.Sum32() % uint32(topics[rec.Topic]))}]
}

// Send implements pipeline.Sink.
func (s *sink) Send(rec *record.Record, ticket record.Ticket) error {
	if s.dead {
		return errEnded
	}
	id := s.identify(rec)
	if part := s.choose(rec); !part.quarantine {
		if hit, timeMS, offset, found := s.findHit(part, rec); found {
			part.hits.Take(hit, timeMS)
			s.w.logf("%s: %v has it at %d", s.w.specs[numberOf(rec)], part.tp, offset)
			s.term.resolver.Acked(part.tp, offset, []record.Ticket{ticket}, s.Size(rec))
			return nil
		}
	}
	way := "from the stream"
	if ticket.IsSide() {
		way = "from the store"
	}
	if err := s.term.resolver.CheckGate(rec, ticket.IsSide()); err != nil {
		s.w.logf("%s holds e%d %s for %s: %v", s.term, numberOf(rec), way, rec.Topic, err)
		return err
	}

	part := s.choose(rec)
	queued := &sent{
		number: numberOf(rec), ns: string(rec.Header(record.HeaderNamespace)), key: string(rec.Key), ticket: ticket, bytes: s.Size(rec), id: id,
		redelivered: string(rec.Header(record.HeaderRedelivered)) == "true",
		rec:         record.Record{Topic: rec.Topic, Key: slices.Clone(rec.Key), Headers: cloneHeaders(rec.Headers), TimeMS: rec.TimeMS},
	}
	switch {
	case !s.adopted[rec.Topic]:
		s.waiting = append(s.waiting, queued)
	case part.quarantine || part.parked:
		s.w.logf("%s holds e%d %s for %v, which is parked", s.term, numberOf(rec), way, part.tp)
		return record.ErrPartitionParked
	default:
		if part.hits.Len() > 0 {
			s.term.resolver.HoldOffsets()
		}
		part.queue = append(part.queue, queued)
	}
	s.w.logf("%s queues e%d %s for %v", s.term, numberOf(rec), way, part.tp)
	return nil
}

// FindHit implements pipeline.Sink.
func (s *sink) FindHit(rec *record.Record) (record.TopicPartition, int64, bool) {
	part := s.choose(rec)
	if part.quarantine {
		return record.TopicPartition{}, 0, false
	}
	_, _, offset, found := s.findHit(part, rec)
	return part.tp, offset, found
}

// MayHold implements pipeline.Sink.
func (s *sink) MayHold(rec *record.Record) bool {
	_, _, found := s.FindHit(rec)
	part := s.choose(rec)
	return found || (part.quarantine || part.mustReopen) && s.w.undo != expireUnread
}

// TopicsWithHits implements pipeline.Sink.
func (s *sink) TopicsWithHits() (list []string) {
	for _, tp := range s.w.kafka.parts {
		if s.parts[tp].hits.Len() > 0 && !slices.Contains(list, tp.Topic) {
			list = append(list, tp.Topic)
		}
	}
	return list
}

// EndReread implements pipeline.Sink.
func (s *sink) EndReread() {
	for _, part := range s.parts {
		part.hits = &fence.Known{}
	}
}

// Flush implements pipeline.Sink. No lock is held here, so other things may happen.
func (s *sink) Flush() { s.w.drift(2) }

// adopt stores the ends of the partitions of a topic, and then lets its records go (N9).
func (s *sink) adopt(topic string) {
	ends := map[string][]int64{}
	for _, tp := range s.w.kafka.parts {
		if tp.Topic == topic {
			ends[topic] = append(ends[topic], s.w.kafka.logs[tp].end())
		}
	}
	if s.w.undo != adoptedUnsaved && !s.w.saveOffsets(s.term, ends) {
		return
	}
	for p, end := range ends[topic] {
		s.term.resolver.Restore(record.TopicPartition{Topic: topic, Partition: int32(p)}, end)
	}
	s.adopted[topic] = true
	s.w.logf("%s adopts topic %s", s.term, topic)

	kept := s.waiting
	s.waiting = nil
	for _, queued := range kept {
		if queued.rec.Topic == topic {
			part := s.choose(&queued.rec)
			part.queue = append(part.queue, queued)
		} else {
			s.waiting = append(s.waiting, queued)
		}
	}
}

// transmit sends the first n records of a partition.
func (s *sink) transmit(part *partition, n int) {
	if s.dead || part.inFlight != nil || len(part.queue) == 0 || part.mustReopen {
		return
	}
	// Another owner acquires the lease after it has expired, and the gate is closed then (N2). A request that has passed it may be slow.
	if s.term.epoch != s.w.doc.epoch {
		return
	}
	n = min(n, len(part.queue))
	part.inFlight = &request{sink: s, part: part, epoch: s.term.producer, records: slices.Clone(part.queue[:n])}
	s.w.kafka.requests = append(s.w.kafka.requests, part.inFlight)
	s.w.logf("%s sends %s to %v", s.term, s.w.names(part.inFlight.records), part.tp)
}

// settle handles the response of a request.
func (s *sink) settle(r *request) {
	part := r.part
	// The records were given back, or the owner is gone.
	if s.dead || part.inFlight != r {
		return
	}
	part.inFlight = nil
	if r.isFenced {
		s.term.die("is fenced by Kafka")
		return
	}

	if r.rejected < 0 {
		part.queue = part.queue[len(r.records):]
		tickets := make([]record.Ticket, len(r.records))
		bytes := 0
		for i, x := range r.records {
			tickets[i] = x.ticket
			bytes += x.bytes
		}
		s.w.logf("%s gets the ack of %s in %v", s.term, s.w.names(r.records), part.tp)
		s.term.resolver.Acked(part.tp, r.base, tickets, bytes)
		return
	}

	// The sink gives back the record, and every later one of its key (N15).
	bad := r.records[r.rejected]
	why := &record.Rejection{Class: record.RecordRejected, Reason: "not now"}
	if s.w.specs[bad.number].tooLarge {
		why = &record.Rejection{Class: record.MessageTooLarge, Reason: "too large"}
	}
	var kept []*sent
	var back []record.Withdrawn
	for i, x := range part.queue {
		switch {
		case x == bad:
			back = append(back, withdrawn(x, why, nil))
		// A record that is dead at once holds nothing back.
		case i > r.rejected && x.key == bad.key && x.ns == bad.ns && !why.Class.DeadAtOnce() && s.w.undo != keepBehindRejected:
			back = append(back, withdrawn(x, nil, record.ErrBlocked))
		default:
			kept = append(kept, x)
		}
	}
	part.queue = kept
	s.w.logf("%s gets the rejection of %s by %v", s.term, s.w.specs[bad.number], part.tp)
	s.term.resolver.Withdrawn(back)
}

// park gives back the records of a partition without a leader (N11).
func (s *sink) park(part *partition) {
	if s.dead || part.parked || s.w.kafka.logs[part.tp].leader {
		return
	}
	// The request may still arrive.
	if part.inFlight != nil {
		for _, x := range part.inFlight.records {
			x.inDoubt = true
		}
		part.mustReopen, part.inFlight = true, nil
	}

	part.parked = true
	var back []record.Withdrawn
	for _, x := range part.queue {
		back = append(back, withdrawn(x, nil, record.ErrPartitionParked))
	}
	s.w.logf("%s parks %v and gives back %s", s.term, part.tp, s.w.names(part.queue))
	part.queue = nil
	s.term.resolver.Withdrawn(back)
}

// recover handles the return of a leader. It reports false if only the next read-back can release the partition.
func (s *sink) recover(part *partition) bool {
	if part.mustReopen && s.w.undo == sendDespiteDoubt {
		part.mustReopen = false
	}
	if part.quarantine || part.mustReopen {
		return false
	}
	if part.parked {
		part.parked = false
		s.term.resolver.Ready(part.tp.Topic)
	}
	return true
}

func withdrawn(x *sent, why *record.Rejection, held error) record.Withdrawn {
	return record.Withdrawn{
		Ticket: x.ticket, Topic: x.rec.Topic, Key: slices.Clone(x.rec.Key), ID: slices.Clone(x.rec.DocumentID()), NS: []byte(x.ns), Rejection: why, Held: held,
		Bytes: x.bytes, MayBeSent: x.inDoubt, TimeMS: x.rec.TimeMS,
	}
}

func cloneHeaders(list []record.Header) []record.Header {
	out := make([]record.Header, len(list))
	for i, header := range list {
		out[i] = record.Header{Key: slices.Clone(header.Key), Value: slices.Clone(header.Value)}
	}
	return out
}

// numberOf returns the number of the event of a record: its payload.
func numberOf(rec *record.Record) int {
	n, err := strconv.Atoi(string(rec.Value))
	if err != nil {
		panic("model: a record without a number: " + string(rec.Value))
	}
	return n
}
