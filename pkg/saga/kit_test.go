package saga_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/lab/sagatest"
	"github.com/outrelay/outrelay/internal/service/sagas"
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
	db   *mongo.Database
	box  *outbox.Box
	sent *mongo.Collection
}

func newPlace(tb testing.TB, opts ...outbox.Option) *place {
	tb.Helper()
	return placeIn(tb, stacktest.Database(tb, stacktest.Client(tb)), opts...)
}

func placeIn(tb testing.TB, db *mongo.Database, opts ...outbox.Option) *place {
	tb.Helper()
	box, err := outbox.New(db, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	return &place{db: db, box: box, sent: db.Collection("outbox")}
}

// memoryBox returns an outbox without a server.
func memoryBox(tb testing.TB) *outbox.Box {
	tb.Helper()
	box, err := memory.NewOutbox(memory.NewDB())
	if err != nil {
		tb.Fatal(err)
	}
	return box
}

// listTypes returns the types of the events in the outbox, in the order of their appends.
func (p *place) listTypes(ctx context.Context) ([]string, error) {
	views, err := p.listEnvelopes(ctx)
	types := []string{}
	for _, raw := range views {
		types = append(types, raw.Lookup("type").StringValue())
	}
	return types, err
}

func (p *place) listEnvelopes(ctx context.Context) ([]bson.Raw, error) {
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
	got, err := p.listTypes(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	if !slices.Equal(got, want) {
		tb.Errorf("events in the outbox: %v, want %v", got, want)
	}
}

// findDocument returns the stored saga, or nil if there is none.
func (p *place) findDocument(tb testing.TB, name string, id any) bson.Raw {
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
		return sagatest.Fixture{Store: sagas.NewMongo(p.db), Box: p.box, Events: p.listTypes}
	})
}

// newType returns a type of events with payloads in JSON.
func newType[P any](name string) event.Type[P] { return event.Type[P]{Aggregate: "order", Name: name} }

func handlerOf[S any](tb testing.TB, s *saga.Saga[S], box *outbox.Box) consumer.Handler {
	tb.Helper()
	h, err := s.Handler(box)
	if err != nil {
		tb.Fatal(err)
	}
	return h
}

// readSnapshot returns a stored saga.
func readSnapshot(tb testing.TB, box *outbox.Box, name, id string) saga.Snapshot {
	tb.Helper()
	got, err := saga.NewDesk(box).Get(tb.Context(), saga.Ref{Saga: name, ID: id})
	if err != nil {
		tb.Fatal(err)
	}
	return got
}

// handleWithRetry runs a message again as long as there are conflicts, as a consumer does.
func handleWithRetry(ctx context.Context, h consumer.Handler, m *consumer.Message) error {
	for {
		if err := h.Handle(ctx, m); !errors.Is(err, saga.ErrConflict) {
			return err
		}
	}
}

func mustHandle(tb testing.TB, h consumer.Handler, ms ...*consumer.Message) {
	tb.Helper()
	for _, m := range ms {
		if err := h.Handle(tb.Context(), m); err != nil {
			tb.Fatalf("message %s: %v", m.ID, err)
		}
	}
}

// newMessage returns a message about the aggregate id, with a JSON value and pairs of headers.
func newMessage(tb testing.TB, typ, id string, value any, headers ...string) *consumer.Message {
	tb.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		tb.Fatal(err)
	}

	m := &consumer.Message{ID: typ + "/" + id, Name: typ, Aggregate: event.Aggregate{Type: "order", ID: id}, Value: text}
	for i := 0; i+1 < len(headers); i += 2 {
		m.Headers = append(m.Headers, event.Header{Key: headers[i], Value: []byte(headers[i+1])})
	}

	return m
}

// publishedMessage returns the message that the relay would publish for a stored envelope.
func publishedMessage(tb testing.TB, raw bson.Raw) *consumer.Message {
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
