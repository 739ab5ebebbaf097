package waiting

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

// scene is the database with an outbox, the owner and the broker of all terms of a test.
type scene struct {
	*bundle
	coll   *mongo.Collection
	held   *lease.Held
	broker *broker

	recording string
	attempts  int
	drop      bool
	route     func(*outboxes.Envelope) ([]string, error)
	flying    int
}

func newScene(t *testing.T) *scene {
	t.Helper()
	b := newBundle(t)
	h := &scene{bundle: b, coll: b.newOutbox("outbox"), broker: newBroker(t), recording: "watermark", attempts: 3}
	// The lease is not renewed, so it lasts longer than any test.
	l := lease.New(lease.Config{Collection: b.db.Collection("watchers"), ID: "orders/0of1", Node: "a", TTL: time.Hour, ReplicaSetID: "here"})
	var err error
	if h.held, err = l.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *scene) ns() string { return h.db.Name() + ".outbox" }

// term is one owner's loop.
type term struct {
	h     *scene
	x     *Exceptions
	f     *Finisher
	out   *fakeOutlet
	dirty atomic.Bool
	stop  func() // ends the loops and waits for them
	mu    sync.Mutex
	ends  map[End]int
}

// newTerm prepares a term. The term starts with run.
func (h *scene) newTerm() *term {
	te := &term{h: h, out: h.broker.connect(), ends: map[End]int{}}
	te.dirty.Store(true)
	shared := Shared{
		Client: h.client, Fencer: h.held, Outlet: te.out, Epoch: 1, Now: time.Now, Log: slog.New(slog.DiscardHandler),
		OnRetry: func(err error) { h.t.Log("trying again: ", err) }, OnRecovered: func() {},
	}
	te.f = NewFinisher(FinisherConfig{
		Shared: shared, Retry: retry.Policy{Base: time.Millisecond, Cap: 2 * time.Millisecond}, MaxAttempts: h.attempts,
		Recording: h.recording, DropExpired: h.drop, Source: deadletter.Source{Kind: "relay", Watcher: "orders", Node: "a", Epoch: 1},
		Count: func(e End, _ record.Class) {
			te.mu.Lock()
			te.ends[e]++
			te.mu.Unlock()
		},
	})

	route := h.route
	if route == nil {
		route = func(*outboxes.Envelope) ([]string, error) { return nil, errors.New("only the outlet routes") }
	}

	te.x = New(Config{
		Shared: shared, Finisher: te.f, Route: route,
		Check: func(*envelope.View) error { return nil }, Compacted: func(string) bool { return false },
		Collections: func() []outboxes.Outbox {
			if !te.dirty.Load() {
				return nil
			}
			return []outboxes.Outbox{{DB: h.db.Name(), Coll: "outbox"}}
		},
	})

	te.x.poll = 20 * time.Millisecond
	if h.flying > 0 {
		te.x.maxInFlight = h.flying
	}
	te.out.ready = te.x.Wake
	return te
}

func (te *term) run() *term {
	ctx, cancel := context.WithCancel(te.h.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = te.x.Run(ctx) })
	wg.Go(func() { _ = te.f.Run(ctx) })

	te.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		te.out.mu.Lock()
		te.out.dead = true
		te.out.mu.Unlock()
		retry.Signal(te.out.kick)
		<-te.out.over
	})
	te.h.t.Cleanup(te.stop)

	return te
}

// newException returns an exception of the stream in the form of WriteExceptions. Positions have one width, as in real
// events.
func (h *scene) newException(n int, key, state string, more ...bson.E) bson.D {
	d := bson.D{
		{Key: "_id", Value: fmt.Sprintf("e%06d", n)},
		{Key: "ts", Value: bson.Timestamp{}},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: key},
		{Key: "type", Value: "Placed"},
		{Key: "payload", Value: "p"},
		{Key: "key", Value: key},
		{Key: "state", Value: state},
		{Key: "pos", Value: fmt.Sprintf("82%06d", n)},
		{Key: "pending", Value: bson.A{"a"}},
		{Key: "attempts", Value: int32(0)},
		{Key: "origin", Value: "stream"},
	}

	if state == "retry" {
		d = append(d, bson.E{Key: "nextAt", Value: time.UnixMilli(1)})
	}

	for _, e := range more {
		d = setField(d, e)
	}
	return d
}

func setField(d bson.D, e bson.E) bson.D {
	for i := range d {
		if d[i].Key == e.Key {
			d[i] = e
			return d
		}
	}
	return append(d, e)
}

func (h *scene) insert(docs ...bson.D) {
	h.t.Helper()
	if _, err := h.coll.InsertMany(h.t.Context(), docs); err != nil {
		h.t.Fatal(err)
	}
}

// waitUntil waits for a condition on the documents.
func (h *scene) waitUntil(what string, cond func() bool) {
	h.t.Helper()
	stacktest.Eventually(h.t, what, cond, func() any { return fmt.Sprintf("%d left, topics %v", h.countLeft(), h.broker.topics) })
}

func (h *scene) countDocuments(filter bson.D) int64 {
	h.t.Helper()
	n, err := h.coll.CountDocuments(h.t.Context(), filter)
	if err != nil {
		h.t.Fatal(err)
	}
	return n
}

// countLeft returns the number of exceptions in the outbox.
func (h *scene) countLeft() int64 {
	return h.countDocuments(bson.D{{Key: "state", Value: bson.D{{Key: "$exists", Value: true}}}})
}

func (h *scene) waitEmpty() {
	h.t.Helper()
	h.waitUntil("no exception is left", func() bool { return h.countLeft() == 0 })
}

func (h *scene) findDocument(id string) bson.M {
	h.t.Helper()
	var m bson.M
	if err := h.coll.FindOne(h.t.Context(), bson.D{{Key: "_id", Value: id}}).Decode(&m); err != nil {
		h.t.Fatal(id, err)
	}
	return m
}

func (te *term) waitWritten() {
	te.h.t.Helper()
	te.h.waitUntil("nothing is in flight", func() bool { return te.x.InFlight() == 0 && te.f.Drain(te.h.t.Context()) == nil })
}

func newRefusal(reason string) *record.Refusal {
	return &record.Refusal{Class: record.RecordRefused, Reason: reason}
}

// InFlight returns the number of published envelopes whose outcomes are not written yet.
func (x *Exceptions) InFlight() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.inFlight)
}
