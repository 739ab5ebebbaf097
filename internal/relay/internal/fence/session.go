package fence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// Session is the identity with which an owner sends, and the partitions that it may not write to yet.
// It is safe for concurrent use. Retry, KeepAlive and NextGeneration run transactions and exclude each
// other.
type Session struct {
	client  *Client
	in      In
	cluster string // id of the Kafka cluster
	moved   bool   // the previous owner sent to another cluster

	txn sync.Mutex // one transaction of this owner at a time

	// mu guards the fields below, and is held during no I/O. Take does not need it, because no other
	// goroutine has the session yet.
	mu         sync.Mutex
	current    Producer
	generation int
	retired    senders
	held       map[record.TopicPartition]*heldPartition // the quarantine
	old        map[int]Producer                         // identities of earlier generations, for their barriers
	gone       map[int64]bool                           // producer ids that the coordinator has forgotten
	foreign    map[int64]int16                          // the highest epoch of a batch of another client, by producer id
}

// heldPartition is a partition in quarantine.
type heldPartition struct {
	tail   *Tail
	reason kafkawire.Obstacle
}

func newSession(client *Client, input In) *Session {
	input.Idle, input.Own, input.epochs = cmp.Or(input.Idle, readIdle), cmp.Or(input.Own, ownTotal), cmp.Or(input.epochs, maxEpoch)
	bounds := &input.Bounds
	bounds.Bytes, bounds.Time, bounds.Memory = cmp.Or(bounds.Bytes, 2<<30), cmp.Or(bounds.Time, time.Minute), cmp.Or(bounds.Memory, 32<<20)
	return &Session{
		client:  client,
		in:      input,
		held:    map[record.TopicPartition]*heldPartition{},
		old:     map[int]Producer{},
		gone:    map[int64]bool{},
		foreign: map[int64]int16{},
	}
}

// Producer returns the identity to send with. Only NextGeneration changes it.
func (s *Session) Producer() Producer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// Generation returns the generation of the transactional id.
func (s *Session) Generation() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation
}

// TransactionalID returns the id in use, with its generation.
func (s *Session) TransactionalID() string { return s.formatID(s.Generation()) }

// Senders returns the list to save: the earlier senders that are still open or that a read-back still
// counts, and this owner last.
func (s *Session) Senders() []record.Sender {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := record.Sender{ID: s.current.ID, Epoch: s.current.Epoch, Generation: s.generation, Cluster: s.cluster}
	return append(s.retired.listSenders(), own)
}

// Quarantined returns the partitions to which nothing may be sent, with the reason for operators.
func (s *Session) Quarantined() map[record.TopicPartition]kafkawire.Obstacle {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[record.TopicPartition]kafkawire.Obstacle, len(s.held))
	for tp, q := range s.held {
		out[tp] = q.reason
	}
	return out
}

// Hold puts a partition into quarantine whose stored offset is 0, because its end could not be read. This owner
// has not written to it. Retry releases it when it can be read.
func (s *Session) Hold(tp record.TopicPartition, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[tp] = &heldPartition{tail: newTail(0), reason: kafkawire.Obstacle{Cause: reason}}
}

func (s *Session) formatID(generation int) string {
	return s.in.TransactionalID + "#" + strconv.Itoa(generation)
}

func (s *Session) patience() Patience {
	reported := false
	return Patience{Stuck: s.in.Stuck, Gate: s.in.Gate, Waiting: func(err error, began time.Time) {
		// Once for each step.
		isNew := err != nil && !reported
		reported = err != nil
		if isNew {
			s.report(Event{Kind: Waiting, Text: fmt.Sprintf("tried for %s: %v", reportAfter, err)})
		}
		if s.in.Waiting != nil {
			s.in.Waiting(err, began)
		}
	}}
}

func (s *Session) report(event Event) {
	if s.in.Event != nil {
		s.in.Event(event)
	}
}

func (s *Session) newReader() *reader {
	s.mu.Lock()
	defer s.mu.Unlock()

	ours := map[int64]int16{s.current.ID: s.current.Epoch}
	for _, x := range s.retired {
		raiseEpoch(ours, x.ID, x.Epoch)
	}

	report := s.report
	if s.moved {
		// The stored offsets belong to the other cluster, which was reported.
		report = func(event Event) {
			if event.Kind != OutOfRange {
				s.report(event)
			}
		}
	}

	return &reader{
		kafka:    s.client,
		ours:     ours,
		bounds:   s.in.Bounds,
		patience: s.patience(),
		idle:     s.in.Idle,
		report:   report,
	}
}

// quarantinedPartitions returns the partitions in quarantine, sorted.
func (s *Session) quarantinedPartitions() []record.TopicPartition {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]record.TopicPartition, 0, len(s.held))
	for tp := range s.held {
		out = append(out, tp)
	}
	slices.SortFunc(out, comparePartitions)
	return out
}

// readEnds returns the ends of the logs of partitions. Each later marker is at or above. It waits for at most idle. The end of a partition
// whose leader does not respond in time is unknownEnd.
func (s *Session) readEnds(
	ctx context.Context, health *Health, partitions []record.TopicPartition, idle time.Duration,
) map[record.TopicPartition]int64 {
	out, leaders := map[record.TopicPartition]int64{}, map[record.TopicPartition]int32{}
	for _, tp := range partitions {
		out[tp] = unknownEnd
		if list := health.layout.Topics[tp.Topic].Partitions; int(tp.Partition) < len(list) && list[tp.Partition].Leader >= 0 {
			leaders[tp] = list[tp.Partition].Leader
		}
	}

	ctx, cancel := context.WithTimeout(ctx, idle)
	defer cancel()
	// An error leaves ends unknown, and the read estimates these. If it is the end of the caller's ctx, the read returns it.
	ends, _ := s.client.kafka.ListOffsets(ctx, leaders)
	maps.Copy(out, ends)
	return out
}

// openSender is an earlier sender that is open in a partition.
type openSender struct {
	Producer
	generation int
}

// openSenders returns the earlier senders that may still write to tp, and above which a marker has to be
// read. Senders that the coordinator has forgotten are not in the result: no process can write such a
// marker.
func (s *Session) openSenders(tp record.TopicPartition) []openSender {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []openSender
	for i := range s.retired {
		x := &s.retired[i]
		if _, isOpen := x.open.findOpen(tp); isOpen && !s.gone[x.ID] {
			out = append(out, openSender{x.Producer, x.generation})
		}
	}
	return out
}

func producerOf(sender record.Sender) Producer { return Producer{ID: sender.ID, Epoch: sender.Epoch} }

// readAndRelease reads partitions, and adds the tails of the fenced ones to released.
func (s *Session) readAndRelease(
	ctx context.Context, reader *reader, list []*reading, released map[record.TopicPartition]*Tail,
) error {
	if err := reader.readAll(ctx, list); err != nil {
		return err
	}
	for _, p := range list {
		if tail := s.releaseIfFenced(p); tail != nil {
			released[p.TopicPartition] = tail
		}
	}
	return nil
}

// releaseIfFenced releases a partition that was read and is fenced, and returns its tail. Otherwise it
// notes the reason and returns nil.
//
// N4: a partition is released when a marker above every earlier sender that is open in it was READ, and
// the partition was read at least up to that marker. The read is in order, so the partition was read up
// to each marker that was found. A batch of another client with a higher epoch of that sender's producer id
// fences as a marker does.
func (s *Session) releaseIfFenced(reading *reading) *Tail {
	var open []Producer
	for _, x := range s.openSenders(reading.TopicPartition) {
		open = append(open, x.Producer)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	tail := reading.tail
	fenced := tail.hasMarkersAbove(open)
	if tail.target < 0 || tail.Next < tail.target || !fenced {
		// An error of the read explains more than the missing marker.
		if reading.err != nil {
			s.held[reading.TopicPartition].reason = kafkawire.Obstacle{Cause: reading.err.Error()}
		} else if !fenced {
			s.held[reading.TopicPartition].reason = kafkawire.Obstacle{Cause: errNoMarker.Error()}
		}
		return nil
	}

	delete(s.held, reading.TopicPartition)
	s.retired.closePartition(reading.TopicPartition, tail.Next)
	for id, epoch := range tail.foreign {
		s.reportForeign(reading.TopicPartition, Producer{ID: id, Epoch: epoch})
	}
	return tail
}

// reportForeign reports a batch of another client, and notes the epoch below which Kafka rejects this owner.
func (s *Session) reportForeign(tp record.TopicPartition, sender Producer) {
	raiseEpoch(s.foreign, sender.ID, sender.Epoch)
	s.report(Event{
		Kind: ForeignProducer, Topic: tp.Topic,
		Text: fmt.Sprintf("another client has written to %s with a producer id of this relay (%v, an epoch that the relay never had): "+
			"the relay takes another producer id; find the client, and let only the relay WRITE to the topic",
			formatPartition(tp), sender),
	})
}

// isRejected reports whether a foreign batch makes Kafka reject the identity of this owner in a partition.
func (s *Session) isRejected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	epoch, seen := s.foreign[s.current.ID]
	return seen && epoch >= s.current.Epoch
}

// noteForgotten notes the earlier senders of a generation that the coordinator has forgotten: it
// returned another producer id, or an epoch that is not above theirs. No process can fence their
// batches.
func (s *Session) noteForgotten(ctx context.Context, generation int, got Producer) {
	s.mu.Lock()
	var previous *Producer
	for _, x := range s.retired {
		if x.generation != generation || s.gone[x.ID] || x.ID == got.ID && x.Epoch < got.Epoch {
			continue
		}
		s.gone[x.ID] = true
		if last := len(s.in.Senders) - 1; last >= 0 && s.in.Senders[last].ID == x.ID {
			previous = &Producer{ID: x.ID, Epoch: x.Epoch}
		}
	}
	s.mu.Unlock()

	// Senders before the previous owner were reported when it happened.
	if previous == nil {
		return
	}

	// N5: an id that was not kept alive for longer than the cluster remembers is expected to change.
	event := Event{Kind: ProducerIDChanged, Alarm: true}
	age := "it is not known when it was last kept alive"
	if !s.in.Alive.IsZero() {
		idle, limit := time.Since(s.in.Alive), s.client.Expiry(ctx).TransactionalID
		event.Alarm = idle < limit
		age = fmt.Sprintf("it was last kept alive %s ago and expires after %s", idle.Round(time.Second), limit)
	}

	event.Text = fmt.Sprintf("Kafka has forgotten transactional id %s of the earlier owner, as expected: %s", s.formatID(generation), age)
	if event.Alarm {
		event.Text = fmt.Sprintf("Kafka has forgotten transactional id %s too early (%s): it had %v and has %v now, so Kafka cannot "+
			"fence the earlier owner; make sure that none of its processes is left, and look for lost data of __transaction_state",
			s.formatID(generation), age, *previous, got)
	}
	s.report(event)
}

// initNextGeneration initializes the first transactional id of a higher generation that does not hang. The identity and
// the generation of the session stay: the saved sender must contain the id with which its batches can be fenced.
func (s *Session) initNextGeneration(ctx context.Context, patience Patience) (got Producer, generation int, err error) {
	for generation = s.Generation() + 1; ; generation++ {
		got, err = s.client.Init(ctx, s.formatID(generation), anyEpoch, patience)
		// An earlier owner may have left this id hanging as well.
		if !errors.Is(err, errStuck) {
			return got, generation, err
		}
	}
}

// moveTo makes got the identity of the session.
func (s *Session) moveTo(ctx context.Context, got Producer, generation int) {
	s.noteForgotten(ctx, generation, got)
	s.mu.Lock()
	left := s.formatID(s.generation)
	s.current, s.generation = got, generation
	s.mu.Unlock()
	s.report(Event{
		Kind: GenerationMoved,
		Text: fmt.Sprintf("transactional id %s was left for %s", left, s.formatID(generation)),
	})
}

// takeNextGeneration moves to the next generation that does not hang, before anything is sent.
func (s *Session) takeNextGeneration(ctx context.Context) error {
	got, generation, err := s.initNextGeneration(ctx, s.patience())
	if err == nil {
		s.moveTo(ctx, got, generation)
	}
	return err
}
