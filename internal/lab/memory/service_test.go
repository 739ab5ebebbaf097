package memory_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

const patience = 60 * time.Second

// world contains everything that a service needs: a database, topics, and a running relay.
type world struct {
	*testing.T
	db     *memory.DB
	box    *outbox.Box
	inbox  *memory.Inbox
	dead   *deadletter.Desk
	broker *memory.Broker
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, db: memory.NewDB(), broker: memory.NewBroker(3)}
	var err error
	if w.dead, err = memory.NewLetters(w.db); err != nil {
		t.Fatal(err)
	}
	if w.box, err = memory.NewOutbox(w.db); err != nil {
		t.Fatal(err)
	}
	if w.inbox, err = memory.NewInbox(w.db); err != nil {
		t.Fatal(err)
	}

	relay, err := memory.NewRelay(w.box, w.broker, routing.Config{}, "")
	if err != nil {
		t.Fatal(err)
	}

	w.start("relay", relay.Run)
	return w
}

// start runs a part of the program until stop is called or the test ends, and waits for its end.
func (w *world) start(name string, run func(ctx context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.Context()))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.Errorf("%s: %v", name, err)
		}
	})

	w.Cleanup(stop)
	return stop
}

func (w *world) context() context.Context {
	ctx, cancel := context.WithTimeout(w.Context(), patience)
	w.Cleanup(cancel)
	return ctx
}

// withSurroundings replaces the surroundings of a consumer.
func withSurroundings(s consuming.Surroundings) consumer.Option {
	return consumer.WithSurroundings(s)
}

func (w *world) newConsumer(group string, topics ...string) *consumer.Consumer {
	w.Helper()
	return w.consumerOf(group, topics)
}

func (w *world) consumerOf(group string, topics []string, more ...consumer.Option) *consumer.Consumer {
	w.Helper()
	c, err := consumer.New(group, nil, append(more, consumer.WithTopics(topics...),
		withSurroundings(consuming.Surroundings{Transport: w.broker, Inbox: w.inbox, Transact: w.db.Transaction}), consumer.WithCommitCount(1),
		consumer.WithErrorHook(func(_ context.Context, err error) {
			if w.Context().Err() == nil {
				w.Log(err)
			}
		}))...)
	if err != nil {
		w.Fatal(err)
	}

	return c
}

// listLetters returns the dead letters, in the order of their offsets.
func (w *world) listLetters() (list []deadletter.Letter) {
	w.Helper()
	for l, err := range w.dead.List(w.context(), deadletter.Query{}) {
		w.mustSucceed(err)
		list = append(list, l)
	}
	slices.SortFunc(list, func(a, b deadletter.Letter) int { return cmp.Compare(a.ID.Offset, b.ID.Offset) })
	return list
}

func (w *world) mustSucceed(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) append(events ...event.Event) {
	w.Helper()
	w.mustSucceed(w.db.Transaction(w.context(), func(ctx context.Context) error { return w.box.Append(ctx, events...) }))
}

type balance struct{ Count, Sum int }

func newDeposit(account string, n int) event.Event {
	return event.New(event.Aggregate{Type: "account", ID: account}, "Deposited", event.Bytes("", fmt.Appendf(nil, "%d", n)))
}

// Two members of a group are rebalanced all the time, records are written twice, and handlers fail
// sometimes. Each event has its effect once, in the order of its key.
func TestConsumerWithoutServers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const accounts, each = 5, 40
	w.broker.Inject(func(_ string, m *transport.Record) memory.Fault {
		return memory.Fault{Duplicate: len(m.Value) % 2}
	})
	balances := memory.NewTable[string, balance](w.db, "balances")
	var mu sync.Mutex
	failed := map[string]bool{}
	handler := func(ctx context.Context, m *consumer.Message) error {
		b, err := balances.Get(ctx, string(m.Key))
		if err != nil && b.Count > 0 {
			return err
		}

		var n int
		if err := json.Unmarshal(m.Value, &n); err != nil {
			return err
		}
		if n != b.Count+1 {
			return fmt.Errorf("%s: %d after %d", m.Key, n, b.Count)
		}
		if err := balances.Put(ctx, string(m.Key), balance{n, b.Sum + n}); err != nil {
			return err
		}

		mu.Lock()
		defer mu.Unlock()
		if n%7 == 0 && !failed[m.ID] {
			failed[m.ID] = true
			// The transaction rolls back the writes of the handler.
			return errors.New("once in a while")
		}

		return nil
	}

	for i := range 2 {
		c := w.newConsumer("bank", "outbox.event.account")
		w.mustSucceed(c.Handle("balances", consumer.Func(handler, "Deposited")))
		w.start(fmt.Sprint("member ", i), c.Run)
	}

	for n := range each {
		for a := range accounts {
			w.append(newDeposit(fmt.Sprint("a-", a), n+1))
		}

		if n%10 == 0 {
			w.broker.Rebalance("bank")
		}

		if n%16 == 5 {
			w.broker.Expire("bank")
		}
	}

	_, err := w.broker.Await(w.context(), "outbox.event.account", accounts*each)
	w.mustSucceed(err)
	w.mustSucceed(w.broker.AwaitCommitted(w.context(), "bank", "outbox.event.account"))
	all, err := balances.All(w.context())
	w.mustSucceed(err)
	for a, b := range all {
		if b != (balance{each, each * (each + 1) / 2}) {
			t.Errorf("%s: %+v", a, b)
		}
	}

	if letters := w.listLetters(); len(all) != accounts || len(letters) != 0 {
		t.Errorf("%d accounts, dead letters %+v", len(all), letters)
	}
}

// A message that cannot be handled becomes a complete dead letter, and the other messages continue.
func TestDeadLettersWithoutServers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	handled := memory.NewTable[string, balance](w.db, "handled")
	c := w.newConsumer("g", "outbox.event.account")
	w.mustSucceed(c.Handle("Deposited", consumer.Func(func(ctx context.Context, m *consumer.Message) error {
		if string(m.Value) == "2" {
			return errors.New("bad message")
		}
		return handled.Insert(ctx, string(m.Value), balance{})
	}, "Deposited"), consumer.WithRetry(consumer.NoRetry())))

	w.start("consumer", c.Run)
	w.append(newDeposit("a", 1), newDeposit("a", 2), newDeposit("a", 3))
	_, err := w.broker.Await(w.context(), "outbox.event.account", 3)
	w.mustSucceed(err)
	w.mustSucceed(w.broker.AwaitCommitted(w.context(), "g", "outbox.event.account"))
	letters := w.listLetters()
	if len(letters) != 1 || string(letters[0].Value) != "2" || letters[0].Name != "Deposited" || !strings.Contains(letters[0].Reason, "bad message") {
		t.Errorf("dead letters %+v", letters)
	}

	if all, err := handled.All(w.context()); len(all) != 2 || err != nil {
		t.Errorf("%v were handled, %v", all, err)
	}
}

// Other services see a letter as an event of the outbox.
func TestDeadLettersAreRedactedAndReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.consumerOf("g", []string{"outbox.event.account"}, consumer.WithDeadLetters(
		deadletter.WithNotification(w.box),
		deadletter.WithRedaction(func(_ context.Context, l *deadletter.Letter) error {
			l.Value, l.Reason = []byte("hidden"), "hidden"
			return nil
		})))

	w.mustSucceed(c.Handle("Deposited", consumer.Func(func(context.Context, *consumer.Message) error { return errors.New("no") }, "Deposited"), consumer.WithRetry(consumer.NoRetry())))
	w.start("consumer", c.Run)
	w.append(newDeposit("a", 1))
	notified, err := w.broker.Await(w.context(), "outbox.event."+deadletter.Notified.Aggregate, 1)
	w.mustSucceed(err)
	var n deadletter.Notification
	w.mustSucceed(json.Unmarshal(notified[0].Value, &n))
	if n.Reason != "hidden" || n.Name != "Deposited" || n.ID.Group != "g" {
		t.Errorf("notification %+v, want the redacted reason and the name of the letter", n)
	}

	w.mustSucceed(w.broker.AwaitCommitted(w.context(), "g", "outbox.event.account"))
	if letters := w.listLetters(); len(letters) != 1 || string(letters[0].Value) != "hidden" {
		t.Errorf("dead letters %+v", letters)
	}
}

// A payload that was appended as a document arrives as relaxed Extended JSON. A step can decode it
// into BSON types.
func TestSagaTakesDocumentsWithoutServers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	type measured struct {
		N  int64     `bson:"n"`
		At time.Time `bson:"at"`
	}
	s := saga.Define[checkout]("measures")
	got := make(chan measured, 1)
	taken := event.Type[measured]{Aggregate: "order", Name: "Measured", Codec: codec.ExtJSON()}
	saga.Start(s, taken, func(_ context.Context, _ *saga.Instance[checkout], m measured) error {
		got <- m
		return nil
	})
	h, err := s.Handler(w.box)
	w.mustSucceed(err)
	c := w.newConsumer("shop", "outbox.event.order")
	w.mustSucceed(c.Handle("measures", h))
	w.start("consumer", c.Run)
	want := measured{N: 1 << 60, At: time.UnixMilli(1_700_000_000_123).UTC()}
	w.append(event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Measured", event.Document(bson.D{{Key: "n", Value: want.N}, {Key: "at", Value: want.At}})))
	select {
	case m := <-got:
		if m.N != want.N || !m.At.Equal(want.At) {
			t.Errorf("%+v", m)
		}
	case <-w.context().Done():
		t.Fatal("the step was never run")
	}

	w.mustSucceed(w.broker.AwaitCommitted(w.context(), "shop", "outbox.event.order"))
}

type checkout struct{ Steps []string }

// A saga, its timeout, and the events that it emits, all in memory.
func TestSagaWithoutServers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := saga.Define[checkout]("checkouts")
	placed := event.Type[[]byte]{Aggregate: "order", Name: "OrderPlaced", Codec: codec.Raw("")}
	saga.Start(s, placed, func(_ context.Context, in *saga.Instance[checkout], _ []byte) error {
		in.State.Steps = append(in.State.Steps, "placed")
		in.Emit(event.New(event.Aggregate{Type: "payment", ID: in.ID()}, "TakePayment", event.Bytes("", []byte("x"))))
		in.TimeoutIn("unpaid", 0)
		return nil
	})
	s.Timeout("unpaid", func(_ context.Context, in *saga.Instance[checkout]) error {
		in.State.Steps = append(in.State.Steps, "unpaid")
		in.Emit(event.New(event.Aggregate{Type: "order", ID: in.ID()}, "OrderCancelled", event.Bytes("", []byte(strings.Join(in.State.Steps, " ")))))
		in.Complete()
		return nil
	})

	h, err := s.Handler(w.box)
	w.mustSucceed(err)
	c := w.newConsumer("shop", "outbox.event.order", "outbox.event.checkouts")
	w.mustSucceed(c.Handle("checkouts", h))
	w.mustSucceed(c.Handle("OrderCancelled", consumer.Func(func(context.Context, *consumer.Message) error { return nil }, "OrderCancelled")))
	w.start("consumer", c.Run)
	for i := range 10 {
		w.append(event.New(event.Aggregate{Type: "order", ID: fmt.Sprint("o-", i)}, "OrderPlaced", event.Bytes("", []byte("x"))))
	}

	records, err := w.broker.Await(w.context(), "outbox.event.order", 20)
	w.mustSucceed(err)
	cancelled := 0
	for _, r := range records {
		if string(r.Value) == "placed unpaid" {
			cancelled++
		}
	}

	if payments := len(w.broker.Records("outbox.event.payment")); cancelled != 10 || payments != 10 {
		t.Errorf("%d cancelled, %d payments", cancelled, payments)
	}
}

type article struct {
	ID    string
	Price int64
}

// A recorded collection and its projector.
func TestProjectorWithoutServers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	articles, err := entity.NewRecorded(nil, w.box, "article", func(a *article) *string { return &a.ID }, memory.NewEntities(w.db, "articles"))
	w.mustSucceed(err)
	view := memory.NewView(w.db, "catalogue")
	projector, err := entity.NewProjector[article, string](nil, "article", memory.NewEntities(w.db, "catalogue"))
	w.mustSucceed(err)
	c := w.newConsumer("catalogue", "outbox.event.article")
	w.mustSucceed(c.Handle("article.*", consumer.Func(projector.Handle, "article.*")))
	w.start("consumer", c.Run)
	w.mustSucceed(w.db.Transaction(w.context(), func(ctx context.Context) error {
		for i := range int64(4) {
			if _, err := articles.Store(ctx, article{ID: fmt.Sprint("a-", i), Price: i}); err != nil {
				return err
			}
		}

		return nil
	}))

	w.mustSucceed(w.db.Transaction(w.context(), func(ctx context.Context) error {
		a, err := articles.Load(ctx, "a-1")
		if err != nil {
			return err
		}

		a.Price = 99
		if _, err := articles.Update(ctx, a); err != nil {
			return err
		}

		_, err = articles.Delete(ctx, "a-2")
		return err
	}))

	_, err = w.broker.Await(w.context(), "outbox.event.article", 6)
	w.mustSucceed(err)
	w.mustSucceed(w.broker.AwaitCommitted(w.context(), "catalogue", "outbox.event.article"))
	docs, err := view.All(w.context())
	w.mustSucceed(err)
	var got []string
	for _, d := range docs {
		var a struct {
			ID    string `bson:"_id"`
			Price int64
		}
		w.mustSucceed(bson.Unmarshal(d, &a))
		got = append(got, fmt.Sprint(a.ID, " ", a.Price))
	}

	if want := []string{"a-0 0", "a-1 99", "a-3 3"}; !slices.Equal(got, want) {
		t.Errorf("the view has %v, want %v", got, want)
	}
}

// A message whose handler fails is set aside as with servers: other keys go on, messages of its key follow it, and the
// transaction that handles it removes it.
func TestFailedMessagesAreSetAsideWithoutServers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var mu sync.Mutex
	var got []string
	attempts := 0
	handled := make(chan struct{})
	handler := func(_ context.Context, m *consumer.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if string(m.Value) == "1" {
			if attempts++; attempts < 4 {
				return errors.New("not yet")
			}
		}
		if got = append(got, fmt.Sprintf("%s %s", m.Key, m.Value)); len(got) == 3 {
			close(handled)
		}
		return nil
	}

	c := w.newConsumer("g", "outbox.event.account")
	w.mustSucceed(c.Handle("Deposited", consumer.Func(handler, "Deposited"), consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}, Min: 50 * time.Millisecond})))
	stop := w.start("consumer", c.Run)
	w.append(newDeposit("a", 1), newDeposit("a", 2), newDeposit("b", 3))
	select {
	case <-handled:
	case <-w.context().Done():
		t.Fatal("not all messages were handled")
	}
	stop()

	if want := []string{"b 3", "a 1", "a 2"}; !slices.Equal(got, want) || attempts != 4 {
		t.Errorf("handled: got %v after %d attempts, want %v after 4", got, attempts, want)
	}
	if left, err := memory.CountSetAside(w.context(), w.db, "g/Deposited"); left != 0 || err != nil {
		t.Errorf("messages that are still set aside: got %d (%v), want none", left, err)
	}
}
