//go:build unix

package fault

import (
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

func mustSucceed(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The primary of three members is killed under load and started again. The relay uses the new primary, and each
// confirmed commit is delivered.
func TestPrimaryKilled(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Mongods: 3})
	s := kit.New(t, kit.Options{Stack: stack})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	owner := s.StartRelay()
	owner.WaitTookOver()
	s.StartStandby(owner)
	load := s.StartLoad(kit.Load{Rate: steadyRate(), Tolerant: true})
	for range chooseRounds(1, 8) {
		topics.WaitDistinct(len(topics.AllRecords()) + 300)
		p, err := stack.Primary(t.Context())
		mustSucceed(t, err)
		mustSucceed(t, p.Kill())
		topics.WaitDistinct(len(topics.AllRecords()) + 300)
		mustSucceed(t, p.Restart(t.Context()))
	}

	load.Stop()
	t.Logf("%s; %d appends failed", s.CheckDelivery(topics), load.CountFailed())
	history.CheckHistory()
}

// After each error that MongoDB may return to the reader, the relay continues from its position with the same
// lease.
func TestStreamErrors(t *testing.T) {
	stacktest.OnlyWith(t, "each of 24 errors takes seconds", "slow")
	t.Parallel()
	// The lease is long, so that only an error may end it.
	s := kit.New(t, kit.Options{Set: map[string]any{"lease.ttl": "10s", "lease.renew": "1s"}})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	began := s.CurrentEpoch()
	load := s.StartLoad(kit.Load{Rate: steadyRate()})
	codes := []int32{6, 43, 50, 89, 91, 189, 237, 262, 10107, 11600, 11602, 13435}
	for _, code := range codes {
		for _, command := range []string{"getMore", "aggregate"} {
			topics.WaitDistinct(s.Ledger.CountCommitted() + 20)
			stacktest.FailTimes(t, s.Client, "outrelay stream "+p.Node, 2, bson.D{{Key: "failCommands", Value: bson.A{command, "getMore"}}, {Key: "errorCode", Value: code}})
		}
	}

	for _, label := range []bson.D{
		{{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "closeConnection", Value: true}},
		{{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "errorCode", Value: int32(1)}, {Key: "errorLabels", Value: bson.A{"ResumableChangeStreamError"}}},
	} {
		topics.WaitDistinct(s.Ledger.CountCommitted() + 20)
		stacktest.FailTimes(t, s.Client, "outrelay stream "+p.Node, 3, label)
	}

	topics.WaitDistinct(s.Ledger.CountCommitted() + 100)
	load.Stop()
	t.Log(s.CheckDelivery(topics))
	if now := s.CurrentEpoch(); now != began {
		t.Errorf("epoch %d, want %d: an error of the stream ended the lease", now, began)
	}
	if strings.Contains(p.ReadLog(), "halted") {
		t.Error("the relay halted")
	}
}

// Kafka is frozen with open connections for longer than a lease. The owner keeps the lease, its memory stays
// bounded, and all events are delivered afterwards.
func TestKafkaStandsStill(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{Stack: stack, Set: map[string]any{"kafka.request_timeout": "2s"}})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	began := s.CurrentEpoch()
	load := s.StartLoad(kit.Load{Rate: steadyRate()})
	broker := stack.Kafkas()[0]
	for range chooseRounds(1, 5) {
		topics.WaitDistinct(s.Ledger.CountCommitted() + 200)
		mustSucceed(t, broker.Pause())
		load.WaitCommitted(s.Ledger.CountCommitted() + 300)
		mustSucceed(t, broker.Resume())
		topics.WaitDistinct(s.Ledger.CountCommitted())
	}

	load.Stop()
	t.Log(s.CheckDelivery(topics))
	if now := s.CurrentEpoch(); now != began {
		t.Errorf("epoch %d, want %d: the outage of Kafka ended the lease", now, began)
	}
}
