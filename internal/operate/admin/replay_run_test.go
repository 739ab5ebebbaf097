package admin_test

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
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// A process that dies at any statement of a transaction, and two that run the same replay.
func TestACrashedReplayGoesOnAndQueuesEachEnvelopeOnce(t *testing.T) {
	t.Parallel()
	var left atomic.Int64
	var mu sync.Mutex
	var kill context.CancelFunc
	c := stacktest.Client(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if e.CommandName == "update" || e.CommandName == "find" || e.CommandName == "aggregate" || e.CommandName == "commitTransaction" {
			if left.Add(-1) == 0 {
				mu.Lock()
				defer mu.Unlock()
				kill()
			}
		}
	}}))

	s := newStand(t, stacktest.Client(t))
	const n = 1200
	s.append(newEnvelopes(n)...)
	s.startWatcher(nil)
	id := s.start(everything)
	dying := s.op
	dying.State = s.state.On(c)
	for round := 0; ; round++ {
		if round == 100 {
			t.Fatal("no round came through")
		}
		ctx, cancel := context.WithCancel(t.Context())
		mu.Lock()
		kill = cancel
		mu.Unlock()
		left.Store(1 + rand.Int64N(5) + int64(round))
		i, err := dying.Replays().Run(ctx, id, admin.ReplayRun{Open: 100})
		cancel()
		if err == nil {
			if i.Queued != n || i.State != admin.ReplayDone || round == 0 {
				t.Errorf("after %d crashes: %+v", round, i)
			}
			break
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}

	checkSentOnce(t, s, n)
}

// checkSentOnce checks that each of n envelopes is queued once, with one number of the delivery.
func checkSentOnce(t *testing.T, s *stand, n int) {
	t.Helper()
	got := s.listQueued()
	if !slices.IsSorted(got) {
		t.Error("their positions are not in the order in which they were written")
	}
	if len(got) != n || len(slices.Compact(slices.Clone(got))) != n {
		t.Errorf("%d envelopes of %d are queued", len(got), n)
	}
	list := s.queued()
	if slices.ContainsFunc(list, func(d waiting.Document) bool { return d.Delivery != list[0].Delivery }) {
		t.Error("the deliveries of one replay have different numbers")
	}
}

func TestTwoThatRunTheSameReplayQueueEachEnvelopeOnce(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	const n = 600
	s.append(newEnvelopes(n)...)
	s.startWatcher(nil)
	id := s.start(everything)
	var wg sync.WaitGroup
	errs := make([]error, 3)
	for i := range errs {
		wg.Go(func() { _, errs[i] = s.r.Run(t.Context(), id, admin.ReplayRun{Open: 100}) })
	}

	wg.Wait()
	came := 0
	for _, err := range errs {
		if err == nil {
			came++
		} else if !errors.Is(err, admin.ErrReplayMoved) {
			t.Error(err)
		}
	}
	if came == 0 {
		if _, err := s.r.Run(t.Context(), id, admin.ReplayRun{}); err != nil {
			t.Fatal(err)
		}
	}

	checkSentOnce(t, s, n)
}

func TestAReplayWaitsForTheRelay(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	const n, open = 260, 50
	s.append(newEnvelopes(n)...)
	var most atomic.Int64
	send := s.newRelayStep(40)
	// The replay begins when the owner has passed all envelopes that may be queued.
	s.startWatcher(func(ctx context.Context) {
		if most.Load() > 0 {
			send(ctx)
		}
	})

	i, err := s.r.Run(t.Context(), s.start(everything), admin.ReplayRun{Wait: admin.WaitUntilSent, Open: open, Progress: func(admin.ReplayInfo) {
		queued, err := s.state.Collection("waiting").CountDocuments(t.Context(), bson.D{})
		if err != nil {
			t.Error(err)
		}
		most.Store(max(most.Load(), queued))
	}})
	if err != nil || i.Queued != n || i.Outstanding != 0 || i.State != admin.ReplayDone {
		t.Fatalf("%+v, %v", i, err)
	}
	if most.Load() != open {
		t.Errorf("%d were queued at a time, want %d", most.Load(), open)
	}
	if left := len(s.queued()); left != 0 || len(s.sent()) != n {
		t.Errorf("it returned while %d were not sent, %d were", left, len(s.sent()))
	}
}

func TestAReplayKeepsItsRateAndCanBeCancelled(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	s.append(newEnvelopes(100)...)
	s.startWatcher(nil)
	o := everything
	o.Rate = 200
	id := s.start(o)
	began := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	i, err := s.r.Run(ctx, id, admin.ReplayRun{Progress: func(i admin.ReplayInfo) {
		if i.Queued >= 80 {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) || i.Queued != 80 || i.State != admin.ReplayRunning {
		t.Fatalf("%+v, %v", i, err)
	}
	if took := time.Since(began); took < 200*time.Millisecond {
		t.Errorf("80 in %v at 200/s", took)
	}

	list, err := s.r.List(t.Context(), 10)
	if err != nil || len(list) != 1 || list[0].ID != id || list[0].Queued != 80 || list[0].Found != 100 {
		t.Errorf("%+v, %v", list, err)
	}
	if err := s.r.Cancel(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := s.r.Run(t.Context(), id, admin.ReplayRun{}); err == nil {
		t.Error("a cancelled replay went on")
	}
	if err := s.r.Cancel(t.Context(), id); !errors.Is(err, admin.ErrReplayMoved) {
		t.Errorf("cancelled twice: %v", err)
	}
}

// Copied documents may share a stamp.
func TestEqualStampsAreNotBrokenApart(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	ts := bson.Timestamp{T: uint32(time.Now().Add(-time.Hour).Unix()), I: 1}
	docs := newEnvelopes(1300)
	for i := range docs {
		// The first envelopes have different stamps, and the later ones have the same.
		if i >= 20 {
			docs[i][5].Value = ts
		}
	}

	s.append(docs...)
	s.startWatcher(nil)
	i, err := s.r.Run(t.Context(), s.start(everything), admin.ReplayRun{})
	if err != nil || i.Queued != 1300 {
		t.Errorf("%+v, %v", i, err)
	}
	if n := len(s.queued()); n != 1300 {
		t.Errorf("%d are queued", n)
	}
}

// A replay that is interrupted between envelopes of one timestamp goes on after the last one, also if they were sent meanwhile.
func TestAnInterruptedReplaySendsNoEnvelopeOfATimestampTwice(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	ts := bson.Timestamp{T: uint32(time.Now().Add(-time.Hour).Unix()), I: 1}
	docs := newEnvelopes(40)

	for i := range docs {
		docs[i][5].Value = ts
	}
	s.append(docs...)
	s.startWatcher(nil)
	o := everything
	o.Rate = 50 // ten in each transaction
	id := s.start(o)
	for runs := 0; ; runs++ {
		ctx, cancel := context.WithCancel(t.Context())
		begun := int64(-1)
		i, err := s.r.Run(ctx, id, admin.ReplayRun{Progress: func(i admin.ReplayInfo) {
			if begun >= 0 && i.Queued > begun {
				cancel()
			}
			begun = i.Queued
		}})
		cancel()
		s.newRelayStep(100)(t.Context())
		if err == nil {
			if i.Queued != 40 || runs == 0 {
				t.Errorf("after %d interruptions: %+v", runs, i)
			}
			break
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	if n := len(s.sent()); n != 40 {
		t.Errorf("%d of 40 were sent", n)
	}
}

// A list that contains a stamp is no stamp. As the last envelope of the range, it would lead the replay back to the beginning.
func TestAListOfStampsIsNotReplayed(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	docs := newEnvelopes(4)
	docs[3][5].Value = bson.A{bson.Timestamp{T: uint32(time.Now().Add(-time.Minute).Unix())}, bson.Timestamp{T: uint32(time.Now().Unix())}}
	s.append(docs...)
	s.startWatcher(nil)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	id := s.start(everything)
	info, err := s.r.Run(ctx, id, admin.ReplayRun{Progress: func(info admin.ReplayInfo) {
		if info.Queued > 3 {
			cancel()
		}
	}})
	if err != nil || info.Queued != 3 || info.Skipped != 0 || len(s.queued()) != 3 {
		t.Errorf("%+v, %v", info, err)
	}
}
