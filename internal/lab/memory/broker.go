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

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/event"
)

// Broker replaces a Kafka cluster: it contains topics with partitions, and consumer groups. It
// implements consumer.Transport. Several consumers can share it, each as a member of its group. It
// is safe for concurrent use.
//
// A topic is created when a record is written to it or a group subscribes to it. A group without
// committed offsets begins with the first record.
type Broker struct {
	partitions int // of a topic that CreateTopic has not created

	mu     sync.Mutex
	topics map[string]*topic
	groups map[string]*group
	faults func(topic string, m *transport.Record) Fault

	roundRobin int32         // for records without a key
	written    uint64        // order of the records of all partitions
	changed    chan struct{} // closed and replaced at each change
}

var _ transport.Transport = (*Broker)(nil)

// defaultPartitions is the default number of partitions of a topic.
const defaultPartitions = 4

// NewBroker returns a broker without topics. partitions is the number of partitions of topics that CreateTopic has not
// created. Defaults to 4.
func NewBroker(partitions int) *Broker {
	if partitions <= 0 {
		partitions = defaultPartitions
	}
	return &Broker{
		partitions: partitions,
		topics:     map[string]*topic{},
		groups:     map[string]*group{},
		changed:    make(chan struct{}),
	}
}

// topic is a topic with its partitions.
type topic struct {
	id         string // unique, also among topics with the same name
	partitions []*partition
}

// partition is a log. After a compaction the offsets of its records have gaps.
type partition struct {
	start   int64 // offset of the first record that is available
	end     int64 // offset of the next record
	records []storedRecord
}

// storedRecord is a record with its position among the records of all partitions.
type storedRecord struct {
	transport.Record
	order uint64
}

// Fault describes what happens to a record that is to be written. The zero value does nothing.
type Fault struct {
	// Err rejects the record and all later records of the same call. A relay treats errRejected as
	// an error of the record and tries it three times. It treats all other errors as an
	// outage and retries until the outage is over.
	Err error

	// Duplicate is the number of additional copies of the record.
	Duplicate int
}

// errRejected is a Fault.Err for an error of the record itself.
var errRejected = errors.New("the broker rejects the record")

// Inject makes the broker call fault for each record before it is written. A nil fault removes the
// function.
func (b *Broker) Inject(fault func(topic string, record *transport.Record) Fault) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = fault
	b.notifyLocked()
}

// CreateTopic creates a topic with n partitions, or adds partitions to an existing one. Then the
// groups of the topic are rebalanced.
func (b *Broker) CreateTopic(name string, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.growTopicLocked(name, n)
}

// Compact removes every record whose key has a later record in the same partition, as Kafka does
// with compacted topics.
func (b *Broker) Compact(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.findOrAddTopicLocked(name).partitions {
		last := map[string]int64{}
		for _, r := range p.records {
			last[string(r.Key)] = r.Offset
		}

		p.records = slices.DeleteFunc(slices.Clone(p.records), func(record storedRecord) bool {
			return record.Key != nil && last[string(record.Key)] > record.Offset
		})
	}
}

// Topics returns the names of the topics, sorted.
func (b *Broker) Topics() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.topics))
}

// Records returns the records of a topic, in the order in which they were written to all its
// partitions.
func (b *Broker) Records(name string) []transport.Record {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.recordsLocked(name)
}

// recordsLocked is Records for callers that hold the lock.
func (b *Broker) recordsLocked(name string) []transport.Record {
	var list []storedRecord
	if topic := b.topics[name]; topic != nil {
		for _, p := range topic.partitions {
			list = append(list, p.records...)
		}
	}

	// Offsets count in one partition. The order of all records of a topic is that of writing.
	slices.SortFunc(list, func(a, b storedRecord) int {
		if a.order < b.order {
			return -1
		}
		return 1
	})

	out := make([]transport.Record, len(list))
	for i, r := range list {
		out[i] = cloneRecord(r.Record)
	}

	return out
}

// Await blocks until the topic has at least n records, and returns all of them. If ctx ends before,
// it returns the existing records and an error.
func (b *Broker) Await(ctx context.Context, name string, n int) ([]transport.Record, error) {
	var list []transport.Record
	err := b.await(ctx, func() bool {
		list = b.recordsLocked(name)
		return len(list) >= n
	})
	if err != nil {
		return list, fmt.Errorf("waiting for %d records of %s, of which there are %d: %w", n, name, len(list), err)
	}
	return list, nil
}

// await blocks until the condition holds, or until ctx ends. It calls the condition with the mutex, after each
// change.
func (b *Broker) await(ctx context.Context, holdsLocked func() bool) error {
	for {
		b.mu.Lock()
		holds := holdsLocked()
		changed := b.changed
		b.mu.Unlock()

		if holds {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Changed returns a channel that is closed when a record is written, offsets are committed, or a group changes.
func (b *Broker) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changed
}

// Publish writes messages to a topic. Each gets the partition of its key and the current
// time. After an error, the messages before the failed one stay written.
func (b *Broker) Publish(ctx context.Context, name string, records []transport.Record) error {
	for _, r := range records {
		r.Time = time.Time{}
		if err := b.writeRecord(ctx, name, &r, -1); err != nil {
			return fmt.Errorf("publishing to %s: %w", name, err)
		}
	}
	return nil
}

// writeRecord writes one record to the partition part. If part is negative, the key selects the
// partition.
func (b *Broker) writeRecord(ctx context.Context, name string, record *transport.Record, part int32) error {
	if err := checkTopic(name); err != nil {
		return err
	}

	b.mu.Lock()
	faults := b.faults
	b.mu.Unlock()

	// The function is called without the lock, so it may use the broker.
	var fault Fault
	if faults != nil {
		fault = faults(name, record)
	}
	if err := errors.Join(ctx.Err(), fault.Err); err != nil {
		return err
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	topic := b.findOrAddTopicLocked(name)
	if part >= int32(len(topic.partitions)) {
		return fmt.Errorf("%w: partition %d does not exist: topic %q has %d", errRejected, part, name, len(topic.partitions))
	}
	// An explicit partition wins over the key, as in a producer.
	if part < 0 {
		part = b.choosePartitionLocked(topic, record.Key)
	}

	for range fault.Duplicate + 1 {
		b.appendRecordLocked(topic.partitions[part], name, part, record)
	}

	b.notifyLocked()
	return nil
}

// checkTopic checks the name of a topic by Kafka's rule.
func checkTopic(name string) error {
	illegal := func(char rune) bool {
		legal := char >= 'a' && char <= 'z' || char >= 'A' && char <= 'Z' || char >= '0' && char <= '9' || char == '.' || char == '_' || char == '-'
		return !legal
	}
	if name == "" || len(name) > 249 || name == "." || name == ".." || strings.ContainsFunc(name, illegal) {
		return fmt.Errorf("%w: invalid topic name %.64q", errRejected, name)
	}
	return nil
}

// choosePartitionLocked returns the partition that Kafka's Java client selects for the key. Records
// without a key are distributed round robin.
func (b *Broker) choosePartitionLocked(topic *topic, key []byte) int32 {
	n := int32(len(topic.partitions))
	if key == nil {
		b.roundRobin++
		return b.roundRobin & 0x7fffffff % n
	}
	return int32(keyhash.Murmur2(key)&0x7fffffff) % n
}

// appendRecordLocked writes a copy of the record to the partition.
func (b *Broker) appendRecordLocked(partition *partition, name string, part int32, record *transport.Record) {
	rec := cloneRecord(transport.Record{
		Topic:     name,
		Partition: part,
		Offset:    partition.end,
		Time:      record.Time,
		Key:       record.Key,
		Value:     record.Value,
		Headers:   record.Headers,
	})
	if rec.Time.IsZero() {
		rec.Time = time.Now()
	}
	// Kafka stores milliseconds.
	rec.Time = time.UnixMilli(rec.Time.UnixMilli())

	b.written++
	partition.records = append(partition.records, storedRecord{rec, b.written})
	partition.end++
}

// findOrAddTopicLocked returns the topic called name.
func (b *Broker) findOrAddTopicLocked(name string) *topic {
	if topic := b.topics[name]; topic != nil {
		return topic
	}
	b.growTopicLocked(name, b.partitions)
	return b.topics[name]
}

// growTopicLocked creates the topic if necessary, and adds partitions until it has n.
func (b *Broker) growTopicLocked(name string, n int) {
	existing := b.topics[name]
	if existing == nil {
		existing = &topic{id: uuid.NewString()}
		b.topics[name] = existing
	}
	if len(existing.partitions) >= n {
		return
	}

	for len(existing.partitions) < n {
		existing.partitions = append(existing.partitions, &partition{})
	}

	b.rebalanceSubscribersLocked(name)
	b.notifyLocked()
}

// notify wakes all goroutines that wait for a change.
func (b *Broker) notify() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.notifyLocked()
}

// notifyLocked wakes all goroutines that wait for a change.
func (b *Broker) notifyLocked() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// cloneRecord returns a copy that shares no memory with record.
func cloneRecord(record transport.Record) transport.Record {
	record.Key = bytes.Clone(record.Key)
	record.Value = bytes.Clone(record.Value)

	headers := make([]event.Header, len(record.Headers))
	for i, h := range record.Headers {
		headers[i] = event.Header{Key: h.Key, Value: bytes.Clone(h.Value)}
	}
	record.Headers = headers
	return record
}
