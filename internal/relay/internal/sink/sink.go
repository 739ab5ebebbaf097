package sink

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// Claims stores the state that must be in the watcher document before a record may be sent.
type Claims interface {
	// SaveSenders stores senders and offsets in one fenced write, which is majority-committed when it
	// returns nil. If senders is nil, the stored senders stay. The stored offset also stays for an
	// offset below zero, and for a partition that is not in the list.
	SaveSenders(ctx context.Context, senders []record.Sender, offsets map[string][]int64) error
}

// TakeOver is the state that a new owner has read from the watcher document.
type TakeOver struct {
	// Fence is the input of the takeover. The sink also calls its Gate before each produce request, so
	// Gate must not be nil.
	Fence fence.In
	// Holder decides which records are held, and takes the records that cannot be sent (N11, N15).
	Holder record.Holder
}

// Sink sends records for one term of ownership. Send, Flush, Size, EndReread and State may be
// called from any goroutine. The records of a partition have the order of the calls of Send.
//
// The sink's lock guards the topics, their partitions, and the state of the parts below.
type Sink struct {
	c      *Opener
	acks   record.Acks
	claims Claims
	gate   func() bool
	log    *slog.Logger
	codec  *batch.Codec

	refresher *refresher
	opener    *opener
	keeper    *keeper
	parker    *parker
	loops     *loopSet
	batches   *batchPool

	mu            sync.Mutex
	topics        map[string]*topic
	lastTopic     *topic // of the latest Send
	producer      batch.Producer
	rereading     bool // EndReread was not called yet (N7, N10)
	paused        bool // loops send nothing, because the sink moves to another transactional id
	ended         error
	cancelRun     func(error) // ends Run; set by Run
	headerScratch []record.Header
}

// Open takes over from earlier owners (N4): it fences them, reads back the records that they have
// sent, and saves the sender and the offsets in one write.
//
// When Open returns, the records of earlier owners are settled in every partition except those in
// quarantine, which a later takeover releases. Nothing has been sent yet. Open retries while Kafka is
// away. It fails when ctx ends, when another owner takes the id (ErrFenced), or when a permission
// is missing.
func (o *Opener) Open(ctx context.Context, takeOver TakeOver, claims Claims, acks record.Acks) (*Sink, error) {
	in := takeOver.Fence
	in.Event = fence.LogEvents(o.cfg.Log, in.Event)
	in.Stuck, in.Idle, in.Own = o.patience, o.patience, o.patience
	out, err := o.fence.Take(ctx, in)
	if err != nil {
		return nil, fmt.Errorf("taking over in Kafka: %w", err)
	}
	sink := o.newSink(takeOver, claims, acks, out, o.fence.Expiry(ctx))

	// N4: the sender is stored before its first record. A successor fences only senders that the
	// document lists.
	offsets := storedOffsets(out.Released)
	for _, name := range out.Forgotten {
		offsets[name] = nil
	}
	if err := claims.SaveSenders(ctx, out.Senders, offsets); err != nil {
		return nil, fmt.Errorf("taking over in Kafka: saving the sender: %w", err)
	}
	if n := len(out.Forgotten); n > 0 {
		sink.log.Info("topics that were deleted are forgotten", "topics", n, "first", out.Forgotten[0])
	}
	sink.addTails(out, in.Offsets)

	// Run repeats this, so only the end of ctx is an error.
	if err := sink.refresher.loadLayout(ctx); err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("taking over in Kafka: %w", err)
	}
	return sink, nil
}

// newSink returns the sink of a producer that has taken over. Its parts share its lock.
func (o *Opener) newSink(takeOver TakeOver, claims Claims, acks record.Acks, out *fence.Out, expiry fence.Expiry) *Sink {
	sink := &Sink{
		c:         o,
		acks:      acks,
		claims:    claims,
		gate:      takeOver.Fence.Gate,
		log:       o.cfg.Log,
		codec:     o.codec,
		producer:  batch.Producer(out.Producer),
		rereading: true,
		topics:    map[string]*topic{},
		batches:   &batchPool{tickets: &o.tickets},
	}
	sink.refresher = &refresher{sink: sink, wake: make(chan struct{}, 1)}
	sink.opener = &opener{sink: sink, create: o.cfg.Create, createdFor: createdFor, wake: make(chan struct{}, 1), missing: make(chan struct{}, 1)}
	sink.keeper = &keeper{sink: sink, session: out.Session, expiry: expiry}
	sink.parker = &parker{
		sink:          sink,
		holder:        takeOver.Holder,
		parkAfter:     o.limits.parkAfter,
		settleTime:    settleTime,
		maxObstructed: int(o.cfg.ParkBytes / 4),
		wake:          make(chan struct{}, 1),
	}
	sink.loops = &loopSet{sink: sink, perBroker: o.cfg.RequestsPerBroker, byID: map[loopID]*loop{}}
	return sink
}

// storedOffsets returns the offsets to store for partitions that were read back.
func storedOffsets(tails map[record.TopicPartition]*fence.Tail) map[string][]int64 {
	offsets := map[string][]int64{}
	for tp, tail := range tails {
		setOffset(offsets, tp, tail.From)
	}
	return offsets
}

// setOffset sets the offset of tp. The value -1 of other partitions leaves their stored offset
// unchanged.
func setOffset(offsets map[string][]int64, tp record.TopicPartition, offset int64) {
	list := offsets[tp.Topic]
	for len(list) <= int(tp.Partition) {
		list = append(list, -1)
	}
	list[tp.Partition] = offset
	offsets[tp.Topic] = list
}

// storedOffset returns the stored offset of a partition, or -1.
func storedOffset(stored map[string][]int64, tp record.TopicPartition) int64 {
	if list := stored[tp.Topic]; int(tp.Partition) < len(list) {
		return list[tp.Partition]
	}
	return -1
}

// addTails creates the topics of a takeover. Every partition gets its stored offset. Partitions
// in quarantine need it too, because their stored offset must not move.
func (s *Sink) addTails(out *fence.Out, stored map[string][]int64) {
	findOrAdd := func(tp record.TopicPartition) *partition {
		topic := s.topics[tp.Topic]
		if topic == nil {
			topic = s.newTopic(tp.Topic)
			topic.earlierCount = len(stored[tp.Topic])
			s.topics[tp.Topic] = topic
		}
		topic.addPartitions(int(tp.Partition) + 1)
		return topic.partitions[tp.Partition]
	}

	now := time.Now()
	for tp, tail := range out.Released {
		partition := findOrAdd(tp)
		partition.ackedEnd, partition.hits, partition.lastUsed = tail.Next, tail.Hits, now
		partition.topic.hitsLeft += tail.Hits.Len()
		// The topic was created again, or is that of another cluster. All partitions of such a topic are new.
		partition.unread = tail.OutOfRange && tail.From < max(storedOffset(stored, tp), 0)
		partition.topic.unread = partition.topic.unread || !partition.unread && (tail.OutOfRange || tail.Truncated)

		s.c.cfg.Metrics.ReadBack.Add(float64(max(tail.Next-tail.From-tail.Markers, 0)))
		s.acks.Restore(tp, tail.From)
	}

	// The obstacles name the number of partitions.
	for tp := range out.Quarantined {
		findOrAdd(tp)
	}
	for tp, reason := range out.Quarantined {
		partition := findOrAdd(tp)
		partition.quarantine = true
		partition.setObstacle(partition.topic.quarantineObstacle(reason), now)

		// N9: a partition without a stored offset is read from 0.
		offset := max(storedOffset(stored, tp), 0)
		partition.ackedEnd = offset
		s.acks.Restore(tp, offset)
	}
}

func (s *Sink) newTopic(name string) *topic {
	return &topic{name: name, batchLimit: s.c.limits.batchBytes, configStale: true, compacted: true}
}

// addPartitions adds partitions until there are n.
func (t *topic) addPartitions(n int) {
	for id := len(t.partitions); id < n; id++ {
		tp := record.TopicPartition{Topic: t.name, Partition: int32(id)}
		t.partitions = append(t.partitions, &partition{topic: t, tp: tp, leader: -1})
	}
}

// FindHit returns the place of rec if the read-back has found it, without removing it from the
// hits. Partitions in quarantine have not been read yet.
func (s *Sink) FindHit(rec *record.Record) (record.TopicPartition, int64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	topic := s.topics[rec.Topic]
	if topic == nil || topic.hitsLeft == 0 {
		return record.TopicPartition{}, 0, false
	}

	var at record.TopicPartition
	var offset int64
	found := false
	fence.EachHit(rec, func(id fence.Identity, timeMS int64) bool {
		if partition := topic.partitionWithHit(id, timeMS); partition != nil {
			at = partition.tp
			offset, found = partition.hits.At(id, timeMS)
		}
		return found
	})
	return at, offset, found
}

// MayHold reports whether the topic of rec may contain it already: the read-back has found it, or has not read a partition in which it
// can be.
func (s *Sink) MayHold(rec *record.Record) bool {
	if _, _, found := s.FindHit(rec); found {
		return true
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	topic := s.topics[rec.Topic]
	if topic == nil || !topic.isOpen() {
		return false
	}
	partition, rejection := topic.choosePartitionLocked(rec)
	return rejection == nil && (partition.quarantine || partition.needsReadBack || partition.mayBeUnreadLocked(rec))
}

// TopicsWithHits returns the topics in which the read-back has found records that were not claimed yet.
func (s *Sink) TopicsWithHits() (topics []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, t := range s.topics {
		if t.hitsLeft > 0 {
			topics = append(topics, name)
		}
	}
	return topics
}

// partitionWithHit returns the partition in which the read-back has found the delivery id, or nil.
// It looks in all partitions: the topic may have grown since, or the envelope may name another
// partition now.
func (t *topic) partitionWithHit(id fence.Identity, timeMS int64) *partition {
	for _, p := range t.partitions {
		if p.hits.Has(id, timeMS) {
			return p
		}
	}
	return nil
}

// Compacted reports whether the topic keeps only the newest record of a key, or whether its policy
// is unknown.
func (s *Sink) Compacted(topic string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.topics[topic]
	return known == nil || known.compacted
}

// EndReread notes that the stream has passed the time of the takeover: no event that follows can
// have been sent before. It drops the hits. What was not read still counts, because a side delivery of any time may be older.
func (s *Sink) EndReread() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rereading = false
	for _, t := range s.topics {
		t.hitsLeft, t.sentKeys, t.allKeysSent = 0, nil, false
		for _, p := range t.partitions {
			p.hits = nil
		}
	}
}

// fail ends the sink with err. Only the first error counts.
func (s *Sink) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failLocked(err)
}

func (s *Sink) failLocked(err error) {
	if s.ended != nil {
		return
	}
	s.ended = err
	if s.cancelRun != nil {
		s.cancelRun(err)
	}
}
