package setaside

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

var orders = Place{Handler: "billing/invoice", Topic: "orders", Partition: 3}

func openStore(t *testing.T, client *mongo.Client) (*Store, *mongo.Database) {
	t.Helper()
	db := stacktest.Database(t, client)
	s := New(db, "inbox_waiting")
	if err := s.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := db.CreateCollection(t.Context(), "effects"); err != nil {
		t.Fatal(err)
	}
	return s, db
}

// message returns a message of a key at an offset. Messages with failures are due at once.
func message(key string, generation, offset int64, failed int) *Message {
	return &Message{
		ID: MessageID(orders, generation, offset, key), Place: orders, Queue: KeyQueue([]byte(key)),
		Generation: generation, Offset: offset, LeaderEpoch: 7, Time: time.UnixMilli(1_700_000_000_123).UTC(),
		Key: []byte(key), Value: fmt.Appendf(nil, "%s at %d", key, offset),
		Attempts: Attempts{Failed: failed},
	}
}

// inTransaction runs f in a transaction and repeats it after conflicts.
func inTransaction(ctx context.Context, db *mongo.Database, f func(ctx context.Context) error) error {
	sess, err := db.Client().StartSession()
	if err != nil {
		return err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	_, err = sess.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, f(ctx) })
	return err
}

func (s *Store) mustAdd(t *testing.T, list ...*Message) {
	t.Helper()
	for _, m := range list {
		if err := s.Add(t.Context(), m, 0); err != nil {
			t.Fatal(err)
		}
	}
}

func (s *Store) mustFirst(t *testing.T, queue Digest) *Message {
	t.Helper()
	m, err := s.First(t.Context(), orders, queue)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMessagesOfAKeyAreTakenInOrder(t *testing.T) {
	t.Parallel()
	s, db := openStore(t, stacktest.Client(t))
	first, second, recreated := message("a", 0, 10, 1), message("a", 0, 12, 0), message("a", 1, 2, 0)
	other := message("b", 0, 11, 1)
	s.mustAdd(t, recreated, second, other, first)

	take := func(m *Message) bool {
		t.Helper()
		var taken bool
		err := inTransaction(t.Context(), db, func(ctx context.Context) (err error) {
			taken, err = s.Take(ctx, m)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return taken
	}

	if take(second) {
		t.Error("the second message of a key was taken before the first")
	}
	if !take(other) {
		t.Error("a message of another key could not be taken")
	}
	for _, want := range []*Message{first, second, recreated} {
		if got := s.mustFirst(t, want.Queue); got == nil || got.ID != want.ID {
			t.Fatalf("first message: got %+v, want offset %d", got, want.Offset)
		}
		if !take(want) {
			t.Errorf("offset %d of generation %d could not be taken", want.Offset, want.Generation)
		}
		if take(want) {
			t.Errorf("offset %d of generation %d was taken twice", want.Offset, want.Generation)
		}
	}
	if got := s.mustFirst(t, first.Queue); got != nil {
		t.Errorf("the queue is not empty: %+v", got)
	}
}

func TestTwoWorkersTakeEachMessageOnceAndInOrder(t *testing.T) {
	t.Parallel()
	s, db := openStore(t, stacktest.Client(t))
	const keys, each = 3, 8
	for offset := range int64(keys * each) {
		s.mustAdd(t, message(fmt.Sprint(offset%keys), 0, offset, 1))
	}

	// Both work on the same keys, like the owner of a partition and the previous one.
	work := func() error {
		for key := range keys {
			queue := KeyQueue([]byte(fmt.Sprint(key)))
			for {
				m, err := s.First(t.Context(), orders, queue)
				if m == nil || err != nil {
					if err != nil {
						return err
					}
					break
				}

				err = inTransaction(t.Context(), db, func(ctx context.Context) error {
					taken, err := s.Take(ctx, m)
					if !taken || err != nil {
						return err
					}
					_, err = db.Collection("effects").InsertOne(ctx, bson.D{{Key: "key", Value: key}, {Key: "offset", Value: m.Offset}})
					return err
				})
				if err != nil {
					return err
				}
			}
		}
		return nil
	}

	var workers sync.WaitGroup
	for range 2 {
		workers.Go(func() {
			if err := work(); err != nil {
				t.Error(err)
			}
		})
	}
	workers.Wait()

	cur, err := db.Collection("effects").Find(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	var effects []struct {
		Key    int
		Offset int64
	}
	if err := cur.All(t.Context(), &effects); err != nil {
		t.Fatal(err)
	}
	got := map[int][]int64{}
	for _, e := range effects {
		got[e.Key] = append(got[e.Key], e.Offset)
	}
	for key := range keys {
		if !slices.IsSorted(got[key]) || len(got[key]) != each || len(slices.Compact(got[key])) != each {
			t.Errorf("key %d: got the offsets %v, want each once and in order", key, got[key])
		}
	}
}

func TestAStepThatIsInterruptedHasNoEffect(t *testing.T) {
	t.Parallel()
	s, db := openStore(t, stacktest.Client(t))
	effects := db.Collection("effects")
	m := message("a", 0, 10, 1)

	// The context ends after each statement in turn, like a process that stops there.
	interrupt := func(steps ...func(ctx context.Context) error) {
		t.Helper()
		for n := range steps {
			ctx, cancel := context.WithCancel(t.Context())
			err := inTransaction(ctx, db, func(ctx context.Context) error {
				for i, step := range steps {
					if err := step(ctx); err != nil {
						return err
					}
					if i == n {
						cancel()
					}
				}
				return nil
			})
			if err == nil {
				t.Fatalf("the transaction was committed although it was interrupted after step %d", n+1)
			}
		}
	}

	writeEffect := func(ctx context.Context) error {
		_, err := effects.InsertOne(ctx, bson.D{})
		return err
	}
	interrupt(writeEffect, func(ctx context.Context) error { return s.Add(ctx, m, 0) })
	if got := s.mustFirst(t, m.Queue); got != nil {
		t.Errorf("an interrupted transaction set a message aside: %+v", got)
	}

	s.mustAdd(t, m)
	interrupt(
		func(ctx context.Context) error {
			taken, err := s.Take(ctx, m)
			if err == nil && !taken {
				t.Error("the message could not be taken")
			}
			return err
		},
		writeEffect,
	)
	if got := s.mustFirst(t, m.Queue); got == nil || got.ID != m.ID {
		t.Errorf("an interrupted transaction removed the message: got %+v", got)
	}
	if n, err := effects.CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("effects of interrupted transactions: got %d (%v), want none", n, err)
	}
}

func TestAMessageIsStoredOnceAndAsItWas(t *testing.T) {
	t.Parallel()
	s, _ := openStore(t, stacktest.Client(t))
	m := message("a", 0, 10, 2)
	m.Value = nil
	m.Headers = []Header{{Key: "$h", Value: nil}, {Key: "empty", Value: []byte{}}, {Key: "", Value: []byte("$x")}}
	m.Spared, m.Elapsed = 1, time.Hour
	m.History = []Failure{{At: m.Time, Attempt: 1, Class: "handler", Reason: "$away"}}
	s.mustAdd(t, m)

	again := *m
	again.Failed, again.Value = 0, []byte("another")
	s.mustAdd(t, &again)

	got := s.mustFirst(t, m.Queue)
	if got.Elapsed < time.Hour || got.Elapsed > time.Hour+time.Minute {
		t.Errorf("time since the first failure: got %v, want about an hour", got.Elapsed)
	}
	got.Elapsed, got.Time = m.Elapsed, got.Time.UTC()
	for i := range got.History {
		got.History[i].At = got.History[i].At.UTC()
	}
	if diff := cmp.Diff(m, got); diff != "" {
		t.Errorf("stored message (-want +got):\n%s", diff)
	}

	// A record without a key is not the same as one with an empty key.
	for offset, key := range [][]byte{nil, {}} {
		m := message("keyless", 0, int64(20+offset), 1)
		m.Key, m.Queue = key, m.ID
		s.mustAdd(t, m)
		if got := s.mustFirst(t, m.Queue); (got.Key == nil) != (key == nil) {
			t.Errorf("key %#v was read as %#v", key, got.Key)
		}
	}
}

func TestAttemptsAndDueTimesAreStored(t *testing.T) {
	t.Parallel()
	s, _ := openStore(t, stacktest.Client(t))
	failed, untried := message("a", 0, 10, 1), message("b", 0, 11, 0)
	if err := s.Add(t.Context(), failed, time.Hour); err != nil {
		t.Fatal(err)
	}
	s.mustAdd(t, message("a", 0, 12, 0), untried)

	waits := func() map[Digest]time.Duration {
		t.Helper()
		heads, err := s.Heads(t.Context(), orders.Handler, orders.Topic, []int32{1, orders.Partition})
		if err != nil {
			t.Fatal(err)
		}
		out := map[Digest]time.Duration{}
		for _, h := range heads {
			if h.Partition != orders.Partition {
				t.Errorf("a queue of partition %d", h.Partition)
			}
			out[h.Queue] = h.Wait
		}
		return out
	}
	if got := waits(); len(got) != 2 || got[untried.Queue] != 0 || got[failed.Queue].Round(time.Minute) != time.Hour {
		t.Errorf("waits: got %v, want an hour and none", got)
	}

	untried.Failed, untried.Elapsed = 1, 0
	untried.History = []Failure{{Class: "handler", Reason: "away"}}
	if err := s.Postpone(t.Context(), untried, time.Minute); err != nil {
		t.Fatal(err)
	}
	if got := waits()[untried.Queue]; got > time.Minute || got < 30*time.Second {
		t.Errorf("wait after a failed retry: got %v, want a minute", got)
	}
	if got := s.mustFirst(t, untried.Queue); got.Failed != 1 || len(got.History) != 1 || got.Elapsed > time.Minute {
		t.Errorf("attempts after a failed retry: got %+v", got.Attempts)
	}
}

func TestWaitingCountAndRetire(t *testing.T) {
	t.Parallel()
	s, _ := openStore(t, stacktest.Client(t))
	for offset := range int64(6) {
		s.mustAdd(t, message(fmt.Sprint(offset%2), 0, offset, 1))
	}
	stranger := message("0", 0, 1, 1)
	stranger.Handler, stranger.ID = "billing/report", MessageID(Place{Handler: "billing/report"}, 0, 1, "")
	s.mustAdd(t, stranger)

	queues := []Digest{KeyQueue([]byte("1")), KeyQueue([]byte("2"))}
	if got, err := s.Waiting(t.Context(), orders, queues); err != nil || !slices.Equal(got, queues[:1]) {
		t.Errorf("waiting queues: got %v (%v), want %v", got, err, queues[:1])
	}
	for limit, want := range map[int]int{4: 4, 100: 6} {
		if n, err := s.Count(t.Context(), orders.Handler, limit); n != want || err != nil {
			t.Errorf("count up to %d: got %d (%v), want %d", limit, n, err, want)
		}
	}
	names, err := s.Handlers(t.Context(), "billing")
	if want := []string{orders.Handler, stranger.Handler}; err != nil || !slices.Equal(names, want) {
		t.Errorf("handlers with messages: got %v (%v), want %v", names, err, want)
	}
	if names, err := s.Handlers(t.Context(), "bill"); err != nil || len(names) != 0 {
		t.Errorf("handlers of another group: got %v (%v), want none", names, err)
	}
	if n, err := s.Retire(t.Context(), orders.Handler); n != 6 || err != nil {
		t.Errorf("retired messages: got %d (%v), want 6", n, err)
	}
	if n, err := s.Count(t.Context(), stranger.Handler, 10); n != 1 || err != nil {
		t.Errorf("messages of another handler: got %d (%v), want 1", n, err)
	}
}

func TestARecordThatDoesNotFitIsRefused(t *testing.T) {
	t.Parallel()
	s, _ := openStore(t, stacktest.Client(t))
	m := message("a", 0, 10, 1)
	m.Value = bytes.Repeat([]byte{1}, maxRecordBytes)
	if err := s.Add(t.Context(), m, 0); !errors.Is(err, ErrTooLarge) {
		t.Errorf("Add: got %v, want ErrTooLarge", err)
	}
}

func TestEveryQueryUsesTheIndex(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	judge := func(p stacktest.Plan) {
		mu.Lock()
		defer mu.Unlock()
		if slices.Contains(p.Stages, "COLLSCAN") {
			t.Errorf("%s scans the collection: %v", p.Command, p.Stages)
		}
		if slices.Contains(p.Stages, "SORT") {
			t.Errorf("%s sorts in memory: %v", p.Command, p.Stages)
		}
		if p.Docs > 1 {
			t.Errorf("%s reads %d documents", p.Command, p.Docs)
		}
	}
	s, _ := openStore(t, stacktest.Explained(t, judge))
	for offset := range int64(40) {
		s.mustAdd(t, message(fmt.Sprint(offset%4), 0, offset, 1))
	}

	m := s.mustFirst(t, KeyQueue([]byte("1")))
	steps := map[string]func() error{
		"Postpone": func() error { return s.Postpone(t.Context(), m, time.Second) },
		"Take":     func() error { _, err := s.Take(t.Context(), m); return err },
		"Heads": func() error {
			heads, err := s.Heads(t.Context(), orders.Handler, orders.Topic, []int32{0, orders.Partition})
			if len(heads) != 4 {
				t.Errorf("queues: got %d, want 4", len(heads))
			}
			return err
		},
		"Waiting": func() error { _, err := s.Waiting(t.Context(), orders, []Digest{m.Queue}); return err },
		"Count":   func() error { _, err := s.Count(t.Context(), orders.Handler, 10); return err },
	}
	for name, step := range steps {
		if err := step(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
