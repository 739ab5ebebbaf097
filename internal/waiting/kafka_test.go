package waiting

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

// broker acts as Kafka for the Outlets of all terms of a test: topics, and their faults.
type broker struct {
	t  testing.TB
	mu sync.Mutex
	// topics contains the written records, in order.
	topics map[string][]written
	refuse func(topic string, w written) *record.Refusal
	parked map[string]bool
	sick   map[string]bool // keys whose partitions are parked
	turned int             // records that were turned away because of that
	twice  []string        // deliveries that stand in a topic more than once
}

type written struct {
	id, key  string
	delivery int32
	flagged  bool
}

func newBroker(t testing.TB) *broker {
	return &broker{t: t, topics: map[string][]written{}, parked: map[string]bool{}, sick: map[string]bool{}}
}

// append writes one record and returns its offset. The broker's lock is held.
func (b *broker) append(topic string, w written) int64 {
	for _, o := range b.topics[topic] {
		if o.id == w.id && o.delivery == w.delivery {
			b.twice = append(b.twice, fmt.Sprint(topic, w))
		}
	}
	b.topics[topic] = append(b.topics[topic], w)
	return int64(len(b.topics[topic]) - 1)
}

func (b *broker) ids(topic string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	ids := []string{}
	for _, w := range b.topics[topic] {
		ids = append(ids, w.id)
	}
	return ids
}

// wire is the connection of one term to the broker. A goroutine answers flushed records, in the order of the
// topic.
type wire struct {
	b      *broker
	routes []string // of an envelope that does not list its targets

	mu      sync.Mutex
	queue   map[string][]*sent
	flushed map[string]int
	seen    map[string]map[written]int64 // read back, by topic
	latched map[[3]string]bool
	opened  map[[3]string]int
	closed  map[[3]string]int // by the test: exceptions that were decided, or loaded at the takeover
	settled map[record.Ticket]int
	told    map[record.Ticket]bool
	reached string
	early   bool // a gate was opened more often than it was closed
	held    bool // answers nothing
	dead    bool
	last    record.Ticket
	most    int // most records in flight at a time
	ready   func(topic string)

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

// connect begins a term: everything that stands in the topics is read back.
func (b *broker) connect() *wire {
	o := &wire{
		b: b, queue: map[string][]*sent{}, flushed: map[string]int{}, seen: map[string]map[written]int64{}, latched: map[[3]string]bool{},
		opened: map[[3]string]int{}, closed: map[[3]string]int{}, settled: map[record.Ticket]int{}, told: map[record.Ticket]bool{}, reached: "9", last: record.Side,
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

func (o *wire) Publish(ctx context.Context, e *outboxes.Envelope, topics []string, tell func(record.Published)) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	if topics == nil {
		topics = o.routes
	}

	key, ok := e.Raw.Lookup("key").StringValueOK()
	if !ok {
		key = e.Raw.Lookup("aggregateid").StringValue()
	}
	n, _ := e.Raw.Lookup("delivery").AsInt64OK()
	w := written{id: e.Raw.Lookup("_id").StringValue(), key: key, delivery: int32(n)}

	o.b.mu.Lock()
	defer o.b.mu.Unlock()
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
			now = append(now, o.answer(p, record.Answer{Topic: topic, Offset: -1, Held: record.ErrBlocked}))
		case o.b.sick[key] && topic == "a":
			o.b.turned++
			now = append(now, o.answer(p, record.Answer{Topic: topic, Offset: -1, Held: record.ErrPartitionParked}))
		case o.b.parked[topic]:
			now = append(now, o.answer(p, record.Answer{Topic: topic, Offset: -1, Held: record.ErrParked}))
		case known:
			delete(o.seen[topic], w)
			now = append(now, o.answer(p, record.Answer{Topic: topic, Offset: offset}))
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

// answer records an answer and returns the function that reports it, which must be called without
// the wire's lock.
func (o *wire) answer(p *published, a record.Answer) func() {
	p.Answers = append(p.Answers, a)
	if p.left--; p.left > 0 {
		return func() {}
	}
	o.told[p.Ticket] = true
	return func() { p.tell(p.Published) }
}

func (o *wire) Flush() {
	o.mu.Lock()
	for topic, q := range o.queue {
		o.flushed[topic] = len(q)
	}
	o.mu.Unlock()
	retry.Signal(o.kick)
}

// run answers one record at a time, of any topic.
func (o *wire) run() {
	defer close(o.over)
	for range o.kick {
		for o.step() {
		}
		o.mu.Lock()
		dead := o.dead
		o.mu.Unlock()
		if dead {
			return
		}
	}
}

func (o *wire) step() bool {
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
	if why := o.refusal(topic, s); why != nil {
		now = o.withdraw(topic, func(q *sent) bool { return q.ns == s.ns && q.w.key == s.w.key }, record.ErrBlocked, s, why)
	} else {
		o.queue[topic] = o.queue[topic][1:]
		o.flushed[topic]--
		now = append(now, o.answer(s.p, record.Answer{Topic: topic, Offset: o.b.append(topic, s.w)}))
	}
	o.mu.Unlock()

	for _, f := range now {
		f()
	}
	return true
}

func (o *wire) refusal(topic string, s *sent) *record.Refusal {
	if o.b.refuse == nil {
		return nil
	}
	return o.b.refuse(topic, s.w)
}

// withdraw takes records out of a queue again, and keeps their keys from going on.
func (o *wire) withdraw(topic string, which func(*sent) bool, held error, refused *sent, why *record.Refusal) (now []func()) {
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
		a := record.Answer{Topic: topic, Offset: -1, Held: held}
		if s == refused {
			a.Refusal, a.Held = why, nil
		}
		now = append(now, o.answer(s.p, a))
	}

	o.queue[topic] = rest
	return now
}

// park makes a topic one that takes nothing, and unpark undoes it.
func (o *wire) park(topic string) {
	o.b.mu.Lock()
	defer o.b.mu.Unlock()
	o.b.parked[topic] = true
	o.mu.Lock()
	now := o.withdraw(topic, func(*sent) bool { return true }, record.ErrParked, nil, nil)
	o.mu.Unlock()
	for _, f := range now {
		f()
	}
}

func (o *wire) unpark(topic string) {
	o.b.mu.Lock()
	o.b.parked[topic] = false
	o.b.mu.Unlock()
	if o.ready != nil {
		o.ready(topic)
	}
}

// hold keeps all answers back; the other way round it lets them go.
func (o *wire) hold(yes bool) {
	o.mu.Lock()
	o.held = yes
	o.mu.Unlock()
	retry.Signal(o.kick)
}

// kill ends the term. A random part of the records in flight is written to each topic, or none without r, and none is
// reported.
func (o *wire) kill(r *rand.Rand) {
	o.b.mu.Lock()
	o.mu.Lock()
	o.dead = true
	for topic, q := range o.queue {
		if r == nil {
			break
		}
		stop := map[string]bool{}

		for _, s := range q[:r.IntN(len(q)+1)] {
			if stop[s.w.key] || o.refusal(topic, s) != nil {
				stop[s.w.key] = true
				continue
			}
			o.b.append(topic, s.w)
		}
	}

	o.mu.Unlock()
	o.b.mu.Unlock()
	retry.Signal(o.kick)
	<-o.over
}

func (o *wire) Settle(tickets []record.Ticket) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, t := range tickets {
		if o.settled[t]++; o.settled[t] > 1 || !o.told[t] {
			o.b.t.Errorf("ticket %d was settled %d times, answered: %v", t, o.settled[t], o.told[t])
		}
	}
}

func (o *wire) OpenGate(ns, topic, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.opened[[3]string{ns, topic, key}]++
	if o.closed[[3]string{ns, topic, key}] < o.opened[[3]string{ns, topic, key}] {
		o.early = true
	}
}

// closeGate counts an exception, as the dispatcher does when it decides that an envelope waits.
func (o *wire) closeGate(ns, topic, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed[[3]string{ns, topic, key}]++
}

// gates returns the exceptions that each gate counts, and whether one was opened more often than it was closed.
func (o *wire) gates() (left map[[3]string]int, early bool) {
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

func (o *wire) Reached() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.reached
}

func (o *wire) reach(pos string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reached = pos
}

func (o *wire) ResumeKey(ns, topic, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.latched, [3]string{ns, topic, key})
}

// quiet checks that each delivery that was answered was settled once, and that no key is kept back.
func (o *wire) quiet() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for t := range o.told {
		if o.settled[t] != 1 {
			o.b.t.Errorf("ticket %d was settled %d times", t, o.settled[t])
		}
	}
	if len(o.latched) > 0 {
		o.b.t.Errorf("keys are held back forever: %v", o.latched)
	}
}

// ordered checks that the first records of each key stand in ascending order of their ids.
func (b *broker) ordered() {
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

func (b *broker) wants(topic string, ids ...string) {
	b.t.Helper()
	if got := b.ids(topic); !slices.Equal(got, ids) {
		b.t.Fatalf("%s holds %q, want %q", topic, got, ids)
	}
}

// standing returns the hits of an envelope, as Outlet.FindHits does.
func (o *wire) standing(e *outboxes.Envelope, topics []string) (hits []record.Answer, all []string) {
	w := identified(e)
	if topics == nil {
		topics = o.routes
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, topic := range topics {
		if at, ok := o.seen[topic][w]; ok {
			hits = append(hits, record.Answer{Topic: topic, Offset: at})
		}
	}
	return hits, topics
}

func identified(e *outboxes.Envelope) written {
	key, ok := e.Raw.Lookup("key").StringValueOK()
	if !ok {
		key = e.Raw.Lookup("aggregateid").StringValue()
	}
	n, _ := e.Raw.Lookup("delivery").AsInt64OK()
	return written{id: e.Raw.Lookup("_id").StringValue(), key: key, delivery: int32(n)}
}

func (b *broker) stands(topic, id, key string, delivery int32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.append(topic, written{id: id, key: key, delivery: delivery})
}
