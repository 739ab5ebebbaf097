package scheduled

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// newLooking returns a Scheduled whose index is looked at by the test, and the state of its collection.
func newLooking(t *testing.T, p *planned) (*Scheduled, *scheduledCollection) {
	t.Helper()
	s := New(Config{
		Client: p.client, Now: p.now, OnRetry: func(err error) { t.Error(err) }, OnRecovered: func() {},
		Collections: func() []outboxes.Outbox { return []outboxes.Outbox{{DB: p.db.Name(), Coll: p.coll.Name()}} },
	})
	s.refreshCollections()
	list, _ := s.takeLooks(time.Now())
	if len(list) != 1 || !list[0].looking {
		t.Fatalf("%d collections are looked at", len(list))
	}
	return s, list[0]
}

// A look finds the envelope that is due first, and when it is to be claimed. A slow look is repeated later.
func TestALookFindsTheFirstEnvelope(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	p.schedule(5, time.Hour)
	first := p.schedule(1, time.Minute)[0]
	s, c := newLooking(t, p)
	began := time.Now()
	s.look(t.Context(), c)
	if due := p.findDocument(first).Lookup("dueAt").DateTime(); c.first != due {
		t.Errorf("the first is due at %d, want %d", c.first, due)
	}
	// The clocks of one machine agree.
	if in := c.claimAt.Sub(began); in < 50*time.Second || in > 60*time.Second {
		t.Errorf("it is claimed in %s", in)
	}

	c.looking = true
	s.noteLook(c, nil, began, began.Add(time.Second))
	if !c.claimAt.IsZero() || c.lookAt.Sub(began) != lookPauseFactor*time.Second {
		t.Errorf("after a slow look, the next one follows after %s", c.lookAt.Sub(began))
	}
	if list, _ := s.takeLooks(c.lookAt.Add(-1)); len(list) > 0 {
		t.Error("a look begins too early")
	}
}

// A hint for an earlier envelope leads to a look at once, also during another look, and not while the collection is paused. Other hints have no effect.
func TestAHintLeadsToALook(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	s, c := newLooking(t, p)
	ns, now := p.ns(), time.Now()
	isDue := func() bool { return !c.looking && time.Until(c.lookAt) <= claimPause }
	set := func(first *firstDue) {
		c.looking, c.lookAgain = true, false
		s.noteLook(c, first, now, now)
	}

	set(&firstDue{at: now.Add(10 * time.Second).UnixMilli(), until: 10 * time.Second})
	if s.NoteScheduled(ns, now.Add(11*time.Second)); isDue() {
		t.Error("a hint for a later envelope leads to a look")
	}
	if s.NoteScheduled(ns, now.Add(9*time.Second)); !isDue() {
		t.Error("a hint for an earlier envelope leads to no look")
	}
	set(nil)
	if s.NoteScheduled(ns, now.Add(2*horizon)); isDue() {
		t.Error("a hint for much later leads to a look")
	}
	c.looking = true
	if s.NoteScheduled(ns, now); !c.lookAgain {
		t.Error("a hint during a look is lost")
	}
	if s.noteLook(c, nil, now, now); !isDue() {
		t.Error("no look follows a hint during a look")
	}

	set(nil)
	s.OnRetry = func(error) {}
	s.pauseCollection(c, &c.failedClaims, fmt.Errorf("a fault"))
	if s.NoteScheduled(ns, now); isDue() {
		t.Error("a paused collection is looked at")
	}
}

// A look that began before a claim has ended may show claimed envelopes. Its result does not count.
func TestALookFromBeforeAClaimDoesNotCount(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	s, c := newLooking(t, p)
	now := time.Now()
	s.noteClaimed([]*part{{scheduledCollection: c, list: make([]taken, 1)}})
	s.noteLook(c, &firstDue{at: now.UnixMilli()}, now, now)
	if !c.claimAt.IsZero() || time.Until(c.lookAt) > claimPause {
		t.Errorf("a claim is due at %s, the next look at %s", c.claimAt, c.lookAt)
	}
}

// A collection that is not watched any more is removed. A collection that only the stream has named
// is looked at, too.
func TestCollectionsComeAndGo(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	s, _ := newLooking(t, p)
	s.Collections = func() []outboxes.Outbox { return nil }
	if s.refreshCollections(); len(s.collections) != 0 {
		t.Errorf("%d collections are watched, want none", len(s.collections))
	}

	s.NoteScheduled("new.outbox", time.Now())
	s.refreshCollections()
	if list, _ := s.takeLooks(time.Now().Add(time.Second)); len(list) != 1 || list[0].ns != "new.outbox" {
		t.Errorf("%d collections are looked at, want one", len(list))
	}

	s.OnRetry = func(error) {}
	c := s.collections["new.outbox"]
	s.pauseCollection(c, &c.failedLooks, fmt.Errorf("a fault"))
	recovered := false
	s.OnRecovered = func() { recovered = true }
	c.hintedAt = time.Now().Add(-keepAfterHint)
	if s.refreshCollections(); len(s.collections) != 0 {
		t.Errorf("a collection that is not listed is looked at long after the hint of the stream")
	}
	// A look at it may end later.
	s.pauseCollection(c, &c.failedLooks, fmt.Errorf("a fault"))
	if !recovered || s.failing != 0 {
		t.Errorf("the removal of a collection that fails ends the problem: %v; %d failures are left", recovered, s.failing)
	}
}

// Many collections whose looks are slow are looked at rarely, and get equal parts of a claim.
func TestManyCollectionsTakeTurns(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	s, c := newLooking(t, p)
	now := time.Now()
	for i := range 999 {
		s.NoteScheduled(fmt.Sprint("db", i, ".outbox"), now)
	}
	for range 100 {
		c.looking = true
		s.noteLook(c, &firstDue{at: now.UnixMilli()}, now, now.Add(10*time.Millisecond))
	}
	if pause := c.lookAt.Sub(now); pause < 4*time.Second || pause > 6*time.Second {
		t.Errorf("looks of 10 ms at 1000 collections are repeated after %s", pause)
	}

	for _, c := range s.collections {
		c.claimAt = now.Add(-time.Second)
	}
	parts, _, _ := s.selectDue(now, 2000)
	if len(parts) != claimCollections || parts[0].limit != 2000/claimCollections {
		t.Errorf("%d collections with up to %d envelopes", len(parts), parts[0].limit)
	}
	if parts, _, _ = s.selectDue(now, 3); len(parts) != 3 || parts[0].limit != 1 {
		t.Errorf("with room for three: %d collections with up to %d envelopes", len(parts), parts[0].limit)
	}
}

// A view can be read and not written: its envelopes cannot be claimed.
func TestACollectionThatCannotBeWrittenHoldsUpNobody(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	if err := p.db.CreateView(t.Context(), "view", "behind", bson.A{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.db.Collection("behind").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "x"}, {Key: "dueAt", Value: time.Now().Add(-time.Hour)}}); err != nil {
		t.Fatal(err)
	}

	ids := p.schedule(50, 0)
	var trouble atomic.Int64
	x := p.takeOver(func(c *setUp) {
		c.Collections = func() []outboxes.Outbox {
			return []outboxes.Outbox{{DB: p.db.Name(), Coll: "view"}, {DB: p.db.Name(), Coll: "outbox"}}
		}
		c.OnRetry = func(error) { trouble.Add(1) }
	})

	x.waitSettled(50)
	ids = append(ids, p.schedule(50, 0)...)
	x.waitSettled(100)
	x.checkSentOnce(time.UnixMilli(0), ids...)
	if trouble.Load() == 0 {
		t.Error("nothing was in the way")
	}
	if n, err := p.db.Collection("behind").CountDocuments(context.WithoutCancel(t.Context()), bson.D{}); err != nil || n != 1 {
		t.Errorf("%d %v", n, err)
	}
}
