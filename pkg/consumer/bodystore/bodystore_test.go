package bodystore

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

func newBodies(t *testing.T, opts ...Option) (*GridFS, *mongo.Database) {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	g, err := NewGridFS(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return g, db
}

// checkedOut runs ev through Produce.
func checkedOut(ctx context.Context, g Store, threshold int, ev event.Event) (out event.Event, err error) {
	err = Produce(g, threshold)(func(_ context.Context, ev event.Event) error { out = ev; return nil })(ctx, ev)
	return out, err
}

// messageOf returns the message of a record that the relay makes of ev.
func messageOf(ev event.Event) (*consumer.Message, error) {
	body, err := ev.Payload()
	m := &consumer.Message{ID: ev.ID().String(), Name: ev.Name(), Key: []byte(ev.Key()), Value: body}
	for _, h := range ev.Headers() {
		m.Headers = append(m.Headers, event.Header(h))
	}
	return m, err
}

// checkedIn returns the message that a handler inside of Consume gets.
func checkedIn(ctx context.Context, g Store, m *consumer.Message) (got *consumer.Message, err error) {
	err = Consume(g)(func(_ context.Context, m *consumer.Message) error { got = m; return nil })(ctx, m)
	return got, err
}

func TestLargeBodiesGoThroughTheStore(t *testing.T) {
	t.Parallel()
	g, db := newBodies(t)
	ctx := t.Context()
	large := []byte(strings.Repeat("0123456789", 100_000))
	// In a transaction, on both sides; its abort leaves the body to the sweep.
	wanted := errors.New("abort")
	var out event.Event
	err := transaction.Run(ctx, db.Client(), func(ctx context.Context) (err error) {
		if out, err = checkedOut(ctx, g, 1000, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", large))); err != nil {
			return err
		}
		return wanted
	})
	if !errors.Is(err, wanted) {
		t.Fatal(err)
	}
	m, err := messageOf(out)
	if err != nil || len(m.Value) != 0 || m.Tombstone() {
		t.Fatalf("the record has %d bytes, tombstone %v: %v", len(m.Value), m.Tombstone(), err)
	}
	err = transaction.Run(ctx, db.Client(), func(ctx context.Context) error {
		got, err := checkedIn(ctx, g, m)
		if err == nil && (!bytes.Equal(got.Value, large) || got == m || len(m.Value) != 0) {
			t.Errorf("got %d bytes; the message itself has %d", len(got.Value), len(m.Value))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	small, err := checkedOut(ctx, g, 1000, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("small"))))
	if p, _ := small.Payload(); err != nil || string(p) != "small" {
		t.Errorf("a small one: %q, %v", p, err)
	}
	tampered := m.Clone()
	claim, _ := m.Header(header)
	tampered.SetHeader(header, append(bytes.Clone(claim[:len(claim)-1]), 'x'))
	if _, err := checkedIn(ctx, g, tampered); !errors.Is(err, consumer.ErrMalformed) {
		t.Errorf("another checksum: %v", err)
	}
	for _, ref := range []string{"nothing;size=3;sha256=00", bson.NewObjectID().Hex() + ";size=3;sha256=00"} {
		tampered.SetHeader(header, []byte(ref))
		if _, err := checkedIn(ctx, g, tampered); !errors.Is(err, ErrGone) || !errors.Is(err, consumer.ErrMalformed) {
			t.Errorf("reference %q: %v", ref, err)
		}
	}
}

func TestBodiesAreSweptByAge(t *testing.T) {
	t.Parallel()
	g, _ := newBodies(t, WithTTL(time.Hour), WithBucket("kept"))
	ctx := t.Context()
	var refs []string
	for range 3 {
		ref, err := g.Put(ctx, bytes.Repeat([]byte("x"), 300_000)) // two chunks each
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, ref)
	}

	started := time.Now()
	g.now = func() time.Time { return started.Add(30 * time.Minute) }
	if n, err := g.sweep(ctx); n != 0 || err != nil {
		t.Fatalf("before their time: swept %d, %v", n, err)
	}
	g.now = func() time.Time { return started.Add(time.Hour + 10*time.Second) }
	if n, err := g.sweep(ctx); n != len(refs) || err != nil {
		t.Fatalf("after their time: swept %d, %v", n, err)
	}
	if _, err := g.Get(ctx, refs[0], 1); !errors.Is(err, ErrGone) {
		t.Errorf("the oldest: %v", err)
	}
	// The remains of an upload that never ended.
	if _, err := g.bucket.GetChunksCollection().InsertOne(ctx, bson.D{{Key: "files_id", Value: bson.NewObjectID()}, {Key: "n", Value: 0}, {Key: "data", Value: []byte("x")}}); err != nil {
		t.Fatal(err)
	}
	g.now = func() time.Time { return started.Add(26 * time.Hour) }
	if n, err := g.sweep(ctx); n != 0 || err != nil {
		t.Fatalf("a day later: swept %d, %v", n, err)
	}
	if n, err := g.bucket.GetChunksCollection().CountDocuments(ctx, bson.D{}); n != 0 || err != nil {
		t.Errorf("%d chunks left, %v", n, err)
	}
}

// However many bodies expire in an hour, a sweep deletes all of them. Otherwise a busy bucket would grow without a bound.
func TestASweepLeavesNothingThatHasExpired(t *testing.T) {
	t.Parallel()
	g, _ := newBodies(t)
	files, chunks := g.bucket.GetFilesCollection(), g.bucket.GetChunksCollection()
	old := time.Now().Add(-2 * g.ttl)
	var bodies, parts []any
	for n := range 1100 {
		id := bson.NewObjectIDFromTimestamp(old)
		id[11], id[10] = byte(n), byte(n>>8)
		bodies = append(bodies, bson.D{{Key: "_id", Value: id}})
		// The chunks of a failed upload have no file.
		if n < 250 {
			parts = append(parts, bson.D{{Key: "_id", Value: id}, {Key: "files_id", Value: bson.NewObjectID()}})
		}
	}
	if _, err := files.InsertMany(t.Context(), bodies); err != nil {
		t.Fatal(err)
	}
	if _, err := chunks.InsertMany(t.Context(), parts); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	stacktest.Eventually(t, "the first sweep deletes everything", func() bool {
		left, err := files.CountDocuments(t.Context(), bson.D{})
		leftParts, err2 := chunks.CountDocuments(t.Context(), bson.D{})
		return err == nil && err2 == nil && left+leftParts == 0
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestTheSweeperEndsWithItsContext(t *testing.T) {
	t.Parallel()
	g, _ := newBodies(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A sweep that fails is logged, and the next one deletes what it has left. Otherwise bodies would pile up unnoticed.
func TestTheSweeperRepeatsFailedSweeps(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	db := stacktest.Database(t, stacktest.Client(t, options.Client().SetAppName(app)))
	var log lockedText
	g, err := NewGridFS(db, WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := checkedOut(t.Context(), g, 1, event.New(event.Aggregate{Type: "a", ID: "1"}, "T", event.Bytes("", []byte("large")))); err != nil {
		t.Fatal(err)
	}
	g.every = 10 * time.Millisecond
	g.now = func() time.Time { return time.Now().Add(2 * g.ttl) }

	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"aggregate"}}, {Key: "errorCode", Value: 8}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	stacktest.Eventually(t, "a failed sweep is logged", func() bool { return strings.Contains(log.String(), "sweeping claim check bodies fails") })
	off()
	stacktest.Eventually(t, "a later sweep deletes the body", func() bool {
		n, err := g.bucket.GetFilesCollection().CountDocuments(t.Context(), bson.D{})
		return err == nil && n == 0
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// lockedText is a text to which several goroutines may write.
type lockedText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func TestABrokenStoreIsRejected(t *testing.T) {
	t.Parallel()
	_, err := NewGridFS(nil, WithTTL(time.Millisecond))
	for _, want := range []string{"database", "time to live"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want a word of the %s", err, want)
		}
	}
}

// Someone who can write to the store cannot make a consumer allocate more than the claim states.
func TestDescriptionOfAStoredBodyIsNotTrusted(t *testing.T) {
	t.Parallel()
	g, db := newBodies(t)
	large := []byte(strings.Repeat("0123456789", 100_000))
	out, err := checkedOut(t.Context(), g, 0, event.New(event.Aggregate{Type: "a", ID: "1"}, "T", event.Bytes("", large)))
	if err != nil {
		t.Fatal(err)
	}
	m, err := messageOf(out)
	if err != nil {
		t.Fatal(err)
	}

	files := db.Collection(defaultBucket + ".files")
	for _, length := range []int64{16 << 40, -5, 1, 1 << 62} {
		if _, err := files.UpdateMany(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "length", Value: length}}}}); err != nil {
			t.Fatal(err)
		}
		got, err := checkedIn(t.Context(), g, m)
		if err != nil || !bytes.Equal(got.Value, large) {
			t.Errorf("length %d: %v", length, err)
		}
	}

	// A body that is longer than its claim is read up to that.
	if _, err := db.Collection(defaultBucket+".chunks").UpdateMany(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "data", Value: make([]byte, 10<<20)}}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := checkedIn(t.Context(), g, m); !errors.Is(err, consumer.ErrMalformed) {
		t.Errorf("a longer body: %v", err)
	}

	for _, claim := range []string{"", "x", "x;sha256=00", "x;size=-1;sha256=00", "x;size=99999999999999;sha256=00", "x;size=1"} {
		broken := *m
		broken.Headers = []event.Header{{Key: header, Value: []byte(claim)}}
		if _, err := checkedIn(t.Context(), g, &broken); !errors.Is(err, consumer.ErrMalformed) {
			t.Errorf("claim %q: %v", claim, err)
		}
	}
}
