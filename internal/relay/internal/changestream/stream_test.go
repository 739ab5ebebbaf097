package changestream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

func numberedIDs(prefix string, n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s%d", prefix, i)
	}
	return ids
}

func TestAStartIsRequired(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{})
	if err := r.waitForEnd(); !errors.Is(err, errNoStart) {
		t.Errorf("Run returned %v, want errNoStart", err)
	}
}

func TestOrderAndCompletenessOfACollection(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	b.insertIDs(coll, "before")
	at := b.clusterTime()
	want := numberedIDs("a", 50)
	b.insertIDs(coll, want[:25]...)
	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at})
	b.insertIDs(b.db.Collection("other"), "x")
	b.insertIDs(coll, want[25:]...)

	// A start by time is inclusive, so the event at exactly that time may be delivered too.
	r.waitUntil("all", func() bool { return slices.Contains(r.insertedIDs(), "a49") })
	r.mu.Lock()
	have := r.insertedIDs()
	r.mu.Unlock()
	if have[0] == "before" {
		have = have[1:]
	}
	if !slices.Equal(have, want) {
		t.Fatalf("got ids %v, want %v", have, want)
	}

	mid := r.eventAt(len(r.events) - 11).pos
	if err := r.stopReader(); !errors.Is(err, context.Canceled) {
		t.Errorf("Run returned %v, want context.Canceled", err)
	}

	b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{Position: mid}).wantIDs(want[40:]...)
}

// A backlog is read in responses of 2,000 small events, each followed at once by the next, and in small ones if the events are large.
func TestABacklogIsReadInFullResponses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		events, bytes int
		isFull        func(n int) bool
	}{
		"small events": {3 * changes.MaxDocuments, 10, func(n int) bool { return n == changes.MaxDocuments }},
		"large events": {200, 100_000, func(n int) bool { return n >= 20 && n <= 60 }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newFixture(t)
			at := b.clusterTime()
			docs := make([]any, c.events)
			for i := range docs {
				docs[i] = bson.D{{Key: "_id", Value: i}, {Key: "x", Value: strings.Repeat("x", c.bytes)}}
			}
			if _, err := b.db.Collection("outbox").InsertMany(t.Context(), docs); err != nil {
				t.Fatal(err)
			}

			r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at})
			r.waitUntil("all", func() bool { return len(r.events) >= c.events })
			r.mu.Lock()
			defer r.mu.Unlock()
			if !slices.ContainsFunc(r.sizes, c.isFull) || slices.Max(r.sizes) > changes.MaxDocuments {
				t.Errorf("the responses have %v events", r.sizes)
			}
		})
	}
}

func TestAStartAtTheClusterTimeLeavesOutEarlierInserts(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	b.insertIDs(coll, "old1", "old2")
	// Otherwise the present would be the time of the last insert.
	b.insertIDs(b.db.Collection("other"), "later")
	at := b.clusterTime()
	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at})
	r.waitUntil("a first position", func() bool { return !r.pos.IsZero() })
	b.insertIDs(coll, "new")
	r.wantIDs("new")
}

func TestDatabaseAndClusterScopes(t *testing.T) {
	t.Parallel()
	b := newFixture(t)

	// Only the patterns of this test match these names.
	prefix := strings.ToLower(stacktest.Name(t))
	tenants := []*mongo.Database{b.admin.Database(prefix + "_1"), b.admin.Database(prefix + "_2")}
	for _, db := range tenants {
		t.Cleanup(func() { _ = db.Drop(context.WithoutCancel(t.Context())) })
	}

	at := b.clusterTime()
	// Both tenants have the same ids.
	for i, id := range []string{"e0", "e1", "e2", "e3"} {
		for _, db := range tenants {
			b.insertIDs(db.Collection("outbox"), id)
			b.insertIDs(db.Collection("outbox_dead"), id)
			b.insertIDs(db.Collection("orders"), id)
			if i%2 == 0 {
				b.insertIDs(db.Collection("audit"), id)
			}
		}
	}

	b.insertIDs(b.db.Collection("outbox"), "foreign")
	ns := func(names ...string) []string {
		for i, n := range names {
			names[i] = prefix + n
		}
		return names
	}

	for _, c := range []struct {
		kind     changes.Kind
		patterns []string
		want     int
		coll     string
	}{
		{changes.Collection, ns("_1.outbox"), 4, "outbox"},
		{changes.Database, ns("_1.outbox", "_1.audit"), 6, "outbox audit"},
		{changes.Database, ns("_1.out*", "_1.aud*t"), 6, "outbox audit"},
		{changes.Cluster, ns("_*.outbox"), 8, "outbox"},
		{changes.Cluster, ns("_1.outbox", "_2.outbox", "_2.audit"), 10, "outbox audit"},
		{changes.Cluster, ns("_*.*"), 20, "outbox audit orders"},
		{changes.Cluster, []string{"*" + prefix[1:] + "_2.outbox", prefix + "_1.audit"}, 6, "outbox audit"},
	} {
		scope := scopeOf(t, c.patterns...)
		if scope.Kind() != c.kind {
			t.Fatalf("%s is a %s stream", scope, scope.Kind())
		}

		r := b.startReader(scope, changes.Start{At: &at})
		r.waitUntil(scope.String(), func() bool { return len(r.insertedIDs()) >= c.want })
		if err := r.stopReader(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", scope, err)
		}
		if len(r.insertedIDs()) != c.want {
			t.Errorf("%s: %d events, want %d: %v", scope, len(r.insertedIDs()), c.want, r.events)
		}

		for _, e := range r.events {
			db, coll, _ := strings.Cut(e.ns, ".")
			if e.op == changes.Insert && (!scope.Matches([]byte(db), []byte(coll)) || !slices.Contains(strings.Fields(c.coll), coll)) {
				t.Errorf("%s: got an event of %s", scope, e.ns)
			}
		}

		if !slices.IsSortedFunc(r.events, func(a, b receivedEvent) int { return strings.Compare(a.data, b.data) }) {
			t.Errorf("%s: tokens do not ascend", scope)
		}
	}
}

func TestIdleCheckpointBesideABusyNeighbour(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "only")
	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at})
	r.waitUntil("the event", func() bool { return slices.Contains(r.insertedIDs(), "only") })
	event := r.lastPosition()
	b.insertIDs(b.db.Collection("busy"), numberedIDs("x", 20)...)
	busy := b.clusterTime()
	r.waitUntil("an empty batch after the neighbor's writes",
		func() bool { return r.idle > 0 && !r.pos.ClusterTime.Before(busy) })
	idle := r.lastPosition()
	if idle.Compare(event) <= 0 {
		t.Fatalf("idle position %s, want a position after %s", idle.Token, event.Token)
	}
	if err := r.stopReader(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}

	b.insertIDs(coll, "next")
	b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{Position: idle}).wantIDs("next")
}

func TestTransactions(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	if err := b.db.CreateCollection(t.Context(), "outbox"); err != nil {
		t.Fatal(err)
	}

	at := b.clusterTime()
	sess, err := b.admin.StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer sess.EndSession(context.WithoutCancel(t.Context()))
	many := func(prefix string, n int, end error) {
		t.Helper()
		docs := make([]any, n)
		for i, id := range numberedIDs(prefix, n) {
			docs[i] = bson.D{{Key: "_id", Value: id}}
		}

		_, err := sess.WithTransaction(t.Context(), func(ctx context.Context) (any, error) {
			if _, err := coll.InsertMany(ctx, docs); err != nil {
				return nil, err
			}
			return nil, end
		})
		if !errors.Is(err, end) {
			t.Fatal(err)
		}
	}

	many("aborted", 3, errors.New("rolled back on purpose"))
	const n = 2000
	many("t", n, nil)
	scope := scopeOf(t, b.db.Name()+".outbox")
	r := b.startReader(scope, changes.Start{At: &at}, func(p *pace) { p.batchSize = 300 })
	r.wantIDs(numberedIDs("t", n)...)
	time0 := r.eventAt(0).pos.ClusterTime
	mid := r.eventAt(776).pos
	if mid.ClusterTime != time0 {
		t.Fatalf("cluster times %v and %v in one transaction, want equal ones", time0, mid.ClusterTime)
	}

	_ = r.stopReader()
	b.startReader(scope, changes.Start{Position: mid}).wantIDs(numberedIDs("t", n)[777:]...)

	// By time, the server repeats the whole transaction, and the stream drops the events at or before the
	// position.
	b.startReader(scope, changes.Start{Position: mid, At: &time0}).wantIDs(numberedIDs("t", n)[777:]...)
}

func TestStopIsPromptAndLeavesNoCursor(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	const await = 20 * time.Second
	for _, patterns := range [][]string{{".outbox"}, {".outbox", ".audit"}, {"*.outbox"}} {
		for i := range patterns {
			patterns[i] = b.db.Name() + patterns[i]
		}

		// A write moves the idle token.
		b.insertIDs(b.db.Collection("x"), strings.Join(patterns, " "))
		at := b.clusterTime()
		r := b.startReader(scopeOf(t, patterns...), changes.Start{At: &at},
			func(p *pace) { p.maxAwait = await; p.patience = time.Minute })
		r.waitUntil("the stream to be live", func() bool {
			return len(r.states) > 0 && r.states[len(r.states)-1].Phase == Live
		})
		begin := time.Now()
		r.cancel()

		// Any write wakes a killed getMore. In the relay it is the release of the lease.
		for i, ended := 0, false; !ended; i++ {
			b.insertIDs(b.db.Collection("x"), fmt.Sprint("wake ", i, patterns))
			select {
			case <-r.done:
				ended = true
			case <-time.After(20 * time.Millisecond):
			}
		}

		if err := r.stopReader(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if d := time.Since(begin); d > await*3/4 {
			t.Errorf("%v: the stop took %s during a wait of %s, want at most %s", patterns, d, await, await*3/4)
		}

		b.waitForCursors(0)
		if s := r.stream.State(); s.Phase != Stopped {
			t.Errorf("state %+v, want stopped", s)
		}
	}
}

// waitForCursors waits until the client watch has at most n cursors on the server. The server keeps an
// abandoned cursor for ten minutes.
func (b *fixture) waitForCursors(n int) {
	b.t.Helper()
	left := b.countCursors()
	for end := time.Now().Add(patience); left > n; left = b.countCursors() {
		if time.Now().After(end) {
			b.t.Errorf("%d cursors on the server, want at most %d", left, n)
			return
		}
	}
}

// countCursors returns the number of idle and waiting cursors of the client watch on the server.
func (b *fixture) countCursors() int {
	b.t.Helper()
	cur, err := b.admin.Database("admin").Aggregate(b.t.Context(), mongo.Pipeline{
		{{Key: "$currentOp", Value: bson.D{{Key: "idleCursors", Value: true}, {Key: "allUsers", Value: true}}}},
		{{Key: "$match", Value: bson.D{
			{Key: "cursor", Value: bson.D{{Key: "$exists", Value: true}}},
			{Key: "cursor.tailable", Value: true},
			{Key: "$or", Value: bson.A{
				bson.D{{Key: "appName", Value: b.app}},
				bson.D{{Key: "cursor.originatingCommand.comment", Value: b.app}},
				bson.D{{Key: "ns", Value: bson.D{{Key: "$regex", Value: "^" + b.db.Name()}}}},
			}},
		}}},
	})
	if err != nil {
		b.t.Fatal(err)
	}

	var all []bson.Raw
	if err := cur.All(b.t.Context(), &all); err != nil {
		b.t.Fatal(err)
	}

	return len(all)
}

func TestRefetch(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "a", "b", "c")
	if _, err := coll.DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}

	s, err := New(Config{Client: b.watch, Scope: scopeOf(t, b.db.Name()+".outbox")})
	if err != nil {
		t.Fatal(err)
	}

	is := func(ids string) func(*changes.Event) bool {
		return func(ev *changes.Event) bool { return strings.ContainsAny(string(ev.ID), ids) }
	}
	var got []string
	upTo := func(n int) func(*changes.Event, []byte) bool {
		return func(_ *changes.Event, doc []byte) bool {
			id, _ := bson.Raw(doc).Lookup("_id").StringValueOK()
			got = append(got, id)
			return len(got) < n
		}
	}
	if err := s.Refetch(t.Context(), resume.Position{ClusterTime: at}, is("bc"), upTo(2)); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, []string{"b", "c"}) {
		t.Errorf("got %v, want b and c", got)
	}
	err = s.Refetch(t.Context(), resume.Position{ClusterTime: at}, is("z"), upTo(9))
	if !errors.Is(err, errNotInStream) || !Lost(err) {
		t.Errorf("Refetch of a missing event returned %v, want errNotInStream", err)
	}
	if err := s.Refetch(t.Context(), resume.Position{}, is("z"), upTo(9)); !errors.Is(err, errNoStart) || !Lost(err) {
		t.Errorf("Refetch without a position returned %v, want errNoStart", err)
	}

	for code, lost := range map[int32]bool{286: true, 280: true, 10107: false, 11600: false, 0: false} {
		if err := fmt.Errorf("reading: %w", mongo.CommandError{Code: code}); Lost(err) != lost {
			t.Errorf("Lost(code %d) = %v, want %v", code, !lost, lost)
		}
	}
}

func TestOplogWindowAndUUID(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	oplog, err := changes.ReadOplog(t.Context(), b.watch)
	if err != nil || oplog.Oldest.IsZero() || oplog.Newest.Before(oplog.Oldest) {
		t.Errorf("oplog %+v: %v", oplog, err)
	}
	if id, err := mongodb.CollectionUUID(t.Context(), b.watch, b.db.Name(), "outbox"); err != nil || id != [16]byte{} {
		t.Errorf("missing collection: UUID %x, error %v, want neither", id, err)
	}

	b.insertIDs(b.db.Collection("outbox"), "a")
	id, err := mongodb.CollectionUUID(t.Context(), b.watch, b.db.Name(), "outbox")
	if err != nil || id == [16]byte{} {
		t.Errorf("UUID %x, error %v, want a UUID", id, err)
	}
}

func TestLargeDocumentsMakeSmallBatches(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	docs := make([]any, 60)

	for i := range docs {
		docs[i] = bson.D{{Key: "_id", Value: fmt.Sprint("big", i)}, {Key: "p", Value: make([]byte, 400_000)}}
	}

	for part := range slices.Chunk(docs, 20) {
		if _, err := coll.InsertMany(t.Context(), part); err != nil {
			t.Fatal(err)
		}
	}

	s, err := New(Config{Client: b.watch, Scope: scopeOf(t, b.db.Name()+".outbox")})
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	out, done := make(chan *changes.Batch), make(chan error, 1)
	go func() { done <- s.Run(ctx, changes.Start{At: &at}, out) }()
	var sizes []int

	for n := 0; n < len(docs); {
		select {
		case batch := <-out:
			if len(batch.Docs) > 0 {
				n += len(batch.Docs)
				sizes = append(sizes, batch.Bytes)
			}
			batch.Release()
		case <-time.After(patience):
			t.Fatalf("no batch within %s", patience)
		}
	}

	cancel()
	<-done

	// The size of the documents is unknown for the first batch.
	for _, size := range sizes[1:] {
		if size > targetBytes+500_000 {
			t.Errorf("batch of %d bytes, want at most %d; all sizes: %v", size, targetBytes+500_000, sizes)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	scope := scopeOf(t, "a.b")
	for _, cfg := range []Config{{}, {Client: b.watch}, {Scope: scope}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("New accepted %+v", cfg)
		}
	}
	if o := changes.Tune(options.Client()); o.Timeout != nil {
		t.Errorf("Tune set the timeout %v, want none", *o.Timeout)
	}
}

// A secondary that replicates nothing responds, and its position stands. Its batches show that the reader is alive, or the term would end
// because a stage does not move.
func TestAPositionThatStandsIsSentAgain(t *testing.T) {
	t.Parallel()
	position := resume.Position{ClusterTime: bson.Timestamp{T: 7, I: 1}}
	sent := make(chan *changes.Batch, 1)
	r := &run{out: sent, position: position}
	send := func() bool {
		if err := r.sendBatch(t.Context(), changes.NewBatch(), position, false); err != nil {
			t.Fatal(err)
		}
		select {
		case batch := <-sent:
			defer batch.Release()
			return batch.Position.Compare(position) == 0
		default:
			return false
		}
	}

	if !send() {
		t.Error("the first empty batch is not sent")
	}
	if send() {
		t.Error("an empty batch is sent right after another one")
	}
	r.lastIdle = time.Now().Add(-idleInterval)
	if !send() {
		t.Error("no empty batch is sent after a while")
	}
}
