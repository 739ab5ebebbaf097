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

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/glob"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// patience is how long a wait for what should come within seconds may take on a loaded machine.
const patience = 60 * time.Second

// got is one event as a test keeps it.
type got struct {
	op   Op
	ns   string
	id   string
	data string
	note string
	size int // of the document
	pos  resume.Position
}

// bundle is a test's own server access: one client to write with and one with an application name of its own to watch with.
type bundle struct {
	t     *testing.T
	app   string
	admin *mongo.Client
	watch *mongo.Client
	db    *mongo.Database
}

func setup(t *testing.T) *bundle {
	t.Helper()
	app := stacktest.Name(t)
	admin := stacktest.Client(t)
	return &bundle{
		t: t, app: app, admin: admin, db: stacktest.Database(t, admin),
		watch: stacktest.Client(t, options.Client().SetAppName(app)),
	}
}

func (b *bundle) now() bson.Timestamp {
	b.t.Helper()
	ts, err := mongodb.ClusterTime(b.t.Context(), b.admin)
	if err != nil {
		b.t.Fatal(err)
	}
	return ts
}

// insert writes documents with these ids, one by one, each majority-committed.
func (b *bundle) insert(coll *mongo.Collection, ids ...string) {
	b.t.Helper()
	for _, id := range ids {
		if _, err := coll.InsertOne(b.t.Context(), bson.D{{Key: "_id", Value: id}}); err != nil {
			b.t.Fatal(err)
		}
	}
}

// fail sets failCommand for this test's watching client alone, and returns how to end it.
func (b *bundle) fail(mode any, data bson.D) (off func()) {
	b.t.Helper()
	return stacktest.FailCommand(b.t, b.app, mode, data)
}

func times(n int) bson.D { return bson.D{{Key: "times", Value: n}} }

func failing(command string, how ...bson.E) bson.D {
	return append(bson.D{{Key: "failCommands", Value: bson.A{command}}}, how...)
}

// reader runs a stream and keeps what comes.
type reader struct {
	t      *testing.T
	stream *Stream
	cancel context.CancelFunc
	done   chan struct{}
	err    error

	mu     sync.Mutex
	cond   *sync.Cond
	events []got
	pos    resume.Position
	idle   int
	states []State
	counts map[string]int
	ended  bool
}

func quick(cfg *Config) {
	cfg.MaxAwait = 100 * time.Millisecond
	cfg.ConfigRetry = 50 * time.Millisecond
	cfg.Unexplained = time.Nanosecond
	cfg.Backoff = retry.Policy{Base: 5 * time.Millisecond, Cap: 50 * time.Millisecond}
	cfg.Log = slog.New(slog.DiscardHandler)
}

func scopeOf(t testing.TB, patterns ...string) *Scope {
	t.Helper()
	s, err := ParseScope(patterns, "outrelay.*")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (b *bundle) read(scope *Scope, start Start, change ...func(*Config)) *reader {
	b.t.Helper()
	r := &reader{t: b.t, done: make(chan struct{}), counts: map[string]int{}}
	r.cond = sync.NewCond(&r.mu)
	cfg := Config{Client: b.watch, Scope: scope}
	quick(&cfg)
	for _, f := range change {
		f(&cfg)
	}
	cfg.OnState = func(s State) {
		r.update(func() { r.states = append(r.states, s) })
	}
	cfg.Metrics = Metrics{Restart: func(reason string) {
		r.update(func() { r.counts[reason]++ })
	}}
	var err error
	if r.stream, err = New(cfg); err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.t.Context())
	r.cancel = cancel
	out := make(chan *Batch)
	go func() {
		defer close(out)
		r.err = r.stream.Run(ctx, start, out)
	}()
	go func() {
		defer close(r.done)
		for batch := range out {
			r.keep(batch)
		}
		r.update(func() { r.ended = true })
	}()
	b.t.Cleanup(func() { cancel(); <-r.done })
	return r
}

func (r *reader) update(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	r.cond.Broadcast()
}

func (r *reader) keep(b *Batch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.cond.Broadcast()
	defer b.Release()
	if len(b.Docs) == 0 {
		r.idle++
	}
	if b.Position.Compare(r.pos) < 0 {
		r.t.Errorf("position went back: %s after %s", b.Position.Token, r.pos.Token)
	}
	r.pos = b.Position
	var ev Event
	for _, raw := range b.Docs {
		if err := Parse(raw, &ev); err != nil {
			r.t.Error(err)
			return
		}
		scope := r.stream.cfg.Scope
		if ev.Op == Rename && !scope.Matches(ev.DB, ev.Coll) && !scope.Matches(ev.ToDB, ev.ToColl) ||
			ev.Op == DropDatabase && !matchesDatabase(scope, ev.DB) {
			continue // another test's
		}
		g := got{
			op: ev.Op, ns: string(ev.DB) + "." + string(ev.Coll), data: string(ev.Data), note: string(ev.Note), size: len(ev.Document),
			pos: resume.Position{Token: slices.Clone(ev.Token), ClusterTime: ev.ClusterTime},
		}
		if ev.Op == Insert {
			g.id, _ = bson.RawValue{Type: bson.Type(ev.IDType), Value: slices.Clone(ev.ID)}.StringValueOK()
			if !ev.HasUUID {
				r.t.Error("an insert event without collection UUID")
			}
		}
		r.events = append(r.events, g)
	}
}

// until waits for cond, which runs under the lock.
func (r *reader) until(what string, cond func() bool) {
	r.t.Helper()
	late := false
	timer := time.AfterFunc(patience, func() { r.update(func() { late = true }) })
	defer timer.Stop()
	r.mu.Lock()
	defer r.mu.Unlock()
	for !cond() {
		if late || r.ended {
			r.t.Fatalf("waiting for %s: ended=%v err=%v, %d events, states %v, restarts %v", what, r.ended, r.err, len(r.events), r.states, r.counts)
		}
		r.cond.Wait()
	}
}

func (r *reader) ids() []string {
	var ids []string
	for _, e := range r.events {
		if e.op == Insert {
			ids = append(ids, e.id)
		}
	}
	return ids
}

// wantIDs waits for as many inserts and compares them.
func (r *reader) wantIDs(want ...string) {
	r.t.Helper()
	r.until(strings.Join(want, " "), func() bool { return len(r.ids()) >= len(want) })
	r.mu.Lock()
	defer r.mu.Unlock()
	if have := r.ids(); !slices.Equal(have, want) {
		r.t.Fatalf("got ids %v, want %v", have, want)
	}
}

// restarts are those for a reason so far; "" for any reason but those that are left out.
func (r *reader) restarts(reason string, but ...string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, count := range r.counts {
		if name == reason || reason == "" && !slices.Contains(but, name) {
			n += count
		}
	}
	return n
}

// at is the n-th event.
func (r *reader) at(n int) got {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.events[n]
}

// position is that of the last batch.
func (r *reader) position() resume.Position {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pos
}

// stop ends Run and returns what it returned.
func (r *reader) stop() error {
	r.cancel()
	<-r.done
	return r.err
}

// end waits for Run to end by itself.
func (r *reader) end() error {
	r.t.Helper()
	select {
	case <-r.done:
	case <-time.After(patience):
		r.t.Fatal("the stream does not end")
	}
	return r.err
}

func (r *reader) wantGap(reason string) *GapError {
	r.t.Helper()
	err := r.end()
	var gap *GapError
	if !errors.As(err, &gap) || gap.Reason != reason {
		r.t.Fatalf("Run ended with %v, want a gap: %s", err, reason)
	}
	return gap
}

// matchesDatabase reports whether a database may hold a watched collection.
func matchesDatabase(s *Scope, db []byte) bool {
	return slices.ContainsFunc(s.include, func(p pattern) bool { return glob.Match(p.db, db) })
}
