//go:build unix

package fault

import (
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/resume"
	"github.com/outrelay/outrelay/test/kit"
)

// interrupted is a scene whose relay has delivered something and ended, with more appended since.
func interrupted(t *testing.T) (*kit.Scene, *kit.Topics) {
	t.Helper()
	// It has to end in order: what a lease leaves behind that ran out is found by a read-back, if the settings are the same.
	s := kit.New(t, kit.Options{Set: map[string]any{"lease.ttl": "20s", "lease.renew": "1s"}})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	s.StartLoad(kit.Load{Events: 300}).WaitDone()
	s.CheckDelivery(topics)
	p.Terminate()
	if code := p.WaitExit(); code != 0 {
		t.Fatalf("exit code %d", code)
	}

	s.StartLoad(kit.Load{Events: 300}).WaitDone()
	return s, topics
}

// setToken writes a token into the watcher document, as a restore or a wrong hand would.
func setToken(t *testing.T, s *kit.Scene, token resume.Token, more ...bson.E) {
	t.Helper()
	res, err := s.State.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: kit.WatcherID}},
		bson.D{{Key: "$set", Value: append(bson.D{{Key: "token", Value: bson.Raw(token)}}, more...)}})
	if err != nil || res.MatchedCount != 1 {
		t.Fatalf("setting the token: %v, %d matched", err, res.MatchedCount)
	}
}

// A token that cannot be read is no reason to begin at "now": the time beside it still says where to go on.
func TestTokenOfGarbage(t *testing.T) {
	t.Parallel()
	for name, data := range map[string]string{"no token at all": "not hexadecimal", "cut off": "8265", "of another kind": "99FFFFFFFF"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, topics := interrupted(t)
			setToken(t, s, resume.TokenOf(data))
			s.StartRelay().WaitTookOver()
			repeatsOneTransaction(t, s.CompareAtEnd(topics))
		})
	}
}

// repeatsOneTransaction: by its time alone, a position cannot say which events of that very time were delivered, so the
// transaction that it stands at may come again. Nothing else may go wrong.
func repeatsOneTransaction(t *testing.T, v kit.Verdict) {
	t.Helper()
	if len(v.Lost)+len(v.Phantoms)+len(v.Disorder)+len(v.Changed) != 0 || len(v.Duplicates) > 3 {
		t.Errorf("not as promised, but for one transaction of at most 3 events: %s", v)
	}
}

// The token of another collection's stream names an event that this one does not have.
func TestTokenOfAnotherStream(t *testing.T) {
	t.Parallel()
	s, topics := interrupted(t)
	other := s.DB.Collection("other")
	cs, err := other.Watch(t.Context(), mongo.Pipeline{}, options.ChangeStream().SetBatchSize(0))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.InsertOne(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}
	if !cs.Next(t.Context()) {
		t.Fatal(cs.Err())
	}

	token := resume.Token(cs.ResumeToken()).Clone()
	_ = cs.Close(t.Context())
	s.StartLoad(kit.Load{Events: 100}).WaitDone()
	setToken(t, s, token)
	// Its time lies behind what was appended before it: going on there would lose those.
	s.StartRelay().WaitTookOver()
	repeatsOneTransaction(t, s.CompareAtEnd(topics))
}

// future is an interrupted scene whose position the servers have not reached, as after the restore of an older backup.
func future(t *testing.T, lostHistory string) (*kit.Scene, *kit.Topics) {
	t.Helper()
	s, topics := interrupted(t)
	at, _ := resume.Token(s.WatcherDocument().Lookup("token").Document()).ClusterTime()
	at.T += 7200
	data := fmt.Sprintf("82%08X%08X2B0229296E04", at.T, at.I)
	setToken(t, s, resume.TokenOf(data), bson.E{Key: "clusterTime", Value: at})
	s.SetConfig("lost_history", lostHistory)
	return s, topics
}

// The policy "halt": the relay says what happened, keeps the lease, and neither begins at "now" nor spins.
func TestTokenFromTheFutureHalts(t *testing.T) {
	t.Parallel()
	s, topics := future(t, "halt")
	before := len(topics.AllRecords())
	p := s.StartRelay()
	p.WaitTookOver()
	s.WaitForStatus("halted", func(st kit.Status) bool { return st.State == "halted" && st.Reason != "" })
	if code, body := p.Get("/readyz"); code == 200 {
		t.Errorf("a halted relay is ready: %s", body)
	}
	if n := len(topics.AllRecords()); n != before {
		t.Errorf("%d records appeared although the position is lost", n-before)
	}

	t.Log(s.ReadStatus().Reason)
}

// The policy "sweep": what the stream cannot bring is found in the outbox. Repeats are possible behind a gap, and they say so.
func TestTokenFromTheFutureIsSwept(t *testing.T) {
	t.Parallel()
	s, topics := future(t, "sweep")
	lost, _ := s.WatcherDocument().Lookup("clusterTime").Timestamp()
	p := s.StartRelay()
	p.WaitTookOver()
	v := s.CompareAtEnd(topics)
	t.Log(v)
	if len(v.Lost)+len(v.Phantoms)+len(v.Disorder)+len(v.Changed) != 0 {
		t.Errorf("not as promised behind a gap: %s", v)
	}

	kit.Eventually(t, "the position belongs to the cluster's own history", func() bool {
		at, _ := s.WatcherDocument().Lookup("clusterTime").Timestamp()
		return at < lost-3600
	})

	if p.HasLogged("level=ERROR") {
		t.Error(fmt.Sprint("errors are logged:\n", p.ReadLog()))
	}

	flagged := 0
	for _, r := range topics.AllRecords() {
		if r.Header("outrelay-redelivered") != "" {
			flagged++
		}
	}

	if len(v.Duplicates) > flagged {
		t.Errorf("%d repeats, and %d records say that they may be one", len(v.Duplicates), flagged)
	}
}

// Another list of collections is another pipeline: the stream is opened by time, and nothing is lost or repeated, in the
// old collection and in the new one.
func TestWatchListChanged(t *testing.T) {
	t.Parallel()
	s, topics := interrupted(t)
	second := s.DB.Collection("outbox2")
	for i := range 20 {
		s.AppendEvents(second, kit.NewEvent("order", "second", i, 50))
	}

	s.SetConfig("watch", []string{s.DB.Name() + ".outbox", s.DB.Name() + ".outbox2"})
	p := s.StartRelay()
	p.WaitTookOver()
	s.StartLoad(kit.Load{Events: 100}).WaitDone()
	for i := range 20 {
		s.AppendEvents(second, kit.NewEvent("order", "third", i, 50))
	}

	v := s.CheckDelivery(topics)
	t.Log(v)
	// And back. A kill in between would let the change of the list be seen in the records: those of one collection carry
	// no outrelay-ns, so a read-back would not know them again.
	p.Terminate()
	if code := p.WaitExit(); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}

	s.SetConfig("watch", []string{s.DB.Name() + ".outbox"})
	s.StartLoad(kit.Load{Events: 100}).WaitDone()
	s.StartRelay().WaitTookOver()
	s.CheckDelivery(topics)
}

// An outbox in which nothing happens keeps its place in the stream while its neighbour is busy, and so the position that a
// successor opens is young.
func TestIdleOutboxBesideABusyNeighbour(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 1, 20))
	s.CheckDelivery(topics)
	began := history.WaitFor("a token", func(v kit.Version) bool { return !v.Token.IsZero() })
	neighbour := s.DB.Collection("neighbour")
	docs := make([]bson.D, 500)
	for i := range docs {
		docs[i] = bson.D{{Key: "pad", Value: make([]byte, 500)}}
	}

	var last bson.Timestamp
	for range 10 {
		if _, err := neighbour.InsertMany(t.Context(), docs); err != nil {
			t.Fatal(err)
		}
	}

	var now struct{ OperationTime bson.Timestamp }
	if err := s.DB.RunCommand(t.Context(), bson.D{{Key: "ping", Value: 1}}).Decode(&now); err != nil {
		t.Fatal(err)
	}
	if last = now.OperationTime; !last.After(began.ClusterTime) {
		t.Fatal("the neighbour wrote nothing")
	}

	v := history.WaitFor("a position behind what the neighbour wrote", func(v kit.Version) bool { return !v.ClusterTime.Before(last) })
	if v.Epoch != began.Epoch {
		t.Errorf("epoch %d, and %d before: the owner changed", v.Epoch, began.Epoch)
	}

	p.Kill()
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 2, 20))
	s.StartRelay().WaitTookOver()
	s.CheckDelivery(topics)
	history.CheckHistory()
}
