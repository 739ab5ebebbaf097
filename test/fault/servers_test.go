//go:build unix

package fault

import (
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The primary of three members dies under load, and comes back: the relay follows the new one, and every commit that was
// confirmed is delivered.
func TestPrimaryKilled(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Mongods: 3})
	s := kit.New(t, kit.Options{Stack: stack})
	history := s.Follow()
	topics := s.Read()
	s.Start().TookOver()
	s.Start().Says("standing by")
	load := s.Write(kit.Load{Rate: 80, Tolerant: true})
	for range rounds(1, 8) {
		topics.Distinct(len(topics.All()) + 300)
		p, err := stack.Primary(t.Context())
		must(t, err)
		must(t, p.Kill())
		topics.Distinct(len(topics.All()) + 300)
		must(t, p.Restart(t.Context()))
	}
	load.Stop()
	t.Logf("%s; %d appends failed", s.Check(topics), load.Failed())
	history.Check()
}

// Every error that MongoDB may give to the reader: it goes on where it was, with the same lease.
func TestStreamErrors(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: map[string]any{"lease.ttl": "10s", "lease.renew": "1s"}}) // only an error is to cost it
	topics := s.Read()
	p := s.Start()
	p.TookOver()
	began := s.Epoch()
	load := s.Write(kit.Load{Rate: 70})
	codes := []int32{6, 43, 50, 89, 91, 189, 237, 262, 10107, 11600, 11602, 13435}
	for _, code := range codes {
		for _, command := range []string{"getMore", "aggregate"} {
			topics.Distinct(s.Ledger.Committed() + 20)
			stacktest.FailTimes(t, s.Client, "outrelay stream "+p.Node, 2, bson.D{{Key: "failCommands", Value: bson.A{command, "getMore"}}, {Key: "errorCode", Value: code}})
		}
	}
	for _, label := range []bson.D{
		{{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "closeConnection", Value: true}},
		{{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "errorCode", Value: int32(1)}, {Key: "errorLabels", Value: bson.A{"ResumableChangeStreamError"}}},
	} {
		topics.Distinct(s.Ledger.Committed() + 20)
		stacktest.FailTimes(t, s.Client, "outrelay stream "+p.Node, 3, label)
	}
	topics.Distinct(s.Ledger.Committed() + 100)
	load.Stop()
	t.Log(s.Check(topics))
	if now := s.Epoch(); now != began {
		t.Errorf("epoch %d, and %d before: an error of the stream cost the lease", now, began)
	}
	if strings.Contains(p.Log(), "halted") {
		t.Error("halted")
	}
}

// Kafka stands still with its connections open, longer than a lease lasts: the owner keeps the lease, memory stays
// bounded, and all is delivered when it goes on.
func TestKafkaStandsStill(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{Stack: stack, Set: map[string]any{"kafka.request_timeout": "2s"}})
	topics := s.Read()
	p := s.Start()
	p.TookOver()
	began := s.Epoch()
	load := s.Write(kit.Load{Rate: 60})
	broker := stack.Kafkas()[0]
	for range rounds(1, 5) {
		topics.Distinct(s.Ledger.Committed() + 200)
		must(t, broker.Pause())
		load.Reached(s.Ledger.Committed() + 300)
		must(t, broker.Resume())
		topics.Distinct(s.Ledger.Committed())
	}
	load.Stop()
	t.Log(s.Check(topics))
	if now := s.Epoch(); now != began {
		t.Errorf("epoch %d, and %d before: silence of Kafka cost the lease", now, began)
	}
}
