//go:build unix

package fault

import (
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/resume"
	"github.com/outrelay/outrelay/test/kit"
)

// newInterruptedScene returns a scene whose relay has delivered events and ended, with more events
// appended since.
func newInterruptedScene(t *testing.T) (*kit.Scene, *kit.Topics) {
	t.Helper()
	// The relay must end gracefully. After an expired lease, a read-back would find its records if the
	// settings are the same.
	s := kit.New(t, kit.Options{Set: map[string]any{"lease.ttl": "20s", "lease.renew": "1s"}})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	s.StartLoad(kit.Load{Events: 300}).WaitDone()
	s.CheckDelivery(topics)
	p.Terminate()
	if code := p.WaitExit(); code != 0 {
		t.Fatalf("exit code %d, want 0", code)
	}

	s.StartLoad(kit.Load{Events: 300}).WaitDone()
	return s, topics
}

// setToken writes a token to the watcher document, like a restore or an operator error.
func setToken(t *testing.T, s *kit.Scene, token resume.Token, more ...bson.E) {
	t.Helper()
	res, err := s.State.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: kit.WatcherID}},
		bson.D{{Key: "$set", Value: append(bson.D{{Key: "token", Value: bson.Raw(token)}}, more...)}})
	if err != nil || res.MatchedCount != 1 {
		t.Fatalf("setting the token: %v, %d matched", err, res.MatchedCount)
	}
}

// If the token cannot be parsed, the relay does not start at "now". It continues from the time in the watcher
// document.
func TestTokenOfGarbage(t *testing.T) {
	t.Parallel()
	for name, data := range map[string]string{"no token at all": "not hexadecimal", "cut off": "8265", "of another kind": "99FFFFFFFF"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, topics := newInterruptedScene(t)
			setToken(t, s, resume.TokenOf(data))
			s.StartRelay().WaitTookOver()
			checkOneTransactionRepeated(t, s.CompareAtEnd(topics))
		})
	}
}

// checkOneTransactionRepeated checks the result of a position without a token. Its time does not show
// which events of that time were delivered, so one transaction may be repeated. No other promise may be
// violated.
func checkOneTransactionRepeated(t *testing.T, v kit.Verdict) {
	t.Helper()
	if len(v.Lost)+len(v.Phantoms)+len(v.Disorder)+len(v.Changed) != 0 || len(v.Duplicates) > 3 {
		t.Errorf("promises are violated, beyond one repeated transaction of at most 3 events: %s", v)
	}
}

// The token of another collection's stream refers to an event that this stream does not have.
func TestTokenOfAnotherStream(t *testing.T) {
	t.Parallel()
	s, topics := newInterruptedScene(t)
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
	// Its time is later than some appended events. A stream from that time would lose them.
	s.StartRelay().WaitTookOver()
	checkOneTransactionRepeated(t, s.CompareAtEnd(topics))
}

// newFutureScene returns an interrupted scene with a position that the servers have not reached, as
// after the restore of an older backup.
func newFutureScene(t *testing.T, lostHistory string) (*kit.Scene, *kit.Topics) {
	t.Helper()
	s, topics := newInterruptedScene(t)
	at, _ := resume.Token(s.WatcherDocument().Lookup("token").Document()).ClusterTime()
	at.T += 7200
	data := fmt.Sprintf("82%08X%08X2B0229296E04", at.T, at.I)
	setToken(t, s, resume.TokenOf(data), bson.E{Key: "clusterTime", Value: at})
	s.SetConfig("lost_history", lostHistory)
	return s, topics
}

// With the policy halt, the relay reports the cause, keeps the lease, does not start at "now" and does not
// retry in a loop.
func TestTokenFromTheFutureHalts(t *testing.T) {
	t.Parallel()
	s, topics := newFutureScene(t, "halt")
	before := len(topics.AllRecords())
	p := s.StartRelay()
	p.WaitTookOver()
	s.WaitForStatus("halted", func(st kit.Status) bool { return st.State == "halted" && st.Reason != "" })
	if code, body := p.Get("/readyz"); code == 200 {
		t.Errorf("a halted relay is ready: %s", body)
	}
	topics.WaitForEnd()
	if n := len(topics.AllRecords()); n != before {
		t.Errorf("%d records appeared although the position is lost", n-before)
	}

	t.Log(s.ReadStatus().Reason)
}

// With the policy sweep, the outbox has the events that the stream cannot supply. Records after a gap may be
// repeated, and are then flagged.
func TestTokenFromTheFutureIsSwept(t *testing.T) {
	t.Parallel()
	s, topics := newFutureScene(t, "sweep")
	lost, _ := s.WatcherDocument().Lookup("clusterTime").Timestamp()
	p := s.StartRelay()
	p.WaitTookOver()
	checkSwept(t, s, topics)

	stacktest.Eventually(t, "the position belongs to the cluster's own history", func() bool {
		at, _ := s.WatcherDocument().Lookup("clusterTime").Timestamp()
		return at < lost-3600
	})

	for _, line := range p.ReadLines(0) {
		if line.Level == "ERROR" {
			t.Errorf("an error is logged: %s%s", line.Message, line.Attrs)
		}
	}
}

// Another list of collections changes the pipeline. The stream is opened by time, and no event of the old or
// the new collection is lost or repeated.
func TestWatchListChanged(t *testing.T) {
	t.Parallel()
	s, topics := newInterruptedScene(t)
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
	// Change the list back, after a kill: the read-back recognizes the records of a longer list.
	p.Kill()

	s.SetConfig("watch", []string{s.DB.Name() + ".outbox"})
	s.StartLoad(kit.Load{Events: 100}).WaitDone()
	s.StartRelay().WaitTookOver()
	s.CheckDelivery(topics)
}

// The position of an idle outbox moves with the stream while another collection is busy, so a successor opens
// the stream at a recent position.
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
		t.Fatal("the other collection got no writes")
	}

	v := history.WaitFor("a position after the writes of the neighbor", func(v kit.Version) bool { return !v.ClusterTime.Before(last) })
	if v.Epoch != began.Epoch {
		t.Errorf("epoch %d, want %d: the owner changed", v.Epoch, began.Epoch)
	}

	p.Kill()
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 2, 20))
	s.StartRelay().WaitTookOver()
	s.CheckDelivery(topics)
	history.CheckHistory()
}
