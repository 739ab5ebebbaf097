//go:build unix

package fault

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// Nodes join, leave and die under load. Slots move from node to node, and no event is lost, repeated or out of
// order.
func TestN28_SlotsGoRoundWhileNodesDie(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"slots": 4})})
	topics := s.ReadTopics()
	load := s.StartLoad(kit.Load{Rate: steadyRate(), Workers: 6, Keys: 10})
	a := s.StartRelay()
	s.WaitShared(map[*kit.Process]int{a: 4})
	b := s.StartRelay()
	s.WaitShared(map[*kit.Process]int{a: 2, b: 2})
	for range chooseRounds(1, 15) {
		a.Kill()
		s.WaitShared(map[*kit.Process]int{b: 4})
		a = s.StartRelay()
		s.WaitShared(map[*kit.Process]int{a: 2, b: 2})
		b.Terminate()
		s.WaitShared(map[*kit.Process]int{a: 4})
		killOwners(t, s, "after-produce-before-ack:20", "after-checkpoint:7")
		b = s.StartRelay()
		s.WaitShared(map[*kit.Process]int{a: 2, b: 2})
	}

	load.Stop()
	t.Log(s.CheckDelivery(topics))
}

// A watcher whose owner was killed is resliced, and one attempt dies at each crash point of the command, with
// events in each state. The new owners of the keys find the records that the old owner had sent but not
// recorded.
func TestN28_ResliceWithEverythingInEveryState(t *testing.T) {
	stacktest.OnlyWith(t, "it takes half a minute of both cores", "slow")
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}, Set: shortLeases(nil)})
	topics := s.ReadTopics("order", "invoice")
	loads := []*kit.RunningLoad{s.StartLoad(kit.Load{Rate: steadyRate(), Keys: 10}), s.StartLoad(kit.Load{Rate: steadyRate(), Type: "invoice", Prefix: "i-"})}
	s.Schedule("order", 300, 20, time.Now().Add(2*time.Second), time.Duration(chooseRounds(15, 60))*time.Second)
	p := s.StartRelay()
	p.WaitTookOver()
	s.WaitHeld(50)
	last := 1
	for i, n := range []int{2, 1, 3, 2, 1}[:chooseRounds(2, 5)] {
		s.AppendMalformed(fmt.Sprintf("bad-%d", i))
		if i%2 == 0 {
			p.Kill()
		}

		slots := fmt.Sprint(n)
		deaths := []string{"reslice-paused", "reslice-fenced", "reslice-done"}
		// Without -fault.long, use each point in one of the two rounds.
		if !*long {
			deaths = [][]string{{deaths[0], deaths[2]}, {deaths[1]}}[i]
		}

		for _, point := range deaths {
			if c := s.RunCrashing(point, "reslice", "--slots", slots, "--yes"); !c.Killed() {
				t.Fatalf("reslice did not die at %s\n%s", point, c.ReadLog())
			}
		}

		if code, out, errOut := s.RunCommand("reslice", "--slots", slots, "--yes", "--json"); code != 0 {
			t.Fatalf("reslice: exit code %d, want 0\n%s%s", code, out, errOut)
		}
		if got := s.ReadSlots(); len(got) != n {
			t.Fatalf("%d slots became %v, want %d slots", last, got, n)
		}

		p.Terminate()
		s.SetConfig("slots", n)
		p = s.StartRelay()
		s.WaitShared(map[*kit.Process]int{p: n})
		last = n
		topics.WaitDistinct(s.Ledger.CountCommitted() / 3)
	}

	s.CreateTopic("invoice", 6, 1)
	for _, l := range loads {
		l.Stop()
	}

	stacktest.Eventually(t, "all that was scheduled is sent", func() bool {
		return s.CountOutbox(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}}) == 0
	})

	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()
	s.CheckDead()
}

// If owners do not drain, the slots stay unchanged and continue.
func TestN28_ResliceIsRejectedWhereNothingDrains(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"lease.drain": "30s"})})
	topics := s.ReadTopics()
	load := s.StartLoad(kit.Load{Rate: steadyRate()})
	p := s.StartRelay()
	p.WaitTookOver()
	topics.WaitDistinct(50)
	// The frozen owner does not renew its lease, so extend the lease here. A renewal that the owner sent before may still arrive.
	p.Freeze()
	extended := 0
	stacktest.Eventually(t, "the lease is extended", func() bool {
		filter := bson.D{{Key: "_id", Value: kit.WatcherID}, {Key: "expiresAt", Value: bson.D{{Key: "$lt", Value: time.Now().Add(time.Minute)}}}}
		result, err := s.State.Collection("watchers").UpdateOne(t.Context(), filter,
			bson.D{{Key: "$set", Value: bson.D{{Key: "expiresAt", Value: time.Now().Add(time.Hour)}}}})
		if err != nil {
			t.Fatal(err)
		}
		extended++
		if result.ModifiedCount > 0 {
			extended = 0
		}
		return extended == 10
	})

	code, _, errOut := s.RunCommand("reslice", "--slots", "2", "--yes", "--wait", "2s")
	if code != 1 || !strings.Contains(errOut, "owners did not drain and release within 2s") {
		t.Fatalf("exit code %d, want a rejection\n%s", code, errOut)
	}

	p.Continue()
	if got := s.ReadSlots(); len(got) != 1 {
		t.Errorf("slots: %v", got)
	}

	load.Stop()
	t.Log(s.CheckDelivery(topics))
}
