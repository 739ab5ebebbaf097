package reconciler

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// broker acts as Kafka for the Outlets of all terms of a test: topics, and their faults.
type broker struct {
	t  testing.TB
	mu sync.Mutex
	// topics contains the written records, in order.
	topics map[string][]written
	reject func(topic string, w written) *record.Rejection
	parked map[string]bool
	sick   map[string]bool // keys whose partitions are parked
	turned int             // records that were turned away because of that
	twice  []string        // deliveries that are in a topic more than once
	// payloads contains the texts that were published, in order.
	payloads []string
}

type written struct {
	id, key  string
	delivery int32
	flagged  bool
}

func newBroker(t testing.TB) *broker {
	return &broker{t: t, topics: map[string][]written{}, parked: map[string]bool{}, sick: map[string]bool{}}
}

// appendLocked writes one record and returns its offset. The caller holds the lock of the broker.
func (b *broker) appendLocked(topic string, w written) int64 {
	for _, o := range b.topics[topic] {
		if o.id == w.id && o.delivery == w.delivery {
			b.twice = append(b.twice, fmt.Sprint(topic, w))
		}
	}
	b.topics[topic] = append(b.topics[topic], w)
	return int64(len(b.topics[topic]) - 1)
}

func (b *broker) listIDs(topic string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	ids := []string{}
	for _, w := range b.topics[topic] {
		ids = append(ids, w.id)
	}
	return ids
}

// fakeOutlet is the connection of one term to the broker. A goroutine responds to flushed records, in the order of the
// topic.
type fakeOutlet struct {
	b      *broker
	routes []string // of an envelope that does not list its targets
	route  func(*outboxes.Envelope) ([]string, error)

	mu         sync.Mutex
	queue      map[string][]*sent
	flushed    map[string]int
	seen       map[string]map[written]int64 // read back, by topic
	unread     map[string]bool              // topics that FindHits cannot read
	latched    map[[3]string]bool
	opened     map[[3]string]int
	closed     map[[3]string]int // by the test: waiting envelopes that were decided, or loaded at the takeover
	settled    map[record.Ticket]int
	reported   map[record.Ticket]bool
	reached    string
	holdsSwept bool
	early      bool // a gate was opened more often than it was closed
	held       bool // responds to no record
	dead       bool
	last       record.Ticket
	most       int // most records in flight at a time
	ready      func(topic string)

	kick chan struct{}
	over chan struct{}
}

// sent is one record in flight.
type sent struct {
	w  written
	ns string
	p  *published
}

type published struct {
	record.Published
	left int
	tell func(record.Published)
}

// connect begins a term, which reads back all records of the topics.
func (b *broker) connect() *fakeOutlet {
	o := &fakeOutlet{
		b: b, queue: map[string][]*sent{}, flushed: map[string]int{}, seen: map[string]map[written]int64{}, latched: map[[3]string]bool{},
		opened: map[[3]string]int{}, closed: map[[3]string]int{}, settled: map[record.Ticket]int{}, reported: map[record.Ticket]bool{}, reached: "9", last: record.Side,
		kick: make(chan struct{}, 1), over: make(chan struct{}),
	}

	b.mu.Lock()
	defer b.mu.Unlock()

	for topic, list := range b.topics {
		o.seen[topic] = map[written]int64{}
		for i, w := range list {
			w.flagged = false
			o.seen[topic][w] = int64(i)
		}
	}

	go o.run()
	return o
}

func (o *fakeOutlet) Publish(ctx context.Context, e *outboxes.Envelope, topics []string, tell func(record.Published)) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	if topics == nil {
		topics = o.routes
	}
	if expiresAt, ok := e.Raw.Lookup("expiresAt").DateTimeOK(); ok && expiresAt < time.Now().UnixMilli() {
		return &record.Rejection{Class: record.Expired, Reason: "too late"}
	}

	w := identifyRecord(e)
	key := w.key

	o.b.mu.Lock()
	defer o.b.mu.Unlock()
	if text, ok := e.Raw.Lookup("payload").StringValueOK(); ok && !o.b.parked[topics[0]] {
		o.b.payloads = append(o.b.payloads, text)
	}
	o.mu.Lock()
	if o.dead {
		o.mu.Unlock()
		return errors.New("this term is over")
	}

	o.last++
	p := &published{Published: record.Published{Ticket: o.last}, left: len(topics), tell: tell}
	var now []func()

	for _, topic := range topics {
		ns := string(e.DB) + "." + string(e.Coll)
		offset, known := o.seen[topic][w]
		switch {
		case o.latched[[3]string{ns, topic, key}]:
			now = append(now, o.reportLocked(p, record.Result{Topic: topic, Offset: -1, Held: record.ErrBlocked}))
		case o.b.sick[key] && topic == "a":
			o.b.turned++
			now = append(now, o.reportLocked(p, record.Result{Topic: topic, Offset: -1, Held: record.ErrPartitionParked}))
		case o.b.parked[topic]:
			now = append(now, o.reportLocked(p, record.Result{Topic: topic, Offset: -1, Held: record.ErrParked}))
		case known:
			delete(o.seen[topic], w)
			now = append(now, o.reportLocked(p, record.Result{Topic: topic, Offset: offset}))
		default:
			w.flagged = e.Redelivered
			o.queue[topic] = append(o.queue[topic], &sent{w: w, ns: ns, p: p})
			w.flagged = false
			total := 0
			for _, q := range o.queue {
				total += len(q)
			}
			o.most = max(o.most, total)
		}
	}
	o.mu.Unlock()

	for _, f := range now {
		f()
	}
	return nil
}

// reportLocked records a result and returns the function that reports it. Call this function without
// the lock of o. The caller of reportLocked holds the lock.
func (o *fakeOutlet) reportLocked(p *published, a record.Result) func() {
	p.Results = append(p.Results, a)
	if p.left--; p.left > 0 {
		return func() {}
	}
	o.reported[p.Ticket] = true
	return func() { p.tell(p.Published) }
}

func (o *fakeOutlet) Flush() {
	o.mu.Lock()
	for topic, q := range o.queue {
		o.flushed[topic] = len(q)
	}
	o.mu.Unlock()
	retry.Signal(o.kick)
}

// run responds to one record at a time, of any topic.
func (o *fakeOutlet) run() {
	defer close(o.over)
	for range o.kick {
		for o.reportNext() {
		}
		o.mu.Lock()
		dead := o.dead
		o.mu.Unlock()
		if dead {
			return
		}
	}
}

func (o *fakeOutlet) reportNext() bool {
	o.b.mu.Lock()
	defer o.b.mu.Unlock()
	o.mu.Lock()

	topic := ""
	for t, n := range o.flushed {
		if n > 0 && len(o.queue[t]) > 0 {
			topic = t
			break
		}
	}

	if topic == "" || o.dead || o.held {
		o.mu.Unlock()
		return false
	}

	s := o.queue[topic][0]
	var now []func()
	if why := o.findRejection(topic, s); why != nil {
		now = o.withdrawLocked(topic, func(q *sent) bool { return q.ns == s.ns && q.w.key == s.w.key }, record.ErrBlocked, s, why)
	} else {
		o.queue[topic] = o.queue[topic][1:]
		o.flushed[topic]--
		now = append(now, o.reportLocked(s.p, record.Result{Topic: topic, Offset: o.b.appendLocked(topic, s.w)}))
	}
	o.mu.Unlock()

	for _, f := range now {
		f()
	}
	return true
}

func (o *fakeOutlet) findRejection(topic string, s *sent) *record.Rejection {
	if o.b.reject == nil {
		return nil
	}
	return o.b.reject(topic, s.w)
}

// withdrawLocked removes records from a queue, and latches their keys until ResumeKey.
func (o *fakeOutlet) withdrawLocked(topic string, which func(*sent) bool, held error, rejected *sent, why *record.Rejection) (now []func()) {
	var rest []*sent
	for i, s := range o.queue[topic] {
		if !which(s) {
			rest = append(rest, s)
			continue
		}

		if i < o.flushed[topic] {
			defer func() { o.flushed[topic]-- }()
		}

		o.latched[[3]string{s.ns, topic, s.w.key}] = true
		a := record.Result{Topic: topic, Offset: -1, Held: held}
		if s == rejected {
			a.Rejection, a.Held = why, nil
		}
		now = append(now, o.reportLocked(s.p, a))
	}

	o.queue[topic] = rest
	return now
}

// park makes a topic reject all records until unpark.
func (o *fakeOutlet) park(topic string) {
	o.b.mu.Lock()
	defer o.b.mu.Unlock()
	o.b.parked[topic] = true
	o.mu.Lock()
	now := o.withdrawLocked(topic, func(*sent) bool { return true }, record.ErrParked, nil, nil)
	o.mu.Unlock()
	for _, f := range now {
		f()
	}
}

func (o *fakeOutlet) unpark(topic string) {
	o.b.mu.Lock()
	o.b.parked[topic] = false
	o.b.mu.Unlock()
	if o.ready != nil {
		o.ready(topic)
	}
}

// holdResults holds all results back, or releases them.
func (o *fakeOutlet) holdResults(yes bool) {
	o.mu.Lock()
	o.held = yes
	o.mu.Unlock()
	retry.Signal(o.kick)
}

// kill ends the term. With r, a random part of the records in flight is written to each topic. None is
// reported.
func (o *fakeOutlet) kill(r *rand.Rand) {
	o.b.mu.Lock()
	o.mu.Lock()
	o.dead = true
	for topic, q := range o.queue {
		if r == nil {
			break
		}
		stop := map[string]bool{}

		for _, s := range q[:r.IntN(len(q)+1)] {
			if stop[s.w.key] || o.findRejection(topic, s) != nil {
				stop[s.w.key] = true
				continue
			}
			o.b.appendLocked(topic, s.w)
		}
	}

	o.mu.Unlock()
	o.b.mu.Unlock()
	retry.Signal(o.kick)
	<-o.over
}

func (o *fakeOutlet) Settle(tickets []record.Ticket) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, t := range tickets {
		if o.settled[t]++; o.settled[t] > 1 || !o.reported[t] {
			o.b.t.Errorf("ticket %d was settled %d times, reported: %v", t, o.settled[t], o.reported[t])
		}
	}
}

func (o *fakeOutlet) OpenGate(ns, topic, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.opened[[3]string{ns, topic, key}]++
	if o.closed[[3]string{ns, topic, key}] < o.opened[[3]string{ns, topic, key}] {
		o.early = true
	}
}

// closeGate counts a waiting envelope, as the dispatcher does when it decides that an envelope waits.
func (o *fakeOutlet) closeGate(ns, topic, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed[[3]string{ns, topic, key}]++
}

// countGates returns the waiting envelopes that each gate counts, and whether one was opened more often than it was closed.
func (o *fakeOutlet) countGates() (left map[[3]string]int, early bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	left = map[[3]string]int{}
	for gate, n := range o.closed {
		if n > o.opened[gate] {
			left[gate] = n - o.opened[gate]
		}
	}
	return left, o.early
}

func (o *fakeOutlet) Reached() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.reached
}

func (o *fakeOutlet) ReachedBySweep() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.holdsSwept {
		return ""
	}
	return o.reached
}

// holdSwept sets whether a sweep has begun, and it is not known how far it has come.
func (o *fakeOutlet) holdSwept(holds bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.holdsSwept = holds
}

func (o *fakeOutlet) setReached(pos string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reached = pos
}

func (o *fakeOutlet) ResumeKey(ns, topic, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.latched, [3]string{ns, topic, key})
}

// checkSettled checks that each reported delivery was settled once, and that no key is latched.
func (o *fakeOutlet) checkSettled() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for t := range o.reported {
		if o.settled[t] != 1 {
			o.b.t.Errorf("ticket %d was settled %d times", t, o.settled[t])
		}
	}
	if len(o.latched) > 0 {
		o.b.t.Errorf("keys are held back forever: %v", o.latched)
	}
}

// checkOrder checks that no record is in a topic twice, and that the records of each key are in ascending order of their ids.
func (b *broker) checkOrder() {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()

	if len(b.twice) > 0 {
		b.t.Errorf("%d records are there twice: %v", len(b.twice), b.twice[:min(5, len(b.twice))])
	}

	for topic, list := range b.topics {
		last := map[string]string{}
		for _, w := range list {
			if w.id < last[w.key] {
				b.t.Errorf("%s: %s came after %s of key %s", topic, w.id, last[w.key], w.key)
			}
			last[w.key] = w.id
		}
	}
}

func (b *broker) checkRecords(topic string, ids ...string) {
	b.t.Helper()
	if got := b.listIDs(topic); !slices.Equal(got, ids) {
		b.t.Fatalf("topic %s has the records %q, want %q", topic, got, ids)
	}
}

// FindHits returns the places of the records that the topics had at the begin of the term.
func (o *fakeOutlet) FindHits(e *outboxes.Envelope) (hits []record.Result, all []string) {
	w, topics := identifyRecord(e), e.Pending
	if topics == nil {
		topics = o.routes
	}
	o.mu.Lock()
	defer o.mu.Unlock()

	for _, topic := range topics {
		at, ok := o.seen[topic][w]
		if ok && !o.unread[topic] {
			hits = append(hits, record.Result{Topic: topic, Offset: at})
		}
	}
	return hits, topics
}

func (o *fakeOutlet) TopicsWithHits() (list []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for topic, seen := range o.seen {
		if len(seen) > 0 && !o.unread[topic] {
			list = append(list, topic)
		}
	}
	return list
}

func (o *fakeOutlet) RouteTopics(e *outboxes.Envelope) ([]string, error) { return o.route(e) }

// end ends the term. An envelope in flight gets no result.
func (o *fakeOutlet) end() {
	o.mu.Lock()
	o.dead = true
	o.mu.Unlock()
	retry.Signal(o.kick)
	<-o.over
}

func identifyRecord(e *outboxes.Envelope) written {
	key, ok := e.Raw.Lookup("key").StringValueOK()
	if !ok {
		key = e.Raw.Lookup("aggregateid").StringValue()
	}
	return written{id: e.Raw.Lookup("_id").StringValue(), key: key, delivery: e.Delivery}
}

func (b *broker) appendRecord(topic, id, key string, delivery int32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.appendLocked(topic, written{id: id, key: key, delivery: delivery})
}
