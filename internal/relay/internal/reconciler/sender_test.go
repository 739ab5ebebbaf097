package reconciler

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func TestN15_ParkedEnvelopesDrainInOrder(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.flying = 700
	var docs []waiting.Entry
	const n = 3000
	for i := range n {
		docs = append(docs, h.newEntry(n-i, fmt.Sprint("k", i%7), waiting.Parked))
	}

	h.enter(docs...)
	h.broker.parked["a"] = true
	te := h.newTerm().run()
	h.waitUntil("the topic is known to take nothing", func() bool {
		te.x.mu.Lock()
		defer te.x.mu.Unlock()
		return len(te.x.parked) == 1 && len(te.x.inFlight) == 0
	})

	if got := h.countLeft(); got != n {
		t.Fatalf("%d are left of %d although the topic is parked", got, n)
	}

	te.out.holdResults(true)
	te.out.unpark("a")
	h.waitUntil("as many are in flight as may be", func() bool { return te.x.InFlight() == h.flying })
	te.out.holdResults(false)
	h.waitEmpty()
	te.waitWritten()
	te.stop()
	h.broker.checkOrder()
	te.out.checkSettled()
	if got := len(h.broker.listIDs("a")); got != n {
		t.Errorf("%d records of %d", got, n)
	}
	if te.out.most != h.flying {
		t.Errorf("%d were in flight at a time, want %d", te.out.most, h.flying)
	}

	opened := 0
	for _, c := range te.out.opened {
		opened += c
	}
	if opened != n {
		t.Errorf("gates were opened %d times for %d envelopes", opened, n)
	}

	if n := te.ends[ledger.Sent]; n != 3000 || h.countLetters() != 0 {
		t.Errorf("%d are sent, %d letters: an outage spends no attempts", n, h.countLetters())
	}
	// The services own the outbox.
	if names, err := h.db.ListCollectionNames(t.Context(), bson.D{{Key: "name", Value: bson.D{{Key: "$not", Value: bson.Regex{Pattern: "^outrelay_"}}}}}); err != nil || len(names) > 0 {
		t.Errorf("the relay has created %v, %v", names, err)
	}
}

func TestN15_AFailedHeadGoesAloneAndItsKeyWaits(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	// The envelope must not reach its last attempt, however long the test takes.
	h.attempts = 1_000_000
	h.enter(
		h.newEntry(1, "k", waiting.Retry, failed(1)), h.newEntry(2, "k", waiting.Blocked), h.newEntry(3, "k", waiting.Blocked),
		h.newEntry(4, "other", waiting.Parked), h.newEntry(5, "other", waiting.Blocked),
	)
	var mu sync.Mutex
	broken, tries := true, 0
	h.broker.reject = func(_ string, w written) *record.Rejection {
		mu.Lock()
		defer mu.Unlock()
		if w.id != "e000001" {
			return nil
		}
		if tries++; broken {
			return newRejection("not today")
		}
		return nil
	}

	te := h.newTerm().run()
	// reject holds mu at each try, so the count needs the lock.
	tried := func() int { mu.Lock(); defer mu.Unlock(); return tries }
	h.waitUntil("five attempts", func() bool { return tried() >= 5 && len(h.broker.listIDs("a")) == 2 })
	h.broker.checkRecords("a", "e000004", "e000005")
	d := h.find(1)
	if d["reason"] != "retry" || d["attempts"].(int32) < 4 || d["error"].(bson.D) == nil || len(d["history"].(bson.A)) < 3 {
		t.Errorf("a failed one: %v", d)
	}

	mu.Lock()
	broken = false
	mu.Unlock()
	h.waitEmpty()
	te.waitWritten()
	h.broker.checkRecords("a", "e000004", "e000005", "e000001", "e000002", "e000003")
	te.out.checkSettled()
}

func TestN15_AnEnvelopeOfTheStreamWaitsForTheResolvedPosition(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	te := h.newTerm()
	te.out.setReached("82000002")
	h.enter(h.newEntry(1, "k", waiting.Parked), h.newEntry(2, "k", waiting.Blocked), h.newEntry(3, "k", waiting.Blocked), h.newEntry(4, "q", waiting.Parked),
		h.newEntry(5, "r", waiting.Parked, origin(waiting.OriginRequeue, 1), func(e *waiting.Entry) { e.Pos = "9" }))
	te.run()
	h.waitUntil("the passed waiting envelopes are sent", func() bool { return h.countLeft() == 2 })
	if got := h.broker.listIDs("a"); len(got) != 3 {
		t.Errorf("published: %q", got)
	}

	te.out.setReached("82000003")
	h.waitUntil("the next", func() bool { return h.countLeft() == 1 })
	te.out.setReached("82000004")
	h.waitEmpty()
	h.broker.checkOrder()
}

func TestN15_OrderIsByTopic(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	both := pending("a", "b")
	h.enter(h.newEntry(1, "k", waiting.Parked, both), h.newEntry(2, "k", waiting.Blocked, pending("b")), h.newEntry(3, "k", waiting.Blocked, both))
	h.broker.parked["a"] = true

	te := h.newTerm().run()
	h.waitUntil("b has all", func() bool { return len(h.broker.listIDs("b")) == 3 })
	h.broker.checkRecords("b", "e000001", "e000002", "e000003")
	te.waitWritten()

	h.waitUntil("two wait for a", func() bool { return h.countDocuments(bson.D{{Key: "topics", Value: "a"}}) == 2 })
	te.out.unpark("a")
	h.waitEmpty()

	h.broker.checkRecords("a", "e000001", "e000003")
	h.broker.checkOrder()
}

func TestN17_AnEnvelopeAtFaultDiesAndItsKeyFlows(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.enter(
		h.newEntry(1, "k", waiting.Retry), h.newEntry(2, "k", waiting.Blocked),
		h.newEntry(3, "large", waiting.Parked), h.newEntry(4, "large", waiting.Blocked),
		h.newEntry(5, "old", waiting.Parked, with("expiresAt", time.UnixMilli(5))), h.newEntry(6, "old", waiting.Blocked),
		h.newEntry(7, "bad", waiting.Retry, with("type", 7)),
	)
	h.broker.reject = func(_ string, w written) *record.Rejection {
		switch w.id {
		case "e000001":
			return newRejection("never")
		case "e000003":
			return &record.Rejection{Class: record.MessageTooLarge, Reason: "too large"}
		}
		return nil
	}

	te := h.newTerm().run()
	h.waitEmpty()
	te.waitWritten()
	h.broker.checkOrder()
	if got := len(h.broker.listIDs("a")); got != 3 {
		t.Errorf("%d records", got)
	}

	for n, want := range map[int]record.Class{1: record.AttemptsExhausted, 3: record.MessageTooLarge, 5: record.Expired, 7: record.Malformed} {
		d := h.letterOf(n)
		if d.Class != want || d.Pos != fmt.Sprintf("82%06d", n) || d.Envelope.Lookup("_id").StringValue() != fmt.Sprintf("e%06d", n) {
			t.Errorf("letter %d: %v at %s, %s", n, d.Class, d.Pos, d.Envelope)
		}
		if n == 1 && (len(d.Attempts) != 3 || d.Attempts[2].Class != record.RecordRejected || d.Attempts[0].Node != "a") {
			t.Errorf("attempts: %+v", d.Attempts)
		}
	}

	te.out.checkSettled()
	if te.out.opened[[3]string{h.ns(), "a", "k"}] != 2 {
		t.Errorf("gates: %v", te.out.opened)
	}
}

func TestN17_ExpiredOnesAreDroppedIfAsked(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.drop = true
	h.enter(h.newEntry(1, "k", waiting.Parked, with("expiresAt", time.UnixMilli(5))))
	te := h.newTerm().run()
	h.waitUntil("it is gone", func() bool { return h.countLeft() == 0 })
	te.waitWritten()
	if n := h.countLetters(); n != 0 || te.ends[ledger.Dropped] != 1 {
		t.Errorf("%d letters, %v", n, te.ends)
	}
}

func TestN18_RequeuedAndReplayedOnesNeedNoPosition(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.route = func(*outboxes.Envelope) ([]string, error) { return []string{"a", "b"}, nil }
	te := h.newTerm()
	te.out.setReached("")
	for i, o := range []string{waiting.OriginRequeue, waiting.OriginReplay} {
		h.enter(h.newEntry(i+1, "k", waiting.Queued, origin(o, int32(i+1)), pending(), nextAt(time.UnixMilli(1)), func(e *waiting.Entry) { e.ReplayOf = "x" }))
	}

	te.run()
	h.waitEmpty()
	te.waitWritten()
	for _, topic := range []string{"a", "b"} {
		h.broker.checkRecords(topic, "e000001", "e000002")
		if l := h.broker.topics[topic]; l[0].delivery != 1 || l[1].delivery != 2 || l[0].flagged || !l[1].flagged {
			t.Errorf("%s: %+v", topic, l)
		}
	}
	if len(te.out.opened) != 0 {
		t.Errorf("gates that were not closed were opened: %v", te.out.opened)
	}
}

func TestN18_ManyThatAreDueFollowOneAnother(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	const n = 2500
	// The first due envelope cannot be sent, because an earlier envelope of its key has to wait.
	docs := []waiting.Entry{
		h.newEntry(0, "stuck", waiting.Retry, nextAt(time.Now().Add(time.Hour)), failed(1)),
	}

	for i := range n {
		key := fmt.Sprint("k", i%1700)
		if i < 50 {
			key = "stuck"
		}
		docs = append(docs, h.newEntry(i+1, key, waiting.Retry, origin(waiting.OriginRequeue, 1), nextAt(time.UnixMilli(int64(i+1)))))
	}

	h.enter(docs...)
	te := h.newTerm()
	te.x.poll = time.Hour
	te.x.work.scanAll = false
	te.run()
	h.waitUntil("all except the waiting envelopes of the stuck key are sent", func() bool { return h.countLeft() == 51 })
	te.waitWritten()
	h.broker.checkOrder()
	te.out.checkSettled()
}

func TestRecordingKeepsOrDeletes(t *testing.T) {
	t.Parallel()
	for _, recording := range []string{ledger.RecordMark, ledger.RecordDelete} {
		t.Run(recording, func(t *testing.T) {
			t.Parallel()
			h := newScene(t)
			h.recording = recording
			list := []waiting.Entry{h.newEntry(1, "k", waiting.Parked, pending("a", "b")), h.newEntry(2, "k", waiting.Blocked)}
			h.enter(list...)
			for _, e := range list {
				if _, err := h.outbox.InsertOne(t.Context(), e.Raw); err != nil {
					t.Fatal(err)
				}
			}
			h.broker.parked["b"] = true

			te := h.newTerm().run()
			h.waitUntil("a has both", func() bool { return len(h.broker.listIDs("a")) == 2 && h.countLeft() == 1 })
			te.waitWritten()

			te.out.unpark("b")
			h.waitEmpty()
			te.waitWritten()

			if recording == ledger.RecordDelete {
				if n, err := h.outbox.CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
					t.Errorf("%d documents are left, %v", n, err)
				}
				return
			}

			want := fmt.Sprint(bson.A{
				bson.D{{Key: "topic", Value: "a"}, {Key: "partition", Value: int32(0)}, {Key: "offset", Value: int64(0)}},
				bson.D{{Key: "topic", Value: "b"}, {Key: "partition", Value: int32(0)}, {Key: "offset", Value: int64(0)}},
			})
			var d bson.M
			if err := h.outbox.FindOne(t.Context(), bson.D{{Key: "_id", Value: "e000001"}}).Decode(&d); err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(d["sent"]); got != want || d["sentAt"] == nil {
				t.Errorf("sent: %s at %v, want %s", got, d["sentAt"], want)
			}
		})
	}
}

// An operator removes documents, resets one, or requeues an envelope, while they are in flight. The gates of removed ones open.
func TestN18_DocumentsThatOperatorsChangeMeanwhile(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.enter(h.newEntry(1, "gone", waiting.Parked), h.newEntry(2, "requeued", waiting.Parked), h.newEntry(3, "reset", waiting.Retry, failed(2)),
		h.newEntry(4, "dies", waiting.Parked), h.newEntry(5, "parks", waiting.Parked))
	h.broker.reject = func(_ string, w written) *record.Rejection {
		switch {
		case w.id == "e000003":
			return newRejection("no")
		case w.id == "e000004":
			return &record.Rejection{Class: record.MessageTooLarge, Reason: "no"}
		}
		return nil
	}

	te := h.newTerm()
	te.out.held = true
	te.run()
	h.waitUntil("all are in flight", func() bool { return te.x.InFlight() == 5 })
	ctx := t.Context()
	_, err1 := h.coll.DeleteOne(ctx, ofEnvelope(1))
	h.enter(h.newEntry(2, "requeued", waiting.Queued, origin(waiting.OriginRequeue, 1), nextAt(time.Now().Add(time.Hour))))
	_, err3 := h.coll.UpdateOne(ctx, ofEnvelope(3), bson.D{{Key: "$set", Value: bson.D{{Key: "attempts", Value: 0}, {Key: "nextAt", Value: time.Now().Add(time.Hour)}}}})
	_, err4 := h.coll.DeleteOne(ctx, ofEnvelope(4))
	_, err5 := h.coll.DeleteOne(ctx, ofEnvelope(5))
	if err := errors.Join(err1, err3, err4, err5); err != nil {
		t.Fatal(err)
	}

	te.out.holdResults(false)
	te.waitWritten()
	for _, n := range []int{1, 4, 5} {
		if h.find(n) != nil {
			t.Errorf("envelope %d, which was removed, is there again", n)
		}
	}
	if n := h.countLetters(); n != 0 {
		t.Error("a removed envelope became a letter")
	}
	if d := h.find(2); d["origin"] != "requeue" || d["delivery"] != int32(1) {
		t.Errorf("requeued: %v", d)
	}
	if d := h.find(3); d["reason"] != "retry" || d["attempts"] != int32(0) {
		t.Errorf("reset: %v", d)
	}
	for key, want := range map[string]int{"gone": 1, "requeued": 1, "reset": 0, "dies": 1, "parks": 1} {
		if got := te.out.opened[[3]string{h.ns(), "a", key}]; got != want {
			t.Errorf("the gate of key %s was opened %d times, want %d", key, got, want)
		}
	}
	te.out.checkSettled()
}

func TestN03_ADeposedOwnerFinishesNothing(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.enter(h.newEntry(1, "k", waiting.Parked), h.newEntry(2, "q", waiting.Parked))
	te := h.newTerm()
	te.out.held = true
	te.run()
	h.waitUntil("both are in flight", func() bool { return te.x.InFlight() == 2 })
	if _, err := h.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{
		{Key: "owner", Value: "b#1"}, {Key: "epoch", Value: int64(99)}, {Key: "expiresAt", Value: time.Now().Add(time.Hour)},
	}}}); err != nil {
		t.Fatal(err)
	}

	te.out.holdResults(false)
	select {
	case <-h.held.Context().Done():
	case <-time.After(overdue):
		t.Fatal("the lease was not lost")
	}

	te.stop()
	if n := h.countLeft(); n != 2 {
		t.Errorf("a deposed owner finished %d", 2-n)
	}
	if len(te.out.settled) > 0 || len(te.out.opened) > 0 {
		t.Errorf("settled %v, opened %v although nothing is written", te.out.settled, te.out.opened)
	}
}

// An envelope is published at once when it is stored, and not by the next poll.
func TestAStoredEnvelopeWakesItsKeyAtOnce(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	te := h.newTerm()
	te.x.poll = time.Hour
	te.run()
	h.waitUntil("the first pass is over", func() bool { te.x.mu.Lock(); defer te.x.mu.Unlock(); return !te.x.work.scanAll })
	e := h.newEntry(1, "k", waiting.Blocked)
	te.l.Add(&ledger.Outcome{End: ledger.Waiting, Reason: e.Reason, NS: e.NS, Raw: e.Raw, Pos: e.Pos, Key: e.Key, Topics: e.Pending})
	h.waitUntil("it is published", func() bool { return len(h.broker.listIDs("a")) == 1 })
	h.waitEmpty()
	h.broker.checkRecords("a", "e000001")
}
