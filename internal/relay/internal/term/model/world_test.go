package model

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/resume"
)

// world is everything that survives the death of an owner, and the owners.
type world struct {
	undo undo
	rand *rand.Rand // of the current step

	now      uint32 // seconds: the clock of the server, and the cluster time
	kafka    *kafka
	doc      document
	outboxes map[string]map[string]*spec // by namespace and id
	stream   []*spec                     // in the order of the commits
	specs    map[int]*spec
	store    map[[waiting.IDSize]byte]*stored
	letters  map[string]letter
	claims   []*claim

	owner *term
	terms []*term // the owner, and frozen ones that woke up

	adds  bool // the configuration names the late outbox at some time
	named bool // it does

	depth     int // of drift
	trace     []string
	violation string
}

// document is the watcher document.
type document struct {
	epoch     int64
	position  resume.Position
	described bool // the position is one of a stream with the late outbox
	beside    string
	offsets   map[string][]int64
}

// spec is one committed event, and what must become of it.
type spec struct {
	number      int
	ns, id, key string
	topics      []string
	raw, event  bson.Raw
	token       resume.Token
	pos         string
	clusterTime bson.Timestamp
	due         int64          // Unix milliseconds; 0: not scheduled
	expires     int64          // Unix milliseconds; 0: never
	rejections  map[string]int // that are left, by topic
	malformed   bool
	tooLarge    bool // Kafka rejects it, and it is dead at once
	unstorable  bool // MongoDB rejects it as a waiting envelope (N16)
	isCancelled bool
	appendedTo  []string // topics that have it
	expiredIn   []string // topics in which it has expired by its letter
}

func (s *spec) String() string {
	kind := ""
	switch {
	case s.due != 0:
		kind = ", scheduled"
	case s.expires != 0:
		kind = ", expires"
	case s.malformed:
		kind = ", malformed"
	case s.tooLarge:
		kind = ", too large"
	case s.unstorable:
		kind = ", unstorable"
	}
	return fmt.Sprintf("e%d (%s/%s, key %s%s)", s.number, s.ns, s.id, s.key, kind)
}

var namespaces = []string{"shop.outbox", "crm.outbox"}

func newWorld(undo undo) *world {
	w := &world{
		undo: undo, now: 1000, kafka: newKafka(), outboxes: map[string]map[string]*spec{}, specs: map[int]*spec{},
		store: map[[waiting.IDSize]byte]*stored{}, letters: map[string]letter{},
	}
	w.doc.offsets = map[string][]int64{}
	w.doc.position = w.positionNow()
	for _, ns := range append(namespaces[:2:2], lateNS) {
		w.outboxes[ns] = map[string]*spec{}
	}
	return w
}

// clock returns the server's time.
func (w *world) clock() time.Time { return time.Unix(int64(w.now), 0) }

func (w *world) clockMS() int64 { return int64(w.now) * 1000 }

// positionNow returns a position after all events.
func (w *world) positionNow() resume.Position {
	at := bson.Timestamp{T: w.now, I: 1 << 20}
	return resume.Position{Token: resume.TokenOf(outboxes.PosAt(at) + "2B04"), ClusterTime: at}
}

func (w *world) logf(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf(format, args...))
}

// fail notes a broken promise. The first one counts.
func (w *world) fail(format string, args ...any) {
	if w.violation == "" {
		w.violation = fmt.Sprintf(format, args...)
		w.logf("VIOLATION: %s", w.violation)
	}
}

// names lists events.
func (w *world) names(list []*sent) string {
	names := make([]string, len(list))
	for i, x := range list {
		names[i] = fmt.Sprintf("e%d", x.number)
	}
	return strings.Join(names, " ")
}

// commitEvents commits a transaction of a service with some events.
func (w *world) commitEvents() {
	w.now++
	ns := namespaces[w.rand.IntN(len(namespaces))]
	isLate := w.adds && w.rand.IntN(2) == 0
	if isLate {
		ns = lateNS
	}
	for i := range 1 + w.rand.IntN(3) {
		s := &spec{
			number: len(w.stream), ns: ns, key: []string{"k", "K", "m"}[w.rand.IntN(3)], rejections: map[string]int{},
			clusterTime: bson.Timestamp{T: w.now, I: uint32(i + 1)},
		}
		s.id = fmt.Sprintf("id%d", s.number)
		if isLate {
			w.chooseFate(s)
			// The late outbox has only what is sent at once, under its own ids.
			s.id, s.due, s.malformed, s.unstorable = fmt.Sprintf("id%d", s.number), 0, false, false
			w.commit(s)
			continue
		}
		// Ids are unique within a collection, for as long as consumers keep marks of them.
		if other := namespaces[1-slices.Index(namespaces, ns)]; w.rand.IntN(4) == 0 && len(w.outboxes[other]) > 0 {
			s.id = w.anyID(other)
		}
		if slices.ContainsFunc(w.stream, func(earlier *spec) bool { return earlier.ns == ns && earlier.id == s.id }) {
			s.id = fmt.Sprintf("id%d", s.number)
		}
		w.reuseID(s)
		w.chooseFate(s)
		w.commit(s)
	}
}

// reuseID sometimes gives s the id of an earlier event of its key whose envelope has left the outbox, as a service does that makes the
// ids of its events from the ids of its documents.
func (w *world) reuseID(s *spec) {
	if w.rand.IntN(4) != 0 {
		return
	}
	for _, earlier := range slices.Backward(w.stream) {
		if earlier.ns != s.ns || earlier.key != s.key || w.outboxes[s.ns][earlier.id] != nil {
			continue
		}

		isAtOnce := func(other *spec) bool {
			return other.ns == s.ns && other.id == earlier.id && other.wall().Equal(s.wall())
		}
		if !slices.ContainsFunc(w.stream, isAtOnce) {
			s.id = earlier.id
			return
		}
	}
}

// wall returns the time of the commit by the clock of the server. Transactions of one moment have one time.
func (s *spec) wall() time.Time { return time.Unix(int64(s.clusterTime.T/4*4), 0) }

// anyID returns the id of an envelope in an outbox, by the order of the commits.
func (w *world) anyID(ns string) string {
	var list []string
	for _, s := range w.stream {
		if w.outboxes[ns][s.id] == s {
			list = append(list, s.id)
		}
	}
	return list[w.rand.IntN(len(list))]
}

func (w *world) chooseFate(s *spec) {
	switch w.rand.IntN(4) {
	case 0:
		s.topics = []string{"a"}
	case 1:
		s.topics = []string{"b"}
	default:
		s.topics = []string{"a", "b"}
	}
	topic := s.topics[w.rand.IntN(len(s.topics))]

	switch w.rand.IntN(18) {
	case 0:
		s.malformed = true
		// An id whose event has only left a letter may be used again.
		for _, earlier := range slices.Backward(w.stream) {
			if earlier.malformed && earlier.ns == s.ns && w.outboxes[s.ns][earlier.id] == nil {
				s.id = earlier.id
				break
			}
		}
	case 1:
		s.tooLarge = true
		s.rejections[topic] = 1 << 20
	case 2:
		s.rejections[topic] = 1 + w.rand.IntN(2)
	case 3:
		s.rejections[topic] = 1 << 20
	case 4, 5:
		s.due = w.clockMS() + int64(w.rand.IntN(4))*1000
	case 6:
		s.unstorable = true
	case 7, 8:
		s.expires = w.clockMS() + int64(1+w.rand.IntN(4))*1000
	}
}

// commit commits an event.
func (w *world) commit(s *spec) {
	s.token = resume.TokenOf(outboxes.PosAt(s.clusterTime) + fmt.Sprintf("2B022C01002C%04X6E", s.number))
	s.pos = outboxes.PosOf(resume.Position{Token: s.token})
	kind := strings.Join(s.topics, "")
	doc := bson.D{
		{Key: "_id", Value: s.id},
		{Key: "ts", Value: s.clusterTime},
		{Key: "aggregatetype", Value: kind},
		{Key: "aggregateid", Value: s.key},
		{Key: "type", Value: "Placed"},
		{Key: "payload", Value: bson.Binary{Data: fmt.Append(nil, s.number)}},
	}
	if s.malformed {
		doc[3].Value = bson.A{}
	}
	if s.due != 0 {
		doc = append(doc, bson.E{Key: "dueAt", Value: bson.DateTime(s.due)})
	}
	if s.expires != 0 {
		doc = append(doc, bson.E{Key: "expiresAt", Value: bson.DateTime(s.expires)})
	}
	s.raw = mustMarshal(doc)
	db, coll, _ := strings.Cut(s.ns, ".")
	s.event = mustMarshal(bson.D{
		{Key: "_id", Value: s.token},
		{Key: "operationType", Value: "insert"},
		{Key: "clusterTime", Value: s.clusterTime},
		{Key: "wallTime", Value: s.wall()},
		{Key: "fullDocument", Value: s.raw},
		{Key: "ns", Value: bson.D{{Key: "db", Value: db}, {Key: "coll", Value: coll}}},
		{Key: "documentKey", Value: bson.D{{Key: "_id", Value: s.id}}},
	})

	w.outboxes[s.ns][s.id] = s
	w.stream = append(w.stream, s)
	w.specs[s.number] = s
	w.logf("a service commits %s to %s", s, strings.Join(s.topics, " and "))
}

// cleanOutbox deletes envelopes, as services and TTL indexes do at any time. It leaves scheduled ones, whose deletion is a cancellation.
func (w *world) cleanOutbox() {
	for _, s := range w.stream {
		// The relay may not have read the late outbox yet.
		if s.ns != lateNS && w.outboxes[s.ns][s.id] == s && s.due == 0 && w.rand.IntN(2) == 0 {
			delete(w.outboxes[s.ns], s.id)
			w.logf("a service deletes %s", s)
			if w.undo == waitInOutbox {
				maps.DeleteFunc(w.store, func(_ [waiting.IDSize]byte, d *stored) bool { return w.specOf(d.Envelope) == s })
			}
		}
	}
}

// cancel deletes a scheduled envelope. It has no effect after the claim (N19).
func (w *world) cancel() {
	for _, s := range w.stream {
		if s.due != 0 && w.outboxes[s.ns][s.id] == s && w.rand.IntN(2) == 0 {
			delete(w.outboxes[s.ns], s.id)
			s.isCancelled = true
			w.logf("a service cancels %s", s)
			return
		}
	}
}

func mustMarshal(doc any) bson.Raw {
	raw, err := bson.Marshal(doc)
	if err != nil {
		panic(err)
	}
	return raw
}

// drift lets up to n things happen that are on their way: requests, responses and markers arrive, and the ledger writes.
func (w *world) drift(n int) {
	if w.depth > 0 || w.violation != "" {
		return
	}
	w.depth++
	defer func() { w.depth-- }()
	for range w.rand.IntN(n + 1) {
		switch w.rand.IntN(5) {
		case 0, 1:
			if len(w.kafka.requests) > 0 {
				w.arrive(w.kafka.requests[w.rand.IntN(len(w.kafka.requests))])
			}
		case 2:
			if len(w.kafka.requests) > 0 {
				w.response(w.kafka.requests[w.rand.IntN(len(w.kafka.requests))])
			}
		case 3:
			if len(w.kafka.markers) > 0 {
				w.land(w.rand.IntN(len(w.kafka.markers)))
			}
		case 4:
			if t := w.anyTerm(); t != nil && t.began {
				t.ledger.write(1 + w.rand.IntN(4))
			}
		}
	}
}

func (w *world) anyTerm() *term {
	if len(w.terms) == 0 {
		return nil
	}
	return w.terms[w.rand.IntN(len(w.terms))]
}
