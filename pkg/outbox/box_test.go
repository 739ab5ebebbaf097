package outbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
	"go.opentelemetry.io/otel/propagation"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/lab/boxtest"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

func TestMain(m *testing.M) {
	stacktest.Wide(8)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// bundle contains the client, the database and the box of one test.
type bundle struct {
	client *mongo.Client
	db     *mongo.Database
	box    *outbox.Box
	coll   *mongo.Collection
}

func setup(t *testing.T, opts ...*options.ClientOptions) bundle {
	t.Helper()
	c := stacktest.Client(t, opts...)
	db := stacktest.Database(t, c)
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	return bundle{c, db, box, db.Collection("outbox")}
}

func (b bundle) newBox(t *testing.T, opts ...outbox.Option) *outbox.Box {
	t.Helper()
	box, err := outbox.New(b.db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return box
}

func (b bundle) checkTypes(t *testing.T, types ...string) {
	t.Helper()
	boxtest.RequireStored(t, b.coll, types...)
}

func newEvent(typ string, opts ...event.Option) event.Event {
	return event.New(event.Aggregate{Type: "order", ID: "o-1"}, typ, event.Bytes("", []byte("p")), opts...)
}

func TestNewRejectsBadOptions(t *testing.T) {
	t.Parallel()
	db := stacktest.Client(t).Database("x")
	for name, opts := range map[string][]outbox.Option{
		"dollar": {outbox.WithCollection("a$b")}, "system": {outbox.WithCollection("system.x")},
		"size": {outbox.WithMaxSize(-1)}, "large": {outbox.WithMaxSize(16 << 20)}, "middleware": {outbox.WithMiddleware(nil)},
	} {
		if _, err := outbox.New(db, opts...); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}

	if _, err := outbox.New(nil); err == nil {
		t.Error("no database was accepted")
	}

	_, err := outbox.New(db, outbox.WithCollection("a$b"), outbox.WithMaxSize(-1))
	if err == nil || !strings.Contains(err.Error(), "a$b") || !strings.Contains(err.Error(), "-1 bytes") {
		t.Errorf("two problems are reported as %v", err)
	}
	if _, err := outbox.New(db, outbox.WithCollection(""), outbox.WithMaxSize(0), outbox.WithLogger(nil), outbox.WithTelemetry(nil)); err != nil {
		t.Errorf("zero is the default: %v", err)
	}
}

func TestAppendRejectsAContextWithoutTransaction(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	rejected := func(what string, ctx context.Context) {
		t.Helper()
		if err := b.box.Append(ctx, newEvent("lost")); !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("%s: %v", what, err)
		}
	}

	rejected("no session", ctx)
	sess, err := b.client.StartSession()
	if err != nil {
		t.Fatal(err)
	}

	defer sess.EndSession(ctx)
	inSession := mongo.NewSessionContext(ctx, sess)
	rejected("a session without transaction", inSession)
	if err := sess.StartTransaction(); err != nil {
		t.Fatal(err)
	}

	if err := b.box.Append(inSession, newEvent("first")); err != nil {
		t.Errorf("in a transaction by hand: %v", err)
	}

	if err := sess.CommitTransaction(ctx); err != nil {
		t.Fatal(err)
	}

	rejected("a committed transaction", inSession)
	err = b.box.Transaction(ctx, func(context.Context) error {
		rejected("the context from outside of the callback", ctx)
		return nil
	})
	if err != nil {
		t.Error(err)
	}

	b.checkTypes(t, "first")
}

func TestWithoutTransaction(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b, ctx := setup(t, w.options().SetWriteConcern(writeconcern.W1())), t.Context()
	plain := b.newBox(t, outbox.WithoutTransaction())
	if err := plain.Append(ctx, newEvent("alone")); err != nil {
		t.Fatal(err)
	}

	if got := w.lastCommand(t, "insert").Lookup("writeConcern", "w").StringValue(); got != "majority" {
		t.Errorf("a plain insert of a w:1 client has w %q", got)
	}

	undo := errors.New("undo")
	if err := b.box.Transaction(ctx, func(ctx context.Context) error {
		if err := plain.Append(ctx, newEvent("rolled back")); err != nil {
			return err
		}
		return undo
	}); !errors.Is(err, undo) {
		t.Error(err)
	}

	// Append joins the transaction of its context.
	b.checkTypes(t, "alone")
}

func TestN28_AppendStoresSlot(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	if err := b.box.Transaction(ctx, func(ctx context.Context) error {
		return b.box.Append(ctx, newEvent("a", event.WithKey("customer-7")))
	}); err != nil {
		t.Fatal(err)
	}

	raw, err := b.coll.FindOne(ctx, bson.D{{Key: "type", Value: "a"}}).Raw()
	if err != nil {
		t.Fatal(err)
	}

	if got, want := raw.Lookup("slot").Int32(), int32(keyhash.Murmur2([]byte("customer-7"))&1023); got != want {
		t.Errorf("slot %d, want %d", got, want)
	}

	if sec, _ := raw.Lookup("ts").Timestamp(); sec == 0 {
		t.Error("the server did not stamp ts")
	}
}

func TestAppendManyKeepsOrderAndAtomicity(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	id := bson.NewObjectID()
	if err := b.box.Transaction(ctx, func(ctx context.Context) error {
		if err := b.box.Append(ctx); err != nil {
			return err
		}
		return b.box.Append(ctx, newEvent("1"), newEvent("2", event.WithID(id)), newEvent("3"))
	}); err != nil {
		t.Fatal(err)
	}

	err := b.box.Transaction(ctx, func(ctx context.Context) error {
		return b.box.Append(ctx, newEvent("4"), newEvent("again", event.WithID(id)))
	})
	if !mongo.IsDuplicateKeyError(err) {
		t.Errorf("the same id again: %v", err)
	}

	b.checkTypes(t, "1", "2", "3")
}

func TestAppendReportsAllProblems(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	small := b.newBox(t, outbox.WithMaxSize(300))
	big := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "big", event.Bytes("", bytes.Repeat([]byte("x"), 300)))
	err := b.box.Transaction(ctx, func(ctx context.Context) error {
		err := small.Append(ctx, newEvent("fine"), event.New(event.Aggregate{ID: "o-1"}, "bad", event.Payload{}), big)
		if !errors.Is(err, event.ErrInvalid) || !errors.Is(err, outbox.ErrTooLarge) {
			t.Errorf("got %v", err)
		} else if want := fmt.Sprintf("event %s has %d bytes, the limit is 300", big.ID(), big.Size()); !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}

		// Nothing was sent, so the transaction can continue without the event.
		return small.Append(ctx, newEvent("fine"))
	})
	if err != nil {
		t.Error(err)
	}

	b.checkTypes(t, "fine")
	limit := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "limit", event.Bytes("", make([]byte, 900<<10)))
	if err := b.newBox(t, outbox.WithoutTransaction()).Append(ctx, limit); !errors.Is(err, outbox.ErrTooLarge) {
		t.Errorf("above the default: %v", err)
	}
}

// The context of a middleware is the transaction's: a write with it stays and goes with the event.
func TestMiddlewareWritesInTheTransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	audit := b.db.Collection("audit")
	for _, name := range []string{"outbox", "audit"} {
		if err := b.db.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	box := b.newBox(t, outbox.WithMiddleware(func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error {
			if _, err := audit.InsertOne(ctx, bson.D{{Key: "_id", Value: ev.ID()}}); err != nil {
				return err
			}
			return next(ctx, ev)
		}
	}))

	abort := errors.New("abort")
	for commits, end := range []error{abort, nil} {
		err := box.Transaction(t.Context(), func(ctx context.Context) error {
			return errors.Join(box.Append(ctx, newEvent("A"), newEvent("B")), end)
		})
		if !errors.Is(err, end) {
			t.Fatal(err)
		}
		for _, coll := range []*mongo.Collection{b.coll, audit} {
			if n, err := coll.CountDocuments(t.Context(), bson.D{}); int(n) != 2*commits || err != nil {
				t.Errorf("%s has %d documents, %v; want %d", coll.Name(), n, err, 2*commits)
			}
		}
	}
}

func TestTraceContextIsCaptured(t *testing.T) {
	t.Parallel()
	b := setup(t)
	w3c := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
	in := propagation.MapCarrier{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1", "baggage": "user=7"}
	ctx := w3c.Extract(t.Context(), in)
	own := "00-ffffffffffffffffffffffffffffffff-b7ad6b7169203331-01"
	if err := b.box.Transaction(ctx, func(ctx context.Context) error {
		if err := b.newBox(t, outbox.WithTelemetry(telemetry.Discard{})).Append(ctx, newEvent("untraced")); err != nil {
			return err
		}
		return b.box.Append(ctx, newEvent("traced", event.WithHeader("mine", []byte("x"))), newEvent("own", event.WithHeader("traceparent", []byte(own))))
	}); err != nil {
		t.Fatal(err)
	}

	for typ, want := range map[string]map[string]string{
		"traced":   {"mine": "x", "traceparent": in["traceparent"], "tracestate": "a=1", "baggage": "user=7"},
		"own":      {"traceparent": own, "baggage": "user=7"},
		"untraced": {},
	} {
		raw, err := b.coll.FindOne(t.Context(), bson.D{{Key: "type", Value: typ}}).Raw()
		if err != nil {
			t.Fatal(err)
		}

		var v envelope.View
		if err := envelope.Parse(raw, &v); err != nil {
			t.Fatal(err)
		}

		got := map[string]string{}
		for it := v.Headers.Iter(); it.Next(); {
			got[string(it.Key)] += string(it.Value)
		}

		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", typ, diff)
		}
	}
}

// The warning must appear exactly for transactions that commit with a write concern below majority.
func TestWeakTransactionsAreWarnedOfOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		client *options.ClientOptions
		tx     *options.TransactionOptionsBuilder
		warns  int
	}{
		{"server's default", options.Client(), options.Transaction(), 0},
		{"w:1 client", options.Client().SetWriteConcern(writeconcern.W1()), options.Transaction(), 1},
		{"w:1 client, majority transaction", options.Client().SetWriteConcern(writeconcern.W1()), options.Transaction().SetWriteConcern(writeconcern.Majority()), 0},
		{"majority client, w:1 transaction", options.Client().SetWriteConcern(writeconcern.Majority()), options.Transaction().SetWriteConcern(writeconcern.W1()), 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, ctx := setup(t, c.client), t.Context()
			var log bytes.Buffer
			box := b.newBox(t, outbox.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
			if err := b.box.Transaction(ctx, func(ctx context.Context) error { return box.Append(ctx, newEvent("pinned")) }); err != nil {
				t.Fatal(err)
			}

			if log.Len() > 0 {
				t.Errorf("a pinned transaction is warned of: %s", &log)
			}

			sess, err := b.client.StartSession()
			if err != nil {
				t.Fatal(err)
			}

			defer sess.EndSession(ctx)
			for range 2 {
				if _, err := sess.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, box.Append(ctx, newEvent("x")) }, c.tx); err != nil {
					t.Fatal(err)
				}
			}

			if got := strings.Count(log.String(), "below majority"); got != c.warns {
				t.Errorf("%d warnings, want %d: %s", got, c.warns, &log)
			}
		})
	}
}

// Documents that were written with the driver, as for Debezium, give the same results in the
// stream.
func TestDebeziumWritersDocuments(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	cs, err := b.coll.Watch(ctx, mongo.Pipeline{})
	if err != nil {
		t.Fatal(err)
	}

	defer cs.Close(ctx)
	oid, agg := bson.NewObjectID(), bson.NewObjectID()
	if _, err := b.coll.InsertOne(ctx, bson.D{
		{Key: "_id", Value: oid},
		{Key: "aggregateid", Value: agg},
		{Key: "aggregatetype", Value: "Order"},
		{Key: "type", Value: "OrderCreated"},
		{Key: "payload", Value: bson.D{{Key: "id", Value: int64(1)}, {Key: "orderDate", Value: bson.NewDateTimeFromTime(time.UnixMilli(1_700_000_000_000))}, {Key: "lineItems", Value: bson.A{bson.D{{Key: "item", Value: "A"}, {Key: "total", Value: 59.98}}}}}},
		{Key: "eventTimestamp", Value: bson.NewDateTimeFromTime(time.Now())},
		{Key: "tenant", Value: bson.A{"x"}},
	}); err != nil {
		t.Fatal(err)
	}
	if !cs.Next(ctx) {
		t.Fatal(cs.Err())
	}

	var v envelope.View
	if err := envelope.Parse(cs.Current.Lookup("fullDocument").Document(), &v); err != nil {
		t.Fatal(err)
	}

	js, err := envelope.AppendPayload(nil, &v)
	if want := `{"id":1,"orderDate":{"$date":"2023-11-14T22:13:20Z"},"lineItems":[{"item":"A","total":59.98}]}`; err != nil || string(js) != want {
		t.Errorf("%s, %v", js, err)
	}

	if string(v.AppendID(nil)) != oid.Hex() || string(v.OrderingKey()) != agg.Hex() || v.Slot != -1 || !v.TS.IsZero() {
		t.Errorf("id %s, key %s, slot %d, ts %v", v.AppendID(nil), v.OrderingKey(), v.Slot, v.TS)
	}
}
