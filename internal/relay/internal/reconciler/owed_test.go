package reconciler

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// N22: while a sweep may owe an envelope to another topic, it waits, and later ones of its key in its topic wait with it. Nothing else does.
func TestN22_AnEnvelopeThatASweepOwesWaits(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	swept := origin(waiting.OriginSweep, 0)
	te := h.newTerm()
	te.out.holdSwept(true)
	h.enter(
		h.newEntry(1, "k", waiting.Parked, swept), h.newEntry(2, "k", waiting.Blocked), h.newEntry(3, "l", waiting.Parked, swept, with("aggregateid", bson.A{})),
		// It is the last one in the order of the store.
		h.newEntry(4, "q", waiting.Parked),
	)
	te.run()
	h.waitUntil("the pass has reached the last envelope", func() bool { return h.find(4) == nil })
	h.broker.checkRecords("a", "e000004")
	if h.countLeft() != 3 || h.countLetters() != 0 {
		t.Errorf("%d wait, and %d are dead", h.countLeft(), h.countLetters())
	}

	te.out.holdSwept(false)
	h.waitEmpty()
	te.waitWritten()
	h.broker.checkRecords("a", "e000004", "e000001", "e000002")
	if h.countLetters() != 1 {
		t.Errorf("%d letters, want that of the malformed envelope", h.countLetters())
	}
}

// N22: a batch of an earlier owner may be in the log although it was given back, while the other topic does not have the envelope. The next
// owner does not send it again. It stays in its outbox, where the repeated sweep finds it.
func TestN22_AnEnvelopeThatASweepOwesIsFinishedWithoutARecordInItsOutbox(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.recording = ledger.RecordDelete
	h.insertAll(3, "p")
	h.enter(h.newEntry(1, "k", waiting.Parked, origin(waiting.OriginSweep, 0)), h.newEntry(2, "k", waiting.Parked))
	for _, id := range []string{"e000001", "e000002"} {
		h.broker.appendRecord("a", id, "k", 0)
	}

	te := h.newTerm()
	defer te.out.kill(nil)
	te.out.holdSwept(true)
	if n, err := te.x.FinishSent(t.Context()); err != nil || n != 2 || h.countLeft() != 0 {
		t.Fatalf("%d are finished, %d wait, %v", n, h.countLeft(), err)
	}
	for i, want := range []int64{1, 1, 0} {
		if n, err := h.outbox.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: ofEnvelope(i)[0].Value}}); err != nil || n != want {
			t.Errorf("the outbox has envelope %d %d times, want %d, %v", i, n, want, err)
		}
	}
}

// N8: a record of the stream has the time of its commit, and a swept envelope that may have been sent before has another time.
func TestN08_ASweptEnvelopeIsRecognizedWithoutItsTime(t *testing.T) {
	t.Parallel()
	for origin, want := range map[string]bool{waiting.OriginSweep: true, waiting.OriginStream: false} {
		document := &waiting.Document{NS: "shop.outbox", Origin: origin, StreamMS: 5000}
		if got := envelopeOf(document).AnyTime; got != want {
			t.Errorf("origin %s: any time %t", origin, got)
		}
		// It was never sent out of the stream, and a later event may have its id.
		document.StreamMS = 0
		if envelopeOf(document).AnyTime {
			t.Errorf("origin %s, not sent before: any time", origin)
		}
	}
}
