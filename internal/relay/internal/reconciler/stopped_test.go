package reconciler

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

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// countReads gives the scene a separate client. It returns the number of documents that the server sends to it, and of
// queries for due envelopes, of which each poll makes one.
func (h *scene) countReads() (documents, polls *atomic.Int64) {
	var n, due atomic.Int64
	h.client = stacktest.Client(h.t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if _, err := e.Command.LookupErr("pipeline", "0", "$match", "nextAt"); err == nil {
			due.Add(1)
		}
	}, Succeeded: func(_ context.Context, e *event.CommandSucceededEvent) {
		for _, batch := range []string{"firstBatch", "nextBatch"} {
			if list, ok := e.Reply.Lookup("cursor", batch).ArrayOK(); ok {
				values, _ := list.Values()
				n.Add(int64(len(values)))
			}
		}
	}}))
	return &n, &due
}

// Envelopes after one that waits for its next attempt are not read again and again while more of the key arrive, and
// the server does not send them when the key is read. Those for another topic are published.
func TestN15_AStoppedKeyIsPassedOver(t *testing.T) {
	t.Parallel()
	const behind = 2000
	h := newScene(t)
	docs := []waiting.Entry{h.newEntry(1, "hot", waiting.Retry, failed(1), nextAt(time.Now().Add(time.Hour)))}
	for i := range behind {
		docs = append(docs, h.newEntry(2+i, "hot", waiting.Blocked))
	}
	docs = append(docs, h.newEntry(5000, "hot", waiting.Parked, pending("b")), h.newEntry(5001, "other", waiting.Parked))
	h.enter(docs...)
	read, polls := h.countReads()
	te := h.newTerm().run()
	h.waitUntil("another topic of the key, and another key, flow", func() bool { return h.countLeft() == behind+1 })
	if n := read.Load(); n > behind/2 {
		t.Errorf("%d documents were read of a key that is stopped", n)
	}

	te.waitWritten()
	before := read.Load()
	for i := range 50 {
		e := h.newEntry(6000+i, "hot", waiting.Blocked)
		h.enter(e)
		round := polls.Load()
		te.entered.Put(&e)
		h.waitUntil("the loop has been round", func() bool { return polls.Load() > round+1 })
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
	docs := []waiting.Entry{h.newEntry(9000, "k000", waiting.Blocked, pending("b"))}
	for i := range 3 * sick {
		key := fmt.Sprintf("k%03d", i)
		docs = append(docs, h.newEntry(2*i, key, waiting.Parked), h.newEntry(2*i+1, key, waiting.Blocked))
		if i%3 == 0 {
			h.broker.sick[key] = true
		}
	}
	h.enter(docs...)
	_, polls := h.countReads()
	te := h.newTerm()
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

// Envelopes with an array as their key become dead letters with that reason, and the envelopes of other keys are published.
func TestN17_AnArrayAsAKeyIsADeadLetterAndHoldsUpNobody(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	var docs []waiting.Entry
	for i := range 2 * firstResponse { // a whole page
		docs = append(docs, h.newEntry(1000+i, "odd", waiting.Parked, with("key", bson.A{"a", int32(i)})))
	}
	for i := range 100 {
		docs = append(docs, h.newEntry(2+i, fmt.Sprint("k", i), waiting.Parked))
	}

	h.enter(docs...)
	began := time.Now()
	h.newTerm().run()
	h.waitUntil("the others are sent", func() bool { return len(h.broker.listIDs("a")) == 100 })
	if took := time.Since(began); took > sureEvery/2 {
		t.Errorf("the others were sent after %v, by the pass that finds missed envelopes", took)
	}

	h.waitEmpty()
	if l := h.letterOf(1000); !strings.Contains(l.Reason, "key is") || h.countLetters() != 2*firstResponse {
		t.Errorf("the reason of a letter is %q, %d letters", l.Reason, h.countLetters())
	}
}

// An envelope that failed before is published alone. If others of its key are in flight, it follows their ends, and does not wait for the pass
// of a minute later.
func TestN15_AnEnvelopeThatGoesAloneFollowsTheOthersAtOnce(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.enter(h.newEntry(1, "k", waiting.Parked), h.newEntry(2, "k", waiting.Blocked), h.newEntry(3, "k", waiting.Blocked, failed(1)),
		h.newEntry(4, "k", waiting.Blocked))
	began := time.Now()
	h.newTerm().run()

	h.waitEmpty()
	h.broker.checkRecords("a", "e000001", "e000002", "e000003", "e000004")
	if took := time.Since(began); took > sureEvery/2 {
		t.Errorf("the last one was sent after %v", took)
	}
}
