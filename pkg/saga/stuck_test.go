package saga_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

// A held message whose step fails affects neither the earlier message that releases it nor messages
// outside of the sequence. It is tried again with the next message.
func TestAHeldMessageThatFailsHarmsNoOther(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]func(ctx context.Context, coll *mongo.Collection) error{
		"error": func(context.Context, *mongo.Collection) error { return errors.New("poison") },
		"error of the server, which ends the transaction": func(ctx context.Context, coll *mongo.Collection) error {
			_, err := coll.InsertOne(ctx, bson.D{{Key: "_id", Value: "there"}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			coll := p.db.Collection("others")
			if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "there"}}); err != nil {
				t.Fatal(err)
			}

			r := p.registry(t)
			s := define[ledger, string](t, r, "ledgers", saga.WithHeldLimit(2))
			poisoned := true
			step := func(ctx context.Context, in *saga.Instance[ledger, string], m *consumer.Message) error {
				n, err := number(m)
				in.State.Steps = append(in.State.Steps, n)
				if n == 3 && poisoned {
					return failure(ctx, coll)
				}

				return err
			}

			s.StartOrHandle("Even", saga.ByKey[string](), step, saga.InSequence(number))
			s.StartOrHandle("Odd", saga.ByKey[string](), step, saga.InSequence(number))
			h := handlerOf(t, s)
			// A consumer tries a failed message again.
			take := func(n int64) (err error) {
				for range 3 {
					if err = h.Handle(t.Context(), numberedMsg(t, n)); err == nil {
						return nil
					}
				}

				return err
			}

			for _, n := range []int64{1, 3, 2, 4} {
				if err := take(n); err != nil {
					t.Fatalf("number %d: %v", n, err)
				}
			}

			got, _, err := r.Desk().Read(t.Context(), "ledgers", "a")
			if err != nil || string(got.State) != `{"steps":[1,2]}` || fmt.Sprint(got.Held) != "[3 4]" || !strings.HasPrefix(got.Stuck, "number 3, message ") {
				t.Errorf("%s, held %v, stuck %q, %v", got.State, got.Held, got.Stuck, err)
			}

			gap, ok := errors.AsType[*saga.GapError](take(5))
			if !ok || gap.Stuck == "" || gap.Next != 3 {
				t.Errorf("one too many: %v", gap)
			}

			poisoned = false
			if err := take(3); err != nil { // another message of that number
				t.Fatal(err)
			}

			got, _, err = r.Desk().Read(t.Context(), "ledgers", "a")
			if err != nil || string(got.State) != `{"steps":[1,2,3,4]}` || len(got.Held) != 0 || got.Stuck != "" {
				t.Errorf("%s, held %v, stuck %q, %v", got.State, got.Held, got.Stuck, err)
			}
		})
	}
}

// An early message is held even if it cannot start the saga, which does not exist yet.
func TestAnEarlyMessageIsHeldBeforeItsSagaBegins(t *testing.T) {
	t.Parallel()
	r := registry(t, newMemory())
	s := define[ledger, string](t, r, "ledgers")
	step := func(_ context.Context, in *saga.Instance[ledger, string], m *consumer.Message) error {
		n, err := number(m)
		in.State.Steps = append(in.State.Steps, n)
		return err
	}

	s.Start("Odd", saga.ByKey[string](), step, saga.InSequence(number))
	s.Handle("Even", saga.ByKey[string](), step, saga.InSequence(number))
	h := handlerOf(t, s)
	handle(t, h, numberedMsg(t, 2), numberedMsg(t, 1))
	got, _, err := r.Desk().Read(t.Context(), "ledgers", "a")
	if err != nil || string(got.State) != `{"steps":[1,2]}` {
		t.Errorf("%s, %v", got.State, err)
	}
}

// Held messages leave room in the saga's document.
func TestHeldMessagesAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := numbered(t, p.registry(t), 100)
	for n := int64(2); ; n++ {
		m := numberedMsg(t, n)
		m.Value = make([]byte, 1<<20)
		err := h.Handle(t.Context(), m)
		if err == nil && n < 20 {
			continue
		}

		if gap, ok := errors.AsType[*saga.GapError](err); !ok || n < 8 || n > 10 || gap.Bytes == 0 {
			t.Errorf("number %d: %v", n, err)
		}

		return
	}
}

// A timeout is used up even if its step drops it.
func TestATimeoutThatIsDroppedHasCome(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.registry(t)
	s := define[ledger, string](t, r, "ledgers")
	s.Start("Odd", saga.ByKey[string](), func(_ context.Context, in *saga.Instance[ledger, string], _ *consumer.Message) error {
		return in.Timeout("late", time.Hour, event.Payload{})
	})
	s.Timeout("late", func(_ context.Context, in *saga.Instance[ledger, string], _ *consumer.Message) error {
		in.State.Steps = append(in.State.Steps, 7)
		return saga.ErrDrop
	})
	h := handlerOf(t, s)
	handle(t, h, numberedMsg(t, 1))
	list, err := p.envelopes(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatal(len(list), err)
	}
	if err := h.Handle(t.Context(), arrived(t, list[0])); err != nil {
		t.Fatal(err)
	}

	got, _, err := r.Desk().Read(t.Context(), "ledgers", "a")
	if err != nil || len(got.Timeouts) != 0 || string(got.State) != `{"steps":null}` {
		t.Errorf("%s, timeouts %v, %v", got.State, got.Timeouts, err)
	}
}

// A saga that was deleted and started again is another one, even with the same version.
func TestAnOldVersionDoesNotOverwriteANewSaga(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	store, err := saga.NewMongoStore(p.db)
	if err != nil {
		t.Fatal(err)
	}

	body := func(n int) bson.Raw {
		raw, err := bson.Marshal(bson.D{{Key: "n", Value: n}})
		if err != nil {
			t.Fatal(err)
		}

		return raw
	}

	old, err := store.Save(t.Context(), "ledgers", saga.Record{ID: "a", Body: body(1)})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Complete(t.Context(), "ledgers", old, 0); err != nil {
		t.Fatal(err)
	}

	again := old
	for again.CreatedAt.Equal(old.CreatedAt) { // the server's clock has milliseconds
		if again, err = store.Save(t.Context(), "ledgers", saga.Record{ID: "a", Body: body(2)}); err != nil || again.Version != old.Version {
			t.Fatal(again.Version, err)
		}

		if again.CreatedAt.Equal(old.CreatedAt) {
			if err := store.Complete(t.Context(), "ledgers", again, 0); err != nil {
				t.Fatal(err)
			}
		}
	}

	if _, err := store.Save(t.Context(), "ledgers", old); !errors.Is(err, saga.ErrConflict) {
		t.Errorf("a step of the old saga: %v", err)
	}
}
