package deadletter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/state"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// bench is a database with an outbox, and the owner of a watcher.
type bench struct {
	t     *testing.T
	db    *mongo.Database
	state state.Database
	owner *countingOwner
}

// countingOwner counts the transactions of the owner.
type countingOwner struct {
	*lease.Held
	transactions int
}

func (c *countingOwner) Fenced(ctx context.Context, dirty []string, fn func(context.Context) error) error {
	c.transactions++
	return c.Held.Fenced(ctx, dirty, fn)
}

func setUp(t *testing.T) *bench {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	return &bench{t: t, db: db, state: state.Of(db), owner: &countingOwner{Held: acquireLease(t, state.Of(db), "a")}}
}

// acquireLease acquires a lease that outlasts every test, so that it need not be renewed.
func acquireLease(t *testing.T, db state.Database, node string) *lease.Held {
	t.Helper()
	l := lease.New(lease.Config{
		Collection:   db.Collection("watchers"),
		ID:           "orders/0of1",
		Node:         node,
		TTL:          time.Hour,
		Renew:        200 * time.Millisecond,
		ReplicaSetID: "here",
	})

	h, err := l.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	return h
}

// insertLetter inserts an envelope and returns its letter.
func (b *bench) insertLetter(id any, fields ...bson.E) Letter {
	b.t.Helper()
	doc := append(bson.D{{Key: "_id", Value: id}, {Key: "aggregatetype", Value: "order"}}, fields...)
	if _, err := b.db.Collection("outbox").InsertOne(b.t.Context(), doc); err != nil {
		b.t.Fatal(err)
	}
	return b.newLetter(doc)
}

// newLetter returns the letter of an envelope.
func (b *bench) newLetter(doc bson.D) Letter {
	b.t.Helper()
	raw, err := bson.Marshal(doc)
	if err != nil {
		b.t.Fatal(err)
	}

	return Letter{
		NS:        b.db.Name() + ".outbox",
		Raw:       raw,
		Class:     record.Malformed,
		Reason:    "type is missing",
		Topic:     "outbox.event.order",
		Partition: 3,
		Pos:       "8265",
		Source:    Source{Kind: "relay", Watcher: "orders", Node: "a", Epoch: 1},
	}
}

func (b *bench) countDocuments(coll string) int64 {
	b.t.Helper()
	n, err := mongodb.Majority(b.db.Collection(coll)).CountDocuments(b.t.Context(), bson.D{})
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

func (b *bench) move(letters ...Letter) Result {
	b.t.Helper()
	r, err := Move(b.t.Context(), b.owner, letters, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

func (b *bench) id(l Letter, delivery int32) ID {
	return ID{NS: l.NS, ID: bson.Raw(l.Raw).Lookup("_id"), Delivery: delivery}
}

func TestMoveIsIdempotentAndKeepsTheWholeEnvelope(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	healthy := b.insertLetter("healthy")

	// The payload has names that look like operators and paths, and bytes. The reason is not valid
	// UTF-8.
	payload := bson.D{{Key: "$set", Value: 1}, {Key: "a.b", Value: bson.Binary{Data: []byte{0, 255}}}}
	plain := b.insertLetter("x", bson.E{Key: "payload", Value: payload})
	plain.Reason = "bad \xff byte " + strings.Repeat("r", 2*maxReason)
	retried := b.insertLetter(bson.NewObjectID())
	retried.Attempts = []Attempt{
		{At: time.UnixMilli(1000), Class: record.RecordRefused, Reason: "first"},
		{At: time.UnixMilli(2000), Class: record.AttemptsExhausted, Reason: "last"},
	}
	retried.Partition = record.AnyPartition
	if r, want := b.move(plain, retried), (Result{Moved: 2, Deleted: 2}); r != want {
		t.Errorf("first move: got %+v, want %+v", r, want)
	}

	d, err := Open(t.Context(), b.db, b.id(plain, 0))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(d.Envelope, plain.Raw) || d.Class != record.Malformed || d.Topic != plain.Topic ||
		*d.Partition != 3 || d.Pos != "8265" || d.Source.Epoch != 1 {
		t.Errorf("the fields of the letter: %+v", d)
	}
	if len(d.Attempts) != 1 || d.MovedAt.IsZero() || !d.FirstFailure.Equal(d.MovedAt) {
		t.Errorf("the attempts of the letter: %+v", d)
	}
	if !strings.HasPrefix(d.Reason, "bad \uFFFD byte") || len(d.Reason) > maxReason+8 {
		t.Errorf("the reason of the letter: got %d bytes, %.20q", len(d.Reason), d.Reason)
	}

	// The second move changes nothing.
	again := plain
	again.Reason = "another"
	if r, want := b.move(again), (Result{Known: 1}); r != want {
		t.Errorf("second move: got %+v, want %+v", r, want)
	}
	d2, err := Open(t.Context(), b.db, b.id(plain, 0))
	if err != nil || d2.Reason != d.Reason || !d2.MovedAt.Equal(d.MovedAt) {
		t.Errorf("the second move changed the letter: %+v, %v", d2, err)
	}

	d, err = Open(t.Context(), b.db, b.id(retried, 0))
	if err != nil || d.Partition != nil || len(d.Attempts) != 2 ||
		d.FirstFailure.UnixMilli() != 1000 || d.LastFailure.UnixMilli() != 2000 {
		t.Errorf("the letter with two attempts: %+v, %v", d, err)
	}
	if n := b.countDocuments("outbox"); n != 1 {
		t.Errorf("%d envelopes are left, want only the healthy one", n)
	}
	if _, err := Open(t.Context(), b.db, b.id(healthy, 0)); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("a letter that does not exist: got %v, want %v", err, mongodb.ErrNotFound)
	}
}

func TestN16_ALetterIsMadeFromTheStreamsImage(t *testing.T) {
	t.Parallel()
	b := setUp(t)

	// This envelope was inserted and deleted in one transaction.
	gone := b.newLetter(bson.D{{Key: "_id", Value: "gone"}})
	if r, want := b.move(gone), (Result{Moved: 1}); r != want {
		t.Errorf("a deleted envelope: got %+v, want %+v", r, want)
	}

	// This envelope was requeued since. The outbox contains its next delivery, which must stay.
	old := b.newLetter(bson.D{{Key: "_id", Value: "again"}})
	next := b.insertLetter("again", bson.E{Key: "delivery", Value: int32(1)})
	if r, want := b.move(old), (Result{Moved: 1}); r != want {
		t.Errorf("a requeued envelope: got %+v, want %+v", r, want)
	}
	if b.countDocuments("outbox") != 1 {
		t.Error("the requeued envelope was deleted with its old delivery")
	}
	if r, want := b.move(next), (Result{Moved: 1, Deleted: 1}); r != want {
		t.Errorf("the next delivery: got %+v, want %+v", r, want)
	}
	for delivery := range int32(2) {
		if _, err := Open(t.Context(), b.db, b.id(old, delivery)); err != nil {
			t.Errorf("delivery %d: %v", delivery, err)
		}
	}
}

func TestN16_AMalformedEnvelopeKeepsItsBytes(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	twice := b.newLetter(bson.D{{Key: "_id", Value: "twice"}, {Key: "type", Value: 1}, {Key: "type", Value: 2}})
	deep := bson.D{{Key: "leaf", Value: 1}}
	for range 170 {
		deep = bson.D{{Key: "d", Value: deep}}
	}
	nested := b.insertLetter("deep", deep...)

	if r := b.move(twice, nested); r.Moved != 2 || r.Deleted != 1 || r.Chunked != 1 {
		t.Errorf("got %+v, want 2 moved, 1 deleted, 1 chunked", r)
	}
	for _, l := range []Letter{twice, nested} {
		d, err := Open(t.Context(), b.db, b.id(l, 0))
		if err != nil || !bytes.Equal(d.Envelope, l.Raw) {
			t.Errorf("%s: got %d bytes, %v, want the %d bytes of the envelope", d.ID, len(d.Envelope), err, len(l.Raw))
		}
	}
}

func TestN20_LargeAndManyFit(t *testing.T) {
	t.Parallel()
	b := setUp(t)

	// A large envelope: four chunks of 4 MiB in two transactions, and then the letter.
	large := b.insertLetter("large", bson.E{Key: "payload", Value: make([]byte, 16<<20-200)})
	large.Reason = strings.Repeat("reason ", 1000)
	if r, want := b.move(large), (Result{Moved: 1, Deleted: 1, Chunked: 1}); r != want {
		t.Errorf("a large envelope: got %+v, want %+v", r, want)
	}
	if b.owner.transactions != 3 {
		t.Errorf("a large envelope: got %d transactions, want 3", b.owner.transactions)
	}
	d, err := Open(t.Context(), b.db, b.id(large, 0))
	if err != nil || !bytes.Equal(d.Envelope, large.Raw) || d.Chunks != 4 {
		t.Errorf("a large letter: got %d bytes in %d chunks, %v", len(d.Envelope), d.Chunks, err)
	}
	n, err := b.db.Collection("outbox_dead").CountDocuments(t.Context(), Letters())
	if err != nil || n != 1 {
		t.Errorf("letters without chunks: got %d, %v, want 1", n, err)
	}

	// Many small envelopes.
	b.owner.transactions = 0
	var docs []any
	var letters []Letter
	for i := range 2100 {
		doc := bson.D{{Key: "_id", Value: fmt.Sprint("many", i)}}
		docs = append(docs, doc)
		letters = append(letters, b.newLetter(doc))
	}
	unordered := options.InsertMany().SetOrdered(false)
	if _, err := b.db.Collection("outbox").InsertMany(t.Context(), docs, unordered); err != nil {
		t.Fatal(err)
	}
	if r, want := b.move(letters...), (Result{Moved: 2100, Deleted: 2100}); r != want {
		t.Errorf("many envelopes: got %+v, want %+v", r, want)
	}
	if b.owner.transactions < 3 || b.owner.transactions > 84 {
		t.Errorf("many envelopes: got %d transactions", b.owner.transactions)
	}

	// Each of these fits a transaction, but two of them do not.
	b.owner.transactions = 0
	letters = letters[:0]
	for i := range 3 {
		letters = append(letters, b.insertLetter(fmt.Sprint("big", i), bson.E{Key: "payload", Value: make([]byte, 5<<20)}))
	}
	if r := b.move(letters...); r.Moved != 3 || r.Deleted != 3 || b.owner.transactions != 3 {
		t.Errorf("big envelopes: got %+v in %d transactions, want 3 in 3", r, b.owner.transactions)
	}
}

func TestN03_ADeposedOwnerMovesNothing(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.insertLetter("x")
	expire := bson.D{{Key: "$set", Value: bson.D{{Key: "expiresAt", Value: time.UnixMilli(0)}}}}
	if _, err := b.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, expire); err != nil {
		t.Fatal(err)
	}

	// Another node takes over. The first one has not noticed yet, and its lease is still valid by
	// its own clock.
	acquireLease(t, b.state, "b")
	if !b.owner.Valid() {
		t.Fatal("the deposed owner has noticed the takeover")
	}
	r, err := Move(t.Context(), b.owner, []Letter{l}, nil)
	if !errors.Is(err, lease.ErrLeaseLost) || r != (Result{}) {
		t.Errorf("got %+v, %v, want %v", r, err, lease.ErrLeaseLost)
	}
	if b.countDocuments("outbox") != 1 || b.countDocuments("outbox_dead") != 0 {
		t.Error("a deposed owner moved an envelope")
	}
}

// N3: if the server is too slow for one transaction with all letters, Move uses smaller ones.
// Otherwise it would never move any of them.
func TestN03_LettersAreMovedInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	chunked := b.insertLetter("large", bson.E{Key: "payload", Value: make([]byte, 15<<20+1)})
	letters := []Letter{chunked}
	for i := range 39 {
		letters = append(letters, b.insertLetter(i))
	}

	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	slow := &stacktest.Hasty{Fence: b.owner, Coll: b.db.Collection(Collection("outbox")), Most: 1}
	r, err := Move(ctx, slow, letters, nil)
	if want := (Result{Moved: 40, Deleted: 40, Chunked: 1}); err != nil || r != want {
		t.Errorf("got %+v, %v, want %+v; %d attempts failed", r, err, want, slow.Late.Load())
	}
	if n := b.countDocuments("outbox"); n != 0 {
		t.Errorf("%d envelopes are left, want none", n)
	}
}

// Two chunks fill a transaction. If the server is too slow for it, the transactions of small documents stay large.
func TestN20_SlowTransactionsOfChunksLeaveTheSizeOfTheOthers(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	large := b.insertLetter("large", bson.E{Key: "payload", Value: make([]byte, 15<<20+1)})

	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	slow := &stacktest.Hasty{
		Fence: b.owner,
		Coll:  b.db.Collection(Collection("outbox")),
		Done:  bson.D{{Key: "_id.chunk", Value: bson.D{{Key: "$exists", Value: true}}}},
		Most:  1,
	}
	size := mongodb.NewPartSize(mongodb.MaxDocuments)
	r, err := Move(ctx, slow, []Letter{large}, size)
	if want := (Result{Moved: 1, Deleted: 1, Chunked: 1}); err != nil || r != want {
		t.Errorf("got %+v, %v, want %+v", r, err, want)
	}
	if size.Most() != mongodb.MaxDocuments || slow.Late.Load() == 0 {
		t.Errorf("after %d slow transactions of chunks, others may hold %d documents, want %d", slow.Late.Load(), size.Most(), mongodb.MaxDocuments)
	}
}

func TestMoveRefusesInvalidLetters(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	good := b.insertLetter("good")
	noClass, noNS, truncated := good, good, good
	noClass.Class = ""
	noNS.NS = "outbox"
	truncated.Raw = good.Raw[:len(good.Raw)-1]

	for name, bad := range map[string]Letter{
		"no id":        b.newLetter(bson.D{{Key: "a", Value: 1}}),
		"no class":     noClass,
		"no namespace": noNS,
		"truncated":    truncated,
	} {
		if _, err := Move(t.Context(), b.owner, []Letter{good, bad}, nil); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
	if b.countDocuments("outbox") != 1 {
		t.Error("a move with an invalid letter has removed an envelope")
	}
	if r := b.move(); r != (Result{}) {
		t.Errorf("a move of no letters: got %+v, want none", r)
	}
}
