package saga_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

// inSequence takes the payload as the number.
func inSequence() saga.StepOption[int64] { return saga.Sequenced(func(n int64) int64 { return n }) }

// sequence defines a saga in which messages of the types Even and Odd are one sequence. It stores the numbers that it handles.
func sequence(f func(ctx context.Context, in *saga.Instance[ledger], n int64) error, opts ...saga.Option) *saga.Saga[ledger] {
	s := saga.Define[ledger]("ledgers", opts...)
	step := func(ctx context.Context, in *saga.Instance[ledger], n int64) error {
		in.State.Steps = append(in.State.Steps, n)
		return f(ctx, in, n)
	}
	saga.StartOrOn(s, newType[int64]("Even"), step, inSequence())
	saga.StartOrOn(s, newType[int64]("Odd"), step, inSequence())
	return s
}

func count(context.Context, *saga.Instance[ledger], int64) error { return nil }

func numberedMsg(tb testing.TB, n int64) *consumer.Message {
	m := newMessage(tb, []string{"Even", "Odd"}[n&1], "a", n)
	m.ID = fmt.Sprint("event-", n)
	return m
}

// model implements a sequence: hold early messages up to a limit, reject more, ignore repeated
// ones, and handle messages without a number at once.
type model struct {
	next  int64
	held  map[int64]bool
	steps []int64
	limit int
	saves int
}

func (m *model) take(n int64) (rejected bool) {
	switch {
	case n <= 0:
		m.steps = append(m.steps, n)
	case n < m.next || m.held[n]:
		return false
	case n > m.next && len(m.held) >= m.limit:
		return true
	default:
		m.held[n] = true
		for m.held[m.next] {
			delete(m.held, m.next)
			m.steps = append(m.steps, m.next)
			m.next++
		}
	}

	m.saves++
	return false
}

func TestASequenceFollowsItsModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		limit := rapid.IntRange(1, 5).Draw(rt, "limit")
		box := memoryBox(t)
		h := handlerOf(t, sequence(count, saga.WithHeld(limit)), box)
		want := model{next: 1, held: map[int64]bool{}, limit: limit}
		for _, n := range rapid.SliceOfN(rapid.Int64Range(-1, 9), 0, 40).Draw(rt, "numbers") {
			err := h.Handle(t.Context(), numberedMsg(t, n))
			if rejected := want.take(n); errors.Is(err, saga.ErrGap) != rejected || err != nil && !rejected {
				rt.Fatalf("number %d: %v, rejected in the model: %v", n, err, rejected)
			}
			if want.saves == 0 {
				continue
			}

			got := readSnapshot(t, box, "ledgers", "a")
			var state struct{ Steps []int64 }
			if err := json.Unmarshal(got.State, &state); err != nil {
				rt.Fatal(err)
			}
			if got.Version != int64(want.saves) || !slices.Equal(state.Steps, want.steps) || got.Sequence != want.next-1 || len(got.Held) != len(want.held) {
				rt.Fatalf("after %d: %+v %s, want %+v", n, got, got.State, want)
			}
		}
	})
}

func TestHeldMessagesAreInTheDocument(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := handlerOf(t, sequence(count, saga.WithHeld(2)), p.box)
	mustHandle(t, h, numberedMsg(t, 3), numberedMsg(t, 2), numberedMsg(t, 3))
	err := h.Handle(t.Context(), numberedMsg(t, 4))
	if !errors.Is(err, saga.ErrGap) || !strings.Contains(err.Error(), "ledgers a waits for number 1 and holds 2 messages: the limit is 2") {
		t.Errorf("one too many: %v", err)
	}

	got := readSnapshot(t, p.box, "ledgers", "a")
	if got.Version != 2 || fmt.Sprint(got.Held) != "[2 3]" || string(got.State) != `{"steps":null}` {
		t.Errorf("before the first has come: %+v", got)
	}

	// Another process continues.
	h = handlerOf(t, sequence(count, saga.WithHeld(2)), p.box)
	mustHandle(t, h, numberedMsg(t, 1), numberedMsg(t, 4))
	got = readSnapshot(t, p.box, "ledgers", "a")
	if got.Version != 4 || len(got.Held) != 0 || got.Sequence != 4 || string(got.State) != `{"steps":[1,2,3,4]}` {
		t.Errorf("after it has come: %+v", got)
	}
}

func TestHeldMessagesComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	s := saga.Define[ledger]("ledgers")
	var got []*consumer.Message
	text := event.Type[[]byte]{Aggregate: "order", Name: "Step", Codec: codec.Raw("")}
	numbers := map[string]int64{"1": 1, "full": 2}
	saga.StartOrOn(s, text, func(_ context.Context, in *saga.Instance[ledger], _ []byte) error {
		got = append(got, in.Message())
		return nil
	}, saga.Sequenced(func(b []byte) int64 {
		if b == nil {
			return 3
		}
		return numbers[string(b)]
	}))
	h := handlerOf(t, s, memoryBox(t))
	full := &consumer.Message{
		Topic: "t", Partition: 3, Offset: 1 << 40, LeaderEpoch: -1, Key: []byte{}, Value: []byte("full"),
		Headers: []event.Header{{Key: "null"}, {Key: "empty", Value: []byte{}}, {Key: "bytes", Value: []byte{0xff}}},
		ID:      "id", Source: "ns", Name: "Step", Aggregate: event.Aggregate{Type: "at", ID: "a"}, ContentType: "ct", SchemaVersion: "sv",
		Delivery: 2, Redelivered: true, Attempt: 3, Group: "g",
	}

	tombstone := &consumer.Message{ID: "x", Name: "Step", Key: []byte("a"), Aggregate: event.Aggregate{ID: "a"}}
	mustHandle(t, h, tombstone, full, newMessage(t, "Step", "a", 1))
	if len(got) != 3 {
		t.Fatalf("%d messages", len(got))
	}

	for i, want := range []*consumer.Message{full, tombstone} {
		m := *got[i+1]
		if !m.Time.IsZero() && !m.Time.Equal(want.Time) {
			t.Errorf("time %v", m.Time)
		}

		m.Time = want.Time
		if fmt.Sprintf("%#v", m) != fmt.Sprintf("%#v", *want) {
			t.Errorf("held and released is\n%#v\nwant\n%#v", m, *want)
		}
	}
}

func TestAHeldMessageWaitsForTheStart(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := saga.Define[order]("orders")
	note := func(_ context.Context, in *saga.Instance[order], _ int64) error {
		in.State.Steps = append(in.State.Steps, in.Message().Name)
		return nil
	}
	saga.Start(s, newType[int64]("begin"), note, inSequence())
	saga.StartOrOn(s, newType[int64]("next"), note, inSequence())
	saga.On(s, newType[int64]("aside"), note)
	h := handlerOf(t, s, p.box)
	mustHandle(t, h, newMessage(t, "next", "a", 2))
	if err := h.Handle(t.Context(), newMessage(t, "aside", "a", nil)); !errors.Is(err, saga.ErrNotFound) {
		t.Errorf("a message for a saga that has only held messages: %v", err)
	}

	mustHandle(t, h, newMessage(t, "begin", "a", 1), newMessage(t, "aside", "a", nil))
	if got := p.findDocument(t, "orders", "a").Lookup("state", "steps").String(); got != `["begin","next","aside"]` {
		t.Errorf("steps %s", got)
	}
}
