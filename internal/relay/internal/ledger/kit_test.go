package ledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// bench is a ledger of an owner, with an outbox and the state database in one database.
type bench struct {
	t       *testing.T
	app     string // of the client that writes
	db      *mongo.Database
	state   state.Database
	outbox  *mongo.Collection
	waiting *mongo.Collection // of a client that no fail point meets, as the next one
	letters *mongo.Collection
	held    *lease.Held
	config  Config

	mu        sync.Mutex
	fences    int     // calls of Fenced
	twice     bool    // each transaction runs twice, as after a commit whose outcome is unknown
	retries   []error // of OnRetry
	recovered int
	entered   []*waiting.Entry
	ends      map[End]int
	restores  [][]*Outcome
	judge     func(tx context.Context) error // runs at the end of each transaction, and may make it fail
}

func setUp(t *testing.T) *bench {
	t.Helper()
	b := &bench{t: t, app: stacktest.Name(t), ends: map[End]int{}}
	plain := stacktest.Client(t)
	b.db = stacktest.Database(t, plain)
	b.state = state.Of(b.db)
	b.outbox = mongodb.Majority(b.db.Collection("outbox"))
	b.waiting, b.letters = mongodb.Majority(b.state.Collection("waiting")), mongodb.Majority(b.state.Collection("letters"))
	for coll, indexes := range map[*mongo.Collection][]mongodb.Index{b.waiting: waiting.Indexes(), b.letters: letters.Indexes()} {
		if err := mongodb.EnsureIndexSet(t.Context(), coll, indexes); err != nil {
			t.Fatal(err)
		}
	}

	// The lease is not renewed, so it lasts longer than any test.
	own := b.state.On(stacktest.Client(t, options.Client().SetAppName(b.app)))
	l := lease.New(lease.Config{Collection: own.Collection("watchers"), ID: "orders/0of1", Node: "a", TTL: time.Hour, ReplicaSetID: "here"})
	var err error
	if b.held, err = l.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}

	b.config = Config{
		Fencer:      b,
		Store:       waiting.NewStore(own.Collection("waiting"), "orders", b.slot()),
		Letters:     own.Collection("letters"),
		Source:      letters.Source{Kind: "relay", Watcher: "orders", Node: "a", Epoch: 1},
		MaxAttempts: 3,
		Backoff:     retry.Policy{Base: time.Hour, Cap: time.Hour},
		Recording:   RecordPosition,
		Restore: func(_ context.Context, list []*Outcome) error {
			b.restores = append(b.restores, slices.Clone(list))
			return nil
		},
		Entered:     func(list []*waiting.Entry) { b.entered = append(b.entered, list...) },
		Now:         time.Now,
		OnRetry:     func(err error) { b.mu.Lock(); b.retries = append(b.retries, err); b.mu.Unlock() },
		OnRecovered: func() { b.mu.Lock(); b.recovered++; b.mu.Unlock() },
		Count:       func(o *Outcome) { b.ends[o.End]++ },
		Log:         slog.New(slog.DiscardHandler),
	}
	return b
}

// Fenced is the fence of the lease, with the additions of the test.
func (b *bench) Fenced(ctx context.Context, also bson.D, fn func(context.Context) error) error {
	runs := 1
	if b.twice {
		runs = 2
	}

	for range runs {
		b.fences++
		err := b.held.Fenced(ctx, also, func(tx context.Context) error {
			err := fn(tx)
			if err == nil && b.judge != nil {
				err = b.judge(tx)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) ns() string { return mongodb.Namespace(b.outbox) }

// newEnvelope returns an envelope of the stream that has to wait because its topic is parked. Positions have one width, as in
// real events.
func (b *bench) newEnvelope(n int, fields ...bson.E) *Outcome {
	doc := append(bson.D{
		{Key: "_id", Value: fmt.Sprintf("e%06d", n)},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "k"},
		{Key: "type", Value: "Placed"},
	}, fields...)

	if !slices.ContainsFunc(fields, func(e bson.E) bool { return e.Key == "payload" }) {
		doc = append(doc, bson.E{Key: "payload", Value: "p"})
	}
	return &Outcome{
		End: Waiting, Reason: waiting.Parked, NS: b.ns(), Raw: b.marshal(doc), Pos: fmt.Sprintf("82%06d", n), Key: "k",
		Topics: []string{"a"}, Partition: record.AnyPartition,
	}
}

func (b *bench) marshal(doc bson.D) bson.Raw {
	b.t.Helper()
	raw, err := bson.Marshal(doc)
	if err != nil {
		b.t.Fatal(err)
	}
	return raw
}

// store stores outcomes, and returns the stored ones as they were reported.
func (b *bench) store(list ...*Outcome) (stored []*Outcome) {
	b.t.Helper()
	stored, err := b.tryStore(b.t.Context(), New(b.config), list...)
	if err != nil {
		b.t.Fatal(err)
	}
	if len(stored) != len(list) {
		b.t.Fatalf("%d of %d outcomes are reported as stored", len(stored), len(list))
	}
	return stored
}

func (b *bench) tryStore(ctx context.Context, l *Ledger, list ...*Outcome) (stored []*Outcome, err error) {
	for _, o := range list {
		o.Stored = func(o *Outcome) { stored = append(stored, o) }
	}
	return stored, l.Store(ctx, slices.Clone(list))
}

// enter stores an envelope as waiting, and returns its document as the sender reads it.
func (b *bench) enter(n int, change ...func(*waiting.Entry)) *waiting.Document {
	b.t.Helper()
	o := b.newEnvelope(n)
	e := waiting.Entry{
		Watcher: "orders", NS: b.ns(), Raw: o.Raw, Key: "k", Pos: o.Pos, Pending: []string{"a"}, Reason: waiting.Parked, Origin: waiting.OriginStream,
	}

	for _, c := range change {
		c(&e)
	}
	if err := waiting.Enter(b.t.Context(), b.waiting, []waiting.Entry{e}); err != nil {
		b.t.Fatal(err)
	}
	d := e.Document()
	// As the sender keeps it while the envelope is in flight.
	d.Envelope = nil
	return &d
}

// waitingOf returns the stored document of an envelope, or nil.
func (b *bench) waitingOf(n int) bson.M {
	b.t.Helper()
	var m bson.M
	err := b.waiting.FindOne(b.t.Context(), bson.D{{Key: "id", Value: fmt.Sprintf("e%06d", n)}}).Decode(&m)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return m
}

// lettersOf returns the letters of an envelope, with their envelopes.
func (b *bench) lettersOf(n int) (list []letters.Dead) {
	b.t.Helper()
	cur, err := b.letters.Find(b.t.Context(), bson.D{{Key: "id", Value: fmt.Sprintf("e%06d", n)}}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		b.t.Fatal(err)
	}
	var ids []struct {
		ID string `bson:"_id"`
	}
	if err := cur.All(b.t.Context(), &ids); err != nil {
		b.t.Fatal(err)
	}

	for _, l := range ids {
		d, err := letters.Open(b.t.Context(), b.letters, l.ID)
		if err != nil {
			b.t.Fatal(err)
		}
		list = append(list, d)
	}
	return list
}

// letterOf returns the only letter of an envelope.
func (b *bench) letterOf(n int) letters.Dead {
	b.t.Helper()
	list := b.lettersOf(n)
	if len(list) != 1 {
		b.t.Fatalf("envelope %d has %d letters, want one", n, len(list))
	}
	return list[0]
}

func (b *bench) count(coll *mongo.Collection, filter bson.D) int64 {
	b.t.Helper()
	n, err := coll.CountDocuments(b.t.Context(), filter)
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// validate sets the validator of a collection. A nil one accepts everything.
func (b *bench) validate(coll *mongo.Collection, validator bson.D) {
	b.t.Helper()
	if validator == nil {
		validator = bson.D{}
	}
	if err := b.db.RunCommand(b.t.Context(), bson.D{{Key: "collMod", Value: coll.Name()}, {Key: "validator", Value: validator}}).Err(); err != nil {
		b.t.Fatal(err)
	}
}

// without returns a validator that rejects the documents of one envelope, or the documents with its body if field is "envelope.type".
func without(field, value string) bson.D {
	return bson.D{{Key: field, Value: bson.D{{Key: "$ne", Value: value}}}}
}

func newRejection(reason string) *record.Rejection {
	return &record.Rejection{Class: record.RecordRejected, Reason: reason}
}

// reported returns the errors that were reported as repeated.
func (b *bench) reported() []error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.retries)
}

// slot is the whole watcher.
func (b *bench) slot() slot.Range { return slot.Range{} }

// watcher returns the document of the owner.
func (b *bench) watcher() (doc lease.Document) {
	b.t.Helper()
	if err := b.state.Collection("watchers").FindOne(b.t.Context(), bson.D{}).Decode(&doc); err != nil {
		b.t.Fatal(err)
	}
	return doc
}

// read returns the stored document of an envelope as the sender reads it.
func (b *bench) read(n int) *waiting.Document {
	b.t.Helper()
	raw, err := b.waiting.FindOne(b.t.Context(), bson.D{{Key: "id", Value: fmt.Sprintf("e%06d", n)}}).Raw()
	if err != nil {
		b.t.Fatal(err)
	}
	d := waiting.ReadDocument(raw)
	d.Envelope = nil
	return &d
}
