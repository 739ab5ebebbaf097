package waiting

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

func TestN15_ParkedEnvelopesDrainInOrder(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.flying = 700
	var docs []bson.D
	const n = 3000
	for i := range n {
		docs = append(docs, h.newException(n-i, fmt.Sprint("k", i%7), "parked"))
	}

	h.insert(docs...)
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

	te.out.holdAnswers(true)
	te.out.unpark("a")
	h.waitUntil("as many are in flight as may be", func() bool { return te.x.InFlight() == h.flying })
	te.out.holdAnswers(false)
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

	d := h.findDocument("e000001")
	for _, f := range []string{"state", "pos", "pending", "attempts", "origin", "nextAt", "history", "lastError"} {
		if _, left := d[f]; left {
			t.Errorf("a finished envelope still has %s", f)
		}
	}
	if _, ok := d["sentAt"].(bson.DateTime); !ok || d["ts"].(bson.Timestamp).T < 1_600_000_000 {
		t.Errorf("a finished envelope: %v", d)
	}
	if got := h.countDocuments(bson.D{{Key: "attempts", Value: bson.D{{Key: "$gt", Value: 0}}}}); got != 0 {
		t.Errorf("an outage spent attempts on %d envelopes", got)
	}
}

func TestN15_AFailedHeadGoesAloneAndItsKeyWaits(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	// The envelope must not reach its last attempt, however long the test takes.
	h.attempts = 1_000_000
	h.insert(
		h.newException(1, "k", "retry", bson.E{Key: "attempts", Value: int32(1)}), h.newException(2, "k", "blocked"), h.newException(3, "k", "blocked"),
		h.newException(4, "other", "parked"), h.newException(5, "other", "blocked"),
	)
	var mu sync.Mutex
	broken, tries := true, 0
	h.broker.refuse = func(_ string, w written) *record.Refusal {
		mu.Lock()
		defer mu.Unlock()
		if w.id != "e000001" {
			return nil
		}
		if tries++; broken {
			return newRefusal("not today")
		}
		return nil
	}

	te := h.newTerm().run()
	// refuse holds mu at each try, so the count needs the lock.
	tried := func() int { mu.Lock(); defer mu.Unlock(); return tries }
	h.waitUntil("five attempts", func() bool { return tried() >= 5 && len(h.broker.listIDs("a")) == 2 })
	h.broker.checkRecords("a", "e000004", "e000005")
	d := h.findDocument("e000001")
	if d["state"] != "retry" || d["attempts"].(int32) < 4 || d["lastError"].(bson.D) == nil || len(d["history"].(bson.A)) < 3 {
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

func TestN15_AnExceptionOfTheStreamWaitsForTheWatermark(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	te := h.newTerm()
	te.out.setReached("82000002")
	h.insert(h.newException(1, "k", "parked"), h.newException(2, "k", "blocked"), h.newException(3, "k", "blocked"), h.newException(4, "q", "parked"),
		h.newException(5, "r", "parked", bson.E{Key: "origin", Value: "requeue"}, bson.E{Key: "pos", Value: "9"}))
	te.run()
	h.waitUntil("the passed exceptions are sent", func() bool { return h.countLeft() == 2 })
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
	both := bson.E{Key: "pending", Value: bson.A{"a", "b"}}
	h.insert(h.newException(1, "k", "parked", both), h.newException(2, "k", "blocked", bson.E{Key: "pending", Value: bson.A{"b"}}), h.newException(3, "k", "blocked", both))
	h.broker.parked["a"] = true

	te := h.newTerm().run()
	h.waitUntil("b has all", func() bool { return len(h.broker.listIDs("b")) == 3 })
	h.broker.checkRecords("b", "e000001", "e000002", "e000003")
	te.waitWritten()

	h.waitUntil("two wait for a", func() bool { return h.countDocuments(bson.D{{Key: "pending", Value: bson.A{"a"}}}) == 2 })
	te.out.unpark("a")
	h.waitEmpty()

	h.broker.checkRecords("a", "e000001", "e000003")
	h.broker.checkOrder()
}

func TestN17_AnEnvelopeAtFaultDiesAndItsKeyFlows(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.insert(
		h.newException(1, "k", "retry"), h.newException(2, "k", "blocked"),
		h.newException(3, "large", "parked"), h.newException(4, "large", "blocked"),
		h.newException(5, "old", "parked", bson.E{Key: "expiresAt", Value: time.UnixMilli(5)}), h.newException(6, "old", "blocked"),
		h.newException(7, "bad", "retry", bson.E{Key: "type", Value: 7}),
	)
	h.broker.refuse = func(_ string, w written) *record.Refusal {
		switch w.id {
		case "e000001":
			return newRefusal("never")
		case "e000003":
			return &record.Refusal{Class: record.MessageTooLarge, Reason: "too large"}
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
		id := bson.RawValue{Type: bson.TypeString}
		_, id.Value, _ = bson.MarshalValue(fmt.Sprintf("e%06d", n))
		d, err := deadletter.Open(t.Context(), h.db, deadletter.ID{NS: h.ns(), ID: id})
		if err != nil || d.Class != want {
			t.Errorf("letter %d: %v, %v", n, d.Class, err)
			continue
		}
		if _, err := d.Envelope.LookupErr("state"); err == nil || d.Pos == "" {
			t.Errorf("letter %d is stored as an exception, pos %q", n, d.Pos)
		}
		if n == 1 && (len(d.Attempts) != 3 || d.Attempts[2].Class != record.RecordRefused || d.Attempts[0].Node != "a") {
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
	h.insert(h.newException(1, "k", "parked", bson.E{Key: "expiresAt", Value: time.UnixMilli(5)}))
	te := h.newTerm().run()
	h.waitUntil("it is gone", func() bool { return h.countDocuments(bson.D{}) == 0 })
	te.waitWritten()
	if n, _ := h.db.Collection("outbox_dead").CountDocuments(t.Context(), bson.D{}); n != 0 || te.ends[Dropped] != 1 {
		t.Errorf("%d letters, %v", n, te.ends)
	}
}

func TestN18_RequeuedAndReplayedOnesNeedNoWatermark(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.route = func(*outboxes.Envelope) ([]string, error) { return []string{"a", "b"}, nil }
	te := h.newTerm()
	te.out.setReached("")
	for i, origin := range []string{"requeue", "replay"} {
		d := h.newException(i+1, "k", "retry", bson.E{Key: "origin", Value: origin}, bson.E{Key: "delivery", Value: int32(i + 1)}, bson.E{Key: "replayOf", Value: "x"})
		for j := range d {
			if d[j].Key == "pending" {
				d[j].Value = nil
			}
		}
		h.insert(d)
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
	if d := h.findDocument("e000001"); d["replayOf"] != "x" || d["delivery"] != int32(1) {
		t.Errorf("the marks of the replay are gone: %v", d)
	}
}

func TestN18_ManyThatAreDueFollowOneAnother(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	const n = 2500
	// The first due envelope cannot be sent, because an earlier envelope of its key has to wait.
	docs := []bson.D{
		h.newException(0, "stuck", "retry", bson.E{Key: "nextAt", Value: time.Now().Add(time.Hour)}, bson.E{Key: "attempts", Value: int32(1)}),
	}

	for i := range n {
		key := fmt.Sprint("k", i%1700)
		if i < 50 {
			key = "stuck"
		}
		docs = append(docs, h.newException(i+1, key, "retry", bson.E{Key: "origin", Value: "requeue"}, bson.E{Key: "nextAt", Value: time.UnixMilli(int64(i + 1))}))
	}

	h.insert(docs...)
	te := h.newTerm()
	te.x.poll = time.Hour
	te.x.work.scanAll = false
	te.run()
	h.waitUntil("all except the exceptions of the stuck key are sent", func() bool { return h.countLeft() == 51 })
	te.waitWritten()
	h.broker.checkOrder()
	te.out.checkSettled()
}

func TestRecordingKeepsOrDeletes(t *testing.T) {
	t.Parallel()
	for _, recording := range []string{"mark", "delete"} {
		t.Run(recording, func(t *testing.T) {
			t.Parallel()
			h := newScene(t)
			h.recording = recording

			h.insert(h.newException(1, "k", "parked", bson.E{Key: "pending", Value: bson.A{"a", "b"}}), h.newException(2, "k", "blocked"))
			h.broker.parked["b"] = true

			te := h.newTerm().run()
			h.waitUntil("a has both", func() bool { return len(h.broker.listIDs("a")) == 2 && h.countLeft() == 1 })
			te.waitWritten()

			te.out.unpark("b")
			h.waitEmpty()
			te.waitWritten()

			if recording == "delete" {
				if n := h.countDocuments(bson.D{}); n != 0 {
					t.Errorf("%d documents are left", n)
				}
				return
			}

			want := fmt.Sprint(bson.A{
				bson.D{{Key: "topic", Value: "a"}, {Key: "partition", Value: int32(0)}, {Key: "offset", Value: int64(0)}},
				bson.D{{Key: "topic", Value: "b"}, {Key: "partition", Value: int32(0)}, {Key: "offset", Value: int64(0)}},
			})
			if got := fmt.Sprint(h.findDocument("e000001")["sent"]); got != want {
				t.Errorf("sent: %s, want %s", got, want)
			}
		})
	}
}

func TestEnvelopesChangedMeanwhileAreLeftAlone(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.insert(h.newException(1, "gone", "parked"), h.newException(2, "requeued", "parked"), h.newException(3, "reset", "retry", bson.E{Key: "attempts", Value: int32(2)}),
		h.newException(4, "dies", "parked"))
	h.broker.refuse = func(_ string, w written) *record.Refusal {
		switch {
		case w.id == "e000003":
			return newRefusal("no")
		case w.id == "e000004":
			return &record.Refusal{Class: record.MessageTooLarge, Reason: "no"}
		}
		return nil
	}

	te := h.newTerm()
	te.out.held = true
	te.run()
	h.waitUntil("all are in flight", func() bool { return te.x.InFlight() == 4 })
	ctx := t.Context()
	id := func(n int) bson.D { return bson.D{{Key: "_id", Value: fmt.Sprintf("e%06d", n)}} }
	_, err1 := h.coll.DeleteOne(ctx, id(1))
	_, err2 := h.coll.ReplaceOne(ctx, id(2), h.newException(2, "requeued", "retry", bson.E{Key: "delivery", Value: int32(1)}, bson.E{Key: "origin", Value: "requeue"},
		bson.E{Key: "nextAt", Value: time.Now().Add(time.Hour)}))
	_, err3 := h.coll.UpdateOne(ctx, id(3), bson.D{{Key: "$set", Value: bson.D{{Key: "attempts", Value: 0}, {Key: "nextAt", Value: time.Now().Add(time.Hour)}}}})
	_, err4 := h.coll.DeleteOne(ctx, id(4))
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Fatal(err)
	}

	te.out.holdAnswers(false)
	te.waitWritten()
	if h.countDocuments(id(1)) != 0 || h.countDocuments(id(4)) != 0 {
		t.Error("a deleted one is there again")
	}
	if n, _ := h.db.Collection("outbox_dead").CountDocuments(ctx, bson.D{}); n != 0 {
		t.Error("a deleted one became a letter")
	}
	if d := h.findDocument("e000002"); d["state"] != "retry" || d["delivery"] != int32(1) {
		t.Errorf("requeued: %v", d)
	}
	if d := h.findDocument("e000003"); d["state"] != "retry" || d["attempts"] != int32(0) {
		t.Errorf("reset: %v", d)
	}

	te.out.checkSettled()
}

func TestN03_ADeposedOwnerFinishesNothing(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.insert(h.newException(1, "k", "parked"), h.newException(2, "q", "parked"))
	te := h.newTerm()
	te.out.held = true
	te.run()
	h.waitUntil("both are in flight", func() bool { return te.x.InFlight() == 2 })
	if _, err := h.db.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{
		{Key: "owner", Value: "b#1"}, {Key: "epoch", Value: int64(99)}, {Key: "expiresAt", Value: time.Now().Add(time.Hour)},
	}}}); err != nil {
		t.Fatal(err)
	}

	te.out.holdAnswers(false)
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

func TestNoQueryWhileNothingIsDirty(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.insert(h.newException(1, "k", "parked"))
	te := h.newTerm()
	te.dirty.Store(false)
	var polls atomic.Int64
	collections := te.x.config.Collections
	te.x.config.Collections = func() []outboxes.Outbox { polls.Add(1); return collections() }
	te.run()
	h.waitUntil("some polls", func() bool { return polls.Load() > 5 })
	if len(h.broker.listIDs("a")) != 0 {
		t.Error("a clean collection was read")
	}

	te.dirty.Store(true)
	h.waitEmpty()
}

func TestWrittenWakesTheKeyAtOnce(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	te := h.newTerm()
	te.x.poll = time.Hour
	te.run()
	list := []Exception{{NS: h.ns(), State: "blocked", Pos: "82000001", Key: "k", Pending: []string{"a"}}}
	list[0].Raw, _ = bson.Marshal(h.newException(1, "k", "x")[:6])
	h.waitUntil("the first pass is over", func() bool { te.x.mu.Lock(); defer te.x.mu.Unlock(); return !te.x.work.scanAll })
	if err := WriteExceptions(t.Context(), h.held, list, nil); err != nil {
		t.Fatal(err)
	}

	te.x.QueueWritten(list)
	h.waitEmpty()
	h.broker.checkRecords("a", "e000001")
}
