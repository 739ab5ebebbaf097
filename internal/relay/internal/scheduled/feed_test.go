package scheduled

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// newFeeding returns a Scheduled whose index is read by the test.
func newFeeding(t *testing.T, p *planned) (*Scheduled, *scheduledCollection) {
	t.Helper()
	s := New(Config{
		Client: p.client, Now: p.now, OnRetry: func(err error) { t.Error(err) },
		Collections: func() []outboxes.Outbox { return []outboxes.Outbox{{DB: p.db.Name(), Coll: p.coll.Name()}} },
	})
	list := s.watchedCollections()
	if len(list) != 1 || !s.shouldRead(list[0]) {
		t.Fatalf("%d collections are watched", len(list))
	}
	t.Cleanup(list[0].closeCursor)
	return s, list[0]
}

// A look that took long is repeated later.
func TestASlowIndexIsReadRarely(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	p.schedule(1, time.Hour)
	s, c := newFeeding(t, p)
	s.continuePass(t.Context(), c)
	if want := min(max(s.Poll, passPauseFactor*c.passTook), maxPassPause); c.nextPass.Sub(c.passBegan) != want {
		t.Errorf("a collection is read again after %s, want %s", c.nextPass.Sub(c.passBegan), want)
	}
	if c.nextPass = time.Now().Add(time.Hour); s.shouldRead(c) || s.timers.entryCount() != 0 {
		t.Errorf("read before its time: %v; %d envelopes for later are in the heap", s.shouldRead(c), s.timers.entryCount())
	}
}

// Many that are due at once are read as the heap has room, each once, in one pass over the index.
func TestManyAreReadInOnePass(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	const n = feedHigh + 3000
	p.schedule(n, -time.Minute)
	s, c := newFeeding(t, p)
	s.continuePass(t.Context(), c)
	if !c.passPending.Load() || c.indexEntries.Load() != feedHigh || s.shouldRead(c) {
		t.Fatalf("%d are in the heap", c.indexEntries.Load())
	}

	var got int
	for c.passPending.Load() || s.timers.entryCount() > 0 {
		out, _, _ := s.timers.takeDue(time.Now().UnixMilli(), maxClaim, 1)
		got += len(out)
		s.requestFeed(out)
		select {
		case <-s.feedWake:
			s.continuePass(t.Context(), c)
		default:
		}
		if len(out) == 0 {
			t.Fatalf("after %d there are no more, and they are not read", got)
		}
	}

	if got != n || s.timers.countInFlight() != n {
		t.Errorf("%d taken, %d aloft; want %d", got, s.timers.countInFlight(), n)
	}
}

// A collection that is not watched any more is removed. A collection that only the stream has named
// is read, too.
func TestCollectionsComeAndGo(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	s, c := newFeeding(t, p)
	s.Collections = func() []outboxes.Outbox { return nil }
	s.timers.addCopy(c, timerID(1), 0, true)
	if list := s.watchedCollections(); len(list) != 0 || s.timers.entryCount() != 0 {
		t.Errorf("%d collections are watched and %d events are in memory, want none", len(list), s.timers.entryCount())
	}

	s.NoteScheduled("new.outbox", timerID(1), time.Now())
	if list := s.watchedCollections(); len(list) != 1 || list[0].ns != "new.outbox" || s.timers.entryCount() != 1 {
		t.Errorf("%d collections are watched and %d events are in memory, want one of each", len(list), s.timers.entryCount())
	}

	p.skew.Store(int64(2 * keepAfterHint))
	if list := s.watchedCollections(); len(list) != 0 {
		t.Errorf("a collection that is not listed is read long after the hint of the stream")
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
