package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/app"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// patience is how long anything may take on a machine that is busy with other things.
const patience = 60 * time.Second

// hostile is what somebody writes into an event to take over the page.
const hostile = `<img src=x onerror="alert(1)">`

// The events of a scene.
const (
	delivered = 40
	forbidden = 120 // dead letters of class not_allowed: more than a page shows
	expired   = 3
	parked    = 4
	scheduled = 2
)

// scene is a watcher with two relays and events in every state, and its page.
type scene struct {
	t     *testing.T
	db    *mongo.Database
	state *mongo.Database
	topic string
	url   string
	app   string // name by which the page's connection is known to MongoDB
}

func openScene(t *testing.T) *scene {
	t.Helper()
	c := stacktest.Client(t)
	s := &scene{t: t, db: stacktest.Database(t, c), state: stacktest.Database(t, c), topic: stacktest.Topic(t, 3)}
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := fmt.Sprintf(`
watcher: orders
mongodb: { uri: %q, state: %q }
kafka: { brokers: [%s] }
watch: [%s.outbox]
topics:
  template: %q
  rules: [{ match: { aggregatetype: lost }, to: [%q] }]
recording: mark
lease: { ttl: 3s, renew: 500ms }
http: { listen: "off", admin: { listen: "127.0.0.1:0", anonymous: operator } }
`, stacktest.MongoURI(t), s.state.Name(), `"`+strings.Join(stacktest.Brokers(t), `","`)+`"`, s.db.Name(), s.topic, s.topic+"-missing")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	load := func(node string) config.Config {
		cfg, _, err := config.Load(file, nil, []string{"node=" + node})
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	s.prepare()
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelError}))
	for _, node := range []string{"one", "two"} {
		cfg := load(node)
		cfg.HTTP.Admin = nil
		r, err := app.New(cfg, "test", log)
		if err != nil {
			t.Fatal(err)
		}
		s.run(r.Run)
	}
	page := "page-" + s.state.Name()
	s.app = "outrelay state " + page
	o, err := app.NewOperators(load(page), "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s.run(o.Run)
	s.url = "http://" + o.Addr()
	s.fill()
	return s
}

// run runs f until the test ends.
func (s *scene) run(f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- f(ctx) }()
	s.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Error(err)
		}
	})
}

// prepare writes what is there before a relay: an envelope that was refused and is tried again in an hour, and a saga.
func (s *scene) prepare() {
	now := time.Now()
	s.insert("outbox", bson.D{
		{Key: "_id", Value: "refused-1"},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "r"},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: "x"},
		{Key: "key", Value: "customer-r"},
		{Key: "state", Value: "retry"},
		{Key: "attempts", Value: 3},
		{Key: "nextAt", Value: now.Add(time.Hour)},
		{Key: "ts", Value: bson.Timestamp{T: uint32(now.Unix())}},
		{Key: "lastError", Value: bson.D{{Key: "class", Value: "record_refused"}, {Key: "reason", Value: "the broker refused it (87)"}, {Key: "topic", Value: s.topic}, {Key: "at", Value: now}}},
	})
}

func (s *scene) insert(coll string, doc bson.D) {
	s.t.Helper()
	if _, err := s.db.Collection(coll).InsertOne(s.t.Context(), doc); err != nil {
		s.t.Fatal(err)
	}
}

// fill appends events in every state and waits until each has got there.
func (s *scene) fill() {
	s.t.Helper()
	box, err := outbox.New(s.db, outbox.WithoutTransaction())
	if err != nil {
		s.t.Fatal(err)
	}
	s.until("a watcher that is live", func(ctx context.Context) bool {
		n, err := s.state.Collection("watchers").CountDocuments(ctx, bson.D{{Key: "owner", Value: bson.D{{Key: "$ne", Value: nil}}}, {Key: "epoch", Value: bson.D{{Key: "$gt", Value: 0}}}})
		return err == nil && n == 1
	})
	var list []event.Event
	add := func(n int, prefix, aggregate, typ string, opts ...event.Option) {
		for i := range n {
			id := fmt.Sprintf("%s-%03d", prefix, i)
			list = append(list, event.New(aggregate, id, typ, map[string]any{"total": i, "note": hostile}, append([]event.Option{event.WithID(id), event.WithKey(fmt.Sprintf("customer-%d", i%5))}, opts...)...))
		}
	}
	add(delivered, "good", "order", "OrderPlaced")
	add(forbidden, "forbidden", "order", "OrderPlaced", event.WithTopic("__consumer_offsets"))
	add(expired, "late", "order", "Quote"+hostile, event.WithExpiresAt(time.Now().Add(-time.Hour)))
	add(parked, "lost", "lost", "OrderLost")
	if err := box.AppendMany(s.t.Context(), list); err != nil {
		s.t.Fatal(err)
	}
	for i := range scheduled {
		if _, err := box.Schedule(s.t.Context(), event.New("order", fmt.Sprint(i), "PaymentDue", nil), time.Now().Add(24*time.Hour)); err != nil {
			s.t.Fatal(err)
		}
	}
	s.until("the dead letters", func(context.Context) bool { return s.count("outbox_dead", bson.D{}) == forbidden+expired })
	s.until("the envelopes that wait", func(context.Context) bool {
		return s.count("outbox", bson.D{{Key: "state", Value: bson.D{{Key: "$in", Value: bson.A{"parked", "blocked", "retry"}}}}}) >= 1+parked
	})
	s.until("the marks of delivered envelopes", func(context.Context) bool {
		return s.count("outbox", bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}) >= delivered
	})
}

func (s *scene) count(coll string, filter bson.D) int64 {
	s.t.Helper()
	n, err := s.db.Collection(coll).CountDocuments(s.t.Context(), filter)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

// until waits for what no signal tells of.
func (s *scene) until(what string, ok func(context.Context) bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for !ok(ctx) {
		select {
		case <-again.C:
		case <-ctx.Done():
			s.t.Fatalf("waiting for %s", what)
		}
	}
}
