package reconciler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// scene is the store of a watcher, the owner and the broker of all terms of a test. The outbox has none of its envelopes, unless
// the test inserts them.
type scene struct {
	t       *testing.T
	client  *mongo.Client // of the terms
	db      *mongo.Database
	state   state.Database
	outbox  *mongo.Collection
	coll    *mongo.Collection // the store
	letters *mongo.Collection
	held    *lease.Held
	broker  *broker

	watcher   string
	recording string
	attempts  int
	drop      bool
	route     func(*outboxes.Envelope) ([]string, error)
	flying    int
}

func newScene(t *testing.T) *scene {
	t.Helper()
	client := stacktest.Client(t)
	db := stacktest.Database(t, client)
	h := &scene{t: t, client: client, db: db, state: state.Of(db), broker: newBroker(t), watcher: "orders", recording: ledger.RecordPosition, attempts: 3}
	h.outbox = mongodb.Majority(db.Collection("outbox"))
	h.coll, h.letters = mongodb.Majority(h.state.Collection("waiting")), mongodb.Majority(h.state.Collection("letters"))
	for coll, indexes := range map[*mongo.Collection][]mongodb.Index{h.coll: waiting.Indexes(), h.letters: letters.Indexes()} {
		if err := mongodb.EnsureIndexSet(t.Context(), coll, indexes); err != nil {
			t.Fatal(err)
		}
	}

	// The lease is not renewed, so it lasts longer than any test.
	l := lease.New(lease.Config{Collection: h.state.Collection("watchers"), ID: "orders/0of1", Node: "a", TTL: time.Hour, ReplicaSetID: "here"})
	var err error
	if h.held, err = l.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *scene) ns() string { return h.db.Name() + ".outbox" }

// term is one owner's loop.
type term struct {
	h       *scene
	x       *Sender
	l       *ledger.Ledger
	out     *fakeOutlet
	entered *mailbox.Box[*waiting.Entry]
	ready   *mailbox.Box[string]
	stop    func() // ends the loops and waits for them
	mu      sync.Mutex
	ends    map[ledger.End]int
}

// newTerm prepares a term. The term starts with run.
func (h *scene) newTerm() *term {
	te := &term{h: h, out: h.broker.connect(), ends: map[ledger.End]int{}, entered: mailbox.New[*waiting.Entry](), ready: mailbox.New[string]()}
	db := h.state.On(h.client)
	store := waiting.NewStore(db.Collection("waiting"), h.watcher, slot.Range{})
	onRetry := func(err error) { h.t.Log("trying again: ", err) }
	te.l = ledger.New(ledger.Config{
		Fencer: h.held, Store: store, Letters: db.Collection("letters"),
		Source:      letters.Source{Kind: "relay", Watcher: h.watcher, Node: "a", Epoch: 1},
		MaxAttempts: h.attempts, Backoff: retry.Policy{Base: time.Millisecond, Cap: 2 * time.Millisecond}, DropExpired: h.drop, Recording: h.recording,
		Restore: func(context.Context, []*ledger.Outcome) error { return errors.New("no image is missing") },
		Entered: func(list []*waiting.Entry) { te.entered.Put(list...) },
		Now:     time.Now, OnRetry: onRetry, OnRecovered: func() {}, Log: slog.New(slog.DiscardHandler),
		Count: func(o *ledger.Outcome) {
			te.mu.Lock()
			te.ends[o.End]++
			te.mu.Unlock()
		},
	})

	te.out.route = h.route
	if te.out.route == nil {
		te.out.route = func(*outboxes.Envelope) ([]string, error) { return nil, errors.New("only the outlet routes") }
	}
	te.x = New(Config{
		Store: store, Ledger: te.l, Outlet: te.out, Now: time.Now, Log: slog.New(slog.DiscardHandler), OnRetry: onRetry, OnRecovered: func() {},
		Compacted: func(string) bool { return false }, Entered: te.entered, Ready: te.ready,
	})
	te.x.poll = 20 * time.Millisecond
	if h.flying > 0 {
		te.x.maxInFlight = h.flying
	}
	te.out.ready = func(topic string) { te.ready.Put(topic) }
	return te
}

func (te *term) run() *term {
	ctx, cancel := context.WithCancel(te.h.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = te.x.Run(ctx) })
	wg.Go(func() { _ = te.l.Run(ctx) })

	te.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		te.out.end()
	})
	te.h.t.Cleanup(te.stop)
	return te
}

// newEntry returns an envelope of the stream that waits for topic a. Positions have one width, as in real events.
func (h *scene) newEntry(n int, key string, reason waiting.Reason, change ...func(*waiting.Entry)) waiting.Entry {
	h.t.Helper()
	e := waiting.Entry{
		Watcher: h.watcher, NS: h.ns(), Key: key, Pos: fmt.Sprintf("82%06d", n), Pending: []string{"a"}, Reason: reason, Origin: waiting.OriginStream,
	}

	if reason == waiting.Retry {
		e.NextAt = time.UnixMilli(1)
	}
	setEnvelope(bson.D{
		{Key: "_id", Value: fmt.Sprintf("e%06d", n)},
		{Key: "ts", Value: bson.Timestamp{T: 1000, I: uint32(n)}},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: key},
		{Key: "type", Value: "Placed"},
		{Key: "payload", Value: "p"},
	})(&e)
	for _, c := range change {
		c(&e)
	}
	return e
}

func setEnvelope(doc bson.D) func(*waiting.Entry) {
	return func(e *waiting.Entry) {
		raw, err := bson.Marshal(doc)
		if err != nil {
			panic(err)
		}
		e.Raw = raw
	}
}

// with sets a field of the envelope.
func with(field string, value any) func(*waiting.Entry) {
	return func(e *waiting.Entry) {
		var doc bson.D
		if err := bson.Unmarshal(e.Raw, &doc); err != nil {
			panic(err)
		}
		setEnvelope(setField(doc, bson.E{Key: field, Value: value}))(e)
	}
}

func pending(topics ...string) func(*waiting.Entry) {
	return func(e *waiting.Entry) { e.Pending = topics }
}

func failed(attempts int32) func(*waiting.Entry) {
	return func(e *waiting.Entry) { e.Attempts = attempts }
}

func nextAt(at time.Time) func(*waiting.Entry) {
	return func(e *waiting.Entry) { e.NextAt = at }
}

// origin sets the origin and the number of the delivery.
func origin(o string, delivery int32) func(*waiting.Entry) {
	return func(e *waiting.Entry) { e.Origin, e.Delivery = o, delivery }
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

func (h *scene) enter(list ...waiting.Entry) {
	h.t.Helper()
	for len(list) > 0 {
		n := min(1000, len(list))
		if err := waiting.Enter(h.t.Context(), h.coll, list[:n]); err != nil {
			h.t.Fatal(err)
		}
		list = list[n:]
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

// countLeft returns the number of envelopes that wait.
func (h *scene) countLeft() int64 { return h.countDocuments(bson.D{}) }

func (h *scene) countLetters() int64 {
	h.t.Helper()
	n, err := h.letters.CountDocuments(h.t.Context(), bson.D{})
	if err != nil {
		h.t.Fatal(err)
	}
	return n
}

func (h *scene) waitEmpty() {
	h.t.Helper()
	h.waitUntil("nothing waits", func() bool { return h.countLeft() == 0 })
}

// find returns the stored document of an envelope, or nil.
func (h *scene) find(n int) bson.M {
	h.t.Helper()
	var m bson.M
	err := h.coll.FindOne(h.t.Context(), ofEnvelope(n)).Decode(&m)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil
	}
	if err != nil {
		h.t.Fatal(n, err)
	}
	return m
}

// ofEnvelope returns the filter for the documents and letters of an envelope.
func ofEnvelope(n int) bson.D { return bson.D{{Key: "id", Value: fmt.Sprintf("e%06d", n)}} }

// letterOf returns the letter of an envelope.
func (h *scene) letterOf(n int) letters.Dead {
	h.t.Helper()
	var id struct {
		ID string `bson:"_id"`
	}

	err := h.letters.FindOne(h.t.Context(), ofEnvelope(n)).Decode(&id)
	if err != nil {
		h.t.Fatalf("the letter of %d: %v", n, err)
	}
	d, err := letters.Open(h.t.Context(), h.letters, id.ID)
	if err != nil {
		h.t.Fatal(err)
	}
	return d
}

func (te *term) waitWritten() {
	te.h.t.Helper()
	te.h.waitUntil("nothing is in flight", func() bool { return te.x.InFlight() == 0 && te.l.Drain(te.h.t.Context()) == nil })
}

func newRejection(reason string) *record.Rejection {
	return &record.Rejection{Class: record.RecordRejected, Reason: reason}
}

// InFlight returns the number of published envelopes whose outcomes are not written yet.
func (x *Sender) InFlight() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.inFlight)
}
