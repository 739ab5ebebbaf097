// Package setasidetest contains the contract of a setaside.Store as tests. Each implementation must pass them, so that a
// test of a consumer in memory is valid for MongoDB.
package setasidetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/service/setaside"
)

// Setup is an empty store.
type Setup struct {
	Store setaside.Store

	// Count returns how many messages of a handler the transaction of ctx sees.
	Count func(ctx context.Context, handler string) (int, error)

	// Transaction runs fn as one unit of work, and again after a conflict.
	Transaction func(ctx context.Context, fn func(ctx context.Context) error) error
}

// suite is one test with its Setup and helper methods.
type suite struct {
	*testing.T
	Setup
}

// Run runs the tests in parallel. factory returns a new Setup for each test.
func Run(t *testing.T, factory func(t *testing.T) Setup) {
	t.Helper()
	for _, test := range []struct {
		name string
		run  func(suite)
	}{
		{"MessagesOfAKeyAreTakenInOrder", messagesOfAKeyAreTakenInOrder},
		{"TwoWorkersTakeEachMessageOnceAndInOrder", twoWorkersTakeEachMessageOnceAndInOrder},
		{"AStepThatIsInterruptedHasNoEffect", aStepThatIsInterruptedHasNoEffect},
		{"AMessageIsStoredOnceAndAsItWas", aMessageIsStoredOnceAndAsItWas},
		{"AttemptsAndDueTimesAreStored", attemptsAndDueTimesAreStored},
		{"WaitingQueuesAreFound", waitingQueuesAreFound},
		{"OneMemberCountsForTheGroup", oneMemberCountsForTheGroup},
		{"RequeuedMessagesAreFound", requeuedMessagesAreFound},
		{"ARecordThatDoesNotFitIsRefused", aRecordThatDoesNotFitIsRefused},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(suite{t, factory(t)})
		})
	}
}

// Orders is the place of the messages of NewMessage.
var Orders = setaside.Place{Handler: "billing/invoice", Topic: "orders", Partition: 3}

// NewMessage returns a message of a key at an offset. A message with failures is due at once.
func NewMessage(key string, generation, offset int64, failed int) *setaside.Message {
	return &setaside.Message{
		ID:          setaside.MessageID(Orders, generation, offset, key),
		Place:       Orders,
		Queue:       setaside.KeyQueue([]byte(key)),
		Generation:  generation,
		Offset:      offset,
		LeaderEpoch: 7,
		Time:        time.UnixMilli(1_700_000_000_123).UTC(),
		Key:         []byte(key),
		Value:       fmt.Appendf(nil, "%s at %d", key, offset),
		Attempts:    setaside.Attempts{Failed: failed},
	}
}

func (s suite) add(list ...*setaside.Message) {
	s.Helper()
	for _, m := range list {
		if err := s.Store.Add(s.Context(), m, 0); err != nil {
			s.Fatal(err)
		}
	}
}

func (s suite) first(queue setaside.Digest) *setaside.Message {
	s.Helper()
	m, err := s.Store.First(s.Context(), Orders, queue)
	if err != nil {
		s.Fatal(err)
	}
	return m
}

func (s suite) take(m *setaside.Message) (taken bool) {
	s.Helper()
	err := s.Transaction(s.Context(), func(ctx context.Context) (err error) {
		taken, err = s.Store.Take(ctx, m)
		return err
	})
	if err != nil {
		s.Fatal(err)
	}
	return taken
}

// newEffect returns a message that stands for the effect of m in a transaction.
func newEffect(m *setaside.Message) *setaside.Message {
	effect := *m
	effect.Handler = "effects/" + string(m.Key)
	effect.ID = setaside.MessageID(effect.Place, m.Generation, m.Offset, "")
	return &effect
}

func (s suite) countEffects(ctx context.Context, key string) int {
	s.Helper()
	n, err := s.Count(ctx, "effects/"+key)
	if err != nil {
		s.Error(err)
	}
	return n
}

func messagesOfAKeyAreTakenInOrder(s suite) {
	first, second, recreated := NewMessage("a", 0, 10, 1), NewMessage("a", 0, 12, 0), NewMessage("a", 1, 2, 0)
	other := NewMessage("b", 0, 11, 1)
	s.add(recreated, second, other, first)

	if s.take(second) {
		s.Error("the second message of a key was taken before the first")
	}
	if !s.take(other) {
		s.Error("a message of another key could not be taken")
	}
	for _, want := range []*setaside.Message{first, second, recreated} {
		if got := s.first(want.Queue); got == nil || got.ID != want.ID {
			s.Fatalf("first message: got %+v, want offset %d", got, want.Offset)
		}
		if !s.take(want) {
			s.Errorf("offset %d of generation %d could not be taken", want.Offset, want.Generation)
		}
		if s.take(want) {
			s.Errorf("offset %d of generation %d was taken twice", want.Offset, want.Generation)
		}
	}
	if got := s.first(first.Queue); got != nil {
		s.Errorf("the queue is not empty: %+v", got)
	}
}

func twoWorkersTakeEachMessageOnceAndInOrder(s suite) {
	const keys, each = 3, 8
	for offset := range int64(keys * each) {
		s.add(NewMessage(fmt.Sprint(offset%keys), 0, offset, 1))
	}

	// A message is in order if the transaction that takes it sees the effects of exactly the earlier ones.
	handle := func(m *setaside.Message) error {
		return s.Transaction(s.Context(), func(ctx context.Context) error {
			taken, err := s.Store.Take(ctx, m)
			if !taken || err != nil {
				return err
			}
			if got, want := s.countEffects(ctx, string(m.Key)), int(m.Offset/keys); got != want {
				s.Errorf("offset %d was taken after %d messages of its key, want %d", m.Offset, got, want)
			}
			return s.Store.Add(ctx, newEffect(m), 0)
		})
	}

	// Both work on the same keys, like the owner of a partition and the previous one.
	work := func() error {
		for key := range keys {
			queue := setaside.KeyQueue([]byte(fmt.Sprint(key)))
			for {
				m, err := s.Store.First(s.Context(), Orders, queue)
				if err != nil {
					return err
				}
				if m == nil {
					break
				}
				if err := handle(m); err != nil {
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
				s.Error(err)
			}
		})
	}
	workers.Wait()

	for key := range keys {
		if n := s.countEffects(s.Context(), fmt.Sprint(key)); n != each {
			s.Errorf("effects of key %d: got %d, want %d", key, n, each)
		}
	}
}

func aStepThatIsInterruptedHasNoEffect(s suite) {
	m := NewMessage("a", 0, 10, 1)

	// The context ends after each step in turn, like a process that stops there.
	interrupt := func(steps ...func(ctx context.Context) error) {
		s.Helper()
		for n := range steps {
			ctx, cancel := context.WithCancel(s.Context())
			err := s.Transaction(ctx, func(ctx context.Context) error {
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
				s.Fatalf("the transaction was committed although it was interrupted after step %d", n+1)
			}
		}
	}

	writeEffect := func(ctx context.Context) error { return s.Store.Add(ctx, newEffect(m), 0) }
	interrupt(writeEffect, func(ctx context.Context) error { return s.Store.Add(ctx, m, 0) })
	if got := s.first(m.Queue); got != nil {
		s.Errorf("an interrupted transaction set a message aside: %+v", got)
	}

	s.add(m)
	takeMessage := func(ctx context.Context) error {
		taken, err := s.Store.Take(ctx, m)
		if err == nil && !taken {
			s.Error("the message could not be taken")
		}
		return err
	}
	interrupt(takeMessage, writeEffect)
	if got := s.first(m.Queue); got == nil || got.ID != m.ID {
		s.Errorf("an interrupted transaction removed the message: got %+v", got)
	}
	if n := s.countEffects(s.Context(), "a"); n != 0 {
		s.Errorf("effects of interrupted transactions: got %d, want none", n)
	}
}

func aMessageIsStoredOnceAndAsItWas(s suite) {
	m := NewMessage("a", 0, 10, 2)
	m.Value = nil
	m.Headers = []setaside.Header{{Key: "$h", Value: nil}, {Key: "empty", Value: []byte{}}, {Key: "", Value: []byte("$x")}}
	m.Spared, m.Elapsed = 1, time.Hour
	m.History = []setaside.Failure{{At: m.Time, Attempt: 1, Class: "handler", Reason: "$away"}}
	s.add(m)

	again := *m
	again.Failed, again.Value = 0, []byte("another")
	s.add(&again)

	got := s.first(m.Queue)
	if got.Elapsed < time.Hour || got.Elapsed > time.Hour+time.Minute {
		s.Errorf("time since the first failure: got %v, want about an hour", got.Elapsed)
	}
	got.Elapsed, got.Time = m.Elapsed, got.Time.UTC()
	for i := range got.History {
		got.History[i].At = got.History[i].At.UTC()
	}
	if !reflect.DeepEqual(got, m) {
		s.Errorf("stored message: got %+v, want %+v", got, m)
	}

	// A message that was read belongs to the caller.
	got.Key[0], got.Headers[1].Key, got.History[0].Reason = 'x', "x", "x"
	if again := s.first(m.Queue); string(again.Key) != "a" || again.Headers[1].Key != "empty" || again.History[0].Reason != "$away" {
		s.Errorf("changing the returned message has changed the stored message: %+v", again)
	}

	// A record without a key is not the same as one with an empty key.
	for offset, key := range [][]byte{nil, {}} {
		m := NewMessage("keyless", 0, int64(20+offset), 1)
		m.Key, m.Queue = key, m.ID
		s.add(m)
		if got := s.first(m.Queue); (got.Key == nil) != (key == nil) {
			s.Errorf("key %#v was read as %#v", key, got.Key)
		}
	}
}

func attemptsAndDueTimesAreStored(s suite) {
	failed, untried := NewMessage("a", 0, 10, 1), NewMessage("b", 0, 11, 0)
	if err := s.Store.Add(s.Context(), failed, time.Hour); err != nil {
		s.Fatal(err)
	}
	s.add(NewMessage("a", 0, 12, 0), untried)

	waits := func() map[setaside.Digest]time.Duration {
		s.Helper()
		heads, err := s.Store.Heads(s.Context(), Orders.Handler, Orders.Topic, []int32{1, Orders.Partition})
		if err != nil {
			s.Fatal(err)
		}
		out := map[setaside.Digest]time.Duration{}
		for _, h := range heads {
			if h.Partition != Orders.Partition {
				s.Errorf("a queue of partition %d", h.Partition)
			}
			out[h.Queue] = h.Wait
		}
		return out
	}
	if got := waits(); len(got) != 2 || got[untried.Queue] != 0 || got[failed.Queue].Round(time.Minute) != time.Hour {
		s.Errorf("waits: got %v, want an hour and none", got)
	}

	untried.Failed, untried.Elapsed = 1, 0
	untried.History = []setaside.Failure{{Class: "handler", Reason: "away"}}
	if err := s.Store.Postpone(s.Context(), untried, time.Minute); err != nil {
		s.Fatal(err)
	}
	if got := waits()[untried.Queue]; got > time.Minute || got < 30*time.Second {
		s.Errorf("wait after a failed retry: got %v, want a minute", got)
	}
	if got := s.first(untried.Queue); got.Failed != 1 || len(got.History) != 1 || got.Elapsed > time.Minute {
		s.Errorf("attempts after a failed retry: got %+v", got.Attempts)
	}

	gone := NewMessage("c", 0, 13, 1)
	if err := s.Store.Postpone(s.Context(), gone, time.Minute); err != nil || s.first(gone.Queue) != nil {
		s.Errorf("a message that does not exist was postponed: error %v", err)
	}
}

func waitingQueuesAreFound(s suite) {
	for offset := range int64(6) {
		s.add(NewMessage(fmt.Sprint(offset%2), 0, offset, 1))
	}
	queues := []setaside.Digest{setaside.KeyQueue([]byte("1")), setaside.KeyQueue([]byte("2"))}
	if got, err := s.Store.Waiting(s.Context(), Orders, queues); err != nil || !slices.Equal(got, queues[:1]) {
		s.Errorf("waiting queues: got %v (%v), want %v", got, err, queues[:1])
	}

	s.add(NewMessage("9", 0, 9, 1), NewMessage("untried", 0, 11, 0))
	for limit, want := range map[int]int{2: 2, 100: 3} {
		if n, err := s.Store.Failing(s.Context(), Orders.Handler, limit); n != want || err != nil {
			s.Errorf("keys that failed, up to %d: got %d (%v), want %d", limit, n, err, want)
		}
	}
}

// newMessageAt returns an untried message at a place.
func newMessageAt(p setaside.Place, offset int64) *setaside.Message {
	m := NewMessage("k", 0, offset, 0)
	m.Place, m.ID = p, setaside.MessageID(p, 0, offset, "")
	return m
}

func oneMemberCountsForTheGroup(s suite) {
	old, removed, foreign := NewMessage("9", 0, 9, 1), Orders, setaside.Place{Handler: "bill/report", Topic: "orders"}
	old.Elapsed, removed.Topic = time.Hour, "removed"
	s.add(old, NewMessage("9", 0, 10, 0), newMessageAt(removed, 1), newMessageAt(foreign, 1))

	counts := 0
	takeCensus := func(member string) setaside.Census {
		s.Helper()
		c, err := s.Store.Census(s.Context(), "billing", member, func(_ context.Context, places []setaside.Place) ([]setaside.Place, error) {
			counts++
			if len(places) != 2 || !slices.Contains(places, Orders) {
				s.Errorf("places of the group: got %v, want %v and %v", places, Orders, removed)
			}
			return []setaside.Place{removed}, nil
		})
		if err != nil {
			s.Fatal(err)
		}
		return c
	}

	for i, member := range []string{"a", "a", "b"} {
		c := takeCensus(member)
		if len(c.Counts) != 2 {
			s.Fatalf("counts: got %+v, want two", c.Counts)
		}
		age := c.Now.Sub(c.Counts[0].Since)
		if got := c.Counts[0]; got.N != 2 || got.Handler != Orders.Handler || got.Topic != Orders.Topic || got.Unread || age < time.Hour || age > time.Hour+time.Minute {
			s.Errorf("census %d, messages that are read: got %+v", i, got)
		}
		if got := c.Counts[1]; got.N != 1 || got.Topic != removed.Topic || !got.Unread || !slices.Equal(got.Partitions, []int32{removed.Partition}) || !got.Since.IsZero() {
			s.Errorf("census %d, messages that no member reads: got %+v", i, got)
		}
		if c.Keeper != (member == "a") || counts != 1 {
			s.Errorf("census %d of %s after %d counts: keeper is %t", i, member, counts, c.Keeper)
		}
	}
}

func requeuedMessagesAreFound(s suite) {
	requeued, foreign := NewMessage("a", 0, 2, 0), NewMessage("a", 0, 3, 0)
	requeued.Requeued, foreign.Requeued = true, true
	foreign.Handler = "shipping/pack"
	foreign.ID = setaside.MessageID(foreign.Place, 0, 3, "")
	failed := NewMessage("b", 0, 4, 1)
	s.add(requeued, foreign, failed)

	want := []setaside.Queue{{Place: Orders, Digest: requeued.Queue}}
	if got, err := s.Store.Requeued(s.Context(), "billing"); err != nil || !slices.Equal(got, want) {
		s.Errorf("queues with requeued messages: got %v (%v), want %v", got, err, want)
	}
	ids := []setaside.Digest{requeued.ID, failed.ID, {1}}
	got, err := s.Store.Stored(s.Context(), ids)
	if err != nil || len(got) != 2 || slices.Contains(got, ids[2]) {
		s.Errorf("stored ids: got %v (%v), want %v", got, err, ids[:2])
	}

	// It stays a requeued message when it fails.
	requeued.Failed = 1
	if err := s.Store.Postpone(s.Context(), requeued, time.Hour); err != nil {
		s.Fatal(err)
	}
	if m := s.first(requeued.Queue); m == nil || !m.Requeued {
		s.Errorf("after a failure: got %+v, want a requeued message", m)
	}
	if !s.take(requeued) {
		s.Error("the message was not taken")
	}
	if got, err := s.Store.Requeued(s.Context(), "billing"); err != nil || len(got) != 0 {
		s.Errorf("queues after the message was taken: got %v (%v), want none", got, err)
	}
}

func aRecordThatDoesNotFitIsRefused(s suite) {
	m := NewMessage("a", 0, 10, 1)
	m.Value = bytes.Repeat([]byte{1}, 12<<20)
	if err := s.Store.Add(s.Context(), m, 0); !errors.Is(err, setaside.ErrTooLarge) {
		s.Errorf("Add: got %v, want ErrTooLarge", err)
	}
}
