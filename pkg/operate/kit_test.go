package operate_test

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/operate"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/relay"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// patience is the time limit for events that usually take seconds, on a busy machine.
const patience = 60 * time.Second

// scene is a service with an outbox, and a relay that its process embeds.
type scene struct {
	t      *testing.T
	client *mongo.Client
	db     *mongo.Database // of the service
	box    *outbox.Box
	topic  string // exists with 3 partitions
	config relay.Config
	relay  *relay.Relay
}

func setup(t *testing.T, change ...func(*relay.Config)) *scene {
	t.Helper()
	client := stacktest.Client(t)
	db, state, topic := stacktest.Database(t, client), stacktest.Database(t, client), stacktest.Topic(t, 3)
	box, err := outbox.New(db, outbox.WithoutTransaction())
	if err != nil {
		t.Fatal(err)
	}

	cfg := relay.Default()
	cfg.MongoDB.URI, cfg.Kafka.Brokers = relay.NewURI(stacktest.MongoURI(t)), stacktest.Brokers(t)
	cfg.Watcher, cfg.State.Database, cfg.Watch, cfg.Topics.Template = "shop", state.Name(), []string{db.Name() + ".outbox"}, topic
	cfg.Lease.TTL, cfg.Lease.Renew = 20*time.Second, 400*time.Millisecond
	for _, f := range change {
		f(&cfg)
	}
	s := &scene{t: t, client: client, db: db, box: box, topic: topic, config: cfg}
	if s.relay, err = relay.New(cfg, relay.WithLogger(slog.New(slog.DiscardHandler))); err != nil {
		t.Fatal(err)
	}
	return s
}

// runRelay runs the relay until the test ends, and waits until it owns the watcher.
func (s *scene) runRelay() {
	s.t.Helper()
	s.runInBackground(s.relay.Run)
	s.await(relay.Owner)
}

// runInBackground calls run, which must return nil when the test ends.
func (s *scene) runInBackground(run func(ctx context.Context) error) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	s.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Error(err)
		}
	})
}

// await waits until the relay has this phase.
func (s *scene) await(phase relay.Phase) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if err := s.relay.Await(ctx, phase); err != nil {
		s.t.Fatalf("phase %s: %v; the status is %+v", phase, err, s.relay.Status())
	}
}

// operator returns the operator of the embedded relay.
func (s *scene) operator() *operate.Operator {
	s.t.Helper()
	op, err := operate.Of(s.relay)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(op.Close)
	return op
}

// append appends an event with this key, and returns its id.
func (s *scene) append(key string, options ...event.Option) string {
	s.t.Helper()
	placed := event.New(event.Aggregate{Type: "order", ID: key}, "OrderPlaced", event.Bytes("", []byte("secret "+key)), options...)
	if err := s.box.Append(s.t.Context(), placed); err != nil {
		s.t.Fatal(err)
	}
	return placed.ID().String()
}

// iterOf is a list of the package.
type iterOf[T any] = iter.Seq2[T, error]

// collect returns all entries of a list.
func collect[T any](t *testing.T, list iter.Seq2[T, error]) (all []T) {
	t.Helper()
	for entry, err := range list {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, entry)
	}
	return all
}

// eventually waits until a list has this number of entries, and returns them.
func eventually[T any](t *testing.T, count int, list func() iter.Seq2[T, error]) (all []T) {
	t.Helper()
	stacktest.Eventually(t, fmt.Sprintf("the list has %d entries", count), func() bool {
		all = collect(t, list())
		return len(all) == count
	}, func() any { return all })
	return all
}
