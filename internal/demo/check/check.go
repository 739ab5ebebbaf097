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
	// Forget bounds the memory of a run without an end: an event is forgotten that long after all of it was delivered, or
	// after its transaction aborted. A later second delivery is then counted as a phantom. 0 keeps everything.
	Forget time.Duration
	// Examples is how many violations are kept in words. Defaults to 20.
	Examples int
	// Others leaves records of events alone that were never begun: for topics to which other writers may write.
	Others bool
	// Latency is told of each committed event that arrived everywhere. Optional.
	Latency *Latency
	// Now is the clock of Forget. Defaults to time.Now.
	Now func() time.Time
}

// Event is what a writer is about to commit.
type Event struct {
	ID     string   // what a Delivery will carry; unique in a Checker
	Key    string   // events of one key are ordered
	Topics []string // where it belongs; nil is any one topic, whichever it turns up in first
	Value  []byte   // what the record must carry; nil is not compared
}

// Delivery is a record that a consumer saw.
type Delivery struct {
	ID        string
	Key       string // of the record
	Topic     string
	Partition int
	Offset    int64
	Value     []byte
	Flagged   bool      // the record says of itself that it may repeat an earlier one
	Seen      time.Time // when the consumer got it; for Options.Latency
}

// What says what a delivery was.
type What int

// The outcomes of Delivered.
const (
	First     What = iota // of this event in this topic
	Duplicate             // seen in this topic before
	Repeated              // seen in this topic before, and flagged as what may be so
	Phantom               // never begun, aborted, or not for this topic
	Foreign               // never begun, with Options.Others
)

type state uint8

const (
	begun state = iota // not known yet how the transaction ends
	committed
	aborted
	unknown
)

type event struct {
	id     string
	state  state
	n      uint64 // place among its key's events
	key    string
	topics []string
	sum    uint64 // of the value; 0 is not compared
	seen   []string
	at     time.Time // of the acknowledged commit
	last   time.Time // of the newest first record
	done   time.Time // when nothing more was to come of it

	excused bool // it need not arrive
}

// wants reports whether the event belongs into topic.
func (e *event) wants(topic string) bool {
	if e.topics == nil {
		return len(e.seen) == 0
	}
	return slices.Contains(e.topics, topic)
}

// missing is the number of topics that have not got it.
func (e *event) missing() int { return max(len(e.topics), 1) - len(e.seen) }

type target struct{ topic, key string }

// line is the order of one key in one topic.
type line struct {
	last      uint64 // the newest event first delivered
	partition int
}

// Checker compares. Create it with [New].
type Checker struct {
	o    Options
	seed maphash.Seed

	mu     sync.Mutex
	events map[string]*event
	open   map[string]*event // begun or committed, and not everywhere yet
	next   map[string]uint64
	lines  map[target]*line
	done   []*event // in the order of their ends, to be forgotten
	r      Report
}

// New makes a Checker.
func New(o Options) *Checker {
	if o.Examples == 0 {
		o.Examples = 20
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Checker{
		o: o, seed: maphash.MakeSeed(), events: map[string]*event{}, open: map[string]*event{},
		next: map[string]uint64{}, lines: map[target]*line{},
	}
}

// Begin announces an event before its transaction is sent. Several events of one key in one transaction are begun in the
// order in which they are appended.
func (c *Checker) Begin(ev Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next[ev.Key]++
	e := &event{id: ev.ID, key: ev.Key, n: c.next[ev.Key], topics: ev.Topics, sum: c.sum(ev.Value)}
	if _, twice := c.events[ev.ID]; twice {
		c.example("event %s was begun twice; the writer is wrong", ev.ID)
	}
	c.events[ev.ID], c.open[ev.ID] = e, e
}

func (c *Checker) sum(value []byte) uint64 {
	if value == nil {
		return 0
	}
	return max(maphash.Bytes(c.seed, value), 1)
}

// Committed says that the commit of these events was acknowledged at that time: from now on they must arrive.
func (c *Checker) Committed(acknowledged time.Time, ids ...string) {
	c.settle(committed, acknowledged, ids)
}

// Aborted says that the transaction of these events will never commit: they must not arrive.
func (c *Checker) Aborted(ids ...string) { c.settle(aborted, time.Time{}, ids) }

// Unknown says that nobody knows whether these events are committed: they may arrive, in their place, or not.
func (c *Checker) Unknown(ids ...string) { c.settle(unknown, time.Time{}, ids) }

func (c *Checker) settle(s state, acknowledged time.Time, ids []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		e := c.events[id]
		if e == nil || e.state != begun {
			c.example("event %s ended without having begun; the writer is wrong", id)
			continue
		}
		e.state, e.at = s, acknowledged
		if e.excused && s == committed && e.missing() > 0 {
			c.excuse(e)
			continue
		}
		switch s {
		case committed:
			c.r.Committed++
			c.full(e)
		case aborted:
			c.r.Aborted++
			if len(e.seen) > 0 {
				c.r.Phantoms += len(e.seen)
				c.example("event %s was delivered to %s although its transaction aborted", e.id, e.seen[0])
			}
		case unknown:
			c.r.Unknown++
		}
		c.close(e)
	}
}

// Excuse says that what was begun until now and has not arrived need not arrive any more: its collection was dropped. It
// may still arrive, in its place.
func (c *Checker) Excuse() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.open {
		e.excused = true
		if e.state == committed {
			c.r.Committed--
			c.excuse(e)
		}
	}
}

func (c *Checker) excuse(e *event) {
	e.state = unknown
	c.r.Excused++
	c.close(e)
}

// full counts a committed event that is everywhere where it belongs.
func (c *Checker) full(e *event) {
	if e.missing() > 0 {
		return
	}
	c.r.Delivered++
	if c.o.Latency != nil && !e.at.IsZero() && !e.last.IsZero() {
		c.o.Latency.Add(e.at, e.last)
	}
}

// close takes an event off the list of those that are on their way, once nothing more is to come of it.
func (c *Checker) close(e *event) {
	if e.state == begun || e.state == committed && e.missing() > 0 {
		return
	}
	delete(c.open, e.id)
	if c.o.Forget == 0 || !e.done.IsZero() {
		return
	}
	now := c.o.Now()
	e.done = now
	c.done = append(c.done, e)
	for len(c.done) > 0 && now.Sub(c.done[0].done) > c.o.Forget {
		delete(c.events, c.done[0].id)
		c.done[0] = nil
		c.done = c.done[1:]
	}
}

// Delivered takes a record that a consumer saw; records of one partition in their order.
func (c *Checker) Delivered(d Delivery) What {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.r.Records++
	if d.Flagged {
		c.r.Flagged++
	}
	e := c.events[d.ID]
	if e == nil && c.o.Others {
		return Foreign
	}
	if e == nil {
		c.r.Phantoms++
		c.example("%s is of an event that nobody appended: %s", at(d), d.ID)
		return Phantom
	}
	if slices.Contains(e.seen, d.Topic) {
		if d.Flagged {
			c.r.Repeated++
			return Repeated
		}
		c.r.Duplicates++
		c.example("%s is the second delivery of event %s", at(d), d.ID)
		return Duplicate
	}
	if e.state == aborted || !e.wants(d.Topic) {
		c.r.Phantoms++
		c.example("%s must not be there: event %s was aborted or belongs elsewhere", at(d), d.ID)
		return Phantom
	}
	e.seen = append(e.seen, d.Topic)
	c.order(e, d)
	if e.key != d.Key || e.sum != 0 && e.sum != c.sum(d.Value) {
		c.r.Altered++
		c.example("%s differs from what was appended as event %s", at(d), d.ID)
	}
	e.last = d.Seen
	if e.excused && e.state == unknown && e.missing() == 0 && !e.at.IsZero() { // it arrived after all
		e.state = committed
		c.r.Excused--
		c.r.Committed++
	}
	if e.state == committed {
		c.full(e)
	}
	c.close(e)
	return First
}

func (c *Checker) order(e *event, d Delivery) {
	t := target{d.Topic, e.key}
	l := c.lines[t]
	if l == nil {
		l = &line{partition: d.Partition}
		c.lines[t] = l
	}
	if d.Partition != l.partition {
		c.r.Strayed++
		c.example("%s: its key was in partition %d before", at(d), l.partition)
		l.partition = d.Partition
	}
	if e.n < l.last {
		c.r.OutOfOrder++
		c.example("%s: event %s is number %d of its key and comes after number %d", at(d), d.ID, e.n, l.last)
		return
	}
	l.last = e.n
}

func (c *Checker) example(format string, args ...any) {
	if len(c.r.Examples) < c.o.Examples {
		c.r.Examples = append(c.r.Examples, fmt.Sprintf(format, args...))
	}
}

func at(d Delivery) string { return fmt.Sprintf("%s/%d@%d", d.Topic, d.Partition, d.Offset) }
