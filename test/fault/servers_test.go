//go:build unix

package fault

import (
	"strings"
	"testing"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

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

// threeBrokers is a cluster that notices a dead broker within 3 s.
func threeBrokers(t *testing.T) *devstack.Stack {
	t.Helper()
	return stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 3, Quick: true, Kafka: devstack.KafkaOptions{
		Props: map[string]string{"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"},
	}})
}

// The primary of three members dies under load, and comes back: the relay follows the new one, and every commit that was
// confirmed is delivered.
func TestPrimaryKilled(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Mongods: 3, Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{Stack: stack})
	history := s.Follow()
	topics := s.Read()
	s.Start().TookOver()
	s.Start().Says("standing by")
	load := s.Write(kit.Load{Rate: 400, Tolerant: true})
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

// A broker that leads partitions dies under load, comes back, and gets a leader moved to it.
func TestBrokerKilledUnderLoad(t *testing.T) {
	stack := threeBrokers(t)
	s := kit.New(t, kit.Options{Stack: stack, Replicas: 3, Topic: []kafka.ConfigEntry{{ConfigName: "min.insync.replicas", ConfigValue: "2"}}})
	history := s.Follow()
	topics := s.Read()
	owner := s.Start()
	owner.TookOver()
	load := s.Write(kit.Load{Rate: 600})
	topic := s.Topic("order")
	for i := range rounds(1, 8) {
		topics.Distinct(s.Ledger.Committed() + 100)
		leader, err := stack.Leader(t.Context(), topic, i%6)
		must(t, err)
		must(t, leader.Kill())
		topics.Distinct(s.Ledger.Committed() + 300)
		must(t, leader.Restart(t.Context()))
		topics.Distinct(s.Ledger.Committed() + 100)
		must(t, stack.MoveLeader(t.Context(), topic, (i+1)%6, leader.ID()))
		topics.Distinct(s.Ledger.Committed() + 100)
		// And a take-over by kill while the cluster settles.
		owner.Kill()
		owner = s.Start()
		owner.TookOver()
	}
	load.Stop()
	t.Log(s.Check(topics))
	history.Check()
	checkEpochs(t, topics)
}

// Partitions without a leader, with one replica each on the broker that died: the others flow until the budget is full; a
// take-over does not wait for them, nor does a zombie write into them when they come back.
func TestLeaderlessPartitionsAndAZombie(t *testing.T) {
	stack := threeBrokers(t)
	s := kit.New(t, kit.Options{Stack: stack})
	sick(t, stack, s, func() *devstack.Member {
		leader, err := stack.Leader(t.Context(), s.Topic("order"), 0)
		must(t, err)
		return leader
	})
}

// Partitions under min ISR: three replicas, all of them needed, and one broker dead.
func TestPartitionsUnderMinISRAndAZombie(t *testing.T) {
	stack := threeBrokers(t)
	s := kit.New(t, kit.Options{
		Stack: stack, Replicas: 3, Partitions: 3, Types: []string{"order"},
		Topic: []kafka.ConfigEntry{{ConfigName: "min.insync.replicas", ConfigValue: "3"}},
	})
	sick(t, stack, s, func() *devstack.Member {
		leader, err := stack.Leader(t.Context(), s.Topic("order"), 0)
		must(t, err)
		return leader
	})
}

// sick lets a broker die under load, then the owner freeze, a standby take over beside the sick partitions, the broker
// come back, and the frozen owner wake up.
func sick(t *testing.T, stack *devstack.Stack, s *kit.Scene, victim func() *devstack.Member) {
	t.Helper()
	history := s.Follow()
	topics := s.Read()
	owner := s.Start()
	owner.TookOver()
	load := s.Write(kit.Load{Rate: 300})
	for range rounds(1, 8) {
		standby := s.Start()
		standby.Says("standing by")
		topics.Distinct(s.Ledger.Committed() + 100)
		broker := victim()
		must(t, broker.Kill())
		kit.Eventually(t, "a blocked target in status", func() bool { return len(s.Status().Blocked) > 0 })
		owner.Stop()
		standby.TookOver()
		kit.Eventually(t, "a blocked target in the status of the successor", func() bool {
			st := s.Status()
			return st.Node == standby.Node && len(st.Blocked) > 0
		})
		must(t, broker.Restart(t.Context()))
		owner.Continue()
		owner.Says("lease lost")
		topics.Distinct(s.Ledger.Committed())
		kit.Eventually(t, "nothing blocked", func() bool { return len(s.Status().Blocked) == 0 })
		owner.Kill()
		owner = standby
	}
	load.Stop()
	t.Log(s.Check(topics))
	history.Check()
	checkEpochs(t, topics)
}

// Every error that MongoDB may give to the reader: it goes on where it was, with the same lease.
func TestStreamErrors(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{Stack: stack})
	topics := s.Read()
	p := s.Start()
	p.TookOver()
	load := s.Write(kit.Load{Rate: 300})
	codes := []int32{6, 43, 50, 89, 91, 189, 237, 262, 10107, 11600, 11602, 13435}
	for _, code := range codes {
		for _, command := range []string{"getMore", "aggregate"} {
			topics.Distinct(s.Ledger.Committed() + 20)
			fail(t, s.Client, "outrelay stream "+p.Node, bson.D{{Key: "times", Value: 2}}, bson.D{{Key: "failCommands", Value: bson.A{command, "getMore"}}, {Key: "errorCode", Value: code}})
		}
	}
	for _, label := range []bson.D{
		{{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "closeConnection", Value: true}},
		{{Key: "failCommands", Value: bson.A{"getMore"}}, {Key: "errorCode", Value: int32(1)}, {Key: "errorLabels", Value: bson.A{"ResumableChangeStreamError"}}},
	} {
		topics.Distinct(s.Ledger.Committed() + 20)
		fail(t, s.Client, "outrelay stream "+p.Node, bson.D{{Key: "times", Value: 3}}, label)
	}
	topics.Distinct(s.Ledger.Committed() + 100)
	load.Stop()
	t.Log(s.Check(topics))
	if st := s.Status(); st.Epoch != 1 {
		t.Errorf("epoch %d: an error of the stream cost the lease", st.Epoch)
	}
	if strings.Contains(p.Log(), "halted") {
		t.Error("halted")
	}
}

// fail makes a command fail for the connections of one application and returns when it has failed so often.
func fail(t *testing.T, client *mongo.Client, app string, mode, data bson.D) {
	t.Helper()
	// Numbered by the server: the count says how often it was entered.
	set := func(mode any) int64 {
		var res struct {
			Count int64 `bson:"count"`
		}
		cmd := bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: mode}, {Key: "data", Value: append(bson.D{{Key: "appName", Value: app}}, data...)}}
		if err := client.Database("admin").RunCommand(t.Context(), cmd).Decode(&res); err != nil {
			t.Fatal(err)
		}
		return res.Count
	}
	times := mode[0].Value.(int)
	before := set(mode)
	wait := bson.D{{Key: "waitForFailPoint", Value: "failCommand"}, {Key: "timesEntered", Value: before + int64(times)}, {Key: "maxTimeMS", Value: 20_000}}
	if err := client.Database("admin").RunCommand(t.Context(), wait).Err(); err != nil {
		t.Fatalf("the fail point was not reached %d times: %v", times, err)
	}
}

// Kafka stands still with its connections open, longer than a lease lasts: the owner keeps the lease, memory stays
// bounded, and all is delivered when it goes on.
func TestKafkaStandsStill(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{Stack: stack, Set: map[string]any{"kafka.request_timeout": "2s"}})
	topics := s.Read()
	p := s.Start()
	p.TookOver()
	load := s.Write(kit.Load{Rate: 500})
	broker := stack.Kafkas()[0]
	for range rounds(1, 5) {
		topics.Distinct(s.Ledger.Committed() + 200)
		must(t, broker.Pause())
		load.Reached(s.Ledger.Committed() + 2500)
		must(t, broker.Resume())
		topics.Distinct(s.Ledger.Committed())
	}
	load.Stop()
	t.Log(s.Check(topics))
	if st := s.Status(); st.Epoch != 1 {
		t.Errorf("epoch %d: silence of Kafka cost the lease", st.Epoch)
	}
}
