package saga_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// A held message whose step fails affects neither the earlier message that releases it nor messages
// outside of the sequence. It is tried again with the next message.
func TestAHeldMessageThatFailsHarmsNoOther(t *testing.T) {
	t.Parallel()
	poison := errors.New("poison")
	for name, failure := range map[string]func(ctx context.Context, p *place) error{
		"error": func(context.Context, *place) error { return poison },
		"error of the server, which ends the transaction": func(ctx context.Context, p *place) error {
			_, err := p.db.Collection("others").InsertOne(ctx, bson.D{{Key: "_id", Value: "there"}})
			return err
		},
		"error of a joined transaction": func(ctx context.Context, p *place) error {
			return p.box.Transaction(ctx, func(context.Context) error { return poison })
		},
		"discarded error of a joined transaction": func(ctx context.Context, p *place) error {
			_ = p.box.Transaction(ctx, func(context.Context) error { return poison })
			return nil
		},
		"panic": func(context.Context, *place) error { panic(poison) },
		"panic in a joined transaction": func(ctx context.Context, p *place) error {
			return p.box.Transaction(ctx, func(context.Context) error { panic(poison) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			coll := p.db.Collection("others")
			if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "there"}}); err != nil {
				t.Fatal(err)
			}

			poisoned := true
			h := handlerOf(t, sequence(func(ctx context.Context, _ *saga.Instance[ledger], n int64) error {
				if n != 3 || !poisoned {
					return nil
				}
				_, err := coll.InsertOne(ctx, bson.D{{Key: "half", Value: true}})
				return errors.Join(err, p.box.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "a"}, "Half", event.Bytes("", nil))), failure(ctx, p))
			}, saga.WithHeld(2)), p.box)
			take := func(n int64) error { return h.Handle(t.Context(), numberedMsg(t, n)) }

			for _, n := range []int64{1, 3, 2, 4} {
				if err := take(n); err != nil {
					t.Fatalf("number %d: %v", n, err)
				}
			}

			got := readSnapshot(t, p.box, "ledgers", "a")
			if string(got.State) != `{"steps":[1,2]}` || fmt.Sprint(got.Held) != "[3 4]" || !strings.HasPrefix(got.Stuck, "number 3, message ") {
				t.Errorf("%s, held %v, stuck %q", got.State, got.Held, got.Stuck)
			}
			if n, err := coll.CountDocuments(t.Context(), bson.D{}); n != 1 || err != nil {
				t.Errorf("the failed step has left documents: %d, %v", n, err)
			}
			p.wantEvents(t)

			gap := take(5)
			if !errors.Is(gap, saga.ErrGap) || !strings.Contains(gap.Error(), "waits for number 3") || !strings.Contains(gap.Error(), "the step for that number fails") {
				t.Errorf("one too many: %v", gap)
			}

			poisoned = false
			// This is another message with the same number.
			if err := take(3); err != nil {
				t.Fatal(err)
			}

			got = readSnapshot(t, p.box, "ledgers", "a")
			if string(got.State) != `{"steps":[1,2,3,4]}` || len(got.Held) != 0 || got.Stuck != "" {
				t.Errorf("%s, held %v, stuck %q", got.State, got.Held, got.Stuck)
			}
		})
	}
}

// A write conflict in the step of a held message is not the fault of the message: the transaction runs again with it. No later
// message of the sequence may come that would release it.
func TestAHeldMessageSurvivesAWriteConflict(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	coll := p.db.Collection("others")
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "shared"}}); err != nil {
		t.Fatal(err)
	}

	increment, attempts := bson.D{{Key: "$inc", Value: bson.D{{Key: "n", Value: 1}}}}, 0
	h := handlerOf(t, sequence(func(ctx context.Context, _ *saga.Instance[ledger], n int64) error {
		if n != 2 {
			return nil
		}
		// Another writer changes the document after the transaction has begun.
		if attempts++; attempts <= 3 {
			if _, err := coll.UpdateByID(outbox.Outside(ctx), "shared", increment); err != nil {
				return err
			}
		}
		_, err := coll.UpdateByID(ctx, "shared", increment)
		return err
	}), p.box)
	mustHandle(t, h, numberedMsg(t, 2), numberedMsg(t, 1))

	got := readSnapshot(t, p.box, "ledgers", "a")
	if string(got.State) != `{"steps":[1,2]}` || len(got.Held) != 0 || got.Stuck != "" || attempts != 4 {
		t.Errorf("%s, held %v, stuck %q after %d attempts", got.State, got.Held, got.Stuck, attempts)
	}
}

// An early message is held even if it cannot start the saga, which does not exist yet.
func TestAnEarlyMessageIsHeldBeforeItsSagaBegins(t *testing.T) {
	t.Parallel()
	box := memoryBox(t)
	s := saga.Define[ledger]("ledgers")
	step := func(_ context.Context, in *saga.Instance[ledger], n int64) error {
		in.State.Steps = append(in.State.Steps, n)
		return nil
	}

	saga.Start(s, newType[int64]("Odd"), step, inSequence())
	saga.On(s, newType[int64]("Even"), step, inSequence())
	mustHandle(t, handlerOf(t, s, box), numberedMsg(t, 2), numberedMsg(t, 1))
	if got := readSnapshot(t, box, "ledgers", "a"); string(got.State) != `{"steps":[1,2]}` {
		t.Errorf("%s", got.State)
	}
}

// Held messages leave room in the saga's document.
func TestHeldMessagesAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := handlerOf(t, sequence(count), p.box)
	for n := int64(2); ; n++ {
		m := numberedMsg(t, n)
		m.SetHeader("large", make([]byte, 1<<20))
		err := h.Handle(t.Context(), m)
		if err == nil && n < 20 {
			continue
		}

		if !errors.Is(err, saga.ErrGap) || n < 8 || n > 10 || !strings.Contains(err.Error(), "above 8 MiB") {
			t.Errorf("number %d: %v", n, err)
		}

		return
	}
}

// A saga that was deleted and started again is another one, even with the same version.
func TestAnOldVersionDoesNotOverwriteANewSaga(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	store := sagas.NewMongo(p.db)
	body := func(n int) bson.Raw {
		raw, err := bson.Marshal(bson.D{{Key: "n", Value: n}})
		if err != nil {
			t.Fatal(err)
		}

		return raw
	}

	old, err := store.Save(t.Context(), "ledgers", sagas.Record{ID: "a", Body: body(1)})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Complete(t.Context(), "ledgers", old, 0); err != nil {
		t.Fatal(err)
	}

	again := old
	// The clock of the server has milliseconds.
	for again.CreatedAt.Equal(old.CreatedAt) {
		if again, err = store.Save(t.Context(), "ledgers", sagas.Record{ID: "a", Body: body(2)}); err != nil || again.Version != old.Version {
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

// The consumer does not try the message again, but the failure of the held message is not its own.
func TestAHeldMessageThatFailsCostsNoAttempt(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	coll := p.db.Collection("others")
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "there"}}); err != nil {
		t.Fatal(err)
	}
	poisoned := true
	h := handlerOf(t, sequence(func(ctx context.Context, _ *saga.Instance[ledger], n int64) error {
		if n != 2 || !poisoned {
			return nil
		}
		_, err := coll.InsertOne(ctx, bson.D{{Key: "_id", Value: "there"}})
		return err
	}), p.box)

	// As in a consumer, the transaction is not that of the saga.
	handle := func(n int64) {
		t.Helper()
		err := p.box.Transaction(t.Context(), func(ctx context.Context) error { return h.Handle(ctx, numberedMsg(t, n)) })
		if err != nil {
			t.Fatalf("number %d: %v", n, err)
		}
	}
	handle(2)
	handle(1)
	if got := readSnapshot(t, p.box, "ledgers", "a"); string(got.State) != `{"steps":[1]}` || fmt.Sprint(got.Held) != "[2]" || got.Stuck == "" {
		t.Errorf("%s, held %v, stuck %q", got.State, got.Held, got.Stuck)
	}

	poisoned = false
	handle(3)
	if got := readSnapshot(t, p.box, "ledgers", "a"); string(got.State) != `{"steps":[1,2,3]}` || len(got.Held) != 0 {
		t.Errorf("%s, held %v", got.State, got.Held)
	}
}

// The first message does not come again, for example because its partition was given back. Another message tries the held one again.
func TestAFailureOfAHeldMessageCountsForOneTransaction(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	coll := p.db.Collection("others")
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "there"}}); err != nil {
		t.Fatal(err)
	}
	var interrupt func()
	h := handlerOf(t, sequence(func(ctx context.Context, _ *saga.Instance[ledger], n int64) error {
		if n != 2 || interrupt == nil {
			return nil
		}
		_, err := coll.InsertOne(ctx, bson.D{{Key: "_id", Value: "there"}})
		interrupt()
		return err
	}), p.box)
	mustHandle(t, h, numberedMsg(t, 2))

	ended := errors.New("the partition is given back")
	err := p.box.Transaction(t.Context(), func(ctx context.Context) error {
		runs := 0
		interrupt = func() { runs++ }
		if err := h.Handle(ctx, numberedMsg(t, 1)); runs == 0 {
			return err
		}
		return ended
	})
	if !errors.Is(err, ended) {
		t.Fatal(err)
	}

	interrupt = nil
	another := numberedMsg(t, 1)
	another.ID = "another"
	mustHandle(t, h, another)
	if got := readSnapshot(t, p.box, "ledgers", "a"); string(got.State) != `{"steps":[1,2]}` || got.Stuck != "" {
		t.Errorf("%s, stuck %q", got.State, got.Stuck)
	}
}

// Each failure repeats the transaction once, however many held messages fail in it.
func TestManyHeldMessagesFailInOneTransaction(t *testing.T) {
	t.Parallel()
	const sagas = 5
	p := newPlace(t)
	h := handlerOf(t, sequence(func(_ context.Context, _ *saga.Instance[ledger], n int64) error {
		if n == 2 {
			return errors.New("poison")
		}
		return nil
	}), p.box)
	message := func(i int, n int64) *consumer.Message {
		m := numberedMsg(t, n)
		m.ID, m.Aggregate.ID = fmt.Sprint(i, n), fmt.Sprint(i)
		return m
	}
	for i := range sagas {
		mustHandle(t, h, message(i, 2))
	}

	runs := 0
	err := p.box.Transaction(t.Context(), func(ctx context.Context) error {
		runs++
		for i := range sagas {
			if err := h.Handle(ctx, message(i, 1)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil || runs != sagas+1 {
		t.Errorf("%d runs for %d failures: %v", runs, sagas, err)
	}
}

// The message that arrived would never have time for the held one.
func TestAHeldMessageThatTakesTooLongIsLeftOut(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := handlerOf(t, sequence(func(ctx context.Context, _ *saga.Instance[ledger], n int64) error {
		if n == 2 {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}), p.box)
	mustHandle(t, h, numberedMsg(t, 2))

	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := h.Handle(ctx, numberedMsg(t, 1)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	mustHandle(t, h, numberedMsg(t, 1))
	if got := readSnapshot(t, p.box, "ledgers", "a"); string(got.State) != `{"steps":[1]}` || got.Stuck == "" {
		t.Errorf("%s, stuck %q", got.State, got.Stuck)
	}
}

// An outage of a schema registry is not the fault of the held message. No later message may come that would release it.
func TestAHeldMessageWaitsForItsCodec(t *testing.T) {
	t.Parallel()
	box := memoryBox(t)
	registry := &fakeRegistry{Codec: codec.JSON()}
	s := saga.Define[ledger]("ledgers")
	saga.StartOrOn(s, event.Type[int64]{Aggregate: "order", Name: "Odd", Codec: registry}, count, inSequence())
	saga.StartOrOn(s, event.Type[int64]{Aggregate: "order", Name: "Even", Codec: registry}, count, inSequence())
	h := handlerOf(t, s, box)
	mustHandle(t, h, numberedMsg(t, 2))

	registry.away = "2"
	if err := h.Handle(t.Context(), numberedMsg(t, 1)); !errors.Is(err, codec.ErrUnavailable) {
		t.Errorf("while the registry is away: %v", err)
	}
	registry.away = ""
	mustHandle(t, h, numberedMsg(t, 1))
	if got := readSnapshot(t, box, "ledgers", "a"); got.Sequence != 2 || got.Stuck != "" {
		t.Errorf("handled up to %d, stuck %q", got.Sequence, got.Stuck)
	}
}

// fakeRegistry is a codec that cannot decode one payload for now.
type fakeRegistry struct {
	codec.Codec
	away string
}

func (r *fakeRegistry) Decode(ctx context.Context, data []byte, into any) error {
	if string(data) == r.away {
		return codec.ErrUnavailable
	}
	return r.Codec.Decode(ctx, data, into)
}
