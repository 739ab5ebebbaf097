package waiting

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// standing and take are what the sink and the app make of Standing and Take.
func (o *wire) standing(e *outboxes.Envelope, topics []string) (hits []Hit) {
	w := identified(e)
	if topics == nil {
		topics = o.routes
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, topic := range topics {
		if at, ok := o.seen[topic][w]; ok {
			hits = append(hits, Hit{ID: w.id, Delivery: w.delivery, Topic: topic, Targets: topics, Offset: at})
		}
	}
	return hits
}

func (o *wire) take(e *outboxes.Envelope, topics []string, tell func(record.Published)) bool {
	w := identified(e)
	o.mu.Lock()
	o.last++
	p := record.Published{Ticket: o.last}
	for _, topic := range topics {
		if at, ok := o.seen[topic][w]; ok {
			delete(o.seen[topic], w)
			p.Answers = append(p.Answers, record.Answer{Topic: topic, Offset: at})
		}
	}
	if len(p.Answers) > 0 {
		o.told[p.Ticket] = true
	}

	o.mu.Unlock()
	if len(p.Answers) == 0 {
		return false
	}

	tell(p)
	return true
}

func identified(e *outboxes.Envelope) written {
	key, ok := e.Raw.Lookup("key").StringValueOK()
	if !ok {
		key = e.Raw.Lookup("aggregateid").StringValue()
	}
	n, _ := e.Raw.Lookup("delivery").AsInt64OK()
	return written{id: e.Raw.Lookup("_id").StringValue(), key: key, delivery: int32(n)}
}

// conceal takes away what the read-back has found in a topic; show is the late release of it, of which Exceptions is to be
// told by Wake, too.
func (te *term) conceal(topic string) (show func(let func())) {
	o := te.out
	o.mu.Lock()
	hidden := o.seen[topic]
	delete(o.seen, topic)
	o.mu.Unlock()
	o.b.mu.Lock()
	o.b.parked[topic] = true
	o.b.mu.Unlock()
	te.x.config.FindRecords, te.x.config.AckIfFound = o.standing, o.take
	return func(let func()) {
		o.mu.Lock()
		o.seen[topic] = hidden
		o.mu.Unlock()
		o.b.mu.Lock()
		o.b.parked[topic] = false
		o.b.mu.Unlock()
		te.x.ReclaimLate(func() bool { return true }, let)
	}
}

func (b *broker) stands(topic, id, key string, delivery int32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.append(topic, written{id: id, key: key, delivery: delivery})
}

// TestN08_WhatIsFoundLateIsFinishedBeforeItsTurn: a partition is read when the term has long begun. What an earlier owner
// has sent to it beside the stream is written down at once, although its turn is an hour away, and only then its offset is
// let go.
func TestN08_WhatIsFoundLateIsFinishedBeforeItsTurn(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	both := bson.E{Key: "pending", Value: bson.A{"a", "b"}}
	hour := bson.E{Key: "nextAt", Value: time.Now().Add(time.Hour)}
	h.put(
		h.exception(1, "k", "retry", hour), h.exception(2, "k", "blocked"),
		h.exception(3, "l", "retry", hour, both),
		h.exception(4, "m", "retry", hour, bson.E{Key: "pending", Value: nil}),
		h.exception(5, "n", "retry", hour, bson.E{Key: "delivery", Value: int32(1)}),
		h.exception(6, "o", "retry", hour),
		h.exception(7, "z", "parked", bson.E{Key: "pending", Value: bson.A{"b"}}),
	)
	for i, key := range map[int]string{1: "k", 3: "l", 4: "m", 5: "n"} {
		h.broker.stands("a", fmt.Sprintf("e%06d", i), key, 0)
	}

	h.route = func(*outboxes.Envelope) ([]string, error) { return []string{"a", "b"}, nil }
	te := h.begin()
	te.out.routes = []string{"a", "b"}
	show := te.conceal("a")
	te.run()
	h.until("all keys were looked at", func() bool { return len(h.broker.ids("b")) == 1 })
	let := make(chan struct{})
	show(func() { close(let) }) // without a Wake: who was behind is to follow nevertheless
	<-let
	h.until("what stands is written down", func() bool { return h.left() == 4 })
	te.landed()
	for id, want := range map[string]string{"e000003": "[b]", "e000004": "[b]", "e000005": "[a]", "e000006": "[a]"} {
		if d := h.doc(id); d["state"] != "retry" || fmt.Sprint(d["pending"]) != want {
			t.Errorf("%s waits for %v, %v, want %s", id, d["pending"], d["state"], want)
		}
	}

	te.out.mu.Lock()
	for _, key := range []string{"k", "l", "m", "n", "o"} {
		n := te.out.opened[[3]string{h.ns(), "a", key}]
		if want := map[string]int{"k": 2, "l": 1, "m": 1}[key]; n != want {
			t.Errorf("the gate of %s was opened %d times, want %d", key, n, want)
		}
	}

	te.out.mu.Unlock()
	te.out.quiet()
	h.broker.ordered() // the one that was blocked behind the first has followed, and nothing was sent twice
}

// TestN08_WhatIsOnItsWayIsLookedAtAgain: an envelope that is in flight, and a scheduled one that somebody has claimed, are
// left to those who have them; the offset waits.
func TestN08_WhatIsOnItsWayIsLookedAtAgain(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	claim := bson.E{Key: "claim", Value: bson.D{{Key: "token", Value: "t"}, {Key: "epoch", Value: int64(1)}}}
	h.put(h.exception(1, "k", "parked", bson.E{Key: "pending", Value: bson.A{"a", "b"}}), bson.D{
		{Key: "_id", Value: "due"},
		{Key: "aggregatetype", Value: "o"},
		{Key: "aggregateid", Value: "s"},
		{Key: "type", Value: "T"},
		{Key: "payload", Value: "p"},
		{Key: "dueAt", Value: time.UnixMilli(7)},
		{Key: "pending", Value: bson.A{"a"}},
		claim,
	})

	h.broker.stands("a", "e000001", "k", 0)
	h.broker.stands("a", "due", "s", 0)
	te := h.begin()
	te.out.routes = []string{"a"}
	show := te.conceal("a")
	te.out.hold(true)
	te.run()
	h.until("the first is on its way to the other topic", func() bool { return te.x.InFlight() == 1 })
	var let atomic.Bool
	show(func() { let.Store(true) })
	te.x.Wake("a")
	h.until("it was looked at", func() bool { te.x.mu.Lock(); defer te.x.mu.Unlock(); return len(te.x.lateReads) == 0 })
	te.out.hold(false)
	h.until("the first is finished", func() bool { return h.left() == 0 })
	te.landed()
	if let.Load() {
		t.Fatal("the offset was let go while a scheduled envelope that stands there was not written down")
	}

	// Its owner could not bring it to its topic, and made an exception of it.
	if _, err := h.coll.UpdateByID(t.Context(), "due", bson.D{
		{Key: "$set", Value: bson.D{{Key: "state", Value: "retry"}, {Key: "pos", Value: "82"}, {Key: "origin", Value: "scheduled"}, {Key: "nextAt", Value: time.Now().Add(time.Hour)}}},
		{Key: "$unset", Value: bson.D{{Key: "claim", Value: ""}, {Key: "dueAt", Value: ""}}},
	}); err != nil {
		t.Fatal(err)
	}

	h.until("the offset is let go", let.Load)
	te.landed()
	if n := h.left(); n != 0 {
		t.Errorf("%d are left", n)
	}

	h.broker.wants("b", "e000001")
	h.broker.ordered()
	te.out.quiet()
}

// TestN08_AFailedLookAtWhatWasFoundLateIsRepeated and the hold neither lost nor let go before.
func TestN08_AFailedLookAtWhatWasFoundLateIsRepeated(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	h.put(h.exception(1, "k", "retry", bson.E{Key: "nextAt", Value: time.Now().Add(time.Hour)}))
	h.broker.stands("a", "e000001", "k", 0)
	te := h.begin()
	te.x.config.Client = h.reader
	show := te.conceal("a")
	var n int
	if err := te.x.reclaimLateHits(t.Context(), nil, true); err != nil {
		t.Fatal("nothing was asked for: ", err)
	}

	show(func() { n++ })
	broken, cancel := context.WithCancel(t.Context())
	cancel()
	if err := te.x.reclaimLateHits(broken, te.x.config.Collections(), true); !errors.Is(err, context.Canceled) || n != 0 {
		t.Fatalf("%v; let go %d times", err, n)
	}
	if err := te.x.reclaimLateHits(t.Context(), te.x.config.Collections(), false); err != nil || n != 1 {
		t.Fatalf("%v; let go %d times", err, n)
	}

	te.run()
	h.drained()
	te.landed()
	te.stop()
	if err := te.x.reclaimLateHits(t.Context(), te.x.config.Collections(), true); err != nil || n != 1 {
		t.Fatalf("%v; let go %d times", err, n)
	}

	te.out.quiet()
}

// TestN08_FoundLateAmongMany: everything of a topic is published at the same time as what stands there is taken. Each
// envelope is finished once, and none is sent again.
func TestN08_FoundLateAmongMany(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	const n = 600
	var docs []bson.D
	r := rand.New(rand.NewPCG(1, 2))
	both := bson.E{Key: "pending", Value: bson.A{"a", "b"}}
	want := map[string]int{}
	for i := range n {
		key := fmt.Sprint("k", i%20)
		var d bson.D
		switch r.IntN(3) {
		case 0:
			d = h.exception(i, key, "parked", both)
			want["b"]++
		case 1:
			d = h.exception(i, key, "retry")
		default:
			d = h.exception(i, key, "blocked")
		}
		docs = append(docs, d)
		want["a"]++
		if i < 300 { // of a key what was sent is what comes first
			h.broker.stands("a", fmt.Sprintf("e%06d", i), key, 0)
		}
	}

	h.put(docs...)
	te := h.begin()
	show := te.conceal("a")
	te.run()
	h.until("the other topic has its own", func() bool { return len(h.broker.ids("b")) == want["b"] })
	let := make(chan struct{})
	show(func() { close(let) })
	te.x.Wake("a")
	<-let
	h.drained()
	te.landed()
	for topic, n := range want {
		if got := len(h.broker.ids(topic)); got != n {
			t.Errorf("topic %s has %d records, want %d", topic, got, n)
		}
	}

	h.broker.ordered()
	te.out.quiet()
	opened := 0
	te.out.mu.Lock()
	for _, n := range te.out.opened {
		opened += n
	}

	te.out.mu.Unlock()
	if opened != want["a"]+want["b"] {
		t.Errorf("gates were opened %d times, want %d", opened, want["a"]+want["b"])
	}
}
