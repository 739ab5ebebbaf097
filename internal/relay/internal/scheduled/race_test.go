package scheduled

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// N19: services cancel and move envelopes around the time at which they become due, while owners come and
// go. An envelope is cancelled or sent, once and not before the last time to which it was moved.
func TestN19_CancelledOrSentNeverBoth(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	const n = 400
	type fate struct {
		id event.ID
		// due is the latest due time that the service has set.
		due       time.Time
		cancelled bool
	}

	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	fates := make([]*fate, 0, n)
	begin := time.Now()
	for _, id := range p.schedule(n, 700*time.Millisecond) {
		fates = append(fates, &fate{id: id, due: begin.Add(700 * time.Millisecond).Truncate(time.Millisecond)})
	}
	all := slices.Clone(fates) // the services reorder theirs
	var services sync.WaitGroup
	var late, orders atomic.Int64
	// busy is closed while the services are at work.
	busy := make(chan struct{})
	for g := range 4 {
		services.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(g)))
			for mine := fates[g*n/4 : (g+1)*n/4 : (g+1)*n/4]; len(mine) > 0; {
				k := r.IntN(len(mine))
				f, over := mine[k], false
				if orders.Add(1) == 100 {
					close(busy)
				}
				var err error
				if r.IntN(6) == 0 {
					if err = p.box.Cancel(t.Context(), f.id); err == nil {
						f.cancelled, over = true, true
					}
				} else {
					at := time.Now().Add(time.Duration(r.IntN(400)-100) * time.Millisecond).Truncate(time.Millisecond)
					if err = p.box.Reschedule(t.Context(), f.id, at); err == nil {
						f.due = at
					}
				}
				if errors.Is(err, outbox.ErrNotScheduled) {
					late.Add(1)
					over = true
				} else if err != nil {
					t.Error(err)
					return
				}
				if over {
					mine[k] = mine[len(mine)-1]
					mine = mine[:len(mine)-1]
				}
			}
		})
	}

	done := make(chan struct{})
	go func() { services.Wait(); close(done) }()
	// Wait, so that some events are cancelled, however quick the owner is.
	select {
	case <-busy:
	case <-done:
	}
	var terms []*taking
	// Each term ends at a random step.
	for racing := true; racing; {
		x := p.takeOver(findRecordsOf(terms...))
		terms = append(terms, x)
		select {
		case <-time.After(700 * time.Millisecond):
		case <-done:
			racing = false
		}
		x.release()
	}

	last := p.takeOver(findRecordsOf(terms...))
	terms = append(terms, last)
	sent := map[string][]time.Time{}
	count := func() int {
		clear(sent)
		for _, x := range terms {
			x.outlet.mu.Lock()
			for id, at := range x.outlet.sent {
				sent[id] = append(sent[id], at...)
			}
			x.outlet.mu.Unlock()
		}
		return len(sent)
	}

	want := 0
	for _, f := range all {
		if !f.cancelled {
			want++
		}
	}

	// The last owner sends the envelopes that the others claimed at once, so all of them are counted together.
	stacktest.EventuallyIn(t, overdue, "the rest", func() bool { return count() >= want })
	for _, f := range all {
		at := sent[f.id.String()]
		switch {
		case f.cancelled && len(at) > 0:
			t.Errorf("%s was cancelled and sent", f.id)
		case !f.cancelled && len(at) == 0:
			t.Errorf("%s was neither cancelled nor sent", f.id)
		case len(at) > 1:
			t.Errorf("%s was sent %d times", f.id, len(at))
		case len(at) > 0 && at[0].Before(f.due):
			t.Errorf("%s was sent %s before the time to which it was moved", f.id, f.due.Sub(at[0]))
		}
	}

	if late.Load() == 0 || want == n || want == 0 {
		t.Errorf("nothing raced: %d came too late, %d of %d cancelled", late.Load(), n-want, n)
	}
}

// findRecordsOf makes an outlet find the records of earlier terms, as the read-back does.
func findRecordsOf(terms ...*taking) func(*setUp) {
	return func(c *setUp) {
		for _, x := range terms {
			for id := range x.outlet.sent {
				c.outlet.had[id] = true
			}
		}
	}
}

// N19, N17: an envelope that its target cannot take waits in the store, and an invalid envelope becomes a dead letter.
// Neither stays in the outbox, and neither delays the others.
func TestN19_NotEveryOneCanBeSent(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	good, rejected, parked, expired := p.schedule(1, 0)[0], p.schedule(1, 0)[0], p.schedule(1, 0)[0], p.schedule(1, 0)[0]
	malformed := "malformed"
	if _, err := p.coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: malformed}, {Key: "dueAt", Value: time.Now()}, {Key: "payload", Value: 3.5}}); err != nil {
		t.Fatal(err)
	}
	result := func(_ context.Context, id string) ([]record.Result, error) {
		switch id {
		case rejected.String():
			return []record.Result{{Topic: "t", Offset: -1, Rejection: &record.Rejection{Class: record.RecordRejected, Reason: "no"}}}, nil
		case parked.String():
			return []record.Result{{Topic: "t", Offset: -1, Held: record.ErrParked}}, nil
		case expired.String():
			return nil, &record.Rejection{Class: record.Expired, Reason: "too late"}
		}
		return []record.Result{{Topic: "t", Offset: 1}}, nil
	}

	var dead atomic.Int32
	x := p.takeOver(func(c *setUp) {
		c.outlet.result = result
		c.ledger.Count = func(o *ledger.Outcome) {
			if o.End == ledger.Dead {
				dead.Add(1)
				c.outlet.mu.Lock()
				c.outlet.reportNext()
				c.outlet.mu.Unlock()
			}
		}
	})

	x.waitSettled(3)
	x.waitUntil("the letters", func(*outlet) bool { return dead.Load() == 2 })
	if n, err := p.letters.CountDocuments(t.Context(), bson.D{{Key: "origin", Value: "scheduled"}}); n != 2 || err != nil {
		t.Errorf("%d dead letters, %v", n, err)
	}
	x.checkSentOnce(time.UnixMilli(0), good)
	for id, want := range map[event.ID]string{rejected: "retry", parked: "parked"} {
		doc := p.findWaiting(id)
		if got, _ := doc.Lookup("reason").StringValueOK(); got != want || doc.Lookup("origin").StringValue() != "scheduled" {
			t.Errorf("want %s: %s", want, doc)
		}
	}
	for _, id := range []event.ID{good, expired, event.NewID(malformed)} {
		if p.findWaiting(id) != nil {
			t.Errorf("%s waits", id)
		}
	}
	if n, err := p.coll.CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("%d are left in the outbox, %v", n, err)
	}
}
