package check

import (
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"time"
)

// Options of a Checker.
type Options struct {
	// Forget bounds the memory of an endless run. An event is forgotten this long after it was
	// delivered to all topics, or after its transaction aborted. A later second delivery then
	// counts as a phantom. 0 keeps everything.
	Forget time.Duration
	// Examples bounds the violations that are described in words. Defaults to 20.
	Examples int
	// Others ignores records of events that were never begun, for topics with other writers.
	Others bool
	// Latency gets each committed event that was delivered to all topics. Optional.
	Latency *Latency
	// Now is the clock for Forget. Defaults to time.Now.
	Now func() time.Time
}

// Event is an event that a writer is about to commit.
type Event struct {
	ID     string   // the id in its Deliveries; unique in a Checker
	Key    string   // events of one key are ordered
	Topics []string // the topics that must get it; nil means a single topic, the first in which it is delivered
	Value  []byte   // the value of the record; nil is not compared
}

// Delivery is a record that a consumer received.
type Delivery struct {
	ID        string
	Key       string // of the record
	Topic     string
	Partition int
	Offset    int64
	Value     []byte
	Flagged   bool      // the record has the redelivered header
	Seen      time.Time // when the consumer received it; for Options.Latency
}

// DeliveryKind is the kind of a delivery.
type DeliveryKind int

// The results of Delivered.
const (
	First      DeliveryKind = iota // the first record of the event in this topic
	Disordered                     // the same, after a later event of its key, or in another partition than the key before
	Duplicate                      // another record of the event in this topic
	Repeated                       // the same, with the redelivered header
	Phantom                        // never begun, aborted, or not for this topic
	Foreign                        // never begun, with Options.Others
)

type state uint8

const (
	begun state = iota // the outcome of the transaction is not known yet
	committed
	aborted
	unknown
)

type event struct {
	id          string
	state       state
	number      uint64 // among the events of its key
	key         string
	topics      []string
	valueHash   uint64 // 0 is not compared
	seenTopics  []string
	committedAt time.Time // when the commit was acknowledged
	lastSeen    time.Time // when the latest of its first records was received
	closedAt    time.Time // when no further record was expected

	excused bool // it need not be delivered
}

// belongsTo reports whether topic must get the event.
func (e *event) belongsTo(topic string) bool {
	if e.topics == nil {
		return len(e.seenTopics) == 0
	}
	return slices.Contains(e.topics, topic)
}

// missingTopics returns the number of topics that do not have the event yet.
func (e *event) missingTopics() int { return max(len(e.topics), 1) - len(e.seenTopics) }

type target struct{ topic, key string }

// keyOrder is the order of one key in one topic.
type keyOrder struct {
	last      uint64 // the highest number of a delivered event
	partition int
}

// Checker compares events with records. Use [New] to create it.
type Checker struct {
	options Options
	seed    maphash.Seed

	mu          sync.Mutex
	events      map[string]*event
	open        map[string]*event // begun or committed, and not delivered to all topics
	lastNumbers map[string]uint64 // by key
	keyOrders   map[target]*keyOrder
	closed      []*event // in the order in which they were closed, to be forgotten
	report      Report
}

// New returns an empty Checker.
func New(options Options) *Checker {
	if options.Examples == 0 {
		options.Examples = 20
	}
	if options.Now == nil {
		options.Now = time.Now
	}

	return &Checker{
		options:     options,
		seed:        maphash.MakeSeed(),
		events:      map[string]*event{},
		open:        map[string]*event{},
		lastNumbers: map[string]uint64{},
		keyOrders:   map[target]*keyOrder{},
	}
}

// Begin registers an event before its transaction is sent. If a transaction has several events of
// one key, they must be begun in the order in which they are appended.
func (c *Checker) Begin(ev Event) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.lastNumbers[ev.Key]++
	event := &event{
		id:        ev.ID,
		key:       ev.Key,
		number:    c.lastNumbers[ev.Key],
		topics:    ev.Topics,
		valueHash: c.hashValue(ev.Value),
	}
	if _, exists := c.events[ev.ID]; exists {
		c.addExampleLocked("event %s was begun twice; the writer is wrong", ev.ID)
	}
	c.events[ev.ID] = event
	c.open[ev.ID] = event
}

// hashValue returns a hash that is not 0, or 0 for nil.
func (c *Checker) hashValue(value []byte) uint64 {
	if value == nil {
		return 0
	}
	return max(maphash.Bytes(c.seed, value), 1)
}

// Committed records that the commit of these events was acknowledged at the given time. From then
// on they must be delivered.
func (c *Checker) Committed(acknowledged time.Time, ids ...string) {
	c.endTransaction(committed, acknowledged, ids)
}

// Aborted records that the transaction of these events will never commit. They must not be
// delivered.
func (c *Checker) Aborted(ids ...string) { c.endTransaction(aborted, time.Time{}, ids) }

// Unknown records that it is unknown whether these events are committed. They may be delivered, in
// their order, or not.
func (c *Checker) Unknown(ids ...string) { c.endTransaction(unknown, time.Time{}, ids) }

func (c *Checker) endTransaction(state state, acknowledged time.Time, ids []string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	for _, id := range ids {
		event := c.events[id]
		if event == nil || event.state != begun {
			c.addExampleLocked("event %s ended without having begun; the writer is wrong", id)
			continue
		}

		event.state = state
		event.committedAt = acknowledged
		// An excused event is not expected until its first record arrives.
		if event.excused && state == committed && event.missingTopics() > 0 {
			c.excuseEventLocked(event)
			continue
		}

		switch state {
		case committed:
			c.report.Committed++
			c.countDeliveredLocked(event)
		case aborted:
			// The relay reads only committed events, so a record of an aborted event has no origin.
			c.report.Aborted++
			if len(event.seenTopics) > 0 {
				c.report.Phantoms += len(event.seenTopics)
				c.addExampleLocked("event %s was delivered to %s although its transaction aborted", event.id, event.seenTopics[0])
			}
		case unknown:
			c.report.Unknown++
		}
		c.closeEventLocked(event)
	}
}

// Excuse records that the events which were begun until now and are not delivered yet need not be
// delivered, because their collection was dropped. They may still be delivered, in their order.
func (c *Checker) Excuse() {
	c.mu.Lock()
	defer c.mu.Unlock()

	for _, e := range c.open {
		e.excused = true
		if e.state == committed {
			c.report.Committed--
			c.excuseEventLocked(e)
		}
	}
}

func (c *Checker) excuseEventLocked(event *event) {
	event.state = unknown
	c.report.Excused++
	c.closeEventLocked(event)
}

// countDeliveredLocked counts a committed event if it is delivered to all topics.
func (c *Checker) countDeliveredLocked(event *event) {
	if event.missingTopics() > 0 {
		return
	}

	c.report.Delivered++
	if c.options.Latency != nil && !event.committedAt.IsZero() && !event.lastSeen.IsZero() {
		c.options.Latency.Add(event.committedAt, event.lastSeen)
	}
}

// closeEventLocked removes an event from the open ones if no further record is expected. It also
// forgets events that were closed long enough ago.
func (c *Checker) closeEventLocked(event *event) {
	if event.state == begun || event.state == committed && event.missingTopics() > 0 {
		return
	}
	delete(c.open, event.id)
	if c.options.Forget == 0 || !event.closedAt.IsZero() {
		return
	}

	now := c.options.Now()
	event.closedAt = now
	c.closed = append(c.closed, event)
	for len(c.closed) > 0 && now.Sub(c.closed[0].closedAt) > c.options.Forget {
		delete(c.events, c.closed[0].id)
		c.closed[0] = nil
		c.closed = c.closed[1:]
	}
}

// Delivered checks a record that a consumer received. The records of one partition must be passed
// in their order.
func (c *Checker) Delivered(delivery Delivery) DeliveryKind {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.report.Records++
	if delivery.Flagged {
		c.report.Flagged++
	}

	event := c.events[delivery.ID]
	if event == nil && c.options.Others {
		c.report.Foreign++
		return Foreign
	}
	if event == nil {
		c.report.Phantoms++
		c.addExampleLocked("%s belongs to an event that was never appended: %s", formatPlace(delivery), delivery.ID)
		return Phantom
	}

	if slices.Contains(event.seenTopics, delivery.Topic) {
		if delivery.Flagged {
			c.report.Repeated++
			return Repeated
		}
		c.report.Duplicates++
		c.addExampleLocked("%s is the second delivery of event %s", formatPlace(delivery), delivery.ID)
		return Duplicate
	}
	if event.state == aborted || !event.belongsTo(delivery.Topic) {
		c.report.Phantoms++
		c.addExampleLocked("%s must not exist: event %s was aborted or belongs to other topics", formatPlace(delivery), delivery.ID)
		return Phantom
	}

	event.seenTopics = append(event.seenTopics, delivery.Topic)
	kind := c.checkOrderLocked(event, delivery)
	if event.key != delivery.Key || event.valueHash != 0 && event.valueHash != c.hashValue(delivery.Value) {
		c.report.Altered++
		c.addExampleLocked("%s differs from the appended event %s", formatPlace(delivery), delivery.ID)
	}
	event.lastSeen = delivery.Seen

	// An excused event is delivered after all, so it counts again.
	if event.excused && event.state == unknown && event.missingTopics() == 0 && !event.committedAt.IsZero() {
		event.state = committed
		c.report.Excused--
		c.report.Committed++
	}
	if event.state == committed {
		c.countDeliveredLocked(event)
	}
	c.closeEventLocked(event)
	return kind
}

// checkOrderLocked compares the place of a first record with the earlier records of its key. It
// returns First or Disordered.
func (c *Checker) checkOrderLocked(event *event, delivery Delivery) DeliveryKind {
	target := target{delivery.Topic, event.key}
	order := c.keyOrders[target]
	if order == nil {
		order = &keyOrder{partition: delivery.Partition}
		c.keyOrders[target] = order
	}

	kind := First
	if delivery.Partition != order.partition {
		kind = Disordered
		c.report.Strayed++
		c.addExampleLocked("%s: its key was in partition %d before", formatPlace(delivery), order.partition)
		// The key stays in the new partition, so that one move counts once.
		order.partition = delivery.Partition
	}
	if event.number < order.last {
		c.report.OutOfOrder++
		c.addExampleLocked("%s: event %s is number %d of its key and comes after number %d",
			formatPlace(delivery), delivery.ID, event.number, order.last)
		return Disordered
	}
	order.last = event.number
	return kind
}

func (c *Checker) addExampleLocked(format string, args ...any) {
	if len(c.report.Examples) < c.options.Examples {
		c.report.Examples = append(c.report.Examples, fmt.Sprintf(format, args...))
	}
}

func formatPlace(delivery Delivery) string {
	return fmt.Sprintf("%s/%d@%d", delivery.Topic, delivery.Partition, delivery.Offset)
}
