package changestream

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/resume"
)

func TestN23_AChangedPipelineNeitherRepeatsNorLoses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	one, two := b.db.Collection("outbox"), b.db.Collection("second")
	at := b.now()
	sess, err := b.admin.StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer sess.EndSession(t.Context())
	// One transaction over both collections: its events share one cluster time.
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
	r := b.read(wide, Start{At: &at})
	r.wantIDs("a", "2a", "b", "2b", "c", "2c")
	behind2a := r.at(1).pos
	_ = r.stop()
	// The token is of an event that the narrow stream does not see: by token the next match would end in error 280.
	gap := b.read(narrow, Start{Position: behind2a})
	if g := gap.wantGap(GapTokenRefused); g.Code != 280 {
		t.Errorf("code %d, want 280", g.Code)
	}
	b.read(narrow, Start{Position: behind2a, PipelineHash: wide.PipelineHash()}).wantIDs("b", "c")
	// The same hash trusts the token.
	b.read(wide, Start{Position: behind2a, PipelineHash: wide.PipelineHash()}).wantIDs("b", "2b", "c", "2c")
}

func TestN23_AnotherCollectionUnderTheNameStartsByTime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// The checkpoint is of a collection that was called outbox once; today another one is, as after a restore.
	at := b.now()
	b.insert(b.db.Collection("old"), "x")
	r := b.read(scopeOf(t, b.db.Name()+".old"), Start{At: &at})
	r.wantIDs("x")
	stored := r.at(0).pos
	_ = r.stop()
	uuid, found, err := CollectionUUID(t.Context(), b.admin, b.db.Name(), "old")
	if err != nil || !found {
		t.Fatal(found, err)
	}
	b.insert(b.db.Collection("outbox"), "a", "b")
	scope := scopeOf(t, b.db.Name()+".outbox")
	b.read(scope, Start{Position: stored}).wantGap(GapTokenRefused) // by token alone
	then := []resume.Collection{{NS: scope.String(), UUID: uuid}}
	b.read(scope, Start{Position: stored, Collections: then}).wantIDs("a", "b")
	// The same collection: the token is trusted.
	if uuid, _, err = CollectionUUID(t.Context(), b.admin, b.db.Name(), "outbox"); err != nil {
		t.Fatal(err)
	}
	b.read(scope, Start{Position: stored, Collections: []resume.Collection{{NS: scope.String(), UUID: uuid}}}).wantGap(GapTokenRefused)
}

func TestN24_WholeEventsAreReadAgainOnlyBehindTheLargeOne(t *testing.T) {
	t.Parallel()
	at := func(data string) resume.Position { return resume.Position{Token: resume.TokenOf(data)} }
	s := slim{on: true, poison: "82AB"}
	for range 3 {
		if s.passed(at("82AB"), true) {
			t.Fatal("its own token would be opened at")
		}
	}
	if !s.passed(at("82AC"), false) {
		t.Error("still slim behind it")
	}
	s = slim{on: true} // none was seen
	if s.passed(at("82"), true) || !s.passed(at("82"), true) {
		t.Error("the first empty reply says nothing, the second one that there is none")
	}
	s = slim{on: true, events: maxDocuments}
	if !s.passed(at("82"), false) {
		t.Error("still slim behind all that a reply can hold")
	}
}

// poison makes a legal document whose change event is larger than the server can send.
func poison(t *testing.T, id string) bson.D {
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
	b := setup(t)
	coll := b.db.Collection("outbox")
	fat := string(bytes.Repeat([]byte("k"), 6000))
	at := b.now()
	b.insert(coll, "a", "b")
	if _, err := coll.InsertOne(t.Context(), poison(t, fat)); err != nil {
		t.Fatal(err)
	}
	b.insert(coll, "c")
	scope := scopeOf(t, b.db.Name()+".outbox")
	r := b.read(scope, Start{At: &at})
	r.wantIDs("a", "b", fat, "c")
	if e := r.at(2); e.size != 16<<20 || e.note != "" {
		t.Errorf("document of %d bytes, note %q", e.size, e.note)
	}
	at2, behindB, behindPoison := r.at(2).pos.ClusterTime, r.at(1).pos, r.at(2).pos
	r.until("whole events again", func() bool { return r.counts["oversize"] >= 2 })
	b.insert(coll, "d")
	r.wantIDs("a", "b", fat, "c", "d")
	_ = r.stop()

	// From the token in front of it, from its own token, and from its own time.
	b.read(scope, Start{Position: behindB}).wantIDs(fat, "c", "d")
	b.read(scope, Start{Position: behindPoison}).wantIDs("c", "d")
	b.read(scope, Start{Position: behindB, At: &at2}).wantIDs(fat, "c", "d")

	if _, err := coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: fat}}); err != nil {
		t.Fatal(err)
	}
	r = b.read(scope, Start{Position: behindB})
	r.wantIDs(fat, "c", "d")
	if e := r.at(0); e.size != 0 || e.note == "" {
		t.Errorf("a document that is gone: %d bytes, note %q", e.size, e.note)
	}
}

func TestN24_AnIdStillLargerThanThat(t *testing.T) {
	t.Parallel()
	b := setup(t)
	coll := b.db.Collection("outbox")
	at := b.now()
	// The token alone, twice the id in hexadecimal, is too large here: nothing can be read around it.
	huge := string(bytes.Repeat([]byte("k"), 5800<<10))
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: huge}}); err != nil {
		t.Fatal(err)
	}
	r := b.read(scopeOf(t, b.db.Name()+".outbox"), Start{At: &at})
	if g := r.wantGap(GapOversize); g.Code != 10334 {
		t.Errorf("code %d", g.Code)
	}
}

func TestN26_TokenOfTheFuture(t *testing.T) {
	t.Parallel()
	b := setup(t)
	coll := b.db.Collection("outbox")
	at := b.now()
	b.insert(coll, "a")
	scope := scopeOf(t, b.db.Name()+".outbox")
	r := b.read(scope, Start{At: &at})
	r.wantIDs("a")
	data := []byte(r.at(0).data)
	_ = r.stop()
	copy(data[2:10], "7F") // decades ahead
	future := resume.Position{Token: resume.TokenOf(string(data))}
	r = b.read(scope, Start{Position: future}, func(c *Config) { c.Watchdog = 400 * time.Millisecond })
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { // the cluster goes on
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
	gap := r.wantGap(GapStalled)
	close(stop)
	<-done
	if !gap.Ahead {
		t.Error("the gap does not say that the position is ahead of the cluster")
	}
	if r.counts["watchdog"] != 1 {
		t.Errorf("restarts %v, want one by the watchdog before the gap", r.counts)
	}
}

func TestN26_OnlyWaitingInGetMoreCounts(t *testing.T) {
	t.Parallel()
	sec := time.Second
	at := func(n uint32) bson.Timestamp { return bson.Timestamp{T: n} }
	w := watchdog{limit: 2 * sec}
	for range 50 { // a quiet cluster
		if v := w.empty(sec, at(1)); v != healthy {
			t.Fatal("barked at a cluster that stands still")
		}
	}
	// The cluster moves; the reply that first shows it does not count, the next ones do.
	if w.empty(sec, at(2)) != healthy || w.empty(sec, at(3)) != healthy {
		t.Fatal("too early")
	}
	if w.empty(sec, at(4)) != reopen {
		t.Fatal("did not bark")
	}
	w.reopened()
	for i := range uint32(3) {
		if w.empty(sec, at(5+i)) != healthy {
			t.Fatal("too early after the reopening")
		}
	}
	if w.empty(sec, at(9)) != dead {
		t.Fatal("did not give up")
	}
	w.moved()
	if w.strikes != 0 || w.empty(sec, at(10)) != healthy {
		t.Fatal("a moving token is not forgiven")
	}
}

func TestN26_BackpressureIsNoStall(t *testing.T) {
	t.Parallel()
	b := setup(t)
	coll := b.db.Collection("outbox")
	at := b.now()
	b.insert(coll, "a")
	cfg := Config{Client: b.watch, Scope: scopeOf(t, b.db.Name()+".outbox")}
	quick(&cfg)
	cfg.Watchdog = 50 * time.Millisecond
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	out, done := make(chan *Batch), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- s.Run(ctx, Start{At: &at}, out) }()
	b.insert(b.db.Collection("busy"), numbers("x", 20)...) // nobody receives, and the cluster goes on
	<-time.After(500 * time.Millisecond)
	select {
	case err := <-done:
		t.Fatalf("ended with %v while nobody received", err)
	case batch := <-out:
		batch.Release()
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
