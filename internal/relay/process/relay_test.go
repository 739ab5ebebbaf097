package process_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestMain(m *testing.M) {
	stacktest.Wide(10)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// patience is how long a wait for what should come within seconds may take on a loaded machine.
const patience = 60 * time.Second

// bundle is one test's database, topic and configuration.
type bundle struct {
	t      *testing.T
	client *mongo.Client
	db     *mongo.Database
	state  state.Database
	topic  string
	box    *outbox.Box
	env    []string
	log    *lines
	logAs  *slog.HandlerOptions // nil: the default
}

// lines is a log that can be waited for.
type lines struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{}
	seen func(line string) // called with each line before the writer goes on, if it is set
}

func (l *lines) Write(p []byte) (int, error) {
	if l.seen != nil {
		l.seen(string(p))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.more)
	l.more = make(chan struct{})
	return l.buf.Write(p)
}

func (l *lines) wait(t *testing.T, text string) string {
	t.Helper()
	deadline := time.After(patience)
	for {
		l.mu.Lock()
		all, more := l.buf.String(), l.more
		l.mu.Unlock()

		if strings.Contains(all, text) {
			return all
		}

		select {
		case <-more:
		case <-deadline:
			t.Fatalf("the log never contained %q:\n%s", text, all)
		}
	}
}

func setup(t *testing.T) *bundle {
	t.Helper()
	return setupOn(t, stacktest.MongoURI(t))
}

// setupOn is setup with the databases on another replica set. A test that needs a fail point for many seconds has its own.
func setupOn(t *testing.T, uri string) *bundle {
	t.Helper()
	c := stacktest.Client(t, options.Client().ApplyURI(uri))
	b := &bundle{t: t, client: c, db: stacktest.Database(t, c), state: state.Of(stacktest.Database(t, c)), topic: stacktest.Topic(t, 3)}
	var err error
	if b.box, err = outbox.New(b.db, outbox.WithoutTransaction()); err != nil {
		t.Fatal(err)
	}

	b.log = &lines{more: make(chan struct{})}
	b.env = []string{
		"OUTRELAY_MONGODB_URI=" + uri,
		"OUTRELAY_STATE_DATABASE=" + b.state.Name(),
		"OUTRELAY_KAFKA_BROKERS=" + strings.Join(stacktest.Brokers(t), ","),
		"OUTRELAY_WATCH=" + b.db.Name() + ".outbox",
		"OUTRELAY_TOPICS_TEMPLATE=" + b.topic,
		"OUTRELAY_HTTP_LISTEN=off",
		// No test here waits for a lease to expire, and one that does because the machine stands still is another term.
		"OUTRELAY_LEASE_TTL=20s", "OUTRELAY_LEASE_RENEW=400ms",
	}

	return b
}

// start runs a relay until stop is called. stop returns the result of Run.
func (b *bundle) start(set ...string) (stop func() error) {
	b.t.Helper()
	return b.startAs(func(*process.Relay) {}, set...)
}

// startAs is start of a relay that is prepared before.
func (b *bundle) startAs(prepare func(*process.Relay), set ...string) (stop func() error) {
	b.t.Helper()
	cfg, _, err := config.Load("", b.env, set)
	if err != nil {
		b.t.Fatal(err)
	}

	// The page is no part of these tests, but a process with the task admin needs a listener.
	build := func(config.Config, string, *slog.Logger, *metrics.Set) (process.Listener, error) {
		return noOperators{}, nil
	}

	r, err := process.New(cfg, "test", slog.New(slog.NewTextHandler(b.log, b.logAs)), process.WithOperators(build))
	if err != nil {
		b.t.Fatal(err)
	}

	prepare(r)
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	once := sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(patience):
			return fmt.Errorf("the relay does not stop")
		}
	})

	b.t.Cleanup(func() {
		if err := once(); err != nil {
			b.t.Error(err)
		}
	})

	return once
}

// countWaiting returns the number of waiting envelopes that match filter, or −1 if they cannot be counted.
func (b *bundle) countWaiting(filter bson.D) int64 { return b.count("waiting", filter) }

// countLetters returns the number of dead letters that match filter, or −1 if they cannot be counted.
func (b *bundle) countLetters(filter bson.D) int64 { return b.count("letters", filter) }

func (b *bundle) count(collection string, filter bson.D) int64 {
	n, err := b.state.Collection(collection).CountDocuments(b.t.Context(), filter)
	if err != nil {
		return -1
	}
	return n
}

// enterWaiting stores a waiting envelope as an owner or an operator does: the envelope of the outbox with this id.
func (b *bundle) enterWaiting(id, pos string, set func(e *waiting.Entry)) {
	b.t.Helper()
	raw, err := b.db.Collection("outbox").FindOne(b.t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	if err != nil {
		b.t.Fatal(err)
	}

	e := waiting.Entry{
		Watcher: "default", NS: b.db.Name() + ".outbox", Raw: raw, Key: "0", Slot: waiting.SlotOf(raw), Pos: pos,
		Reason: waiting.Parked, Origin: waiting.OriginStream,
	}
	set(&e)
	if err := waiting.Enter(b.t.Context(), b.state.Collection("waiting"), []waiting.Entry{e}); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bundle) append(n int, opts ...event.Option) {
	b.t.Helper()
	for i := range n {
		if err := b.box.Append(b.t.Context(), event.New(event.Aggregate{Type: "order", ID: fmt.Sprint(i % 5)}, "Placed", event.Bytes("", []byte(fmt.Sprint(i))), opts...)); err != nil {
			b.t.Fatal(err)
		}
	}
}

// consume reads n records of the topic from its start.
func (b *bundle) consume(n int) []*kgo.Record {
	b.t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(b.t)...), kgo.ConsumeTopics(b.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		b.t.Fatal(err)
	}
	defer cl.Close()
	var all []*kgo.Record
	for len(all) < n {
		more := b.poll(cl)
		if more == nil {
			b.t.Fatalf("%d of %d records arrived", len(all), n)
		}
		all = append(all, more...)
	}

	return all
}

// poll returns the next records, or none if none arrives for a long time.
func (b *bundle) poll(cl *kgo.Client) (records []*kgo.Record) {
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	for ctx.Err() == nil {
		if records = cl.PollFetches(ctx).Records(); len(records) > 0 {
			return records
		}
	}
	return nil
}

func (b *bundle) status() admin.SlotStatus {
	b.t.Helper()
	s, err := admin.ReadStatus(b.t.Context(), b.state)
	if err != nil {
		b.t.Fatal(err)
	}
	if len(s.Slots) != 1 {
		b.t.Fatalf("%d slots, want one", len(s.Slots))
	}
	return s.Slots[0]
}

func TestStartUpReport(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	b.start()
	b.consume(1)

	log := b.log.wait(t, "took over")
	for _, want := range []string{"watcher=default", "epoch=", "position="} {
		if !strings.Contains(log, want) {
			t.Errorf("the log of the start does not contain %q:\n%s", want, log)
		}
	}
	if w := b.status(); w.Owner == "" || w.Epoch < 1 || w.ExpiresInMS <= 0 || !strings.Contains(log, fmt.Sprint("epoch=", w.Epoch)) {
		t.Errorf("status %+v, want a living owner of the epoch that the log of the start contains:\n%s", w, log)
	}
}

// With longDrain, a stop that waits for the drain time exceeds the patience of the test.
const longDrain = "lease.drain=10m"

func TestStopJoinsEverything(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start(longDrain)
	b.append(50)
	b.consume(50)
	// goleak finds goroutines that outlive the stop.
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if w := b.status(); w.Owner != "" || w.State != "no-owner" {
		t.Errorf("after a stop the status is %+v, want a released lease", w)
	}
}

func TestRunsStartAfresh(t *testing.T) {
	t.Parallel()
	b := setup(t)
	seen, epoch := 0, int64(0)
	for range 3 {
		stop := b.start()
		b.append(20)
		seen += 20
		b.consume(seen)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		w := b.status()
		if w.Epoch <= epoch {
			t.Fatalf("epoch %d after epoch %d: each run acquires the lease again", w.Epoch, epoch)
		}
		epoch = w.Epoch
	}

	ids := map[string]bool{}
	records := b.consume(seen)
	for _, r := range records {
		ids[string(r.Headers[0].Value)] = true
	}
	if len(ids) != seen || len(records) != seen {
		t.Fatalf("%d records of %d ids, want %d: a clean stop repeats nothing", len(records), len(ids), seen)
	}
}

func TestExpired(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1, event.WithExpiry(time.Now().Add(-time.Minute)))
	b.append(1)
	b.start()
	b.consume(1)
	var dead struct {
		Class    string   `bson:"class"`
		Envelope bson.Raw `bson:"envelope"`
	}

	stacktest.Eventually(t, "the expired envelope is a dead letter", func() bool {
		return b.state.Collection("letters").FindOne(t.Context(), bson.D{}).Decode(&dead) == nil
	})

	if dead.Class != "expired" || dead.Envelope.Lookup("type").StringValue() != "Placed" {
		t.Fatalf("the expired envelope became %+v", dead)
	}
	if n, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{}); err != nil || n != 2 {
		t.Fatalf("%d envelopes (%v) are left in the outbox, want both: only the purge removes them", n, err)
	}
}

func TestVanishedDocumentHalts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	stop := b.start()
	b.consume(1)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.state.Collection("watchers").DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}
	b.append(1)
	stop = b.start()
	// The relay has then written the document again.
	b.log.wait(t, "vanished")
	stacktest.Eventually(t, "the relay is halted", func() bool { return b.status().State == "halted" })

	// An operator orders the sweep. Envelopes that were never delivered arrive, and delivered ones
	// arrive again with the header.
	if err := (admin.Operator{State: b.state, Watcher: "default", Actor: "ann"}).Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
		t.Fatal(err)
	}
	ids, flagged := map[string]bool{}, 0
	for _, r := range b.consume(3) {
		ids[string(r.Headers[0].Value)] = true
		for _, h := range r.Headers {
			if h.Key == record.HeaderRedelivered {
				flagged++
			}
		}
	}
	if len(ids) != 2 || flagged != 2 {
		t.Fatalf("%d ids and %d flagged records after the recovery, want both envelopes, flagged", len(ids), flagged)
	}
	stacktest.Eventually(t, "the relay is live", func() bool { return b.status().State == "live" })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}

func TestHTTPAddressTaken(t *testing.T) {
	t.Parallel()
	b := setup(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg, _, err := config.Load("", b.env, []string{"http.listen=" + l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}

	r, err := process.New(cfg, "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "http.listen") {
		t.Fatalf("a taken address gives %v, want an error that names http.listen", err)
	}
}

// noOperators stands in for the operators' page and API.
type noOperators struct{}

func (noOperators) Addr() string { return "none" }

func (noOperators) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (noOperators) Close() error { return nil }

func (noOperators) Reload(*config.Admin) []string { return nil }
