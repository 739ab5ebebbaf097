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
		{"TheHandlersOfAllMembersAreListed", theHandlersOfAllMembersAreListed},
		{"RequestsOfOperatorsAreFound", requestsOfOperatorsAreFound},
		{"DiscardedMessagesAreFound", discardedMessagesAreFound},
		{"ARecordThatDoesNotFitIsRejected", aRecordThatDoesNotFitIsRejected},
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
	if err := s.Store.Add(s.Context(), 0, list...); err != nil {
		s.Fatal(err)
	}
}

func (s suite) first(queue setaside.Digest) *setaside.Message {
	s.Helper()
	message, err := s.Store.First(s.Context(), Orders, queue)
	if err != nil {
		s.Fatal(err)
	}
	return message
}

func (s suite) take(message *setaside.Message) (taken bool) {
	s.Helper()
	err := s.Transaction(s.Context(), func(ctx context.Context) (err error) {
		taken, err = s.Store.Take(ctx, message)
		return err
	})
	if err != nil {
		s.Fatal(err)
	}
	return taken
}

// newEffect returns a message that stands for the effect of message in a transaction.
func newEffect(message *setaside.Message) *setaside.Message {
	effect := *message
	effect.Handler = "effects/" + string(message.Key)
	effect.ID = setaside.MessageID(effect.Place, message.Generation, message.Offset, "")
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

func messagesOfAKeyAreTakenInOrder(suite suite) {
	first, second, recreated := NewMessage("a", 0, 10, 1), NewMessage("a", 0, 12, 0), NewMessage("a", 1, 2, 0)
	other := NewMessage("b", 0, 11, 1)
	suite.add(recreated, second, other, first)

	if suite.take(second) {
		suite.Error("the second message of a key was taken before the first")
	}
	if !suite.take(other) {
		suite.Error("a message of another key could not be taken")
	}
	for _, want := range []*setaside.Message{first, second, recreated} {
		if got := suite.first(want.Queue); got == nil || got.ID != want.ID {
			suite.Fatalf("first message: got %+v, want offset %d", got, want.Offset)
		}
		if !suite.take(want) {
			suite.Errorf("offset %d of generation %d could not be taken", want.Offset, want.Generation)
		}
		if suite.take(want) {
			suite.Errorf("offset %d of generation %d was taken twice", want.Offset, want.Generation)
		}
	}
	if got := suite.first(first.Queue); got != nil {
		suite.Errorf("the queue is not empty: %+v", got)
	}
}

func twoWorkersTakeEachMessageOnceAndInOrder(suite suite) {
	const keys, each = 3, 8
	for offset := range int64(keys * each) {
		suite.add(NewMessage(fmt.Sprint(offset%keys), 0, offset, 1))
	}

	// A message is in order if the transaction that takes it sees the effects of exactly the earlier ones.
	handle := func(message *setaside.Message) error {
		return suite.Transaction(suite.Context(), func(ctx context.Context) error {
			taken, err := suite.Store.Take(ctx, message)
			if !taken || err != nil {
				return err
			}
			if got, want := suite.countEffects(ctx, string(message.Key)), int(message.Offset/keys); got != want {
				suite.Errorf("offset %d was taken after %d messages of its key, want %d", message.Offset, got, want)
			}
			return suite.Store.Add(ctx, 0, newEffect(message))
		})
	}

	// Both work on the same keys, like the owner of a partition and the previous one.
	work := func() error {
		for key := range keys {
			queue := setaside.KeyQueue([]byte(fmt.Sprint(key)))
			for {
				message, err := suite.Store.First(suite.Context(), Orders, queue)
				if err != nil {
					return err
				}
				if message == nil {
					break
				}
				if err := handle(message); err != nil {
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
				suite.Error(err)
			}
		})
	}
	workers.Wait()

	for key := range keys {
		if n := suite.countEffects(suite.Context(), fmt.Sprint(key)); n != each {
			suite.Errorf("effects of key %d: got %d, want %d", key, n, each)
		}
	}
}

func aStepThatIsInterruptedHasNoEffect(suite suite) {
	message := NewMessage("a", 0, 10, 1)

	// The context ends after each step in turn, like a process that stops there.
	interrupt := func(steps ...func(ctx context.Context) error) {
		suite.Helper()
		for n := range steps {
			ctx, cancel := context.WithCancel(suite.Context())
			err := suite.Transaction(ctx, func(ctx context.Context) error {
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
				suite.Fatalf("the transaction was committed although it was interrupted after step %d", n+1)
			}
		}
	}

	writeEffect := func(ctx context.Context) error { return suite.Store.Add(ctx, 0, newEffect(message)) }
	interrupt(writeEffect, func(ctx context.Context) error { return suite.Store.Add(ctx, 0, message) })
	if got := suite.first(message.Queue); got != nil {
		suite.Errorf("an interrupted transaction set a message aside: %+v", got)
	}

	suite.add(message)
	takeMessage := func(ctx context.Context) error {
		taken, err := suite.Store.Take(ctx, message)
		if err == nil && !taken {
			suite.Error("the message could not be taken")
		}
		return err
	}
	interrupt(takeMessage, writeEffect)
	if got := suite.first(message.Queue); got == nil || got.ID != message.ID {
		suite.Errorf("an interrupted transaction removed the message: got %+v", got)
	}
	if n := suite.countEffects(suite.Context(), "a"); n != 0 {
		suite.Errorf("effects of interrupted transactions: got %d, want none", n)
	}
}

func aMessageIsStoredOnceAndAsItWas(suite suite) {
	message := NewMessage("a", 0, 10, 2)
	message.Value = nil
	message.Headers = []setaside.Header{{Key: "$h", Value: nil}, {Key: "empty", Value: []byte{}}, {Key: "", Value: []byte("$x")}}
	message.Spared, message.Elapsed = 1, time.Hour
	message.History = []setaside.Failure{{At: message.Time, Attempt: 1, Class: "handler", Reason: "$away"}}
	suite.add(message)

	again := *message
	again.Failed, again.Value = 0, []byte("another")
	suite.add(&again)

	got := suite.first(message.Queue)
	if got.Elapsed < time.Hour || got.Elapsed > time.Hour+time.Minute {
		suite.Errorf("time since the first failure: got %v, want about an hour", got.Elapsed)
	}
	got.Elapsed, got.Time, got.ReadAt = message.Elapsed, got.Time.UTC(), time.Time{}
	for i := range got.History {
		got.History[i].At = got.History[i].At.UTC()
	}
	if !reflect.DeepEqual(got, message) {
		suite.Errorf("stored message: got %+v, want %+v", got, message)
	}

	// A message that was read belongs to the caller.
	got.Key[0], got.Headers[1].Key, got.History[0].Reason = 'x', "x", "x"
	if again := suite.first(message.Queue); string(again.Key) != "a" || again.Headers[1].Key != "empty" || again.History[0].Reason != "$away" {
		suite.Errorf("changing the returned message has changed the stored message: %+v", again)
	}

	// A record without a key is not the same as one with an empty key.
	for offset, key := range [][]byte{nil, {}} {
		message := NewMessage("keyless", 0, int64(20+offset), 1)
		message.Key, message.Queue = key, message.ID
		suite.add(message)
		if got := suite.first(message.Queue); (got.Key == nil) != (key == nil) {
			suite.Errorf("key %#v was read as %#v", key, got.Key)
		}
	}
}

func attemptsAndDueTimesAreStored(suite suite) {
	failed, untried := NewMessage("a", 0, 10, 1), NewMessage("b", 0, 11, 0)
	if err := suite.Store.Add(suite.Context(), time.Hour, failed); err != nil {
		suite.Fatal(err)
	}
	suite.add(NewMessage("a", 0, 12, 0), untried)
	// A query for two places may find others: each topic has each partition number.
	second, third := setaside.Place{Handler: Orders.Handler, Topic: "refunds", Partition: 1}, Orders
	third.Partition = second.Partition
	suite.add(newMessageAt(second, 1), newMessageAt(third, 2))

	waits := func() map[setaside.Digest]time.Duration {
		suite.Helper()
		heads, err := suite.Store.Heads(suite.Context(), []setaside.Place{Orders, second})
		if err != nil {
			suite.Fatal(err)
		}
		out := map[setaside.Digest]time.Duration{}
		for _, h := range heads {
			if h.Place == Orders {
				out[h.Digest] = h.Wait
			} else if h.Place != second {
				suite.Errorf("a queue of %+v", h.Place)
			}
		}
		return out
	}
	if got := waits(); len(got) != 2 || got[untried.Queue] != 0 || got[failed.Queue].Round(time.Minute) != time.Hour {
		suite.Errorf("waits: got %v, want an hour and none", got)
	}

	untried.Failed, untried.Elapsed = 1, 0
	untried.History = []setaside.Failure{{Class: "handler", Reason: "away"}}
	if err := suite.Store.Postpone(suite.Context(), untried, time.Minute); err != nil {
		suite.Fatal(err)
	}
	if got := waits()[untried.Queue]; got > time.Minute || got < 30*time.Second {
		suite.Errorf("wait after a failed retry: got %v, want a minute", got)
	}
	if got := suite.first(untried.Queue); got.Failed != 1 || len(got.History) != 1 || got.Elapsed > time.Minute {
		suite.Errorf("attempts after a failed retry: got %+v", got.Attempts)
	}

	gone := NewMessage("c", 0, 13, 1)
	if err := suite.Store.Postpone(suite.Context(), gone, time.Minute); err != nil || suite.first(gone.Queue) != nil {
		suite.Errorf("a message that does not exist was postponed: error %v", err)
	}
}

func waitingQueuesAreFound(suite suite) {
	for offset := range int64(6) {
		suite.add(NewMessage(fmt.Sprint(offset%2), 0, offset, 1))
	}
	queues := []setaside.Digest{setaside.KeyQueue([]byte("1")), setaside.KeyQueue([]byte("2"))}
	if got, err := suite.Store.Waiting(suite.Context(), Orders, queues); err != nil || !slices.Equal(got, queues[:1]) {
		suite.Errorf("waiting queues: got %v (%v), want %v", got, err, queues[:1])
	}

	suite.add(NewMessage("9", 0, 9, 1), NewMessage("untried", 0, 11, 0))
	for limit, want := range map[int]int{2: 2, 100: 3} {
		if n, err := suite.Store.Failing(suite.Context(), Orders.Handler, limit); n != want || err != nil {
			suite.Errorf("keys that failed, up to %d: got %d (%v), want %d", limit, n, err, want)
		}
	}
}

func requestsOfOperatorsAreFound(suite suite) {
	requeued, foreign := NewMessage("a", 0, 2, 0), NewMessage("a", 0, 3, 0)
	requeued.Requested, foreign.Requested = true, true
	foreign.Handler = "shipping/pack"
	foreign.ID = setaside.MessageID(foreign.Place, 0, 3, "")
	longer := newMessageAt(setaside.Place{Handler: "billing/eu/report", Topic: "orders"}, 1)
	longer.Requested = true
	failed := NewMessage("b", 0, 4, 1)
	suite.add(requeued, foreign, longer, failed)

	want := []setaside.Request{{Queue: setaside.Queue{Place: Orders, Digest: requeued.Queue}}}
	if got, err := suite.Store.Requested(suite.Context(), "billing"); err != nil || !slices.Equal(got, want) {
		suite.Errorf("queues with requests: got %v (%v), want %v", got, err, want)
	}
	ids := []setaside.Digest{requeued.ID, failed.ID, {1}}
	got, err := suite.Store.Stored(suite.Context(), ids)
	if err != nil || len(got) != 2 || slices.Contains(got, ids[2]) {
		suite.Errorf("stored ids: got %v (%v), want %v", got, err, ids[:2])
	}

	// The attempt that was requested is over when it fails.
	first := suite.first(requeued.Queue)
	if first == nil || !first.Requested {
		suite.Fatalf("before the attempt: got %+v, want a requested message", first)
	}
	first.Failed = 1
	if err := suite.Store.Postpone(suite.Context(), first, time.Hour); err != nil {
		suite.Fatal(err)
	}
	if message := suite.first(requeued.Queue); message == nil || message.Requested {
		suite.Errorf("after a failure: got %+v, want a message without a request", message)
	}
	if got, err := suite.Store.Requested(suite.Context(), "billing"); err != nil || len(got) != 0 {
		suite.Errorf("queues after the attempt: got %v (%v), want none", got, err)
	}
}

func discardedMessagesAreFound(suite suite) {
	kept, second, third := NewMessage("a", 0, 2, 1), NewMessage("a", 0, 4, 0), NewMessage("a", 0, 3, 0)
	for _, m := range []*setaside.Message{second, third} {
		m.Requested, m.Discarded = true, &setaside.Discard{By: "ann", At: time.Now().UTC().Truncate(time.Millisecond)}
	}
	suite.add(kept, second, third)

	queue := setaside.Queue{Place: Orders, Digest: kept.Queue}
	check := func() {
		suite.Helper()
		want := []setaside.Request{{Queue: queue, Discards: 2}}
		if got, err := suite.Store.Requested(suite.Context(), "billing"); err != nil || !slices.Equal(got, want) {
			suite.Errorf("queues with requests: got %v (%v), want %v", got, err, want)
		}
		got, err := suite.Store.Discarded(suite.Context(), queue)
		if err != nil || len(got) != 2 || got[0].ID != third.ID || got[1].ID != second.ID || *got[0].Discarded != *third.Discarded {
			suite.Errorf("discarded messages: got %+v (%v), want the two in their order", got, err)
		}
	}
	check()

	// An attempt of the queue does not end the orders.
	first := suite.first(kept.Queue)
	first.Failed++
	if err := suite.Store.Postpone(suite.Context(), first, time.Hour); err != nil {
		suite.Fatal(err)
	}
	check()

	for _, want := range []bool{true, false} {
		if removed, err := suite.Store.Remove(suite.Context(), second); removed != want || err != nil {
			suite.Errorf("removal: got %t (%v), want %t", removed, err, want)
		}
	}
}

func aRecordThatDoesNotFitIsRejected(suite suite) {
	message := NewMessage("a", 0, 10, 1)
	message.Value = bytes.Repeat([]byte{1}, 12<<20)
	if err := suite.Store.Add(suite.Context(), 0, message); !errors.Is(err, setaside.ErrTooLarge) {
		suite.Errorf("Add: got %v, want ErrTooLarge", err)
	}
}
