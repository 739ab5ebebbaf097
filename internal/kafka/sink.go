package kafka

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
)

// Claims writes what must be in the watcher document before a record may be sent.
type Claims interface {
	// Save writes senders (nil: as they are) and offsets in one fenced write, majority-committed when it returns nil. An
	// offset below zero, and a partition that is not in the list, keep what is stored.
	Save(ctx context.Context, senders []record.Sender, offsets map[string][]int64) error
}

// TakeOver is what a new owner knows from the watcher document.
type TakeOver struct {
	TransactionalID string // without `#generation` (N5)
	Generation      int
	Offsets         map[string][]int64
	Senders         []record.Sender
	// Gate reports whether the lease is valid; asked before each produce.
	Gate func() bool
	// Bounds of the read-back for a topic. Default to 2 GiB and 60 s (N8).
	Bounds fence.Bounds
	// Alias is how the records of one collection may stand there from before.
	Alias fence.Alias
	// Alive is the latest time at which the earlier owner may have kept its transactional id alive; zero: unknown (N5).
	Alive time.Time
	// Holder decides what is held, and takes what cannot be brought on (N11, N15).
	Holder record.Holder
	// Event hears what an operator may want to know; it must not block. nil: it is only logged.
	Event func(fence.Event)
}

// Sink sends records for one term of ownership. Send, Flush, Size, EndReplay and State may be called from any goroutine,
// but the order of a partition is that of the calls of Send.
type Sink struct {
	c       *Client
	acks    record.Acks
	holder  record.Holder
	claims  Claims
	gate    func() bool
	log     *slog.Logger
	session *fence.Session
	expiry  fence.Expiry

	tickets ticketLists
	adopt   chan struct{} // one token: a topic waits for adoption
	renew   chan struct{} // one token: fresh metadata are wanted
	park    chan struct{} // one token: a target holds too much
	stop    func(error)   // ends Run; set by Run

	mu       sync.Mutex
	topics   map[string]*topic
	last     *topic // of the latest Send
	lanes    map[laneID]*lane
	start    func(*lane) // starts a lane's goroutine; nil before Run
	free     buffers
	spare    []*pending // structs of batches
	batches  int        // that were begun and not discarded
	producer batch.Producer
	codec    *batch.Codec
	replay   bool // EndReplay was not called yet (N7, N10)
	halted   bool // lanes send nothing, because the transactional id is left
	ended    error
	queued   int64 // bytes sent to us and not resolved
	count    int   // records sent to us and not resolved
	empty    chan struct{}
	flagged  []record.Header // scratch
}

// Open takes over from earlier owners (design §7, N4): it fences them, reads back what they have sent, and saves the
// sender and the offsets in one write. When it returns, what earlier owners sent is settled in every partition but those
// in quarantine, which Run releases later; nothing has been sent. It goes on trying while Kafka is away; it ends with ctx,
// when the id is taken by somebody else (ErrFenced), or when something has to be granted.
func Open(ctx context.Context, c *Client, to TakeOver, claims Claims, acks record.Acks) (*Sink, error) {
	s := &Sink{
		c: c, acks: acks, holder: to.Holder, claims: claims, gate: to.Gate, log: c.cfg.Log, codec: c.codec, replay: true,
		adopt: make(chan struct{}, 1), renew: make(chan struct{}, 1), park: make(chan struct{}, 1),
		topics: map[string]*topic{}, lanes: map[laneID]*lane{},
	}
	out, err := c.fence.Take(ctx, fence.In{
		TransactionalID: to.TransactionalID, Generation: to.Generation, Offsets: to.Offsets, Senders: to.Senders,
		Gate: to.Gate, Bounds: to.Bounds, Alias: to.Alias, Alive: to.Alive, Event: s.events(to.Event),
		Stuck: c.patience, Idle: c.patience, Own: c.patience,
	})
	if err != nil {
		return nil, fmt.Errorf("taking over in Kafka: %w", err)
	}
	s.session, s.producer = out.Session, batch.Producer(out.Producer)
	s.expiry = c.fence.Expiry(ctx)
	if err := claims.Save(ctx, out.Senders, released(out.Released)); err != nil {
		return nil, fmt.Errorf("taking over in Kafka: saving the sender: %w", err)
	}
	s.adoptTails(out, to.Offsets)
	if err := s.lookUp(ctx); err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("taking over in Kafka: %w", err)
	}
	return s, nil
}

// events logs what happens in the fence and passes it on.
func (s *Sink) events(to func(fence.Event)) func(fence.Event) {
	return func(e fence.Event) {
		s.log.Warn(e.Text, "event", string(e.Kind), "topic", e.Topic)
		if to != nil {
			to(e)
		}
	}
}

// released lists the offsets to store for partitions that were read back.
func released(tails map[record.TopicPartition]*fence.Tail) map[string][]int64 {
	offsets := map[string][]int64{}
	for tp, tail := range tails {
		set(offsets, tp, tail.From)
	}
	return offsets
}

// set puts one offset into lists whose other entries keep what is stored.
func set(offsets map[string][]int64, tp record.TopicPartition, offset int64) {
	list := offsets[tp.Topic]
	for len(list) <= int(tp.Partition) {
		list = append(list, -1)
	}
	list[tp.Partition] = offset
	offsets[tp.Topic] = list
}

// adoptTails makes the topics of a take-over. Every partition gets its stored offset, those in quarantine too: theirs
// must not move.
func (s *Sink) adoptTails(out *fence.Out, stored map[string][]int64) {
	at := func(tp record.TopicPartition) *part {
		t := s.topics[tp.Topic]
		if t == nil {
			t = s.newTopic(tp.Topic)
			t.had(len(stored[tp.Topic]))
			s.topics[tp.Topic] = t
		}
		t.grow(int(tp.Partition) + 1)
		return t.parts[tp.Partition]
	}
	now := time.Now()
	for tp, tail := range out.Released {
		p := at(tp)
		p.end, p.hits, p.used = tail.Next, tail.Hits, now
		p.flag = tail.OutOfRange || tail.Truncated
		p.t.hits += tail.Hits.Len()
		s.c.cfg.Metrics.ReadBack.Add(float64(max(tail.Next-tail.From, 0)))
		s.acks.Restore(tp, tail.From)
	}
	for tp, why := range out.Quarantined {
		p := at(tp)
		p.quarantine = true
		p.hold(obstacle{kindQuarantined, why}, now)
		offset := int64(0)
		if list := stored[tp.Topic]; int(tp.Partition) < len(list) {
			offset = max(list[tp.Partition], 0)
		}
		p.end = offset
		s.acks.Restore(tp, offset)
	}
}

func (s *Sink) newTopic(name string) *topic {
	return &topic{name: name, limit: s.c.cfg.MaxBatchBytes, stale: true, compacted: true}
}

// grow adds partitions up to n.
func (t *topic) grow(n int) {
	for id := len(t.parts); id < n; id++ {
		t.parts = append(t.parts, &part{t: t, tp: record.TopicPartition{Topic: t.name, Partition: int32(id)}, leader: -1})
	}
}

// lookUp reads leaders and limits of the known topics.
func (s *Sink) lookUp(ctx context.Context) error {
	names := s.names()
	if len(names) == 0 {
		return nil
	}
	if err := s.describe(ctx); err != nil {
		return err
	}
	layout, err := s.c.Metadata(ctx, names)
	if err != nil {
		return err
	}
	s.place(layout)
	return nil
}

// names lists the topics with partitions.
func (s *Sink) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, t := range s.topics {
		if len(t.parts) > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Standing tells where a record stands that the read-back has found, without taking it from what was found. Partitions in
// quarantine were not read yet.
func (s *Sink) Standing(rec *record.Record) (record.TopicPartition, int64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, _, at := s.standing(rec)
	if p == nil {
		return record.TopicPartition{}, 0, false
	}
	return p.tp, at, true
}

// standing finds the partition in which a read-back has found a record; nil if none has. The lock is held.
func (s *Sink) standing(rec *record.Record) (p *part, id fence.Identity, at int64) {
	t := s.topics[rec.Topic]
	if t == nil || t.hits == 0 {
		return nil, id, 0
	}
	id, ok := fence.IdentityOf(rec.Headers)
	if !ok {
		return nil, id, 0
	}
	if p = t.standing(id); p != nil {
		at, _ = p.hits.At(id)
	}
	return p, id, at
}

// standing finds the partition in which a read-back has found a delivery, whichever it is: a topic may have grown since, or
// the envelope ask for another partition now.
func (t *topic) standing(id fence.Identity) *part {
	for _, p := range t.parts {
		if p.hits.Has(id) {
			return p
		}
	}
	return nil
}

// Compacted reports whether a topic keeps the newest record of a key only, or whether that is not known.
func (s *Sink) Compacted(topic string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.topics[topic]
	return t == nil || t.compacted
}

// Take acks a record that a read-back has found, from within the call, and takes it from what was found; false for any
// other, of which nothing is done. It is for deliveries outside of the stream's order whose turn has not come: what stands
// there needs none, nor a partition that can be written. The identity alone decides (N7); nothing is sent, so that no
// order is at stake (N10).
func (s *Sink) Take(rec *record.Record, t record.Ticket) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, id, at := s.standing(rec)
	if p == nil || s.ended != nil {
		return false
	}
	p.hits.Take(id)
	p.t.hits--
	_, size := sizes(rec)
	s.hit(p.tp, at, t, size)
	return true
}

// EndReplay says that the stream has passed the time of the take-over: nothing that follows can have been sent before. What
// was read back is dropped, but for records that wait and are looked up later, and for partitions that were not read yet or
// have turned records away: deliveries outside of the stream's order are looked up there to the end.
func (s *Sink) EndReplay() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replay = false
	for _, t := range s.topics {
		s.keepUnread(t)
		t.forget()
	}
}

// Recycle gives a ticket slice of an ack back.
func (s *Sink) Recycle(list []record.Ticket) { s.tickets.put(list) }

// fail ends the sink with err; the first one counts.
func (s *Sink) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(err)
}

// Drain blocks until everything sent so far is acked, refused or given back, or ctx ends, or the sink does.
func (s *Sink) Drain(ctx context.Context) error {
	s.Flush()
	for {
		s.mu.Lock()
		if s.count == 0 || s.ended != nil {
			err := s.ended
			if s.count == 0 {
				err = nil
			}
			s.mu.Unlock()
			return err
		}
		if s.empty == nil {
			s.empty = make(chan struct{})
		}
		wait := s.empty
		s.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// resolved takes n records off what is in flight. The lock is held.
func (s *Sink) resolved(n, bytes int) {
	s.count -= n
	s.queued -= int64(bytes)
	if s.count == 0 && s.empty != nil {
		close(s.empty)
		s.empty = nil
	}
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
