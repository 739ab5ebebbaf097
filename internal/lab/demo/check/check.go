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
func New(o Options) *Checker {
	if o.Examples == 0 {
		o.Examples = 20
	}
	if o.Now == nil {
		o.Now = time.Now
	}

	return &Checker{
		options:     o,
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
	e := &event{
		id:        ev.ID,
		key:       ev.Key,
		number:    c.lastNumbers[ev.Key],
		topics:    ev.Topics,
		valueHash: c.hashValue(ev.Value),
	}
	if _, exists := c.events[ev.ID]; exists {
		c.addExampleLocked("event %s was begun twice; the writer is wrong", ev.ID)
	}
	c.events[ev.ID] = e
	c.open[ev.ID] = e
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

func (c *Checker) endTransaction(s state, acknowledged time.Time, ids []string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	for _, id := range ids {
		e := c.events[id]
		if e == nil || e.state != begun {
			c.addExampleLocked("event %s ended without having begun; the writer is wrong", id)
			continue
		}

		e.state = s
		e.committedAt = acknowledged
		// An excused event is not expected until its first record arrives.
		if e.excused && s == committed && e.missingTopics() > 0 {
			c.excuseEventLocked(e)
			continue
		}

		switch s {
		case committed:
			c.report.Committed++
			c.countDeliveredLocked(e)
		case aborted:
			// The relay reads only committed events, so a record of an aborted event has no origin.
			c.report.Aborted++
			if len(e.seenTopics) > 0 {
				c.report.Phantoms += len(e.seenTopics)
				c.addExampleLocked("event %s was delivered to %s although its transaction aborted", e.id, e.seenTopics[0])
			}
		case unknown:
			c.report.Unknown++
		}
		c.closeEventLocked(e)
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

func (c *Checker) excuseEventLocked(e *event) {
	e.state = unknown
	c.report.Excused++
	c.closeEventLocked(e)
}

// countDeliveredLocked counts a committed event if it is delivered to all topics.
func (c *Checker) countDeliveredLocked(e *event) {
	if e.missingTopics() > 0 {
		return
	}

	c.report.Delivered++
	if c.options.Latency != nil && !e.committedAt.IsZero() && !e.lastSeen.IsZero() {
		c.options.Latency.Add(e.committedAt, e.lastSeen)
	}
}

// closeEventLocked removes an event from the open ones if no further record is expected. It also
// forgets events that were closed long enough ago.
func (c *Checker) closeEventLocked(e *event) {
	if e.state == begun || e.state == committed && e.missingTopics() > 0 {
		return
	}
	delete(c.open, e.id)
	if c.options.Forget == 0 || !e.closedAt.IsZero() {
		return
	}

	now := c.options.Now()
	e.closedAt = now
	c.closed = append(c.closed, e)
	for len(c.closed) > 0 && now.Sub(c.closed[0].closedAt) > c.options.Forget {
		delete(c.events, c.closed[0].id)
		c.closed[0] = nil
		c.closed = c.closed[1:]
	}
}

// Delivered checks a record that a consumer received. The records of one partition must be passed
// in their order.
func (c *Checker) Delivered(d Delivery) DeliveryKind {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.report.Records++
	if d.Flagged {
		c.report.Flagged++
	}

	e := c.events[d.ID]
	if e == nil && c.options.Others {
		c.report.Foreign++
		return Foreign
	}
	if e == nil {
		c.report.Phantoms++
		c.addExampleLocked("%s belongs to an event that was never appended: %s", formatPlace(d), d.ID)
		return Phantom
	}

	if slices.Contains(e.seenTopics, d.Topic) {
		if d.Flagged {
			c.report.Repeated++
			return Repeated
		}
		c.report.Duplicates++
		c.addExampleLocked("%s is the second delivery of event %s", formatPlace(d), d.ID)
		return Duplicate
	}
	if e.state == aborted || !e.belongsTo(d.Topic) {
		c.report.Phantoms++
		c.addExampleLocked("%s must not exist: event %s was aborted or belongs to other topics", formatPlace(d), d.ID)
		return Phantom
	}

	e.seenTopics = append(e.seenTopics, d.Topic)
	kind := c.checkOrderLocked(e, d)
	if e.key != d.Key || e.valueHash != 0 && e.valueHash != c.hashValue(d.Value) {
		c.report.Altered++
		c.addExampleLocked("%s differs from the appended event %s", formatPlace(d), d.ID)
	}
	e.lastSeen = d.Seen

	// An excused event is delivered after all, so it counts again.
	if e.excused && e.state == unknown && e.missingTopics() == 0 && !e.committedAt.IsZero() {
		e.state = committed
		c.report.Excused--
		c.report.Committed++
	}
	if e.state == committed {
		c.countDeliveredLocked(e)
	}
	c.closeEventLocked(e)
	return kind
}

// checkOrderLocked compares the place of a first record with the earlier records of its key. It
// returns First or Disordered.
func (c *Checker) checkOrderLocked(e *event, d Delivery) DeliveryKind {
	t := target{d.Topic, e.key}
	order := c.keyOrders[t]
	if order == nil {
		order = &keyOrder{partition: d.Partition}
		c.keyOrders[t] = order
	}

	kind := First
	if d.Partition != order.partition {
		kind = Disordered
		c.report.Strayed++
		c.addExampleLocked("%s: its key was in partition %d before", formatPlace(d), order.partition)
		// The key stays in the new partition, so that one move counts once.
		order.partition = d.Partition
	}
	if e.number < order.last {
		c.report.OutOfOrder++
		c.addExampleLocked("%s: event %s is number %d of its key and comes after number %d",
			formatPlace(d), d.ID, e.number, order.last)
		return Disordered
	}
	order.last = e.number
	return kind
}

func (c *Checker) addExampleLocked(format string, args ...any) {
	if len(c.report.Examples) < c.options.Examples {
		c.report.Examples = append(c.report.Examples, fmt.Sprintf(format, args...))
	}
}

func formatPlace(d Delivery) string { return fmt.Sprintf("%s/%d@%d", d.Topic, d.Partition, d.Offset) }
