package saga_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/sagatest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// place contains the database of one test.
type place struct {
	db    *mongo.Database
	store *saga.MongoStore
	box   *outbox.Box
	sent  *mongo.Collection
}

func newPlace(tb testing.TB, opts ...outbox.Option) *place {
	tb.Helper()
	return placeIn(tb, stacktest.Database(tb, stacktest.Client(tb)), opts...)
}

func placeIn(tb testing.TB, db *mongo.Database, opts ...outbox.Option) *place {
	tb.Helper()
	store, err := saga.NewMongoStore(db)
	if err != nil {
		tb.Fatal(err)
	}

	box, err := outbox.New(db, opts...)
	if err != nil {
		tb.Fatal(err)
	}

	return &place{db: db, store: store, box: box, sent: db.Collection("outbox")}
}

func (p *place) registry(tb testing.TB, opts ...saga.Option) *saga.Registry {
	tb.Helper()
	return registry(tb, p.store, append([]saga.Option{saga.WithOutbox(p.box)}, opts...)...)
}

func registry(tb testing.TB, store saga.Store, opts ...saga.Option) *saga.Registry {
	tb.Helper()
	r, err := saga.NewRegistry(store, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// types returns the types of the events in the outbox, in the order of their appends.
func (p *place) types(ctx context.Context) ([]string, error) {
	views, err := p.envelopes(ctx)
	types := []string{}
	for _, raw := range views {
		types = append(types, raw.Lookup("type").StringValue())
	}
	return types, err
}

func (p *place) envelopes(ctx context.Context) ([]bson.Raw, error) {
	cur, err := p.sent.Find(ctx, bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
	if err != nil {
		return nil, err
	}
	var raws []bson.Raw
	err = cur.All(ctx, &raws)
	return raws, err
}

func (p *place) wantEvents(tb testing.TB, want ...string) {
	tb.Helper()
	got, err := p.types(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	if !slices.Equal(got, want) {
		tb.Errorf("events in the outbox: %v, want %v", got, want)
	}
}

// document returns the stored saga, or nil if there is none.
func (p *place) document(tb testing.TB, name string, id any) bson.Raw {
	tb.Helper()
	raw, err := p.db.Collection(name).FindOne(tb.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil
	}
	if err != nil {
		tb.Fatal(err)
	}
	return raw
}

func (p *place) serverTime(tb testing.TB) time.Time {
	tb.Helper()
	var reply struct{ LocalTime time.Time }
	if err := p.db.RunCommand(tb.Context(), bson.D{{Key: "hello", Value: 1}}).Decode(&reply); err != nil {
		tb.Fatal(err)
	}
	return reply.LocalTime
}

func TestMongoStore(t *testing.T) {
	t.Parallel()
	sagatest.Run(t, func(tb testing.TB) sagatest.Fixture {
		p := newPlace(tb)
		return sagatest.Fixture{Store: p.store, Outbox: p.box, Events: p.types}
	})
}

func define[S any, I saga.Identifier](tb testing.TB, r *saga.Registry, name string, opts ...saga.SagaOption) *saga.Saga[S, I] {
	tb.Helper()
	s, err := saga.New[S, I](r, name, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

type handlerer interface {
	Handler() (consumer.Handler, error)
}

func handlerOf(tb testing.TB, s handlerer) consumer.Handler {
	tb.Helper()
	h, err := s.Handler()
	if err != nil {
		tb.Fatal(err)
	}
	return h
}

func handle(tb testing.TB, h consumer.Handler, ms ...*consumer.Message) {
	tb.Helper()
	for _, m := range ms {
		if err := h.Handle(tb.Context(), m); err != nil {
			tb.Fatalf("message %s: %v", m.ID, err)
		}
	}
}

// msg returns a message with a JSON value and pairs of headers.
func msg(tb testing.TB, typ, key string, value any, headers ...string) *consumer.Message {
	tb.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		tb.Fatal(err)
	}

	m := &consumer.Message{ID: typ + "/" + key, Name: typ, Key: []byte(key), Value: text}
	for i := 0; i+1 < len(headers); i += 2 {
		m.Headers = append(m.Headers, event.Header{Key: headers[i], Value: []byte(headers[i+1])})
	}

	return m
}

// arrived returns the message that the relay would publish for a stored envelope.
func arrived(tb testing.TB, raw bson.Raw) *consumer.Message {
	tb.Helper()
	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil {
		tb.Fatal(err)
	}

	value, err := envelope.AppendPayload([]byte{}, &v)
	if err != nil {
		tb.Fatal(err)
	}

	m := &consumer.Message{ID: string(v.AppendID(nil)), Name: string(v.Type), Key: bytes.Clone(v.OrderingKey()), Value: value}
	for it := v.Headers.Iter(); it.Next(); {
		m.Headers = append(m.Headers, event.Header{Key: string(it.Key), Value: bytes.Clone(it.Value)})
	}

	return m
}

// memory is a Store without transactions, for tests that need no server.
type memory struct {
	saga.Store
	mu      sync.Mutex
	records map[any]saga.Record
	refuse  int // conflicts to come
	saves   int
}

func newMemory() *memory { return &memory{records: map[any]saga.Record{}} }

func (s *memory) InTransaction(context.Context) bool { return false }

func (s *memory) Transaction(ctx context.Context, fn func(context.Context) error) error {
	return fn(ctx)
}

func (s *memory) Load(_ context.Context, _ string, id any) (saga.Record, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.records[id]
	return r, ok, nil
}

func (s *memory) Save(_ context.Context, name string, r saga.Record) (saga.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saves++
	if s.refuse > 0 || s.records[r.ID].Version != r.Version {
		s.refuse--
		return r, &saga.ConflictError{Saga: name, ID: saga.FormatID(r.ID), Version: r.Version}
	}

	r.Version, r.UpdatedAt = r.Version+1, time.Now()
	s.records[r.ID] = r
	return r, nil
}

func (s *memory) Complete(_ context.Context, _ string, r saga.Record, _ time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.records, r.ID)
	return nil
}
