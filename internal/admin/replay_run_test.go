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

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lease"
)

// A process that dies at any statement of a transaction, and two that run the same replay.
func TestACrashedReplayGoesOnAndQueuesEachEnvelopeOnce(t *testing.T) {
	t.Parallel()
	var left atomic.Int64
	var mu sync.Mutex
	var kill context.CancelFunc
	c := stacktest.Client(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if e.CommandName == "update" || e.CommandName == "commitTransaction" {
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

func checkSentOnce(t *testing.T, s *stand, n int64) {
	t.Helper()
	for _, f := range []bson.D{{{Key: "delivery", Value: 1}}, {{Key: "delivery", Value: 1}, {Key: "state", Value: "retry"}}} {
		if got, err := s.box.CountDocuments(t.Context(), f); err != nil || got != n {
			t.Errorf("%d envelopes of %d are %v, %v", got, n, f, err)
		}
	}
	got := s.listQueued()
	if !slices.IsSorted(got) {
		t.Error("their positions are not in the order in which they were written")
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

	i, err := s.r.Run(t.Context(), s.start(everything), admin.ReplayRun{Wait: true, Open: open, Progress: func(admin.ReplayInfo) {
		queued, err := s.box.CountDocuments(t.Context(), bson.D{{Key: "state", Value: "retry"}})
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
	if left, err := s.box.CountDocuments(t.Context(), bson.D{{Key: "state", Value: bson.D{{Key: "$exists", Value: true}}}}); err != nil || left != 0 {
		t.Errorf("it returned while %d were not sent, %v", left, err)
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

// A replay takes the fence of each of its transactions from the document that the owner renews.
func TestN03_AReplayLeavesTheOwnerItsLease(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	s.append(newEnvelopes(1000)...)
	s.startWatcher(nil)
	if _, err := s.state.Collection("watchers").DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}

	l := lease.New(lease.Config{Collection: s.state.Collection("watchers"), ID: "orders/0of1", Node: "n1", ReplicaSetID: "x", TTL: 5 * time.Second, Renew: 200 * time.Millisecond})
	h, err := l.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() { defer close(ended); _ = h.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	s.moveWatcher(t.Context())
	i, err := s.r.Run(t.Context(), s.start(everything), admin.ReplayRun{})
	if err != nil || i.Queued != 1000 {
		t.Fatalf("%+v, %v", i, err)
	}
	if err := h.Context().Err(); err != nil {
		t.Errorf("the owner lost its lease: %v", context.Cause(h.Context()))
	}

	// A quick replay ends before the lease was to be renewed: the owner must be able to do it afterwards.
	var w struct{ Fence, Seq int64 }
	for until := time.Now().Add(time.Minute); w.Seq < 3; {
		if err := s.state.Collection("watchers").FindOne(t.Context(), bson.D{}).Decode(&w); err != nil || time.Now().After(until) {
			t.Fatalf("%+v, %v", w, err)
		}
	}
	if err := h.Context().Err(); err != nil || w.Fence < 2 {
		t.Errorf("the owner lost its lease: %v; %+v", context.Cause(h.Context()), w)
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
	if got, err := s.box.CountDocuments(t.Context(), bson.D{{Key: "delivery", Value: 1}}); err != nil || got != 1300 {
		t.Errorf("%d, %v", got, err)
	}
}
