package reconciler

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Requeued envelopes that do not list their topics cannot be left out by the server while their topic is parked. Where more of
// them are due than one query returns, the whole collection is read, but not at each poll.
func TestN17_DueRetriesOfAParkedTopicAreNotReadInFullAtEachPoll(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.route = func(*outboxes.Envelope) ([]string, error) { return []string{"a"}, nil }
	var docs []waiting.Entry
	for i := range dueLimit + 10 {
		docs = append(docs, h.newEntry(i, fmt.Sprint("k", i), waiting.Retry, origin(waiting.OriginRequeue, 1),
			pending(), nextAt(time.UnixMilli(int64(i+1)))))
	}
	last := docs[len(docs)-1]
	// Only a pass over all envelopes reads this envelope.
	with("payload", "behind the due ones")(&last)
	h.enter(last)
	h.enter(docs[:len(docs)-1]...)

	var passes atomic.Int64
	h.client = stacktest.Client(t, options.Client().SetMonitor(&event.CommandMonitor{Succeeded: func(_ context.Context, e *event.CommandSucceededEvent) {
		if bytes.Contains(e.Reply, []byte("behind the due ones")) {
			passes.Add(1)
		}
	}}))
	te := h.newTerm()
	t.Cleanup(te.out.end)
	h.broker.parked["a"] = true
	te.x.parked["a"] = struct{}{}
	poll := func() {
		t.Helper()
		if err := te.x.RunRound(t.Context(), true); err != nil {
			t.Fatal(err)
		}
	}

	for range 5 {
		poll()
	}
	if n := passes.Load(); n != 1 {
		t.Errorf("%d passes over everything at 5 polls, want 1", n)
	}

	// Retries that are stuck for any other reason are passed over as early as the retries of a parked
	// topic.
	clear(te.x.parked)
	te.x.passTook = 0
	for since, want := range map[time.Duration]bool{probeEvery / 2: false, probeEvery: true} {
		te.x.lastPass = time.Now().Add(-since)
		if got := te.x.isPassDue(); got != want {
			t.Errorf("a pass %v after the last one: %v, want %v", since, got, want)
		}
	}
	// A slow pass is not repeated so soon.
	te.x.passTook = probeEvery
	if te.x.isPassDue() {
		t.Errorf("a pass that took %v is repeated after %v", te.x.passTook, probeEvery)
	}

	te.x.lastPass = time.Now().Add(-sureEvery) // the time has come
	poll()
	if n := passes.Load(); n != 2 {
		t.Errorf("%d passes over everything, want another one once its time has come", n)
	}
}

// A topic returns a record, and is ready again before the result arrives. The envelope is published again at the next poll, and not
// by the next pass over everything.
func TestN17_ATopicThatIsReadyBeforeItsResultIsNotParked(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	te := h.newTerm()
	t.Cleanup(te.out.end)
	for _, held := range []error{record.ErrParked, record.ErrPartitionParked} {
		for ready, want := range map[bool]bool{true: false, false: true} {
			key := orderKey{h.db.Name() + ".outbox", "k"}
			id, f := docID{1}, &flight{key: key, topics: []string{"a"}}
			te.x.mu.Lock()
			te.x.trackLocked(id, f)
			te.x.mu.Unlock()
			if ready {
				te.x.Wake("a")
			}

			te.x.noteResults(f, []record.Result{{Topic: "a", Held: held}})
			te.x.mu.Lock()
			if got := te.x.isParkedLocked(key, "a"); got != want {
				t.Errorf("%v, ready before the result %t: parked %t, want %t", held, ready, got, want)
			}
			te.x.untrackLocked(id, f)
			te.x.mu.Unlock()
			te.x.Wake("")
		}
	}
}

// A due retry whose topic is parked is read once, not at each poll: its key is looked at again when the topic can be written.
func TestN17_ADueRetryOfAParkedTopicIsReadOnce(t *testing.T) {
	t.Parallel()
	const due, polls, body = 300, 5, "a whole payload"
	h := newScene(t)
	h.route = func(*outboxes.Envelope) ([]string, error) { return []string{"a"}, nil }
	var docs []waiting.Entry
	for i := range due {
		docs = append(docs, h.newEntry(i, fmt.Sprint("k", i), waiting.Retry, origin(waiting.OriginRequeue, 1),
			pending(), nextAt(time.UnixMilli(int64(i+1))), with("payload", body)))
	}
	h.enter(docs...)

	var payloads atomic.Int64
	h.client = stacktest.Client(t, options.Client().SetMonitor(&event.CommandMonitor{Succeeded: func(_ context.Context, e *event.CommandSucceededEvent) {
		payloads.Add(int64(bytes.Count(e.Reply, []byte(body))))
	}}))
	te := h.newTerm()
	te.x.parked["a"] = struct{}{}
	for range polls {
		if err := te.x.publishDue(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := payloads.Load(); n != due {
		t.Errorf("%d payloads were read at %d polls, want %d", n, polls, due)
	}

	te.x.Wake("a")
	keys, _, err := te.x.findDueKeys(t.Context())
	if list := keys[h.ns()]; err != nil || len(list) != due {
		t.Errorf("%d keys are due when the topic can be written, want %d (%v)", len(list), due, err)
	}
	te.run()
	h.waitEmpty()
}

// More retries of one key are due than one query returns, and the first one is in flight for long. The others are not looked for again and again.
func TestN17_RetriesThatWaitForAFlightAreNotReadInALoop(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	var docs []waiting.Entry
	for i := range dueLimit + 1 {
		docs = append(docs, h.newEntry(i, "k", waiting.Retry, failed(1), nextAt(time.UnixMilli(int64(i+1)))))
	}
	h.enter(docs...)
	te := h.newTerm()
	t.Cleanup(te.out.end)
	store := &countingStore{Store: te.x.config.Store}
	te.x.config.Store, te.x.config.Outlet = store, silentOutlet{te.out}

	if err := te.x.RunRound(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	for round := 0; len(te.x.wake) > 0 && round < 20; round++ {
		<-te.x.wake
		if err := te.x.RunRound(t.Context(), false); err != nil {
			t.Fatal(err)
		}
	}
	if te.x.InFlight() != 1 || store.reads > 3 {
		t.Errorf("%d reads for %d flights", store.reads, te.x.InFlight())
	}
}

// silentOutlet accepts envelopes and reports no results.
type silentOutlet struct{ *fakeOutlet }

func (silentOutlet) Publish(context.Context, *outboxes.Envelope, []string, func(record.Published)) error {
	return nil
}

// countingStore counts the queries for due retries.
type countingStore struct {
	Store
	reads int
}

func (s *countingStore) DueKeys(ctx context.Context, near time.Time, skip []string, limit int) ([]waiting.DueKey, error) {
	s.reads++
	return s.Store.DueKeys(ctx, near, skip, limit)
}
