package changestream

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// patience limits a wait for an event that normally needs seconds, on a loaded machine.
const patience = 60 * time.Second

// receivedEvent is a copy of one event.
type receivedEvent struct {
	op   changes.Op
	ns   string
	id   string
	data string
	note string
	size int // of the document
	pos  resume.Position
}

// fixture holds the clients and the database of one test. admin writes. watch reads the stream and has
// its own application name, so that fail points affect only this test.
type fixture struct {
	skip  []changes.Skip // of the readers that start later
	t     *testing.T
	app   string
	admin *mongo.Client
	watch *mongo.Client
	db    *mongo.Database
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	app := stacktest.Name(t)
	admin := stacktest.Client(t)
	return &fixture{
		t: t, app: app, admin: admin, db: stacktest.Database(t, admin),
		watch: stacktest.Client(t, options.Client().SetAppName(app)),
	}
}

func (b *fixture) clusterTime() bson.Timestamp {
	b.t.Helper()
	ts, err := mongodb.ClusterTime(b.t.Context(), b.admin)
	if err != nil {
		b.t.Fatal(err)
	}
	return ts
}

// insertIDs inserts one document for each id, in order. Each is majority-committed.
func (b *fixture) insertIDs(coll *mongo.Collection, ids ...string) {
	b.t.Helper()
	for _, id := range ids {
		if _, err := coll.InsertOne(b.t.Context(), bson.D{{Key: "_id", Value: id}}); err != nil {
			b.t.Fatal(err)
		}
	}
}

// setFailCommand sets the fail point failCommand for the client watch of this test. off ends it.
func (b *fixture) setFailCommand(mode any, data bson.D) (off func()) {
	b.t.Helper()
	return stacktest.FailCommand(b.t, b.app, mode, data)
}

func failTimes(n int) bson.D { return bson.D{{Key: "times", Value: n}} }

func failCommand(command string, how ...bson.E) bson.D {
	return append(bson.D{{Key: "failCommands", Value: bson.A{command}}}, how...)
}

// reader runs a stream and stores its events.
type reader struct {
	t      *testing.T
	stream *Stream
	cancel context.CancelFunc
	done   chan struct{}
	err    error

	mu     sync.Mutex
	cond   *sync.Cond
	events []receivedEvent
	pos    resume.Position
	idle   int
	sizes  []int // of the batches that are not empty
	states []State
	counts map[string]int
	ended  bool
}

// shorten makes a stream fast enough for a test.
func (p *pace) shorten() {
	p.maxAwait = 100 * time.Millisecond
	p.configRetry = 50 * time.Millisecond
	p.unexplained = time.Nanosecond
	p.backoff = retry.Policy{Base: 5 * time.Millisecond, Cap: 50 * time.Millisecond}
}

func scopeOf(t testing.TB, patterns ...string) *changes.Scope {
	t.Helper()
	s, err := changes.ParseScope(patterns, "outrelay.*")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (b *fixture) startReader(scope *changes.Scope, start changes.Start, change ...func(*pace)) *reader {
	b.t.Helper()
	r := &reader{t: b.t, done: make(chan struct{}), counts: map[string]int{}}
	r.cond = sync.NewCond(&r.mu)
	cfg := Config{Client: b.watch, Scope: scope, Skip: b.skip, Log: slog.New(slog.DiscardHandler)}
	cfg.Metrics = Metrics{Restart: func(reason string) {
		r.withLock(func() { r.counts[reason]++ })
	}}

	var err error
	if r.stream, err = New(cfg); err != nil {
		b.t.Fatal(err)
	}
	r.stream.pace.shorten()
	for _, f := range change {
		f(&r.stream.pace)
	}
	r.stream.onState = func(s State) {
		r.withLock(func() { r.states = append(r.states, s) })
	}

	ctx, cancel := context.WithCancel(b.t.Context())
	r.cancel = cancel
	out := make(chan *changes.Batch)
	go func() {
		defer close(out)
		r.err = r.stream.Run(ctx, start, out)
	}()

	go func() {
		defer close(r.done)
		for batch := range out {
			r.storeBatch(batch)
		}
		r.withLock(func() { r.ended = true })
	}()

	b.t.Cleanup(func() { cancel(); <-r.done })
	return r
}

func (r *reader) withLock(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	r.cond.Broadcast()
}

func (r *reader) storeBatch(b *changes.Batch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.cond.Broadcast()
	defer b.Release()
	if len(b.Docs) == 0 {
		r.idle++
	} else {
		r.sizes = append(r.sizes, len(b.Docs))
	}
	if b.Position.Compare(r.pos) < 0 {
		r.t.Errorf("position went back from %s to %s", r.pos.Token, b.Position.Token)
	}

	r.pos = b.Position
	var ev changes.Event
	for _, raw := range b.Docs {
		if err := changes.Parse(raw, &ev); err != nil {
			r.t.Error(err)
			return
		}

		scope := r.stream.cfg.Scope
		if ev.Op == changes.Rename && !scope.Matches(ev.DB, ev.Coll) && !scope.Matches(ev.ToDB, ev.ToColl) ||
			ev.Op == changes.DropDatabase && !matchesDatabase(scope, ev.DB) {
			// The event belongs to another test.
			continue
		}

		g := receivedEvent{
			op:   ev.Op,
			ns:   string(ev.DB) + "." + string(ev.Coll),
			data: resume.Token(ev.Token).Data(),
			note: string(ev.Note),
			size: len(ev.Document),
			pos:  resume.Position{Token: slices.Clone(ev.Token), ClusterTime: ev.ClusterTime},
		}
		if ev.Op == changes.Insert {
			g.id, _ = bson.RawValue{Type: bson.Type(ev.IDType), Value: slices.Clone(ev.ID)}.StringValueOK()
			if !ev.HasUUID {
				r.t.Error("an insert event without collection UUID")
			}
		}

		r.events = append(r.events, g)
	}
}

// waitUntil blocks until cond returns true. It calls cond with the lock held.
func (r *reader) waitUntil(what string, cond func() bool) {
	r.t.Helper()
	late := false
	timer := time.AfterFunc(patience, func() { r.withLock(func() { late = true }) })
	defer timer.Stop()
	r.mu.Lock()
	defer r.mu.Unlock()

	for !cond() {
		if late || r.ended {
			r.t.Fatalf("waiting for %s: ended=%v err=%v, %d events, states %v, restarts %v",
				what, r.ended, r.err, len(r.events), r.states, r.counts)
		}
		r.cond.Wait()
	}
}

func (r *reader) insertedIDs() []string {
	var ids []string
	for _, e := range r.events {
		if e.op == changes.Insert {
			ids = append(ids, e.id)
		}
	}
	return ids
}

// wantIDs waits for the same number of inserts and compares their ids.
func (r *reader) wantIDs(want ...string) {
	r.t.Helper()
	r.waitUntil(strings.Join(want, " "), func() bool { return len(r.insertedIDs()) >= len(want) })
	r.mu.Lock()
	defer r.mu.Unlock()
	if have := r.insertedIDs(); !slices.Equal(have, want) {
		r.t.Fatalf("got ids %v, want %v", have, want)
	}
}

// countRestarts returns the number of restarts with the given reason. With reason "" it counts all
// reasons except those in but.
func (r *reader) countRestarts(reason string, but ...string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, count := range r.counts {
		if name == reason || reason == "" && !slices.Contains(but, name) {
			n += count
		}
	}
	return n
}

// eventAt returns event n.
func (r *reader) eventAt(n int) receivedEvent {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.events[n]
}

// lastPosition returns the position of the last batch.
func (r *reader) lastPosition() resume.Position {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pos
}

// stopReader ends Run and returns its error.
func (r *reader) stopReader() error {
	r.cancel()
	<-r.done
	return r.err
}

// waitForEnd blocks until Run ends without a stop, and returns its error.
func (r *reader) waitForEnd() error {
	r.t.Helper()
	select {
	case <-r.done:
	case <-time.After(patience):
		r.t.Fatalf("Run did not end within %s", patience)
	}
	return r.err
}

func (r *reader) wantGap(reason string) *changes.GapError {
	r.t.Helper()
	err := r.waitForEnd()
	var gap *changes.GapError
	if !errors.As(err, &gap) || gap.Reason != reason {
		r.t.Fatalf("Run returned %v, want a gap with reason %s", err, reason)
	}
	return gap
}

// matchesDatabase reports whether a database may contain a watched collection.
func matchesDatabase(s *changes.Scope, db []byte) bool {
	return slices.ContainsFunc(strings.Split(s.String(), ","), func(pattern string) bool {
		name, _, _ := strings.Cut(pattern, ".")
		return glob.Match(name, db)
	})
}
