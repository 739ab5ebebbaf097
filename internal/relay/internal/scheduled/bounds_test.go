package scheduled

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

// insertLarge inserts scheduled envelopes with a body of so many bytes, and returns their ids.
func (p *planned) insertLarge(n, bytes int, due time.Time) (ids []event.ID) {
	p.t.Helper()
	for range n {
		id := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Due", event.Bytes("", nil)).ID()
		doc := bson.D{
			{Key: "_id", Value: id},
			{Key: "ts", Value: bson.Timestamp{}},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "o-1"},
			{Key: "type", Value: "Due"},
			{Key: "dueAt", Value: due},
			{Key: "payload", Value: make([]byte, bytes)},
		}
		if _, err := p.coll.InsertOne(p.t.Context(), doc); err != nil {
			p.t.Fatal(err)
		}
		ids = append(ids, id)
	}
	return ids
}

// Ten envelopes of 6 MB are due at once, and Kafka does not accept any of them. The relay holds a few of them in memory, and leaves
// the others in the outbox.
func TestLargeEnvelopesAreClaimedAsMemoryAllows(t *testing.T) {
	t.Parallel()
	const n, size = 10, 6 << 20
	p := newPlanned(t)
	ids := p.insertLarge(n, size, time.Now())
	blocked, free := make(chan struct{}, n), make(chan struct{})
	x := p.takeOver(func(c *setUp) {
		c.outlet.result = func(ctx context.Context, _ string) ([]record.Result, error) {
			blocked <- struct{}{}
			select {
			case <-free:
				return []record.Result{{Topic: "t", Offset: 1}}, nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
	})

	<-blocked
	// It claims until there is no room, one at a time.
	most := int64(maxClaimedBytes/size + 1)
	last, since := int64(-1), time.Now()
	for time.Since(since) < 3*time.Second {
		claimed, err := waiting.CountClaimed(t.Context(), p.claims, watcherID)
		if err != nil {
			t.Fatal(err)
		}
		if claimed > most {
			t.Fatalf("%d envelopes of 6 MB are claimed, want at most %d", claimed, most)
		}
		if claimed != last {
			last, since = claimed, time.Now()
		}
	}
	close(free)
	x.waitSettled(n)
	x.checkSentOnce(time.Time{}, ids...)
	p.checkNothingLeft()
}

// N16: an envelope that fits its outbox and does not fit the store becomes a dead letter, and delays no other.
func TestN16_AnEnvelopeThatTheStoreRejectsBecomesADeadLetter(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(30, 0)
	large := p.insertLarge(1, 16<<20-300, time.Now())
	ids = append(ids, p.schedule(30, 0)...)

	var dead atomic.Int32
	x := p.takeOver(func(c *setUp) {
		c.ledger.Count = func(o *ledger.Outcome) {
			if o.End == ledger.Dead {
				dead.Add(1)
			}
		}
	})
	x.waitSettled(60)
	x.checkSentOnce(time.Time{}, ids...)
	stacktest.EventuallyIn(t, overdue, "a dead letter", func() bool { return dead.Load() > 0 })
	letter, err := p.letters.FindOne(t.Context(), bson.D{{Key: "id", Value: large[0]}}).Raw()
	if err != nil || letter.Lookup("reason").StringValue() == "" {
		t.Errorf("the letter: %v %v", letter, err)
	}
	stacktest.EventuallyIn(t, overdue, "it leaves the outbox", func() bool { return p.findDocument(large[0]) == nil })
	p.checkNothingLeft()
}

// N19: an outbox whose validator rejects the mark of one envelope delays no other. That envelope is sent, too.
func TestN19_AnEnvelopeThatCannotBeMarkedDelaysNoOther(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(40, 0)
	bad := ids[17]
	valid := bson.A{
		bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: p.findDocument(bad).Lookup("_id")}}}},
		bson.D{{Key: "scheduledFor", Value: nil}},
	}
	validate := bson.D{{Key: "collMod", Value: p.coll.Name()}, {Key: "validator", Value: bson.D{{Key: "$or", Value: valid}}}}
	if err := p.db.RunCommand(t.Context(), validate).Err(); err != nil {
		t.Fatal(err)
	}

	var problems atomic.Int64
	x := p.takeOver(func(c *setUp) {
		c.ledger.Recording = ledger.RecordMark
		c.OnRetry = func(error) { problems.Add(1) }
	})
	x.waitSettled(len(ids))
	x.checkSentOnce(time.Time{}, ids...)
	for _, id := range ids {
		doc := p.findDocument(id)
		if id == bad && doc != nil || id != bad && doc.Lookup("scheduledFor").Type != bson.TypeDateTime {
			t.Errorf("in the outbox: %s", doc)
		}
	}
	if n := problems.Load(); n > 0 {
		t.Errorf("the outbox was paused %d times", n)
	}
}

// N19: envelopes that are malformed in different ways become dead letters, once each, and leave the outbox.
func TestN19_MalformedEnvelopesBecomeDeadLetters(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	due := bson.E{Key: "dueAt", Value: time.Now()}
	list := []bson.D{
		{due},
		{due, {Key: "payload", Value: 3.5}},
		{due, {Key: "aggregateid", Value: 5}, {Key: "payload", Value: "p"}},
		{due, {Key: "aggregatetype", Value: "a"}, {Key: "aggregateid", Value: "b"}, {Key: "type", Value: "c"}, {Key: "headers", Value: "no"}},
		{due, {Key: "key", Value: bson.A{1, 2}}, {Key: "expiresAt", Value: "soon"}},
		{due, {Key: "slot", Value: bson.D{}}, {Key: "scheduledFor", Value: 1}, {Key: "nextAt", Value: "x"}, {Key: "pending", Value: 7}},
	}
	for i, doc := range list {
		if _, err := p.coll.InsertOne(t.Context(), append(bson.D{{Key: "_id", Value: i}}, doc...)); err != nil {
			t.Fatal(err)
		}
	}
	good := p.schedule(5, 0)

	var dead atomic.Int32
	x := p.takeOver(func(c *setUp) {
		c.ledger.Count = func(o *ledger.Outcome) {
			if o.End == ledger.Dead {
				dead.Add(1)
				c.outlet.mu.Lock()
				c.outlet.reportNext()
				c.outlet.mu.Unlock()
			}
		}
	})
	x.waitSettled(len(good))
	x.waitUntil("the letters", func(*outlet) bool { return int(dead.Load()) == len(list) })
	x.checkSentOnce(time.Time{}, good...)
	if n, err := p.letters.CountDocuments(t.Context(), bson.D{{Key: "class", Value: record.Malformed}}); err != nil || int(n) != len(list) {
		t.Errorf("%d letters, want %d; %v", n, len(list), err)
	}
	p.checkNothingLeft()
}

// N19: an outbox that rejects each claim, because the relay's user may not remove its documents or because it is a view, delays no
// other. It is a problem until it accepts claims.
func TestN19_AnOutboxThatRejectsClaimsDelaysNoOther(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	if err := p.db.CreateView(t.Context(), "view", "behind", bson.A{}); err != nil {
		t.Fatal(err)
	}
	old := bson.D{{Key: "_id", Value: "x"}, {Key: "dueAt", Value: time.Now().Add(-time.Hour)}}
	if _, err := p.db.Collection("behind").InsertOne(t.Context(), old); err != nil {
		t.Fatal(err)
	}

	var problems, recovered atomic.Int64
	x := p.takeOver(func(c *setUp) {
		c.Collections = func() []outboxes.Outbox {
			return []outboxes.Outbox{{DB: p.db.Name(), Coll: "view"}, {DB: p.db.Name(), Coll: "outbox"}}
		}
		c.OnRetry = func(error) { problems.Add(1) }
		c.OnRecovered = func() { recovered.Add(1) }
	})

	var ids []event.ID
	var late []time.Duration
	for i := range 12 {
		due := time.Now().Add(300 * time.Millisecond).Truncate(time.Millisecond)
		ids = append(ids, p.schedule(1, time.Until(due))...)
		x.waitSettled(i + 1)
		late = append(late, x.outlet.sentAt(ids[i]).Sub(due))
	}
	x.checkSentOnce(time.Time{}, ids...)
	// A wait of all outboxes for this outbox would be seconds long.
	slices.Sort(late)
	if late[len(late)*3/4] > 2*time.Second {
		t.Errorf("late by %v", late)
	}
	if problems.Load() == 0 || recovered.Load() > 0 {
		t.Errorf("%d problems, %d recoveries", problems.Load(), recovered.Load())
	}

	// Then it is a collection.
	if err := p.db.Collection("view").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := p.db.Collection("view").InsertOne(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	stacktest.EventuallyIn(t, overdue, "the end of the problem", func() bool { return recovered.Load() > 0 })
}

// The estimate of the server's clock goes back or forward by an hour, and is corrected two seconds later. No envelope is sent before it
// is due, and afterwards none waits longer than five seconds.
func TestN19_AStepOfTheClock(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{-time.Hour, time.Hour} {
		t.Run(step.String(), func(t *testing.T) {
			t.Parallel()
			p := newPlanned(t)
			x := p.takeOver(nil)
			p.schedule(1, 300*time.Millisecond)
			x.waitSettled(1)

			type planned struct {
				id  event.ID
				due time.Time
			}
			var list []planned
			add := func(in time.Duration) {
				due := time.Now().Add(in).Truncate(time.Millisecond)
				list = append(list, planned{p.schedule(1, time.Until(due))[0], due})
			}
			// Some are claimed, and some are in the cache, when the step comes.
			for i := range 10 {
				add(time.Duration(i) * 400 * time.Millisecond)
			}
			p.skew.Store(int64(step))
			add(time.Second)
			select {
			case <-time.After(2 * time.Second):
			case <-t.Context().Done():
			}
			p.skew.Store(0)
			right := time.Now()
			for i := range 4 {
				add(time.Duration(i) * 300 * time.Millisecond)
			}

			x.waitSettled(1 + len(list))
			for _, e := range list {
				at := x.outlet.sentAt(e.id)
				if at.Before(e.due) {
					t.Errorf("sent %s before it is due", e.due.Sub(at))
				}
				// The clock is right since then. The machine of a test may be slow.
				if late := at.Sub(e.due); at.Sub(right) > 5*time.Second && late > 5*time.Second {
					t.Errorf("sent %s after it is due", late)
				}
			}
		})
	}
}

// N19: an outbox whose claims never end in time, because its indexes are missing or something has locked it, delays no other. It is a problem
// until it has no due envelope.
func TestN19_AnOutboxWhoseClaimsDoNotEndDelaysNoOther(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	slow := p.db.Collection("slow")
	if _, err := slow.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "x"}, {Key: "dueAt", Value: time.Now().Add(-time.Hour)}}); err != nil {
		t.Fatal(err)
	}

	var problems, recovered atomic.Int64
	ids := p.schedule(300, 0)
	x := p.takeOver(func(c *setUp) {
		c.Collections = func() []outboxes.Outbox {
			return []outboxes.Outbox{{DB: p.db.Name(), Coll: "slow"}, {DB: p.db.Name(), Coll: "outbox"}}
		}
		c.Fencer = &stacktest.Hasty{Fence: c.Fencer, Coll: slow, Most: 0}
		c.OnRetry = func(error) { problems.Add(1) }
		c.OnRecovered = func() { recovered.Add(1) }
	})
	x.waitSettled(300)
	stacktest.EventuallyIn(t, overdue, "a problem", func() bool { return problems.Load() > 0 })
	for round := range 3 {
		ids = append(ids, p.schedule(200, 0)...)
		x.waitSettled(500 + 200*round)
	}
	x.checkSentOnce(time.Time{}, ids...)
	if n := recovered.Load(); n > 0 {
		t.Errorf("%d recoveries", n)
	}

	if _, err := slow.DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}
	stacktest.EventuallyIn(t, overdue, "the end of the problem", func() bool { return recovered.Load() > 0 })
}
