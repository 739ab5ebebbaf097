package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// DefaultPartitions is how many partitions a topic has unless WithPartitions or CreateTopic says another number.
const DefaultPartitions = 4

// Broker is Kafka in memory: topics of partitions, and groups. It is a consumer.Transport: any number of consumers, each a
// member of its group, may have the same one. It is safe for concurrent use.
//
// A topic comes into being when it is written to or subscribed to. A group that has committed nothing begins with the
// first record.
type Broker struct {
	clock      Clock
	partitions int

	mu      sync.Mutex
	topics  map[string]*topic
	groups  map[string]*group
	faults  func(topic string, m *consumer.Message) Fault
	turn    int32         // for records without a key
	written uint64        // order of the records over all partitions
	changed chan struct{} // closed at each change, then another one
}

var _ consumer.Transport = (*Broker)(nil)

// BrokerOption configures a Broker. WithClock is one.
type BrokerOption interface{ broker(*Broker) }

type partitionsOption int

func (n partitionsOption) broker(b *Broker) { b.partitions = int(n) }

// WithPartitions sets how many partitions a topic has that nobody created. Defaults to DefaultPartitions.
func WithPartitions(n int) BrokerOption { return partitionsOption(max(n, 1)) }

// NewBroker makes a broker without topics.
func NewBroker(opts ...BrokerOption) *Broker {
	b := &Broker{
		clock: systemClock{}, partitions: DefaultPartitions,
		topics: map[string]*topic{}, groups: map[string]*group{}, changed: make(chan struct{}),
	}
	for _, o := range opts {
		o.broker(b)
	}
	return b
}

type topic struct {
	id         string // no other topic has it, also not one of the same name that comes later
	partitions []*partition
}

// partition is a log; a record that was compacted away leaves a hole.
type partition struct {
	start   int64 // the first offset that is there
	end     int64 // the next one
	records []stored
}

type stored struct {
	consumer.Record
	order uint64
}

// Fault is what happens to a record that is to be written. The zero value is nothing.
type Fault struct {
	// Err refuses the record and those behind it in the same call. A relay takes ErrRefused for the record's own fault,
	// which it tries DefaultAttempts times, and everything else for an outage, which it waits out.
	Err error
	// Duplicate writes the record so many times more.
	Duplicate int
	// Delay lets the writer wait, by the broker's clock.
	Delay time.Duration
}

// ErrRefused is a Fault.Err that is the record's own.
var ErrRefused = errors.New("the broker refuses the record")

// Inject asks f about each record from now on, before it is written; nil ends that.
func (b *Broker) Inject(f func(topic string, m *consumer.Message) Fault) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = f
	b.change()
}

// CreateTopic makes a topic of n partitions, or gives one that is there more of them. Groups are rebalanced.
func (b *Broker) CreateTopic(name string, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.grow(name, n)
}

// DeleteTopic removes a topic, its records, and what the groups have committed of it. A topic of that name that comes later
// is another one, and begins with offset 0.
func (b *Broker) DeleteTopic(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.topics, name)
	for _, g := range b.groups {
		maps.DeleteFunc(g.offsets, func(tp consumer.TopicPartition, _ int64) bool { return tp.Topic == name })
	}
	b.rebalanceSubscribers(name)
	b.change()
}

// Compact removes every record whose key has a later one in its partition, as Kafka does in time with compacted topics.
func (b *Broker) Compact(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.topic(name).partitions {
		last := map[string]int64{}
		for _, r := range p.records {
			last[string(r.Key)] = r.Offset
		}
		p.records = slices.DeleteFunc(slices.Clone(p.records), func(r stored) bool { return r.Key != nil && last[string(r.Key)] > r.Offset })
	}
}

// Truncate removes the records before an offset, as retention does.
func (b *Broker) Truncate(name string, part int32, before int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ps := b.topic(name).partitions
	if int(part) >= len(ps) {
		return
	}
	p := ps[part]
	p.start = min(max(before, p.start), p.end)
	p.records = slices.DeleteFunc(slices.Clone(p.records), func(r stored) bool { return r.Offset < p.start })
	b.change()
}

// Topics are the names of the topics, sorted.
func (b *Broker) Topics() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.topics))
}

// Records are those of a topic, in the order in which they were written over all its partitions.
func (b *Broker) Records(name string) []consumer.Record {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.records(name)
}

func (b *Broker) records(name string) []consumer.Record {
	var list []stored
	if t := b.topics[name]; t != nil {
		for _, p := range t.partitions {
			list = append(list, p.records...)
		}
	}
	slices.SortFunc(list, func(a, b stored) int {
		if a.order < b.order {
			return -1
		}
		return 1
	})
	out := make([]consumer.Record, len(list))
	for i, r := range list {
		out[i] = clone(r.Record)
	}
	return out
}

// Await returns the records of a topic when there are n of them.
func (b *Broker) Await(ctx context.Context, name string, n int) ([]consumer.Record, error) {
	for {
		b.mu.Lock()
		list, changed := b.records(name), b.changed
		b.mu.Unlock()
		if len(list) >= n {
			return list, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return list, fmt.Errorf("waiting for %d records of %s, of which there are %d: %w", n, name, len(list), ctx.Err())
		}
	}
}

// Publish writes messages to a topic, each to the partition of its key and with the time of the broker's clock. What is
// written is written: after an error those before the one at fault are.
func (b *Broker) Publish(ctx context.Context, name string, ms []*consumer.Message) error {
	for _, m := range ms {
		now := *m
		now.Time = time.Time{}
		if err := b.write(ctx, name, &now, -1); err != nil {
			return fmt.Errorf("publishing to %s: %w", name, err)
		}
	}
	return nil
}

// write appends one record, to that partition or, if it is negative, to the key's.
func (b *Broker) write(ctx context.Context, name string, m *consumer.Message, part int32) error {
	if err := checkTopic(name); err != nil {
		return err
	}
	b.mu.Lock()
	faults := b.faults
	b.mu.Unlock()
	var f Fault
	if faults != nil {
		f = faults(name, m)
	}
	if f.Delay > 0 {
		reached, stop := b.clock.At(b.clock.Now().Add(f.Delay))
		defer stop()
		select {
		case <-reached:
		case <-ctx.Done():
		}
	}
	if err := errors.Join(ctx.Err(), f.Err); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.topic(name)
	if part >= int32(len(t.partitions)) {
		return fmt.Errorf("%w: partition %d of %s, which has %d", ErrRefused, part, name, len(t.partitions))
	}
	if part < 0 {
		part = b.partitionOf(t, m.Key)
	}
	for range f.Duplicate + 1 {
		b.append(t.partitions[part], name, part, m)
	}
	b.change()
	return nil
}

func checkTopic(name string) error {
	legal := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
	}
	if name == "" || len(name) > 249 || name == "." || name == ".." || strings.ContainsFunc(name, func(r rune) bool { return !legal(r) }) {
		return fmt.Errorf("%w: %.64q is no name of a topic", ErrRefused, name)
	}
	return nil
}

// partitionOf is Java's choice for a key; records without one take turns.
func (b *Broker) partitionOf(t *topic, key []byte) int32 {
	n := int32(len(t.partitions))
	if key == nil {
		b.turn++
		return b.turn & 0x7fffffff % n
	}
	return int32(event.Murmur2(key)&0x7fffffff) % n
}

func (b *Broker) append(p *partition, name string, part int32, m *consumer.Message) {
	r := clone(consumer.Record{Topic: name, Partition: part, Offset: p.end, Time: m.Time, Key: m.Key, Value: m.Value, Headers: m.Headers})
	if r.Time.IsZero() {
		r.Time = b.clock.Now()
	}
	r.Time = time.UnixMilli(r.Time.UnixMilli())
	b.written++
	p.records = append(p.records, stored{r, b.written})
	p.end++
}

// topic is the one of that name, made if there is none.
func (b *Broker) topic(name string) *topic {
	if t := b.topics[name]; t != nil {
		return t
	}
	b.grow(name, b.partitions)
	return b.topics[name]
}

func (b *Broker) grow(name string, n int) {
	t := b.topics[name]
	if t == nil {
		t = &topic{id: uuid.NewString()}
		b.topics[name] = t
	}
	if len(t.partitions) >= n {
		return
	}
	for len(t.partitions) < n {
		t.partitions = append(t.partitions, &partition{})
	}
	b.rebalanceSubscribers(name)
	b.change()
}

// change wakes all that wait for something to happen.
func (b *Broker) change() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// clone is a record whose bytes are its own.
func clone(r consumer.Record) consumer.Record {
	r.Key, r.Value = bytes.Clone(r.Key), bytes.Clone(r.Value)
	headers := make([]consumer.Header, len(r.Headers))
	for i, h := range r.Headers {
		headers[i] = consumer.Header{Key: h.Key, Value: bytes.Clone(h.Value)}
	}
	r.Headers = headers
	return r
}
