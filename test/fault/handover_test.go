//go:build unix

package fault

import (
	"fmt"
	"testing"

	"github.com/outrelay/outrelay/test/kit"
)

// rounds is how often a fault is repeated: a few times, or many in the long run.
func rounds(few, many int) int {
	if *long {
		return many
	}
	return few
}

// A graceful stop under load, again and again: the standby goes on at once, nothing is repeated.
func TestHandoverUnderLoad(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	owner := s.StartRelay()
	owner.WaitTookOver()
	load := s.StartLoad(kit.Load{Rate: float64(rounds(120, 1500))})
	for range rounds(3, 20) {
		standby := s.StartRelay()
		standby.WaitForLog("standing by")
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
	for _, v := range gaps(history.Versions()) {
		t.Log(v)
	}
}

// gaps says for how long nobody owned the watcher between one owner and the next.
func gaps(all []kit.Version) (out []string) {
	for i := 1; i < len(all); i++ {
		if a, b := all[i-1], all[i]; b.Epoch > a.Epoch {
			out = append(out, fmt.Sprintf("epoch %d: %s after the last word of epoch %d", b.Epoch, b.At.Sub(a.At), a.Epoch))
		}
	}
	return out
}

// An owner that sleeps through its lease (SIGSTOP) wakes in a world with another owner: it writes nothing more into any
// topic nor into MongoDB, and stands by.
func TestZombieWritesNothing(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: quick(nil)})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	owner := s.StartRelay()
	owner.WaitTookOver()
	load := s.StartLoad(kit.Load{Rate: float64(rounds(120, 1500))})
	for range rounds(2, 20) {
		standby := s.StartRelay()
		standby.WaitForLog("standing by")
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

// checkEpochs finds a record of a producer's earlier epoch behind one of a later epoch: a write of a zombie.
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
			t.Errorf("%s/%d: epoch %d at offset %d behind epoch %d at %d", r.Topic, r.Partition, r.Epoch, r.Offset, b.Epoch, b.Offset)
		}
		last[s] = r
	}
}
