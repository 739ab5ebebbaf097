//go:build unix

package fault

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/test/kit"
)

// chooseRounds returns how often a fault is repeated: few times, or many times with -fault.long.
func chooseRounds(few, many int) int {
	if *long {
		return many
	}
	return few
}

// steadyRate is the load of most tests, in events per second: the events go on while something breaks. Several tests run at once, so
// that a higher load would make the short form slower without breaking anything else.
func steadyRate() float64 { return float64(chooseRounds(30, 80)) }

// A graceful stop under load is repeated. The standby takes over at once, and no event is repeated.
func TestHandoverUnderLoad(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: map[string]any{"lease.ttl": "20s"}})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	owner := s.StartRelay()
	owner.WaitTookOver()
	load := s.StartLoad(kit.Load{Rate: float64(chooseRounds(60, 1500))})
	for range chooseRounds(3, 20) {
		var standby *kit.Process
		owner, standby = s.StartStandby(owner)
		topics.WaitDistinct(s.Ledger.CountCommitted() + 200)
		owner.Terminate()
		standby.WaitTookOver()
		if code := owner.WaitExit(); code != 0 {
			t.Errorf("%s: exit code %d after SIGTERM", owner.Node, code)
		}
		owner = standby
	}

	load.Stop()
	t.Log(s.CheckDelivery(topics))
	history.CheckHistory()
	checkReleased(t, history.Versions(), 10*time.Second)
}

// checkReleased fails the test if an owner acquired the lease later than limit after the last write of the owner before.
func checkReleased(t *testing.T, all []kit.Version, limit time.Duration) {
	t.Helper()
	for i := 1; i < len(all); i++ {
		if a, b := all[i-1], all[i]; b.Epoch > a.Epoch && b.At.Sub(a.At) > limit {
			t.Errorf("epoch %d began %s after the last write of epoch %d", b.Epoch, b.At.Sub(a.At), a.Epoch)
		}
	}
}

// An owner that is frozen for longer than its lease (SIGSTOP) continues after another node has taken over. It
// mustSucceed not write to any topic or to MongoDB, and becomes a standby.
func TestZombieWritesNothing(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(nil)})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	owner := s.StartRelay()
	owner.WaitTookOver()
	load := s.StartLoad(kit.Load{Rate: float64(chooseRounds(60, 1500))})
	for range chooseRounds(2, 20) {
		var standby *kit.Process
		owner, standby = s.StartStandby(owner)
		topics.WaitDistinct(s.Ledger.CountCommitted() + 100)
		owner.Freeze()
		standby.WaitTookOver()
		topics.WaitDistinct(s.Ledger.CountCommitted() + 100)
		owner.Continue()
		owner.WaitForLog("lease lost")
		topics.WaitDistinct(s.Ledger.CountCommitted() + 100)
		owner.Kill()
		owner = standby
	}

	load.Stop()
	t.Log(s.CheckDelivery(topics))
	history.CheckHistory()
	checkEpochs(t, topics)
}

// checkEpochs fails the test for each record with an earlier producer epoch than a previous record: the write
// of a zombie.
func checkEpochs(t *testing.T, topics *kit.Topics) {
	t.Helper()
	type sender struct {
		topic     string
		partition int32
		producer  int64
	}

	last := map[sender]*kit.Record{}
	for _, r := range topics.AllRecords() {
		s := sender{r.Topic, r.Partition, r.Producer}
		if b := last[s]; b != nil && b.Epoch > r.Epoch {
			t.Errorf("%s/%d: epoch %d at offset %d after epoch %d at %d", r.Topic, r.Partition, r.Epoch, r.Offset, b.Epoch, b.Offset)
		}
		last[s] = r
	}
}
