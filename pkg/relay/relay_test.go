package relay_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/relay"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// patience is the time limit for events that usually take seconds, on a busy machine.
const patience = 60 * time.Second

// scene contains everything that a service needs for one test.
type scene struct {
	box    *outbox.Box
	topic  string
	config relay.Config
}

func setup(t *testing.T) *scene {
	t.Helper()
	c := stacktest.Client(t)
	db, state, topic := stacktest.Database(t, c), stacktest.Database(t, c), stacktest.Topic(t, 3)
	box, err := outbox.New(db, outbox.WithoutTransaction())
	if err != nil {
		t.Fatal(err)
	}

	cfg := configOf(stacktest.MongoURI(t), stacktest.Brokers(t)...)
	cfg.State.Database, cfg.Watch, cfg.Topics.Template = state.Name(), []string{db.Name() + ".outbox"}, topic
	cfg.Lease.TTL, cfg.Lease.Renew = 20*time.Second, 400*time.Millisecond
	return &scene{box: box, topic: topic, config: cfg}
}

// configOf returns the defaults with the addresses of servers.
func configOf(uri string, brokers ...string) relay.Config {
	c := relay.Default()
	c.MongoDB.URI, c.Kafka.Brokers = relay.NewURI(uri), brokers
	return c
}

// start runs a relay until stop, which returns the result of Run.
func (s *scene) start(t *testing.T, node string) (r *relay.Relay, stop func() error) {
	t.Helper()
	c := s.config
	c.Node = node
	r, err := relay.New(c, relay.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}

	return r, s.run(t, r)
}

// run runs r until stop, which returns the result of Run.
func (s *scene) run(t *testing.T, r *relay.Relay) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	stop = func() error { cancel(); err := <-ended; ended <- nil; return err }
	t.Cleanup(func() { _ = stop() })
	return stop
}

func waitPhases(t *testing.T, r *relay.Relay, phases ...relay.Phase) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := r.Await(ctx, phases...); err != nil {
		t.Fatalf("not %v: %v; %+v", phases, err, r.Status())
	}
}

func (s *scene) append(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		if err := s.box.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: fmt.Sprint(i % 5)}, "Placed", event.Bytes("", []byte(fmt.Sprint(i))))); err != nil {
			t.Fatal(err)
		}
	}
}

// readValues returns the values of the first n records of the topic.
func (s *scene) readValues(t *testing.T, n int) (readValues []string) {
	t.Helper()
	return s.valuesFrom(t, stacktest.Brokers(t), n)
}

// valuesFrom is like values, for other brokers.
func (s *scene) valuesFrom(t *testing.T, brokers []string, n int, opts ...kgo.Opt) (values []string) {
	t.Helper()
	opts = append(opts, kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(s.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	cl, err := kgo.NewClient(opts...)
	if err != nil {
		t.Fatal(err)
	}

	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for len(values) < n {
		f := cl.PollFetches(ctx)
		if ctx.Err() != nil {
			t.Fatalf("%d of %d records arrived", len(values), n)
		}

		f.EachRecord(func(r *kgo.Record) { values = append(values, string(r.Value)) })
	}

	return values
}

func TestTwoInstancesOfAServiceShareTheWork(t *testing.T) {
	t.Parallel()
	s := setup(t)
	a, stop := s.start(t, "a")
	waitPhases(t, a, relay.Owner)
	b, _ := s.start(t, "b")
	waitPhases(t, b, relay.Standby)
	waitPhases(t, b) // a standby is ready
	s.append(t, 10)
	s.readValues(t, 10)
	if err := stop(); err != nil {
		t.Errorf("a stop: %v", err)
	}

	waitPhases(t, b, relay.Owner)
	s.append(t, 10)
	if got := s.readValues(t, 20); len(got) != 20 {
		t.Errorf("%d records of 20: %v", len(got), got)
	}

	if err := a.Run(t.Context()); !errors.Is(err, relay.ErrRan) {
		t.Errorf("a second run: %v", err)
	}

	if err := a.Await(t.Context(), relay.Owner); !errors.Is(err, relay.ErrEnded) {
		t.Errorf("waiting for one that has ended: %v", err)
	}
}

func TestHandlerServesProbesAndMetrics(t *testing.T) {
	t.Parallel()
	s := setup(t)
	r, _ := s.start(t, "a")
	waitPhases(t, r, relay.Owner)
	for path, want := range map[string]string{"/livez": `"live":true`, "/readyz": `"phase":"owner"`, "/metrics": "outrelay_lease_owner 1"} {
		w := httptest.NewRecorder()
		r.Handler().ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		body, _ := io.ReadAll(w.Body)
		if w.Code != 200 || !strings.Contains(string(body), want) {
			t.Errorf("%s: %d %.300s, no %s", path, w.Code, body, want)
		}
	}
}

func TestEveryProblemAtOnce(t *testing.T) {
	t.Parallel()
	cfg := configOf("", "nowhere")
	cfg.Lease.TTL, cfg.Limits.Memory = time.Millisecond, 1<<10
	_, err := relay.New(cfg)
	for _, want := range []string{"mongodb.uri", "kafka.brokers", "lease.ttl", "limits.memory"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no word of %s in: %v", want, err)
		}
	}

	if _, err := relay.Load(filepath.Join(t.TempDir(), "none.yaml"), nil); err == nil || !strings.Contains(err.Error(), "none.yaml") {
		t.Errorf("a missing file: %v", err)
	}

	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	if err := os.WriteFile(file, []byte("lease: {tll: 2s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := relay.Load(file, nil); err == nil || !strings.Contains(err.Error(), "did you mean lease.ttl") {
		t.Errorf("an unknown key: %v", err)
	}
}

// TestOperatorsPageIsRejected: the page needs packages that an embedded relay does not link, so its listener has a clear error.
func TestOperatorsPageIsRejected(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "outrelay.yaml")
	text := "mongodb: {uri: mongodb://localhost/shop}\nkafka: {brokers: [localhost:9092]}\nhttp: {admin: {listen: 127.0.0.1:0, anonymous: operator}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := relay.Load(file, nil)
	if err != nil {
		t.Fatal(err)
	}

	_, err = relay.New(cfg)
	if err == nil || !strings.Contains(err.Error(), "http.admin") || !strings.Contains(err.Error(), "outrelay run") {
		t.Errorf("got error %v, want one that names http.admin and outrelay run", err)
	}

	// A service may mount the page without a listener.
	cfg.HTTP.Admin.Listen, cfg.HTTP.Admin.Anonymous = "off", "none"
	if _, err := relay.New(cfg); err != nil {
		t.Errorf("without a listener: %v", err)
	}
}

// The environment is used only with the option, and a relay that never runs leaves nothing running.
func TestEnvironmentIsAskedFor(t *testing.T) {
	env := []string{"OUTRELAY_MONGODB_URI=mongodb://127.0.0.1:1/?replicaSet=rs0", "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1", "OUTRELAY_WATCH=shop.outbox"}
	for _, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		t.Setenv(name, value)
	}

	if _, err := relay.New(relay.Default()); err == nil {
		t.Error("the environment was read without Load")
	}

	cfg, err := relay.Load("", env)
	if err != nil {
		t.Fatal(err)
	}
	r, err := relay.New(cfg)
	if err != nil {
		t.Fatal(err)
	}

	if got := r.Status(); got.Phase != relay.Starting || got.Ready {
		t.Errorf("before it runs: %+v", got)
	}

	w := httptest.NewRecorder()
	r.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/readyz", nil))
	if w.Code != 503 {
		t.Errorf("/readyz before it runs: got %d, want 503", w.Code)
	}
}

// Only the service, and not the relay, notifies the service manager.
func TestServiceManagerGetsNoNotification(t *testing.T) {
	s := setup(t)
	socket := filepath.Join(t.TempDir(), "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}

	defer func() { _ = manager.Close() }()
	t.Setenv("NOTIFY_SOCKET", socket)
	r, stop := s.start(t, "a")
	waitPhases(t, r, relay.Owner)
	if err := stop(); err != nil {
		t.Error(err)
	}

	// Notifications of the relay would arrive before this notification.
	last, err := net.Dial("unixgram", socket)
	if err != nil {
		t.Fatal(err)
	}

	defer func() { _ = last.Close() }()
	if _, err := io.WriteString(last, "the end"); err != nil {
		t.Fatal(err)
	}

	text := make([]byte, 200)
	if n, err := manager.Read(text); err != nil || string(text[:n]) != "the end" {
		t.Errorf("it got %q, %v", text[:n], err)
	}
}
