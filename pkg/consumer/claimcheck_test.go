package consumer

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func bodies(t *testing.T, opts ...GridFSOption) (*GridFS, *mongo.Database) {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	g, err := NewGridFS(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return g, db
}

// checkedOut runs ev through ClaimCheckOut.
func checkedOut(ctx context.Context, g BodyStore, threshold int, ev event.Event) (out event.Event, err error) {
	err = ClaimCheckOut(g, threshold)(func(_ context.Context, ev event.Event) error { out = ev; return nil })(ctx, ev)
	return out, err
}

// checkedIn is what a handler inside of ClaimCheckIn gets.
func checkedIn(ctx context.Context, g BodyStore, m *Message) (got *Message, err error) {
	err = ClaimCheckIn(g)(HandlerFunc(func(_ context.Context, m *Message) error { got = m; return nil })).Handle(ctx, m)
	return got, err
}

func TestLargeBodiesGoThroughTheStore(t *testing.T) {
	t.Parallel()
	g, db := bodies(t)
	ctx := t.Context()
	large := []byte(strings.Repeat("0123456789", 100_000))
	// In a transaction, on both sides; its abort leaves the body to the sweep.
	wanted := errors.New("abort")
	var out event.Event
	err := outbox.Transaction(ctx, db.Client(), func(ctx context.Context) (err error) {
		if out, err = checkedOut(ctx, g, 1000, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", large))); err != nil {
			return err
		}
		return wanted
	})
	if !errors.Is(err, wanted) {
		t.Fatal(err)
	}
	m, err := directMessage(out)
	if err != nil || len(m.Value) != 0 || m.Tombstone() {
		t.Fatalf("the record has %d bytes, tombstone %v: %v", len(m.Value), m.Tombstone(), err)
	}
	err = outbox.Transaction(ctx, db.Client(), func(ctx context.Context) error {
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
	tampered := m.Copy()
	claim, _ := m.Header(headerClaimCheck)
	tampered.SetHeader(headerClaimCheck, append(bytes.Clone(claim[:len(claim)-1]), 'x'))
	if _, err := checkedIn(ctx, g, tampered); !errors.Is(err, ErrValidation) {
		t.Errorf("another checksum: %v", err)
	}
	for _, ref := range []string{"nothing", bson.NewObjectID().Hex() + ";sha256=00"} {
		tampered.SetHeader(headerClaimCheck, []byte(ref))
		if _, err := checkedIn(ctx, g, tampered); !errors.Is(err, ErrBodyGone) || !errors.Is(err, ErrValidation) {
			t.Errorf("reference %q: %v", ref, err)
		}
	}
}

func TestBodiesAreSweptByAge(t *testing.T) {
	t.Parallel()
	g, _ := bodies(t, BodiesTTL(time.Hour), Bodies("kept"))
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
	if n, err := g.Sweep(ctx, 10); n != 0 || err != nil {
		t.Fatalf("before their time: swept %d, %v", n, err)
	}
	g.now = func() time.Time { return started.Add(time.Hour + 10*time.Second) }
	if n, err := g.Sweep(ctx, 2); n != 2 || err != nil {
		t.Fatalf("with a limit of two: swept %d, %v", n, err)
	}
	if _, err := g.Get(ctx, refs[0]); !errors.Is(err, ErrBodyGone) {
		t.Errorf("the oldest: %v", err)
	}
	if _, err := g.Get(ctx, refs[2]); err != nil {
		t.Errorf("the latest: %v", err)
	}
	// What an upload left that never ended.
	if _, err := g.bucket.GetChunksCollection().InsertOne(ctx, bson.D{{Key: "files_id", Value: bson.NewObjectID()}, {Key: "n", Value: 0}, {Key: "data", Value: []byte("x")}}); err != nil {
		t.Fatal(err)
	}
	g.now = func() time.Time { return started.Add(26 * time.Hour) }
	if n, err := g.Sweep(ctx, 10); n != 1 || err != nil {
		t.Fatalf("a day later: swept %d, %v", n, err)
	}
	if n, err := g.bucket.GetChunksCollection().CountDocuments(ctx, bson.D{}); n != 0 || err != nil {
		t.Errorf("%d chunks left, %v", n, err)
	}
}

func TestTheSweeperEndsWithItsContext(t *testing.T) {
	t.Parallel()
	g, _ := bodies(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, time.Millisecond) }()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := g.Run(t.Context(), 0); !errors.Is(err, ErrConfiguration) {
		t.Errorf("a sweep every 0 s: %v", err)
	}
}

func TestABrokenBodyStoreIsRefused(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	for name, f := range map[string]func() (*GridFS, error){
		"database": func() (*GridFS, error) { return NewGridFS(nil) },
		"name":     func() (*GridFS, error) { return NewGridFS(db, Bodies("")) },
		"ttl":      func() (*GridFS, error) { return NewGridFS(db, BodiesTTL(time.Millisecond)) },
		"log":      func() (*GridFS, error) { return NewGridFS(db, BodiesLogger(nil)) },
	} {
		if _, err := f(); !errors.Is(err, ErrConfiguration) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEmitMiddlewareWritesInTheTransaction(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{outbox.DefaultCollection, "audit"} {
		if err := db.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	e, err := NewEmitter(box, EmitVia(func(next Emit) Emit {
		return func(ctx context.Context, ev event.Event) error {
			if _, err := db.Collection("audit").InsertOne(ctx, bson.D{{Key: "_id", Value: ev.ID()}}); err != nil {
				return err
			}
			return next(ctx, ev)
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	wanted := errors.New("abort")
	for n, end := range []error{wanted, nil} {
		err := outbox.Transaction(t.Context(), db.Client(), func(ctx context.Context) error {
			return errors.Join(e.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("1"))), event.New(event.Aggregate{Type: "order", ID: "2"}, "A", event.Bytes("", []byte("2")))), end)
		})
		if !errors.Is(err, end) {
			t.Fatal(err)
		}
		for _, name := range []string{outbox.DefaultCollection, "audit"} {
			if got, err := db.Collection(name).CountDocuments(t.Context(), bson.D{}); int(got) != 2*n || err != nil {
				t.Errorf("%s has %d documents, %v; want %d", name, got, err, 2*n)
			}
		}
	}
}
