package reconciler

import (
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// N16: whatever the services do with their outbox, the envelopes that wait are delivered in order.
func TestN16_NothingThatAnOutboxIsOrDoesConcernsWhatWaits(t *testing.T) {
	t.Parallel()
	const envelopes = 30
	command := func(h *scene, c bson.D) {
		h.t.Helper()
		if err := h.db.RunCommand(h.t.Context(), c).Err(); err != nil {
			h.t.Fatal(err)
		}
	}
	index := func(h *scene, options ...bson.E) {
		h.t.Helper()
		command(h, bson.D{{Key: "createIndexes", Value: "outbox"}, {Key: "indexes", Value: bson.A{append(bson.D{{Key: "name", Value: "own"}}, options...)}}})
	}
	create := func(options ...bson.E) func(h *scene) {
		return func(h *scene) { command(h, append(bson.D{{Key: "create", Value: "outbox"}}, options...)) }
	}
	numeric := bson.E{Key: "collation", Value: bson.D{{Key: "locale", Value: "en"}, {Key: "numericOrdering", Value: true}}}
	coarse := bson.E{Key: "collation", Value: bson.D{{Key: "locale", Value: "en"}, {Key: "strength", Value: 2}}}

	for name, c := range map[string]struct {
		before func(h *scene) // makes the outbox
		during func(h *scene) // while envelopes wait
		view   bool
	}{
		"a cleaning job":   {during: func(h *scene) { _, _ = h.outbox.DeleteMany(h.t.Context(), bson.D{}) }},
		"a dropped outbox": {during: func(h *scene) { _ = h.outbox.Drop(h.t.Context()) }},
		"a renamed outbox": {during: func(h *scene) { h.rename("archive") }},
		"edited documents": {during: func(h *scene) {
			_, _ = h.outbox.UpdateMany(h.t.Context(), bson.D{}, bson.D{{Key: "$unset", Value: bson.D{{Key: "payload", Value: 1}}}})
		}},
		"replaced documents": {during: func(h *scene) { _, _ = h.outbox.DeleteMany(h.t.Context(), bson.D{}); h.insertAll(envelopes, "later") }},
		"an index with a TTL": {
			before: func(h *scene) {
				index(h, bson.E{Key: "key", Value: bson.D{{Key: "expireAt", Value: 1}}}, bson.E{Key: "expireAfterSeconds", Value: 0})
			},
			// What the server does, without the wait for its next pass.
			during: func(h *scene) {
				_, _ = h.outbox.DeleteMany(h.t.Context(), bson.D{{Key: "expireAt", Value: bson.D{{Key: "$lt", Value: time.Now()}}}})
			},
		},
		"a collation of numbers": {before: create(numeric)},
		"a collation of letters": {before: create(coarse)},
		"a unique index": {before: func(h *scene) {
			index(h, bson.E{Key: "key", Value: bson.D{{Key: "payload", Value: 1}}}, bson.E{Key: "unique", Value: true},
				bson.E{Key: "partialFilterExpression", Value: bson.D{{Key: "state", Value: bson.D{{Key: "$exists", Value: true}}}}})
		}},
		"a validator": {before: create(bson.E{Key: "validator", Value: bson.D{{Key: "state", Value: nil}, {Key: "pending", Value: nil}, {Key: "sentAt", Value: nil}}})},
		"a view":      {view: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newScene(t)
			if c.before != nil {
				c.before(h)
			}
			if c.view {
				if err := h.db.CreateView(t.Context(), "outbox", "orders", bson.A{}); err != nil {
					t.Fatal(err)
				}
			} else {
				h.insertAll(envelopes, "p")
			}

			// Each reason to wait occurs, and keys that a coarse collation takes for one.
			h.broker.parked["a"] = true
			te := h.newTerm().run()
			keys := []string{"k1", "K1", "k10", "k2"}
			for i := range envelopes {
				e := h.newEntry(i, keys[i%len(keys)], waiting.Blocked)
				o := &ledger.Outcome{End: ledger.Waiting, Reason: waiting.Blocked, NS: e.NS, Raw: e.Raw, Pos: e.Pos, Key: e.Key, Topics: e.Pending, Recorded: true}
				switch i % 5 {
				case 0:
					o.Reason = waiting.Parked
				case 1:
					o.End, o.Reason, o.Rejection, o.Topic = ledger.Retrying, waiting.Retry, *newRejection("not yet"), "a"
				}
				te.l.Add(o)
			}
			h.waitUntil("all wait", func() bool { return h.countLeft() == envelopes })
			if c.during != nil {
				c.during(h)
			}

			before := h.readOutbox()
			te.out.unpark("a")
			h.waitEmpty()
			te.waitWritten()
			h.broker.checkOrder()
			te.out.checkSettled()
			if got := len(h.broker.listIDs("a")); got != envelopes || h.countLetters() != 0 {
				t.Errorf("%d of %d are delivered, %d letters", got, envelopes, h.countLetters())
			}
			if after := h.readOutbox(); after != before {
				t.Errorf("the outbox was changed:\n%s\n%s", before, after)
			}
		})
	}
}

// insertAll inserts the envelopes into the outbox, as a service does.
func (h *scene) insertAll(n int, payload string) {
	h.t.Helper()
	var docs []any
	for i := range n {
		docs = append(docs, h.newEntry(i, "k", waiting.Blocked, with("payload", payload), with("expireAt", time.Now().Add(-time.Hour))).Raw)
	}
	if _, err := h.outbox.InsertMany(h.t.Context(), docs); err != nil {
		h.t.Fatal(err)
	}
}

func (h *scene) rename(to string) {
	h.t.Helper()
	err := h.client.Database("admin").RunCommand(h.t.Context(), bson.D{{Key: "renameCollection", Value: h.ns()}, {Key: "to", Value: h.db.Name() + "." + to}}).Err()
	if err != nil {
		h.t.Fatal(err)
	}
}

// readOutbox returns the documents and the indexes of the outbox.
func (h *scene) readOutbox() string {
	h.t.Helper()
	var docs []bson.Raw

	cur, err := h.outbox.Find(h.t.Context(), bson.D{})
	if err == nil {
		err = cur.All(h.t.Context(), &docs)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	names := ""
	// A view has none.
	if specs, err := h.outbox.Indexes().ListSpecifications(h.t.Context()); err == nil {
		for _, s := range specs {
			names += s.Name + " "
		}
	}
	list, err := h.db.ListCollectionNames(h.t.Context(), bson.D{{Key: "name", Value: "outbox"}})
	if err != nil {
		h.t.Fatal(err)
	}
	return fmt.Sprint(docs, names, list)
}

// Two watchers with one outbox send the same ids, each from its own documents.
func TestN16_TwoWatchersSendTheSameEnvelopes(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	var list []waiting.Entry
	for i := range 20 {
		list = append(list, h.newEntry(i, "k", waiting.Blocked))
		list = append(list, h.newEntry(i, "k", waiting.Blocked, func(e *waiting.Entry) { e.Watcher = "audit" }))
	}
	h.enter(list...)

	first := h.newTerm().run()
	h.waitUntil("the first has sent its own", func() bool { return h.countLeft() == 20 })
	first.waitWritten()
	first.stop()
	h.broker.checkOrder()
	if n := h.countDocuments(bson.D{{Key: "watcher", Value: "audit"}}); n != 20 {
		t.Fatalf("the other watcher has %d of 20", n)
	}

	// The other has topics of its own.
	h.broker, h.watcher = newBroker(t), "audit"
	second := h.newTerm().run()
	h.waitEmpty()
	second.waitWritten()
	h.broker.checkOrder()
	if n := len(h.broker.listIDs("a")); n != 20 {
		t.Errorf("%d of 20 are sent", n)
	}
}

// An id is used twice: its first envelope still waits while the second one comes. Both are sent, in their order.
func TestN15_AnIDThatIsUsedTwiceIsSentTwice(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.broker.parked["a"] = true
	te := h.newTerm().run()
	add := func(pos int, payload string) {
		e := h.newEntry(1, "k", waiting.Parked, with("payload", payload))
		te.l.Add(&ledger.Outcome{End: ledger.Waiting, Reason: waiting.Parked, NS: e.NS, Raw: e.Raw, Pos: fmt.Sprintf("82%06d", pos), Key: e.Key, Topics: e.Pending})
	}
	add(1, "first")
	add(2, "second")
	h.waitUntil("both wait", func() bool { return h.countLeft() == 2 })

	te.out.unpark("a")
	h.waitEmpty()
	te.waitWritten()
	h.broker.checkRecords("a", "e000001", "e000001")
	h.broker.mu.Lock()
	defer h.broker.mu.Unlock()
	if got := h.broker.payloads; fmt.Sprint(got) != "[first second]" {
		t.Errorf("sent %v", got)
	}
}
