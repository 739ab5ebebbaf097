package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/operators"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// patience is the time limit of each wait. It is long, because the machine may be busy.
const patience = 60 * time.Second

// hostile is a text in events that tries to run a script in the page.
const hostile = `<img src=x onerror="alert(1)">`

// The events of a scene.
const (
	delivered = 40
	forbidden = 120 // dead letters of class not_allowed, more than one page shows
	expired   = 3
	parked    = 48
	scheduled = 3
	rejected  = 3 // waiting for a retry
	aged      = 2 // delivered hours ago, according to their timestamp

	remembered = 90 // minutes in the history
)

// The tokens of the listener with a login.
const (
	operatorToken = "operator-token-of-the-scene"
	viewerToken   = "viewer-token-of-the-scene"
)

// scene is a watcher with two relays and events in every state, and its page.
type scene struct {
	t       *testing.T
	db      *mongo.Database
	state   state.Database
	topic   string
	url     string
	login   string // address of a page that requires a login
	app     string // application name of the page's connection to MongoDB
	actions *actionLog
}

// actionLog is a log handler that stores the performed actions of operators.
type actionLog struct {
	slog.Handler
	mu   sync.Mutex
	done map[string]bool
}

func (d *actionLog) Enabled(context.Context, slog.Level) bool { return true }

func (d *actionLog) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "action" {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.done[a.Value.String()] = true
		}
		return true
	})
	return nil
}

// findMissing returns the offered actions that were not performed.
func (d *actionLog) findMissing(offered map[string]bool) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.DeleteFunc(slices.Sorted(maps.Keys(offered)), func(name string) bool { return d.done[name] })
}

func openScene(t *testing.T) *scene {
	t.Helper()
	c := stacktest.Client(t)
	s := &scene{t: t, db: stacktest.Database(t, c), state: state.Of(stacktest.Database(t, c)), topic: stacktest.Topic(t, 3)}
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := fmt.Sprintf(`
watcher: orders
mongodb: { uri: %q }
state: { database: %q }
kafka: { brokers: [%s] }
watch: [%s.outbox]
topics:
  template: %q
  rules: [{ match: { aggregatetype: lost }, to: [%q] }]
recording: mark
lease: { ttl: 10s, renew: 500ms }
http: { listen: "off", admin: { listen: "127.0.0.1:0", anonymous: operator, token: %q, viewer_token: %q, rate: 1000 } }
`, stacktest.MongoURI(t), s.state.Name(), `"`+strings.Join(stacktest.Brokers(t), `","`)+`"`, s.db.Name(), s.topic, s.topic+"-missing", operatorToken, viewerToken)
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

	s.insertInitialState()
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelError}))
	for _, node := range []string{"one", "two"} {
		cfg := load(node)
		cfg.HTTP.Admin = nil
		r, err := process.New(cfg, "test", log)
		if err != nil {
			t.Fatal(err)
		}
		s.runInBackground(r.Run)
	}

	page := "page-" + s.state.Name()
	s.app = "outrelay state " + page
	s.actions = &actionLog{Handler: slog.DiscardHandler, done: map[string]bool{}}
	s.url = s.servePage(load(page), slog.New(s.actions))
	guarded := load("guarded-" + s.state.Name())
	guarded.HTTP.Admin.Anonymous = "none"
	s.login = s.servePage(guarded, slog.New(slog.DiscardHandler))
	s.appendEvents()
	return s
}

// servePage serves a page until the test ends, and returns its address.
func (s *scene) servePage(cfg config.Config, log *slog.Logger) string {
	s.t.Helper()
	o, err := operators.New(cfg, "test", log, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	s.runInBackground(o.Run)
	return "http://" + o.Addr()
}

// runInBackground runs f until the test ends.
func (s *scene) runInBackground(f func(context.Context) error) {
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

// insertInitialState inserts the state before the relays start: envelopes that are retried in an hour,
// a saga, and an inbox with a mark that is a week old and a claimed message.
func (s *scene) insertInitialState() {
	now := time.Now()
	var list []waiting.Entry
	for i := range rejected {
		raw, err := bson.Marshal(bson.D{
			{Key: "_id", Value: fmt.Sprintf("rejected-%d", i+1)},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "r"},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "payload", Value: "x"},
			{Key: "key", Value: fmt.Sprintf("customer-r%d", i)},
			{Key: "ts", Value: bson.Timestamp{T: uint32(now.Unix())}},
		})
		if err != nil {
			s.t.Fatal(err)
		}
		// It stays in its outbox while it waits. The relay begins after it.
		if _, err := s.db.Collection("outbox").InsertOne(s.t.Context(), bson.Raw(raw)); err != nil {
			s.t.Fatal(err)
		}
		list = append(list, waiting.Entry{
			Watcher: "orders", NS: s.db.Name() + ".outbox", Raw: raw, Key: fmt.Sprintf("customer-r%d", i),
			Pos: outboxes.PosAt(bson.Timestamp{T: uint32(now.Unix()), I: uint32(i)}), Pending: []string{s.topic},
			Reason: waiting.Retry, Origin: waiting.OriginRequeue, Attempts: 3, NextAt: now.Add(time.Hour),
			Error: &record.Attempt{Class: "record_rejected", Reason: "the broker rejected it (87)", Topic: s.topic, At: now},
		})
	}
	if err := s.state.Ensure(s.t.Context(), slog.New(slog.DiscardHandler)); err != nil {
		s.t.Fatal(err)
	}
	if err := waiting.Enter(s.t.Context(), s.state.Collection("waiting"), list); err != nil {
		s.t.Fatal(err)
	}

	minutes := bson.A{}
	for i := range remembered {
		minutes = append(minutes, bson.D{
			{Key: "t", Value: now.Add(time.Duration(i-remembered) * time.Minute)},
			{Key: "r", Value: float64(i % 30)},
			{Key: "l", Value: float64(i % 7)},
			{Key: "p50", Value: 0.8 + float64(i%5)/10},
			{Key: "p99", Value: 3 + float64(i%9)/2},
		})
	}
	if _, err := s.state.Collection("history").InsertOne(s.t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}, {Key: "samples", Value: minutes}}); err != nil {
		s.t.Fatal(err)
	}

	store := sagas.NewMongo(s.db)

	body, err := bson.Marshal(bson.D{{Key: "state", Value: bson.D{{Key: "step", Value: "paying" + hostile}}}})
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := store.Prepare(s.t.Context(), sagas.Type{Name: "order_sagas", Owner: "orders", ID: sagas.String}); err != nil {
		s.t.Fatal(err)
	}
	if _, err := store.Save(s.t.Context(), "order_sagas", sagas.Record{ID: "saga-1", Body: body}); err != nil {
		s.t.Fatal(err)
	}

	s.fillInbox()
}

// ageDelivered sets the timestamps of two delivered envelopes back by three hours.
func (s *scene) ageDelivered() {
	s.t.Helper()
	old := bson.Timestamp{T: uint32(time.Now().Add(-3 * time.Hour).Unix()), I: 1}
	if _, err := s.db.Collection("outbox").UpdateMany(s.t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: bson.A{"good-030", "good-031"}}}}}, bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: old}}}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *scene) fillInbox() {
	box, err := mongostore.Open(s.db, inbox.Settings{})
	if err != nil {
		s.t.Fatal(err)
	}
	if err := box.EnsureIndexes(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}

	for _, id := range []string{"old", "new"} {
		e := inbox.Entry{Key: inbox.Key{Consumer: "billing/pay", ID: id}}
		if err := box.Once(s.t.Context(), e, func(context.Context) error { return nil }, inbox.OnceConfig{}); err != nil {
			s.t.Fatal(err)
		}
	}

	if _, err := box.Claim(s.t.Context(), inbox.Entry{Key: inbox.Key{Consumer: "billing/pay", ID: "held"}}, time.Hour); err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.db.Collection("inbox").UpdateOne(s.t.Context(), bson.D{{Key: "_id.i", Value: "old"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "at", Value: time.Now().Add(-8 * 24 * time.Hour)}}}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *scene) insertDocument(coll string, doc bson.D) {
	s.t.Helper()
	if _, err := s.db.Collection(coll).InsertOne(s.t.Context(), doc); err != nil {
		s.t.Fatal(err)
	}
}

// newEvents returns n events of five keys.
func newEvents(n int, prefix, aggregate, typ string, opts ...event.Option) []event.Event {
	list := make([]event.Event, n)
	for i := range list {
		id := fmt.Sprintf("%s-%03d", prefix, i)
		payload := event.Document(map[string]any{"total": i, "note": hostile})
		own := append([]event.Option{event.WithID(id), event.WithKey(fmt.Sprintf("customer-%d", i%5))}, opts...)
		list[i] = event.New(event.Aggregate{Type: aggregate, ID: id}, typ, payload, own...)
	}
	return list
}

// appendForbidden appends events to a topic that is never allowed.
func (s *scene) appendForbidden(box *outbox.Box, prefix string) {
	s.t.Helper()
	if err := box.Append(s.t.Context(), newEvents(forbidden, prefix, "order", "OrderPlaced", event.WithTopic("__consumer_offsets"))...); err != nil {
		s.t.Fatal(err)
	}
}

// openOutbox returns an outbox whose appends need no transaction.
func (s *scene) openOutbox() *outbox.Box {
	s.t.Helper()
	box, err := outbox.New(s.db, outbox.WithoutTransaction())
	if err != nil {
		s.t.Fatal(err)
	}
	return box
}

// appendEvents appends events for each state, and waits until they have reached it.
func (s *scene) appendEvents() {
	s.t.Helper()
	box := s.openOutbox()
	s.waitUntil("a watcher that is live", func(ctx context.Context) bool {
		n, err := s.state.Collection("watchers").CountDocuments(ctx, bson.D{{Key: "owner", Value: bson.D{{Key: "$ne", Value: nil}}}, {Key: "epoch", Value: bson.D{{Key: "$gt", Value: 0}}}})
		return err == nil && n == 1
	})

	list := slices.Concat(
		newEvents(delivered, "good", "order", "OrderPlaced"),
		newEvents(expired, "late", "order", "QuoteOffered", event.WithExpiry(time.Now().Add(-time.Hour))),
		newEvents(parked, "lost", "lost", "OrderLost"),
	)
	s.appendForbidden(box, "forbidden")
	if err := box.Append(s.t.Context(), list...); err != nil {
		s.t.Fatal(err)
	}

	for i := range scheduled {
		if _, err := box.Schedule(s.t.Context(), time.Now().Add(24*time.Hour), event.New(event.Aggregate{Type: "order", ID: fmt.Sprint(i)}, "PaymentDue", event.Payload{}, event.WithID(fmt.Sprintf("due-%d", i)))); err != nil {
			s.t.Fatal(err)
		}
	}

	s.waitUntil("the dead letters", func(context.Context) bool { return s.countLetters(bson.D{}) == forbidden+expired })
	s.waitUntil("the envelopes that wait", func(context.Context) bool {
		return s.countIn(s.state.Collection("waiting"), bson.D{}) >= rejected+parked
	})

	s.waitUntil("the marks of delivered envelopes", func(context.Context) bool {
		return s.countDocuments("outbox", bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}) >= delivered
	})
}

// allSent reports whether the envelopes with these ids are recorded as sent.
func (s *scene) allSent(ids ...string) bool {
	s.t.Helper()
	filter := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}, {Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}
	return s.countDocuments("outbox", filter) == int64(len(ids))
}

// noneWaits reports whether none of the envelopes waits in the store: they were sent.
func (s *scene) noneWaits(ids ...string) bool {
	s.t.Helper()
	return s.countIn(s.state.Collection("waiting"), bson.D{{Key: "id", Value: bson.D{{Key: "$in", Value: ids}}}}) == 0
}

// slot is a watcher document: the owner of a slot and the orders of operators.
type slot struct {
	Owner   string `bson:"owner"`
	Node    string `bson:"node"`
	Epoch   int64  `bson:"epoch"`
	Control struct {
		Paused   bool      `bson:"paused"`
		Pin      string    `bson:"pin"`
		StepDown time.Time `bson:"stepDownUntil"`
	} `bson:"control"`
}

func (s *scene) readSlot(id string) (w slot) {
	s.t.Helper()
	if err := s.state.Collection("watchers").FindOne(s.t.Context(), bson.D{{Key: "_id", Value: id}}).Decode(&w); err != nil {
		s.t.Fatal(err)
	}
	return w
}

func (s *scene) countDocuments(coll string, filter bson.D) int64 {
	s.t.Helper()
	return s.countIn(s.db.Collection(coll), filter)
}

func (s *scene) countLetters(filter bson.D) int64 {
	s.t.Helper()
	return s.countIn(s.state.Collection("letters"), filter)
}

// envelopeOf returns the id of the envelope of a dead letter.
func (s *scene) envelopeOf(letter string) string {
	s.t.Helper()
	var found struct {
		ID string `bson:"id"`
	}
	if err := s.state.Collection("letters").FindOne(s.t.Context(), bson.D{{Key: "_id", Value: letter}}).Decode(&found); err != nil {
		s.t.Fatal(err)
	}
	return found.ID
}

func (s *scene) countIn(coll *mongo.Collection, filter bson.D) int64 {
	s.t.Helper()
	n, err := coll.CountDocuments(s.t.Context(), filter)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

// waitUntil polls ok until it returns true.
func (s *scene) waitUntil(what string, ok func(context.Context) bool) {
	s.t.Helper()
	stacktest.Eventually(s.t, what, func() bool { return ok(s.t.Context()) })
}
