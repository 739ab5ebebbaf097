package waiting

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// countReads gives the scene a separate client, and returns the number of documents that the server sends to it.
func (h *scene) countReads() *atomic.Int64 {
	var n atomic.Int64
	h.client = stacktest.Client(h.t, options.Client().SetMonitor(&event.CommandMonitor{Succeeded: func(_ context.Context, e *event.CommandSucceededEvent) {
		for _, batch := range []string{"firstBatch", "nextBatch"} {
			if list, ok := e.Reply.Lookup("cursor", batch).ArrayOK(); ok {
				values, _ := list.Values()
				n.Add(int64(len(values)))
			}
		}
	}}))
	return &n
}

// Envelopes after one that waits for its next attempt are not read again and again while more of the key arrive, and
// the server does not send them when the key is read. Those for another topic are published.
func TestN15_AStoppedKeyIsPassedOver(t *testing.T) {
	t.Parallel()
	const behind = 2000
	h := newScene(t)
	docs := []bson.D{h.newException(1, "hot", "retry", bson.E{Key: "attempts", Value: int32(1)}, bson.E{Key: "nextAt", Value: time.Now().Add(time.Hour)})}
	for i := range behind {
		docs = append(docs, h.newException(2+i, "hot", "blocked"))
	}
	docs = append(docs, h.newException(5000, "hot", "parked", bson.E{Key: "pending", Value: bson.A{"b"}}), h.newException(5001, "other", "parked"))
	h.insert(docs...)
	read := h.countReads()
	te := h.newTerm().run()
	h.waitUntil("another topic of the key, and another key, flow", func() bool {
		return h.countDocuments(bson.D{{Key: "sentAt", Value: bson.D{{Key: "$ne", Value: nil}}}}) == 2
	})
	if n := read.Load(); n > behind/2 {
		t.Errorf("%d documents were read of a key that is stopped", n)
	}

	te.waitWritten()
	before := read.Load()
	for i := range 50 {
		d := h.newException(6000+i, "hot", "blocked")
		h.insert(d)
		raw, err := bson.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		te.x.QueueWritten([]Exception{{NS: h.ns(), Raw: raw, State: "blocked", Pending: []string{"a"}, Key: "hot", Pos: fmt.Sprint(d[8].Value)}})
		h.waitUntil("the loop has been round", func() bool {
			te.x.mu.Lock()
			defer te.x.mu.Unlock()
			return len(te.x.work.keys) == 0
		})
	}
	if n := read.Load() - before; n > 100 {
		t.Errorf("%d documents were read because more of a stopped key came", n)
	}
}

// If one partition of a topic cannot be written, the envelopes of its keys wait. All others are sent, and nothing is tried at each poll.
func TestN11_AParkedPartitionHoldsUpNoOtherKey(t *testing.T) {
	t.Parallel()
	const sick = 100
	h := newScene(t)
	docs := []bson.D{h.newException(9000, "k000", "blocked", bson.E{Key: "pending", Value: bson.A{"b"}})}
	for i := range 3 * sick {
		key := fmt.Sprintf("k%03d", i)
		docs = append(docs, h.newException(2*i, key, "parked"), h.newException(2*i+1, key, "blocked"))
		if i%3 == 0 {
			h.broker.sick[key] = true
		}
	}
	h.insert(docs...)
	te := h.newTerm()
	var polls atomic.Int64
	collections := te.x.config.Collections
	te.x.config.Collections = func() []outboxes.Outbox { polls.Add(1); return collections() }
	// No pass is due because of its time.
	te.x.lastPass = time.Now().Add(time.Hour)
	te.run()

	h.waitUntil("all that waits for other partitions is sent", func() bool { return h.countLeft() == 2*sick })
	te.waitWritten()
	seen := polls.Load()
	h.waitUntil("some polls", func() bool { return polls.Load() > seen+10 })
	h.broker.mu.Lock()
	if h.broker.turned != sick {
		t.Errorf("%d attempts for %d keys", h.broker.turned, sick)
	}
	clear(h.broker.sick)
	h.broker.mu.Unlock()

	te.out.unpark("a")
	h.waitEmpty()
	te.waitWritten()
	h.broker.checkOrder()
	te.out.checkSettled()
}

// An envelope with an array as its key becomes a dead letter with that reason, and the envelopes of other keys
// are published.
func TestN17_AnArrayAsAKeyIsADeadLetterAndHoldsUpNobody(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	var docs []bson.D
	for i := range 2 * firstReply { // a whole page
		docs = append(docs, setField(h.newException(1000+i, "odd", "parked"), bson.E{Key: "key", Value: bson.A{"a", int32(i)}}))
	}

	for i := range 100 {
		docs = append(docs, h.newException(2+i, fmt.Sprint("k", i), "parked"))
	}

	h.insert(docs...)
	began := time.Now()
	h.newTerm().run()
	h.waitUntil("the others are sent", func() bool {
		return h.countDocuments(bson.D{{Key: "sentAt", Value: bson.D{{Key: "$ne", Value: nil}}}}) == 100
	})
	if took := time.Since(began); took > sureEvery/2 {
		t.Errorf("the others were sent after %v, by the pass that finds missed exceptions", took)
	}

	h.waitUntil("they are dead", func() bool { return h.countLeft() == 0 })
	var letter struct{ Reason string }
	if err := h.db.Collection("outbox_dead").FindOne(t.Context(), bson.D{}).Decode(&letter); err != nil || !strings.Contains(letter.Reason, "key is") {
		t.Errorf("the reason of the letter is %q, %v", letter.Reason, err)
	}
}
