package reconcile

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
)

// feeding is a Scheduled whose index is asked by the test.
func feeding(t *testing.T, p *planned) (*Scheduled, *calendar) {
	t.Helper()
	s := NewScheduled(ScheduledConfig{
		Finisher: NewFinisher(Finishing{}),
		Client:   p.client, Epoch: 1, Now: p.now, Outlet: newOutlet(),
		Collections: func() []store.Outbox { return []store.Outbox{{DB: p.db.Name(), Coll: p.coll.Name()}} },
	})
	list := s.watched()
	if len(list) != 1 || !s.due(list[0]) {
		t.Fatalf("%d collections are asked", len(list))
	}
	t.Cleanup(list[0].close)
	return s, list[0]
}

// A collection without scheduled envelopes is left alone until the stream tells of one.
func TestAnIdleCollectionIsAskedRarely(t *testing.T) {
	t.Parallel()
	p := plan(t)
	s, c := feeding(t, p)
	s.look(t.Context(), c)
	if !c.idle.Load() || c.next.Sub(c.began) != recheck {
		t.Fatalf("an empty collection is asked again after %s", c.next.Sub(c.began))
	}
	if c.next = time.Now().Add(time.Hour); s.due(c) {
		t.Fatal("it is asked before its time")
	}
	p.schedule(1, time.Hour)
	s.Saw(c.ns, timerID(1), time.Now().Add(time.Hour))
	select {
	case <-s.asked:
	default:
		t.Error("nobody is woken")
	}
	if !s.due(c) || s.timers.len() != 0 {
		t.Errorf("an envelope for later: due %v, %d remembered", s.due(c), s.timers.len())
	}
	c.checked = time.Time{}
	s.look(t.Context(), c)
	// A look that took long is repeated later.
	if want := min(max(s.Poll, slowLook*c.took), mostWait); c.idle.Load() || c.next.Sub(c.began) != want {
		t.Errorf("a collection with an envelope for later is asked again after %s, want %s", c.next.Sub(c.began), want)
	}
}

// Many that are due at once are read as the heap has room, each once, in one pass over the index.
func TestManyAreReadInOnePass(t *testing.T) {
	t.Parallel()
	p := plan(t)
	const n = feedMost + 3000
	p.schedule(n, -time.Minute)
	s, c := feeding(t, p)
	s.look(t.Context(), c)
	if !c.more.Load() || c.fed.Load() != feedMost || s.due(c) {
		t.Fatalf("%d are in the heap", c.fed.Load())
	}
	var got int
	for c.more.Load() || s.timers.len() > 0 {
		out, _, _ := s.timers.take(nil, time.Now().UnixMilli(), store.MaxClaim, 1)
		got += len(out)
		s.hungry(out)
		select {
		case <-s.asked:
			s.look(t.Context(), c)
		default:
		}
		if len(out) == 0 {
			t.Fatalf("after %d there is no more, and nobody asks for it", got)
		}
	}
	if got != n || c.found != n || s.timers.aloft() != n {
		t.Errorf("%d taken, %d found, %d aloft; want %d", got, c.found, s.timers.aloft(), n)
	}
}

// What is watched no longer is forgotten; what only the stream has told of is asked, too.
func TestCollectionsComeAndGo(t *testing.T) {
	t.Parallel()
	p := plan(t)
	s, c := feeding(t, p)
	s.Collections = func() []store.Outbox { return nil }
	s.timers.add(c, timerID(1), 0, true)
	if list := s.watched(); len(list) != 0 || s.timers.len() != 0 {
		t.Errorf("%d are asked, %d remembered", len(list), s.timers.len())
	}
	s.Saw("new.outbox", timerID(1), time.Now())
	s.Saw("nonsense", timerID(1), time.Now())
	if list := s.watched(); len(list) != 1 || list[0].ns != "new.outbox" || s.timers.len() != 1 {
		t.Errorf("%d are asked, %d remembered", len(list), s.timers.len())
	}
	p.skew = 2 * known
	if list := s.watched(); len(list) != 0 {
		t.Errorf("one that is not on the list long after the stream told of it is asked")
	}
}

// A view can be read and not written: its envelopes cannot be claimed.
func TestACollectionThatCannotBeWrittenHoldsUpNobody(t *testing.T) {
	t.Parallel()
	p := plan(t)
	if err := p.db.CreateView(t.Context(), "view", "behind", bson.A{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.db.Collection("behind").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "x"}, {Key: "dueAt", Value: time.Now().Add(-time.Hour)}}); err != nil {
		t.Fatal(err)
	}
	ids := p.schedule(50, 0)
	var trouble atomic.Int64
	x := p.take(func(_ *Finishing, c *ScheduledConfig) {
		c.Collections = func() []store.Outbox {
			return []store.Outbox{{DB: p.db.Name(), Coll: "view"}, {DB: p.db.Name(), Coll: "outbox"}}
		}
		c.Trouble = func(error) { trouble.Add(1) }
	})
	x.settles(50)
	ids = append(ids, p.schedule(50, 0)...)
	x.settles(100)
	x.once(time.UnixMilli(0), ids...)
	if trouble.Load() == 0 {
		t.Error("nothing was in the way")
	}
	if n, err := p.db.Collection("behind").CountDocuments(context.WithoutCancel(t.Context()), bson.D{{Key: "claim", Value: nil}}); err != nil || n != 1 {
		t.Errorf("%d %v", n, err)
	}
}
