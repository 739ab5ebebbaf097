package scheduled

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/watched"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	outboxevent "github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// claimEarly makes a term claim envelopes long before they are due, so that a slow machine has time for a test.
func claimEarly(c *setUp) { c.ahead = 10 * time.Second }

// waitClaimed waits until n envelopes are claimed.
func (p *planned) waitClaimed(n int64) {
	p.t.Helper()
	stacktest.EventuallyIn(p.t, overdue, "the claims", func() bool {
		got, err := waiting.CountClaimed(p.t.Context(), p.claims, watcherID)
		return err == nil && got >= n
	})
}

// countEnvelopes returns the number of envelopes that are held.
func (h *held) countEnvelopes() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, run := range h.runs {
		n += len(run)
	}
	return n
}

// hasFound reports whether a look has found a scheduled envelope of a collection.
func (s *Scheduled) hasFound(ns string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.collections[ns]
	return c != nil && !c.claimAt.IsZero()
}

func (o *outlet) sentAt(id fmt.Stringer) time.Time {
	o.mu.Lock()
	defer o.mu.Unlock()
	if times := o.sent[id.String()]; len(times) > 0 {
		return times[0]
	}
	return time.Time{}
}

// N19: services cancel and move thousands of envelopes at the moment at which the owner claims them. Exactly one of the two wins.
func TestN19_ExactlyOneWinsAgainstTheClaim(t *testing.T) {
	t.Parallel()
	// On a busy machine, a cancellation takes tens of milliseconds.
	const n, services = 1000, 4
	p := newPlanned(t)
	first := time.Now().Add(6 * time.Second).Truncate(time.Millisecond)
	due := func(i int) time.Time { return first.Add(time.Duration(i) * 6 * time.Millisecond) }
	var list []outboxevent.Event
	for i := range n {
		list = append(list, outboxevent.New(outboxevent.Aggregate{Type: "order", ID: "o-1"}, "Due", outboxevent.Bytes("", []byte("p")), outboxevent.WithDueAt(due(i))))
	}
	for part := range slices.Chunk(list, 500) {
		if err := p.box.Append(t.Context(), part...); err != nil {
			t.Fatal(err)
		}
	}

	type fate struct {
		canceled bool
		due      time.Time // as it was set last
	}
	fates := make([]fate, n)
	x := p.takeOver(nil)
	var running sync.WaitGroup
	for s := range services {
		running.Go(func() {
			for i := s; i < n; i += services {
				id := list[i].ID()
				fates[i].due = due(i)
				// Each is claimed at most a second before.
				moment := due(i).Add(-claimAhead + time.Duration(rand.IntN(750)-500)*time.Millisecond)
				if err := retry.Sleep(t.Context(), time.Until(moment)); err != nil {
					t.Error(err)
					return
				}
				var err error
				if i%2 == 0 {
					err = p.box.Cancel(t.Context(), id)
					fates[i].canceled = err == nil
				} else {
					later := due(i).Add(time.Duration(rand.IntN(1500)) * time.Millisecond)
					if err = p.box.Reschedule(t.Context(), id, later); err == nil {
						fates[i].due = later
					}
				}
				if err != nil && !errors.Is(err, outbox.ErrNotScheduled) {
					t.Error(err)
					return
				}
			}
		})
	}
	running.Wait()

	want, moved := 0, 0
	for i := range fates {
		if !fates[i].canceled {
			want++
		}
		if !fates[i].due.Equal(due(i)) {
			moved++
		}
	}
	x.waitSettled(want)
	x.outlet.mu.Lock()
	defer x.outlet.mu.Unlock()
	for i := range list {
		at := x.outlet.sent[list[i].ID().String()]
		switch {
		case fates[i].canceled && len(at) > 0:
			t.Errorf("event %d was canceled and sent", i)
		case !fates[i].canceled && len(at) != 1:
			t.Errorf("event %d was sent %d times", i, len(at))
		case len(at) == 1 && at[0].Before(fates[i].due):
			t.Errorf("event %d was sent %s too early", i, fates[i].due.Sub(at[0]))
		}
	}
	p.checkNothingLeft()
	if want == n || want == n/2 || moved == 0 || moved == n/2 {
		t.Errorf("nothing raced: %d of %d canceled, %d of %d moved", n-want, n/2, moved, n/2)
	}
}

// N19: the owner dies after it has claimed an envelope, and before it is due. The next owner sends it once, when it is due.
func TestN19_KilledBetweenClaimAndSend(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(20, 6*time.Second)
	due := time.UnixMilli(p.findDocument(ids[0]).Lookup("dueAt").DateTime())

	first := p.takeOver(claimEarly)
	p.waitClaimed(20)
	first.release()
	if at := time.Now(); !at.Before(due) {
		t.Fatal("the machine is too slow: the envelopes are due already")
	}
	if len(first.outlet.sent) > 0 {
		t.Fatalf("%d were sent before they are due", len(first.outlet.sent))
	}
	if err := p.box.Cancel(t.Context(), ids[0]); !errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("a claimed envelope can be canceled: %v", err)
	}

	second := p.takeOver(claimEarly)
	second.waitSettled(20)
	second.checkSentOnce(due, ids...)
	p.checkNothingLeft()
}

// N19: the outcome of the transaction of a claim is unknown, and its repetition finds nothing, because it was committed. The
// envelopes are sent once all the same, and not before they are due.
func TestN19_AClaimWithAnUnknownOutcomeLosesNothing(t *testing.T) {
	t.Parallel()

	for _, in := range []time.Duration{-time.Second, 3 * time.Second} {
		t.Run(in.String(), func(t *testing.T) {
			t.Parallel()
			p := newPlanned(t)
			ids := p.schedule(20, in)
			due := time.UnixMilli(p.findDocument(ids[0]).Lookup("dueAt").DateTime())
			x := p.takeOver(func(c *setUp) { c.Fencer = repeatingFencer{c.Fencer} })
			x.waitSettled(20)
			x.checkSentOnce(due, ids...)
			p.checkNothingLeft()
		})
	}
}

// repeatingFencer runs each transaction again after its commit, as if the response were lost.
type repeatingFencer struct{ mongodb.Fencer }

func (f repeatingFencer) Fenced(ctx context.Context, also bson.D, fn func(context.Context) error) error {
	if err := f.Fencer.Fenced(ctx, also, fn); err != nil {
		return err
	}
	return f.Fencer.Fenced(ctx, also, fn)
}

// N19: an envelope that is due at short notice does not wait for one that was claimed before and is due later.
func TestN19_ShortNotice(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	later := p.schedule(1, 5*time.Second)[0]
	due := time.UnixMilli(p.findDocument(later).Lookup("dueAt").DateTime())
	x := p.takeOver(claimEarly)
	p.waitClaimed(1)
	soon := p.schedule(1, 0)[0]
	x.waitSettled(1)

	if at := x.outlet.sentAt(soon); at.IsZero() || !at.Before(due) {
		t.Errorf("the envelope that was due first was sent at %s, and the other is due at %s", at, due)
	}
	x.waitSettled(2)
	x.checkSentOnce(time.Time{}, soon, later)
}

// N19: a service cancels an envelope in a transaction that stays open. It delays no other envelope.
func TestN19_ALockedEnvelopeDelaysNoOther(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(300, 2*time.Second)
	session, err := p.client.StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer session.EndSession(context.WithoutCancel(t.Context()))
	if err := session.StartTransaction(); err != nil {
		t.Fatal(err)
	}
	if err := p.box.Cancel(mongo.NewSessionContext(t.Context(), session), ids[7]); err != nil {
		t.Fatal(err)
	}

	x := p.takeOver(nil)
	x.waitSettled(299)
	if err := session.AbortTransaction(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.waitSettled(300)
	x.checkSentOnce(time.Time{}, ids...)
}

// N19: a later owner finds scheduled envelopes without a read of the other outboxes.
func TestN19_ATakeoverReadsNoOtherOutbox(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	read := map[string]int{}
	p := newPlanned(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		mu.Lock()
		defer mu.Unlock()
		if coll, ok := e.Command.Lookup(e.CommandName).StringValueOK(); ok {
			read[coll]++
		}
	}}))
	list := []outboxes.Outbox{{DB: p.db.Name(), Coll: "outbox"}}
	for i := range 40 {
		o := outboxes.Outbox{DB: p.db.Name(), Coll: fmt.Sprintf("other%d", i)}
		list = append(list, o)
		if _, err := p.db.Collection(o.Coll).InsertOne(t.Context(), bson.D{{Key: "ts", Value: bson.Timestamp{T: 1}}}); err != nil {
			t.Fatal(err)
		}
	}
	newSchedules := func() *watched.Schedules {
		return &watched.Schedules{
			Coll: p.db.Collection("schedules"), Client: p.client, Watcher: "orders", Log: slog.New(slog.DiscardHandler),
			Calls: &readiness.Calls{Timeout: overdue, State: readiness.NewState(time.Minute, time.Now, slog.New(slog.DiscardHandler))},
		}
	}

	// The first owner has read the event of the envelope in its stream.
	ids := p.schedule(1, time.Second)
	if err := newSchedules().Note(t.Context(), p.ns()); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	clear(read)
	mu.Unlock()

	next := newSchedules()
	if err := next.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	x := p.takeOver(func(c *setUp) { c.Collections = next.Outboxes })
	x.waitSettled(1)
	x.checkSentOnce(time.Time{}, ids...)

	mu.Lock()
	defer mu.Unlock()
	if read["schedules"] != 1 {
		t.Errorf("the list was read %d times, want once", read["schedules"])
	}
	for _, o := range list[1:] {
		if read[o.Coll] > 0 {
			t.Errorf("%d commands for %s", read[o.Coll], o.Coll)
		}
	}
}

// N17: a scheduled envelope leaves its outbox with the claim. If deliveries are marked, it stays, and gets its mark when it is sent.
func TestN17_ScheduledEnvelopesAreRecorded(t *testing.T) {
	t.Parallel()
	for _, recording := range []string{ledger.RecordPosition, ledger.RecordDelete, ledger.RecordMark} {
		t.Run(recording, func(t *testing.T) {
			t.Parallel()
			p := newPlanned(t)
			sent, rejected, later := p.schedule(1, 0)[0], p.schedule(1, 0)[0], p.schedule(1, time.Hour)[0]
			due := p.findDocument(sent).Lookup("dueAt")
			x := p.takeOver(func(c *setUp) {
				c.ledger.Recording = recording
				c.outlet.result = func(_ context.Context, id string) ([]record.Result, error) {
					if id == rejected.String() {
						return []record.Result{{Topic: "t", Offset: -1, Rejection: &record.Rejection{Class: record.RecordRejected, Reason: "no"}}}, nil
					}
					return []record.Result{{Topic: "t", Partition: 2, Offset: 7}}, nil
				}
			})
			x.waitSettled(2)

			if p.findWaiting(sent) != nil || p.findWaiting(rejected) == nil || p.findDocument(later).Lookup("dueAt").Type != bson.TypeDateTime {
				t.Errorf("waiting: %v %v; later: %v", p.findWaiting(sent), p.findWaiting(rejected), p.findDocument(later))
			}
			doc, other := p.findDocument(sent), p.findDocument(rejected)
			if recording != ledger.RecordMark {
				if doc != nil || other != nil {
					t.Errorf("in the outbox: %s %s", doc, other)
				}
				return
			}
			if !doc.Lookup("scheduledFor").Equal(due) || doc.Lookup("dueAt").Type != 0 || doc.Lookup("sentAt").Type != bson.TypeDateTime ||
				doc.Lookup("sent", "0", "offset").AsInt64() != 7 {
				t.Errorf("a sent envelope: %s", doc)
			}
			if other.Lookup("scheduledFor").Type != bson.TypeDateTime || other.Lookup("sentAt").Type != 0 {
				t.Errorf("a rejected envelope: %s", other)
			}
		})
	}
}

// A cleaning job or a TTL that removes a scheduled envelope before it is due cancels it, also if the owner has read its id.
func TestARemovedEnvelopeIsCanceled(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(10, 4*time.Second)
	x := p.takeOver(nil)
	stacktest.EventuallyIn(t, overdue, "the first of them is known", func() bool { return x.hasFound(p.ns()) })
	gone := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids[:9]}}}}
	if res, err := p.coll.DeleteMany(t.Context(), gone); err != nil || res.DeletedCount != 9 {
		t.Fatalf("%+v, %v", res, err)
	}
	x.waitSettled(1)
	x.checkSentOnce(time.Time{}, ids[9])
}

// N8: an owner dies after one envelope of a claim has become a waiting one, and before another was sent. The next owner sends only the
// other one out of the claim.
func TestN08_AnEnvelopeThatHasLeftItsClaimIsNotSentOutOfIt(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(20, 0)
	// Kafka rejects the first one, and stops after the fifth.
	var sends int
	var rejected outboxevent.ID
	result := func(ctx context.Context, id string) ([]record.Result, error) {
		sends++
		switch {
		case sends == 1:
			rejected = outboxevent.ParseID(id)
			return []record.Result{{Topic: "t", Offset: -1, Rejection: &record.Rejection{Class: record.RecordRejected, Reason: "no"}}}, nil
		case sends > 5:
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		return []record.Result{{Topic: "t", Offset: 1}}, nil
	}
	first := p.takeOver(func(c *setUp) { c.outlet.result = result })
	stacktest.EventuallyIn(t, overdue, "a retry", func() bool {
		n, err := p.waiting.CountDocuments(t.Context(), bson.D{})
		return err == nil && n == 1
	})
	first.release()
	if first.outlet.settled > 0 {
		t.Errorf("%d offsets were released while the claim exists", first.outlet.settled)
	}

	second := p.takeOver(findRecordsOf(first))
	stacktest.EventuallyIn(t, overdue, "the end of the claim", func() bool {
		n, err := p.claims.CountDocuments(t.Context(), bson.D{})
		return err == nil && n == 0
	})
	second.release()
	for _, id := range ids {
		if n := len(first.outlet.sent[id.String()]) + len(second.outlet.sent[id.String()]); id != rejected && n != 1 || id == rejected && n != 0 {
			t.Errorf("%s was sent %d times", id, n)
		}
	}
	if n, err := p.waiting.CountDocuments(t.Context(), bson.D{}); err != nil || n != 1 {
		t.Errorf("%d envelopes wait, %v", n, err)
	}
}

// N8: an owner dies when it has sent envelopes of a claim to one of their two topics. The next owner sends them to the other one only.
func TestN08_AClaimedEnvelopeThatWasSentToOneTopicWaitsForTheOther(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(5, 6*time.Second)
	first := p.takeOver(claimEarly)
	p.waitClaimed(5)
	first.release()

	second := p.takeOver(func(c *setUp) {
		c.outlet.topics = []string{"t", "u"}
		for _, id := range ids {
			c.outlet.had[id.String()] = true
		}
	})
	second.release()
	if n, err := p.claims.CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 {
		t.Errorf("%d claims are left, %v", n, err)
	}
	for _, id := range ids {
		if topics := p.findWaiting(id).Lookup("topics").StringValue(); topics != "u" {
			t.Errorf("%s waits for %q", id, topics)
		}
	}
}

// N19: the estimate of the server's clock is two hours ahead at a takeover. The next owner sends the claimed envelopes only when they are due, and
// claims none that is due later.
func TestN19_AnEstimateThatIsAheadSendsNothingEarly(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(20, 8*time.Second)
	due := time.UnixMilli(p.findDocument(ids[0]).Lookup("dueAt").DateTime())
	later := p.schedule(20, time.Hour)
	first := p.takeOver(claimEarly)
	p.waitClaimed(20)
	first.release()

	p.skew.Store(int64(2 * time.Hour))
	second := p.takeOver(nil)
	second.waitSettled(20)
	second.checkSentOnce(due, ids...)
	for _, id := range later {
		if p.findDocument(id) == nil {
			t.Errorf("%s is claimed an hour before it is due", id)
		}
	}
}

// A collection was dropped: its envelopes that are claimed and not due yet go with it. Envelopes of another collection, or of a later one of the name, stay, and
// after a failed write all stay.
func TestClaimedEnvelopesAreDiscarded(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	// They must not be due before they are discarded, also on a slow machine.
	dropped := p.schedule(30, 2*time.Minute)
	x := p.takeOver(func(c *setUp) { c.ahead = 3 * time.Minute })
	// The envelopes are held a moment after their claim is stored.
	stacktest.EventuallyIn(t, overdue, "the claimed envelopes", func() bool { return x.Scheduled.held.countEnvelopes() == 30 })
	db := p.db.Name()
	for _, c := range []struct{ db, coll, before string }{{db, "other", "83"}, {db, "outbox", "82"}, {db + "x", "", "83"}} {
		if n, err := x.Discard(t.Context(), c.db, c.coll, c.before); n != 0 || err != nil {
			t.Errorf("%+v discards %d, %v", c, n, err)
		}
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := x.Discard(canceled, db, "outbox", "83"); n != 0 || err == nil {
		t.Errorf("without a write, %d are discarded, %v", n, err)
	}

	if n, err := x.Discard(t.Context(), db, "outbox", "83"); n != 30 || err != nil {
		t.Errorf("%d are discarded, %v", n, err)
	}
	stacktest.EventuallyIn(t, overdue, "the end of the claim", func() bool {
		n, err := p.claims.CountDocuments(t.Context(), bson.D{})
		return err == nil && n == 0
	})
	kept := p.schedule(1, 8*time.Second)
	p.waitClaimed(1)
	x.waitSettled(1)
	x.checkSentOnce(time.Time{}, kept...)
	if n := x.count.Load() + x.bytes.Load(); n != 0 {
		t.Errorf("%d envelopes and bytes are still counted; %d were discarded", n, len(dropped))
	}
}
