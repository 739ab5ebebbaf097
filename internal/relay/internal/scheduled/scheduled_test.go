package scheduled

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/reconciler"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// watcherID is the id of the watcher document.
const watcherID = "orders/0of1"

// planned is a test's own database with an outbox and the state of a relay, and terms of ownership over it.
type planned struct {
	t       testing.TB
	client  *mongo.Client
	db      *mongo.Database
	box     *outbox.Box
	coll    *mongo.Collection
	waiting *mongo.Collection
	letters *mongo.Collection
	claims  *mongo.Collection
	skew    atomic.Int64 // the difference between the assumed and the real clock of the server
}

func newPlanned(t testing.TB, opts ...*options.ClientOptions) *planned {
	t.Helper()
	p := &planned{t: t, client: stacktest.Client(t, opts...)}
	p.db = stacktest.Database(t, p.client)
	p.coll = mongodb.Majority(p.db.Collection("outbox"))
	p.waiting, p.letters, p.claims = p.db.Collection("waiting"), p.db.Collection("letters"), p.db.Collection("claims")

	for coll, indexes := range map[*mongo.Collection][]mongodb.Index{
		p.coll: outboxes.Indexes{Purge: true, Scheduled: true}.List(), p.waiting: waiting.Indexes(), p.letters: letters.Indexes(),
	} {
		if err := mongodb.EnsureIndexSet(t.Context(), coll, indexes); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if p.box, err = outbox.New(p.db, outbox.WithoutTransaction()); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *planned) now() time.Time { return time.Now().Add(time.Duration(p.skew.Load())) }

func (p *planned) ns() string { return mongodb.Namespace(p.coll) }

// schedule appends events that are due so long from now, and returns their ids.
func (p *planned) schedule(n int, in time.Duration) []event.ID {
	p.t.Helper()
	at := time.Now().Add(in).Truncate(time.Millisecond)
	var ids []event.ID
	var list []event.Event
	for range n {
		e := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Due", event.Bytes("", []byte("p")), event.WithDueAt(at))
		ids, list = append(ids, e.ID()), append(list, e)
	}
	if err := p.box.Append(p.t.Context(), list...); err != nil {
		p.t.Fatal(err)
	}
	return ids
}

// taking is one term: it owns the watcher, and its parts run until stop.
type taking struct {
	*Scheduled
	p      *planned
	sender *reconciler.Sender
	held   *lease.Held
	outlet *outlet
	ctx    context.Context
	stop   context.CancelFunc
	ended  chan struct{}
}

// setUp has the parts of a term that a test may change before it begins.
type setUp struct {
	Config
	ledger *ledger.Config
	outlet *outlet
	ahead  time.Duration // how long before their due times envelopes are claimed; 0: the default
	claim  int           // the most envelopes of a claim; 0: the default
}

// takeOver acquires the watcher and starts the parts.
func (p *planned) takeOver(change func(c *setUp)) *taking {
	p.t.Helper()
	l := lease.New(lease.Config{Collection: p.db.Collection("watchers"), ID: watcherID, Node: "n", ReplicaSetID: "x", TTL: time.Minute})
	x := &taking{p: p, outlet: newOutlet(), ended: make(chan struct{})}
	var err error
	if x.held, err = l.Acquire(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}

	log := slog.New(slog.DiscardHandler)
	store := waiting.NewStore(p.waiting, "orders", slot.Range{})
	entered := mailbox.New[*waiting.Entry]()
	c := &setUp{outlet: x.outlet, ledger: &ledger.Config{
		Fencer: x.held, Store: store, Letters: p.letters, Claims: p.claims, Source: letters.Source{Kind: "relay", Watcher: "orders"},
		MaxAttempts: 5, Backoff: retry.Policy{Base: time.Minute, Cap: time.Hour}, Recording: ledger.RecordPosition,
		Entered: func(list []*waiting.Entry) { entered.Put(list...) }, Now: p.now,
		OnRetry: func(error) {}, OnRecovered: func() {}, Count: func(*ledger.Outcome) {}, Log: log,
	}}
	c.Config = Config{
		Client: p.client, Fencer: x.held, Claims: p.claims, Watchers: p.db.Collection("watchers"), WatcherID: watcherID, Outlet: x.outlet, Now: p.now, Log: log,
		OnRetry: func(error) {}, OnRecovered: func() {}, OnSent: func(time.Duration) {},
		Collections: func() []outboxes.Outbox { return []outboxes.Outbox{{DB: p.db.Name(), Coll: p.coll.Name()}} },
	}
	if change != nil {
		change(c)
	}

	c.Ledger = ledger.New(*c.ledger)
	c.Mark = c.ledger.Recording == ledger.RecordMark
	x.sender = reconciler.New(reconciler.Config{
		Store: store, Ledger: c.Ledger, Outlet: x.outlet, Now: p.now, Log: log,
		OnRetry: func(error) {}, OnRecovered: func() {}, Compacted: func(string) bool { return false },
		Entered: entered, Ready: mailbox.New[string](),
	})
	x.Scheduled = New(c.Config)
	if c.ahead > 0 {
		x.ahead = c.ahead
	}
	if c.claim > 0 {
		x.maxClaim = c.claim
	}
	if _, err := x.sender.FinishSent(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	if _, err := x.Recover(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	x.ctx, x.stop = context.WithCancel(context.WithoutCancel(p.t.Context()))
	var wg sync.WaitGroup
	renew := func(ctx context.Context) error { return x.held.Run(ctx, nil) }
	for _, run := range []func(context.Context) error{renew, c.Ledger.Run, x.sender.Run, x.Scheduled.Run} {
		wg.Go(func() {
			if err := run(x.ctx); x.ctx.Err() == nil && !errors.Is(err, lease.ErrReleased) {
				p.t.Errorf("a part ended without a stop: %v", err)
			}
		})
	}

	go func() { wg.Wait(); close(x.ended) }()
	p.t.Cleanup(x.release)
	return x
}

// release stops the parts and releases the watcher. It may be called more than once.
func (x *taking) release() {
	x.stop()
	<-x.ended
	ctx, cancel := context.WithTimeout(context.Background(), overdue)
	defer cancel()
	_ = x.held.Release(ctx, nil)
}

// outlet acts as the dispatcher and Kafka: it keeps its envelopes, and results as the test sets it.
type outlet struct {
	mu      sync.Mutex
	sent    map[string][]time.Time
	tickets record.Ticket
	open    map[record.Ticket]bool // reported and not settled
	settled int
	twice   int // settled without having been reported
	change  chan struct{}
	had     map[string]bool // read back: an earlier term has sent it
	topics  []string        // that each envelope has; one of them is "t"

	// result is what becomes of an envelope; nil acks it. It may block.
	result func(ctx context.Context, id string) ([]record.Result, error)
}

func newOutlet() *outlet {
	return &outlet{sent: map[string][]time.Time{}, open: map[record.Ticket]bool{}, had: map[string]bool{}, topics: []string{"t"}, change: make(chan struct{})}
}

func (o *outlet) Publish(ctx context.Context, e *outboxes.Envelope, _ []string, report func(record.Published)) error {
	var v envelope.View
	if err := envelope.Parse(e.Raw, &v); err != nil {
		return &record.Rejection{Class: record.Malformed, Reason: err.Error()}
	}
	id := string(v.AppendID(nil))
	results := []record.Result{{Topic: "t", Offset: 1}}
	if o.result != nil {
		var err error
		if results, err = o.result(ctx, id); err != nil {
			return err
		}
	}

	o.mu.Lock()
	if results[0].Offset >= 0 {
		o.sent[id] = append(o.sent[id], time.Now())
	}
	o.tickets++
	t := o.tickets | record.Side
	o.open[t] = true
	o.reportNext()
	o.mu.Unlock()
	report(record.Published{Ticket: t, Results: results})
	return nil
}

func (o *outlet) reportNext() {
	close(o.change)
	o.change = make(chan struct{})
}

func (o *outlet) Settle(tickets []record.Ticket) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, t := range tickets {
		if !o.open[t] {
			o.twice++
		}
		delete(o.open, t)
	}
	o.settled += len(tickets)
	o.reportNext()
}

func (o *outlet) OpenGate(string, string, string)  {}
func (o *outlet) ResumeKey(string, string, string) {}
func (o *outlet) Reached() string                  { return "82FFFFFFFFFFFFFFFF" }
func (o *outlet) ReachedBySweep() string           { return o.Reached() }
func (o *outlet) Flush()                           {}

func (o *outlet) RouteTopics(*outboxes.Envelope) ([]string, error) { return []string{"t"}, nil }

func (o *outlet) TopicsWithHits() []string {
	if len(o.had) == 0 {
		return nil
	}
	return []string{"t"}
}

func (o *outlet) FindHits(e *outboxes.Envelope) (hits []record.Result, all []string) {
	var v envelope.View
	if envelope.Parse(e.Raw, &v) == nil && o.had[string(v.AppendID(nil))] {
		hits = []record.Result{{Topic: "t", Offset: 1}}
	}
	return hits, o.topics
}

// waitUntil waits for a state of the outlet.
func (x *taking) waitUntil(what string, f func(o *outlet) bool) {
	x.p.t.Helper()
	deadline := time.After(overdue)
	for {
		x.outlet.mu.Lock()
		done, change, n, settled := f(x.outlet), x.outlet.change, len(x.outlet.sent), x.outlet.settled
		x.outlet.mu.Unlock()

		if done {
			return
		}

		select {
		case <-change:
		case <-deadline:
			x.p.t.Fatalf("%s never came; %d were sent, %d settled", what, n, settled)
		}
	}
}

func (x *taking) waitSettled(n int) {
	x.p.t.Helper()
	x.waitUntil(fmt.Sprintf("the settling of %d", n), func(o *outlet) bool { return o.settled >= n })
}

// checkSentOnce checks that each of ids, and nothing else, was sent once, not before at.
func (x *taking) checkSentOnce(at time.Time, ids ...event.ID) {
	x.p.t.Helper()
	x.outlet.mu.Lock()
	defer x.outlet.mu.Unlock()
	if len(x.outlet.sent) != len(ids) || x.outlet.twice > 0 {
		x.p.t.Errorf("%d envelopes were sent, want %d; %d settled twice", len(x.outlet.sent), len(ids), x.outlet.twice)
	}

	for _, id := range ids {
		switch times := x.outlet.sent[id.String()]; {
		case len(times) != 1:
			x.p.t.Errorf("%s was sent %d times", id, len(times))
		case times[0].Before(at):
			x.p.t.Errorf("%s was sent %s before it was due", id, at.Sub(times[0]))
		}
	}
}

func (p *planned) findDocument(id event.ID) bson.Raw {
	p.t.Helper()
	raw, err := p.coll.FindOne(p.t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		p.t.Fatal(err)
	}
	return raw
}

// findWaiting returns the document of the store for the envelope id, or nil.
func (p *planned) findWaiting(id any) bson.Raw {
	p.t.Helper()
	raw, err := p.waiting.FindOne(p.t.Context(), bson.D{{Key: "id", Value: id}}).Raw()
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		p.t.Fatal(err)
	}
	return raw
}

// checkNothingLeft checks that neither the outbox nor the store has an envelope.
func (p *planned) checkNothingLeft() {
	p.t.Helper()
	for _, coll := range []*mongo.Collection{p.coll, p.waiting, p.claims} {
		if n, err := coll.CountDocuments(p.t.Context(), bson.D{}); err != nil || n != 0 {
			p.t.Errorf("%d are left in %s, %v", n, coll.Name(), err)
		}
	}
}

// N19: the server's clock decides, also where this process takes it to be later than it is.
func TestN19_NeverBeforeItIsDue(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{-40 * time.Millisecond, 0, 300 * time.Millisecond} {
		t.Run(skew.String(), func(t *testing.T) {
			t.Parallel()
			p := newPlanned(t)
			p.skew.Store(int64(skew))

			var mu sync.Mutex
			var late []time.Duration
			ids := p.schedule(20, 900*time.Millisecond)
			due := time.UnixMilli(p.findDocument(ids[0]).Lookup("dueAt").DateTime())
			x := p.takeOver(func(c *setUp) {
				c.OnSent = func(d time.Duration) { mu.Lock(); late = append(late, d); mu.Unlock() }
			})

			x.waitSettled(20)
			x.checkSentOnce(due, ids...)

			mu.Lock()
			defer mu.Unlock()
			if len(late) != 20 || slices.Min(late) < skew {
				t.Errorf("late by %v", late)
			}
		})
	}
}

// N19: a hint of the stream is as good as the index, and no better: the claim's filter decides.
func TestN19_TheStreamsHintIsOnlyAHint(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	x := p.takeOver(func(c *setUp) {
		c.Poll = time.Hour
		c.Collections = func() []outboxes.Outbox { return nil }
	})

	soon, later, cancelled := p.schedule(1, 200*time.Millisecond), p.schedule(1, time.Hour), p.schedule(1, 200*time.Millisecond)
	if err := p.box.Cancel(t.Context(), cancelled[0]); err != nil {
		t.Fatal(err)
	}
	for range slices.Concat(soon, later, cancelled) {
		x.NoteScheduled(mongodb.Namespace(p.coll), time.Now().Add(190*time.Millisecond))
	}

	x.waitSettled(1)
	x.checkSentOnce(time.UnixMilli(0), soon...)
	if p.findDocument(later[0]) == nil {
		t.Error("an envelope that is not due is claimed")
	}
}

// A timer fires when it is due; other tests bound only how early. Each begins when its predecessor has fired, so that nothing else
// wakes the sender, and one of them is on time even on a loaded machine.
func TestTimersFireWhenTheyAreDue(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		wait time.Duration
		hint bool
	}{
		"found by the index": {wait: 2 * time.Second},
		// The claim is due 50 ms after the longest wait of the loop. A loop that waits longer each time is late by almost half a second.
		"told by the stream": {wait: maxIdle + claimAhead - claimAhead/claimDelay + 50*time.Millisecond, hint: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlanned(t)
			x := p.takeOver(func(s *setUp) {
				if c.hint {
					s.Poll = time.Hour
				}
			})
			var late []time.Duration
			for i := range 3 {
				due := time.Now().Add(c.wait)
				id := p.schedule(1, c.wait)[0]
				if c.hint {
					x.NoteScheduled(mongodb.Namespace(p.coll), due)
				}
				x.waitSettled(i + 1)

				x.outlet.mu.Lock()
				late = append(late, x.outlet.sent[id.String()][0].Sub(due))
				x.outlet.mu.Unlock()
			}
			if slices.Min(late) > 250*time.Millisecond {
				t.Errorf("each envelope was sent late, by %v", late)
			}
		})
	}
}

// N19: the stream does not show that a service moves an envelope; the index does.
func TestN19_ARescheduleNeedsNoStream(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	earlier, late := p.schedule(1, time.Hour), p.schedule(1, 300*time.Millisecond)
	moved := time.Now().Add(500 * time.Millisecond)
	if err := p.box.Reschedule(t.Context(), earlier[0], moved); err != nil {
		t.Fatal(err)
	}
	if err := p.box.Reschedule(t.Context(), late[0], moved.Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	x := p.takeOver(nil)
	for i := range slices.Concat(earlier, late) { // the stream contains these
		x.NoteScheduled(mongodb.Namespace(p.coll), time.Now().Add([]time.Duration{time.Hour, 0}[i]))
	}

	x.waitSettled(2)
	x.checkSentOnce(moved.Truncate(time.Millisecond), slices.Concat(earlier, late)...)
	x.outlet.mu.Lock()
	defer x.outlet.mu.Unlock()
	if at := x.outlet.sent[late[0].String()][0]; at.Before(moved.Add(999 * time.Millisecond)) {
		t.Error("an envelope was sent at the time from which it was moved away")
	}
}

// N19: if an owner dies at any step, its successor sends the envelopes that were not sent, and only
// those. An envelope that was claimed and not sent is in a claim, and has left the outbox.
func TestN19_TakeOver(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	hang := make(chan struct{})
	first := p.takeOver(func(c *setUp) {
		c.outlet.result = func(ctx context.Context, _ string) ([]record.Result, error) {
			c.outlet.mu.Lock()
			n := len(c.outlet.sent)
			c.outlet.mu.Unlock()
			if n < 400 {
				return []record.Result{{Topic: "t", Offset: 1}}, nil
			}
			select {
			case <-hang:
			default:
				close(hang)
			}
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
	})

	ids := p.schedule(1500, 0)
	<-hang
	// The others may be claimed or not.
	first.waitUntil("400 sent", func(o *outlet) bool { return len(o.sent) == 400 })
	first.release()
	if n, err := waiting.CountClaimed(t.Context(), p.claims, watcherID); n == 0 || err != nil {
		t.Errorf("%d envelopes are claimed, %v", n, err)
	}
	second := p.takeOver(findRecordsOf(first))
	second.waitSettled(1100)
	seen := map[string]int{}
	for _, o := range []*outlet{first.outlet, second.outlet} {
		for id, times := range o.sent {
			seen[id] += len(times)
		}
	}

	for _, id := range ids {
		if seen[id.String()] != 1 {
			t.Fatalf("%s was sent %d times", id, seen[id.String()])
		}
	}
	p.checkNothingLeft()
}
