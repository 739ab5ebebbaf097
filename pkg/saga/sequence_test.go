package saga_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

func number(m *consumer.Message) (int64, error) {
	v, ok := m.Header("number")
	if !ok {
		return 0, nil
	}
	return strconv.ParseInt(string(v), 10, 64)
}

// numbered stores the numbers that it handles, for two types in one sequence.
func numbered(tb testing.TB, r *saga.Registry, limit int) consumer.Handler {
	s := define[ledger, string](tb, r, "ledgers", saga.WithHeldLimit(limit))
	f := func(_ context.Context, in *saga.Instance[ledger, string], m *consumer.Message) error {
		n, err := number(m)
		in.State.Steps = append(in.State.Steps, n)
		return err
	}
	s.StartOrHandle("Even", saga.ByKey[string](), f, saga.InSequence(number))
	s.StartOrHandle("Odd", saga.ByKey[string](), f, saga.InSequence(number))
	return handlerOf(tb, s)
}

func numberedMsg(tb testing.TB, n int64) *consumer.Message {
	return msg(tb, []string{"Even", "Odd"}[n&1], "a", n, "number", strconv.FormatInt(n, 10))
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

func (m *model) take(n int64) (refused bool) {
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
		store := newMemory()
		h := numbered(t, registry(t, store), limit)
		want := model{next: 1, held: map[int64]bool{}, limit: limit}
		for _, n := range rapid.SliceOfN(rapid.Int64Range(-1, 9), 0, 40).Draw(rt, "numbers") {
			err := h.Handle(t.Context(), numberedMsg(t, n))
			if refused := want.take(n); errors.Is(err, saga.ErrGap) != refused || err != nil && !refused {
				rt.Fatalf("number %d: %v, refused in the model: %v", n, err, refused)
			}
			if store.saves != want.saves {
				rt.Fatalf("number %d: saved %d times, want %d", n, store.saves, want.saves)
			}
			if want.saves == 0 {
				continue
			}

			var got struct {
				State    ledger
				Sequence int64
				Held     []struct{ Number int64 }
			}
			if err := bson.Unmarshal(store.records["a"].Body, &got); err != nil {
				rt.Fatal(err)
			}
			if !slices.Equal(got.State.Steps, want.steps) || got.Sequence != want.next-1 || len(got.Held) != len(want.held) {
				rt.Fatalf("after %d: %+v, want %+v", n, got, want)
			}
		}
	})
}

func TestWhatIsHeldIsInTheDocument(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.registry(t)
	h := numbered(t, r, 2)
	early := numberedMsg(t, 3)
	early.Value, early.Topic, early.Partition, early.Offset = nil, "t", 4, 5
	handle(t, h, early, numberedMsg(t, 2), early)
	err := h.Handle(t.Context(), numberedMsg(t, 4))
	var e *saga.GapError
	if !errors.Is(err, saga.ErrGap) || !errors.As(err, &e) || *e != (saga.GapError{Saga: "ledgers", ID: "a", Next: 1, Got: 4, Held: 2, Limit: 2}) {
		t.Errorf("one too many: %v", err)
	}

	got, found, err := r.Desk().Read(t.Context(), "ledgers", "a")
	if err != nil || !found || got.Version != 2 || fmt.Sprint(got.Held) != "[2 3]" || string(got.State) != `{"steps":null}` {
		t.Errorf("before the first has come: %+v %v %v", got, found, err)
	}

	// Another process continues.
	h = numbered(t, p.registry(t), 2)
	handle(t, h, numberedMsg(t, 1), numberedMsg(t, 4))
	got, _, err = r.Desk().Read(t.Context(), "ledgers", "a")
	if err != nil || got.Version != 4 || len(got.Held) != 0 || got.Sequence != 4 || string(got.State) != `{"steps":[1,2,3,4]}` {
		t.Errorf("after it has come: %+v %v", got, err)
	}
}

func TestHeldMessagesComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	store := newMemory()
	s := define[ledger, string](t, registry(t, store), "ledgers")
	var got []*consumer.Message
	s.StartOrHandle("Step", saga.ByKey[string](), func(_ context.Context, _ *saga.Instance[ledger, string], m *consumer.Message) error {
		got = append(got, m)
		return nil
	}, saga.InSequence(number))
	h := handlerOf(t, s)
	full := &consumer.Message{
		Topic: "t", Partition: 3, Offset: 1 << 40, LeaderEpoch: -1, Key: []byte("a"), Value: []byte{},
		Headers: []event.Header{{Key: "number", Value: []byte("2")}, {Key: "null"}, {Key: "empty", Value: []byte{}}, {Key: "bytes", Value: []byte{0xff}}},
		ID:      "id", Source: "ns", Name: "Step", Aggregate: event.Aggregate{Type: "at", ID: "ai"}, ContentType: "ct", SchemaVersion: "sv",
		Delivery: 2, Redelivered: true, Attempt: 3, Group: "g",
	}

	tombstone := &consumer.Message{ID: "x", Name: "Step", Key: []byte("a"), Headers: []event.Header{{Key: "number", Value: []byte("3")}}}
	handle(t, h, tombstone, full, msg(t, "Step", "a", nil, "number", "1"))
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
	s := define[order, string](t, p.registry(t), "orders")
	note := func(what string) saga.Func[order, string] {
		return func(_ context.Context, in *saga.Instance[order, string], _ *consumer.Message) error {
			in.State.Steps = append(in.State.Steps, what)
			return nil
		}
	}

	by, in := saga.ByKey[string](), saga.InSequence(number)
	s.Start("Begin", by, note("begin"), in)
	s.StartOrHandle("Next", by, note("next"), in)
	s.Handle("Aside", by, note("aside"))
	h := handlerOf(t, s)
	handle(t, h, msg(t, "Next", "a", nil, "number", "2"))
	if err := h.Handle(t.Context(), msg(t, "Aside", "a", nil)); !errors.Is(err, saga.ErrNotFound) {
		t.Errorf("a message for a saga that has only held messages: %v", err)
	}

	handle(t, h, msg(t, "Begin", "a", nil, "number", "1"), msg(t, "Aside", "a", nil))
	if got := p.document(t, "orders", "a").Lookup("state", "steps").String(); got != `["begin","next","aside"]` {
		t.Errorf("steps %s", got)
	}
}

// A message that its step drops has had its turn: later messages do not wait for it, and earlier
// ones keep their effect.
func TestADroppedMessageHasHadItsTurn(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := define[ledger, string](t, p.registry(t), "ledgers")
	f := func(_ context.Context, in *saga.Instance[ledger, string], m *consumer.Message) error {
		n, err := number(m)
		in.State.Steps = append(in.State.Steps, n)
		in.Emit(event.New(event.Aggregate{Type: "ledger", ID: "a"}, fmt.Sprint("Step", n), event.Payload{}))
		if n == 2 || n == 5 {
			return saga.ErrDrop
		}

		return err
	}

	s.StartOrHandle("Even", saga.ByKey[string](), f, saga.InSequence(number))
	s.StartOrHandle("Odd", saga.ByKey[string](), f, saga.InSequence(number))
	h := handlerOf(t, s)
	handle(t, h, numberedMsg(t, 3), numberedMsg(t, 2), numberedMsg(t, 1), numberedMsg(t, 4))
	if err := h.Handle(t.Context(), numberedMsg(t, 5)); err != nil {
		t.Errorf("a message that is dropped in its turn: %v", err)
	}

	handle(t, h, numberedMsg(t, 6))
	var got struct {
		State    ledger `bson:"state"`
		Sequence int64  `bson:"sequence"`
	}
	if err := bson.Unmarshal(p.document(t, "ledgers", "a"), &got); err != nil {
		t.Fatal(err)
	}

	if !slices.Equal(got.State.Steps, []int64{1, 3, 4, 6}) || got.Sequence != 6 {
		t.Errorf("%+v", got)
	}

	p.wantEvents(t, "Step1", "Step3", "Step4", "Step6")
}
