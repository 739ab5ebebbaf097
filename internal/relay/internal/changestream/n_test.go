package changestream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

func TestN23_AChangedPipelineNeitherRepeatsNorLoses(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	one, two := b.db.Collection("outbox"), b.db.Collection("second")
	at := b.clusterTime()
	sess, err := b.admin.StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer sess.EndSession(t.Context())

	// All events of one transaction over both collections have the same cluster time.
	_, err = sess.WithTransaction(mongo.NewSessionContext(t.Context(), sess), func(ctx2 context.Context) (any, error) {
		for _, id := range []string{"a", "b", "c"} {
			if _, err := one.InsertOne(ctx2, bson.D{{Key: "_id", Value: id}}); err != nil {
				return nil, err
			}
			if _, err := two.InsertOne(ctx2, bson.D{{Key: "_id", Value: "2" + id}}); err != nil {
				return nil, err
			}
		}
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}

	narrow, wide := scopeOf(t, b.db.Name()+".outbox"), scopeOf(t, b.db.Name()+".outbox", b.db.Name()+".second")
	r := b.startReader(wide, changes.Start{At: &at})
	r.wantIDs("a", "2a", "b", "2b", "c", "2c")
	behind2a := r.eventAt(1).pos
	_ = r.stopReader()

	// The narrow stream does not contain the event of the token. A start by token fails with error 280 at
	// the next event.
	gap := b.startReader(narrow, changes.Start{Position: behind2a})
	if g := gap.wantGap(changes.GapTokenRejected); g.Code != 280 {
		t.Errorf("code %d, want 280", g.Code)
	}

	b.startReader(narrow, changes.Start{Position: behind2a, PipelineHash: wide.PipelineHash()}).wantIDs("b", "c")
	// With the same hash, the token is used.
	b.startReader(wide, changes.Start{Position: behind2a, PipelineHash: wide.PipelineHash()}).wantIDs("b", "2b", "c", "2c")
}

func TestN23_AnotherCollectionUnderTheNameStartsByTime(t *testing.T) {
	t.Parallel()
	b := newFixture(t)

	// The checkpoint belongs to a collection that had the name before, as after a restore.
	at := b.clusterTime()
	b.insertIDs(b.db.Collection("old"), "x")
	r := b.startReader(scopeOf(t, b.db.Name()+".old"), changes.Start{At: &at})
	r.wantIDs("x")
	stored := r.eventAt(0).pos
	_ = r.stopReader()
	uuid, err := mongodb.CollectionUUID(t.Context(), b.admin, b.db.Name(), "old")
	if err != nil || uuid == [16]byte{} {
		t.Fatal(uuid, err)
	}

	b.insertIDs(b.db.Collection("outbox"), "a", "b")
	scope := scopeOf(t, b.db.Name()+".outbox")

	// Without the UUID, the start by token fails.
	b.startReader(scope, changes.Start{Position: stored}).wantGap(changes.GapTokenRejected)
	then := []changes.KnownCollection{{NS: scope.String(), UUID: uuid}}
	b.startReader(scope, changes.Start{Position: stored, Collections: then}).wantIDs("a", "b")

	// With the UUID of the present collection, the token is used.
	if uuid, err = mongodb.CollectionUUID(t.Context(), b.admin, b.db.Name(), "outbox"); err != nil {
		t.Fatal(err)
	}

	b.startReader(scope, changes.Start{
		Position:    stored,
		Collections: []changes.KnownCollection{{NS: scope.String(), UUID: uuid}},
	}).wantGap(changes.GapTokenRejected)
}

func TestN24_WholeEventsAreReadAgainOnlyBehindTheLargeOne(t *testing.T) {
	t.Parallel()
	at := func(data string) resume.Position { return resume.Position{Token: resume.TokenOf(data)} }
	s := slimMode{on: true, lastFetched: at("82AB")}
	for range 3 {
		if s.hasPassed(at("82AB"), true) {
			t.Fatal("passed at the token of the large event: the server would build that event again")
		}
	}

	if !s.hasPassed(at("82AC"), false) {
		t.Error("not passed after the large event")
	}

	// No oversized document was found.
	s = slimMode{on: true}
	if s.hasPassed(at("82"), true) || !s.hasPassed(at("82"), true) {
		t.Error("want passed only at the second empty response")
	}

	s = slimMode{on: true, events: changes.MaxDocuments}
	if !s.hasPassed(at("82"), false) {
		t.Error("not passed after as many events as a response can hold")
	}
}

// oversizeDocument returns a legal document whose change event is larger than the server can send.
func oversizeDocument(t *testing.T, id string) bson.D {
	t.Helper()
	doc := bson.D{{Key: "_id", Value: id}, {Key: "p", Value: []byte{}}}
	raw, err := bson.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	doc[1].Value = bytes.Repeat([]byte{7}, 16<<20-len(raw))
	return doc
}

func TestN24_ADocumentTooLargeForAnEvent(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	fat := string(bytes.Repeat([]byte("k"), 6000))
	at := b.clusterTime()
	b.insertIDs(coll, "a", "b")
	if _, err := coll.InsertOne(t.Context(), oversizeDocument(t, fat)); err != nil {
		t.Fatal(err)
	}

	b.insertIDs(coll, "c")
	scope := scopeOf(t, b.db.Name()+".outbox")
	r := b.startReader(scope, changes.Start{At: &at})
	r.wantIDs("a", "b", fat, "c")
	if e := r.eventAt(2); e.size != 16<<20 || e.note != "" {
		t.Errorf("document of %d bytes with note %q, want %d without a note", e.size, e.note, 16<<20)
	}

	at2, behindB, behindPoison := r.eventAt(2).pos.ClusterTime, r.eventAt(1).pos, r.eventAt(2).pos
	r.waitUntil("whole events again", func() bool { return r.counts["oversize"] >= 2 })
	b.insertIDs(coll, "d")
	r.wantIDs("a", "b", fat, "c", "d")
	_ = r.stopReader()

	// Start at the token before the large event, at its own token, and at its own time.
	b.startReader(scope, changes.Start{Position: behindB}).wantIDs(fat, "c", "d")
	b.startReader(scope, changes.Start{Position: behindPoison}).wantIDs("c", "d")
	b.startReader(scope, changes.Start{Position: behindB, At: &at2}).wantIDs(fat, "c", "d")

	if _, err := coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: fat}}); err != nil {
		t.Fatal(err)
	}
	r = b.startReader(scope, changes.Start{Position: behindB})
	r.wantIDs(fat, "c", "d")
	if e := r.eventAt(0); e.size != 0 || e.note == "" {
		t.Errorf("deleted document: %d bytes with note %q, want 0 with a note", e.size, e.note)
	}
}

func TestN24_AnIdStillLargerThanThat(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()

	// The token contains the id in hexadecimal, so the token alone is too large. Slim mode cannot pass it.
	huge := string(bytes.Repeat([]byte("k"), 5800<<10))
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: huge}}); err != nil {
		t.Fatal(err)
	}

	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at})
	if g := r.wantGap(changes.GapOversize); g.Code != 10334 {
		t.Errorf("code %d, want 10334", g.Code)
	}
}

// With an _id of 8 MiB, the server cannot build the token of the event as a string. It returns another code.
func TestN24_AnIdThatNoTokenCanHold(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "a")
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: string(bytes.Repeat([]byte("i"), 8<<20))}}); err != nil {
		t.Fatal(err)
	}
	b.insertIDs(coll, "b")

	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at})
	if g := r.wantGap(changes.GapOversize); g.Code != 16493 {
		t.Errorf("code %d, want 16493", g.Code)
	}
}

// An error without a class may come from the next event, if the server repeats it at the same token.
func TestN24_ARepeatedErrorIsReadAround(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	b.insertIDs(coll, "a")
	r := b.startReader(scopeOf(t, b.db.Name()+".outbox"), changes.Start{At: &at})
	r.wantIDs("a")
	if st := r.stream.State(); st.Reopenings != 0 || !st.StuckSince.IsZero() {
		t.Errorf("a stream that moves: %+v", st)
	}

	off := b.setFailCommand(failTimes(4), failCommand("getMore", bson.E{Key: "errorCode", Value: int32(4242)}))
	defer off()
	stuck := false
	r.waitUntil("reading without large documents", func() bool {
		stuck = stuck || r.stream.State().Reopenings >= oversizeAttempts
		return slices.ContainsFunc(r.states, func(s State) bool { return s.Phase == Oversize })
	})
	if !stuck {
		t.Error("the state has not shown that the stream reopens without moving")
	}

	b.insertIDs(coll, "b")
	r.wantIDs("a", "b")
	r.waitUntil("a stream that moves", func() bool { return r.stream.State().Reopenings == 0 && r.stream.State().StuckSince.IsZero() })
}

func TestN26_TokenOfTheFuture(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	scope := scopeOf(t, b.db.Name()+".outbox")
	r := b.startReader(scope, b.startInFuture(scope), func(p *pace) { p.watchdog = 400 * time.Millisecond })
	stop := make(chan struct{})
	done := make(chan struct{})

	// Other writes move the cluster time.
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				_, _ = b.db.Collection("busy").InsertOne(t.Context(), bson.D{{Key: "i", Value: i}})
				<-time.After(20 * time.Millisecond)
			}
		}
	}()

	gap := r.wantGap(changes.GapStalled)
	close(stop)
	<-done
	if !gap.Ahead {
		t.Error("Ahead = false, want true: the position is in the future of the cluster")
	}
	if r.counts["watchdog"] != 1 {
		t.Errorf("restarts %v, want one by the watchdog", r.counts)
	}
}

func TestN26_OnlyWaitingInGetMoreCounts(t *testing.T) {
	t.Parallel()
	sec := time.Second
	at := func(n uint32) bson.Timestamp { return bson.Timestamp{T: n} }
	w := watchdog{limit: 2 * sec}

	// The cluster is quiet.
	for range 50 {
		if v := w.observeEmptyResponse(sec, at(1)); v != verdictHealthy {
			t.Fatalf("verdict %d for a quiet cluster, want healthy", v)
		}
	}

	// The cluster time moves. The first response that shows it does not count, the next ones do.
	if w.observeEmptyResponse(sec, at(2)) != verdictHealthy || w.observeEmptyResponse(sec, at(3)) != verdictHealthy {
		t.Fatal("verdict before the limit, want healthy")
	}
	if w.observeEmptyResponse(sec, at(4)) != verdictReopen {
		t.Fatal("no reopening at the limit")
	}

	w.streamReopened()
	for i := range uint32(3) {
		if w.observeEmptyResponse(sec, at(5+i)) != verdictHealthy {
			t.Fatal("verdict before the limit after the reopening, want healthy")
		}
	}

	if w.observeEmptyResponse(sec, at(9)) != verdictDead {
		t.Fatal("the token is not dead after the second time")
	}
	w.tokenMoved()
	if w.strikes != 0 || w.observeEmptyResponse(sec, at(10)) != verdictHealthy {
		t.Fatal("a moved token did not reset the watchdog")
	}
}

func TestN26_BackpressureIsNoStall(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	scope := scopeOf(t, b.db.Name()+".outbox")
	start := b.startInFuture(scope)
	var restarts atomic.Int64
	s, err := New(Config{Client: b.watch, Scope: scope, Log: slog.New(slog.DiscardHandler), Metrics: Metrics{Restart: func(string) { restarts.Add(1) }}})
	if err != nil {
		t.Fatal(err)
	}
	s.pace.shorten()
	s.pace.watchdog = 1500 * time.Millisecond

	out, done := make(chan *changes.Batch), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- s.Run(ctx, start, out) }()

	// The token stands while the cluster time moves. Each response takes 100 ms in the server, and waits for the test for longer than
	// the limit. From the third one on, time would count.
	for i := range 5 {
		b.insertIDs(b.db.Collection("busy"), fmt.Sprint(i))
		<-time.After(s.pace.watchdog + 100*time.Millisecond)
		select {
		case err := <-done:
			t.Fatalf("Run returned %v during backpressure", err)
		case batch := <-out:
			batch.Release()
		case <-time.After(patience):
			t.Fatal("no batch arrives")
		}
	}
	if n := restarts.Load(); n != 0 {
		t.Errorf("%d restarts during backpressure", n)
	}

	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// startInFuture returns a start after a token that is decades ahead of the cluster, so that it never moves.
func (b *fixture) startInFuture(scope *changes.Scope) changes.Start {
	b.t.Helper()
	at := b.clusterTime()
	b.insertIDs(b.db.Collection("outbox"), "a")
	r := b.startReader(scope, changes.Start{At: &at})
	r.wantIDs("a")
	data := []byte(r.eventAt(0).data)
	_ = r.stopReader()

	copy(data[2:10], "7F")
	return changes.Start{Position: resume.Position{Token: resume.TokenOf(string(data))}}
}
