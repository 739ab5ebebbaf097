//go:build unix

package fault

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

var long = flag.Bool("fault.long", false, "run the long loops as well")

func TestMain(m *testing.M) {
	// The long tests keep the processors busy, and several of them start servers. If six of them share two
	// processors, MongoDB sometimes does not respond for seconds, and leases of two seconds expire.
	flag.Parse()
	if *long {
		stacktest.Wide(2)
	}
	kit.Main(m)
}

// points are the crash points, each with the pass at which it kills. Points on the path of the events kill some
// time into the load, points of a takeover at the first pass.
var points = []string{
	"after-lease", "after-init", "after-barrier", "mid-read-back", "after-open",
	"after-getmore:12", "before-produce:9", "after-produce-before-ack:8", "after-ack-before-position:11",
	"before-checkpoint:3", "after-checkpoint:3", "mid-claim-write", "before-release", "after-release",
}

// Each owner dies while it works: the first by SIGKILL from outside, the next at a crash point during or after
// its takeover, and another at a different point right after it. Each point is used once; -fault.long uses all
// pairs. No event may be lost, repeated or out of order.
func TestKillAtEveryCrashPoint(t *testing.T) {
	t.Parallel()
	half := len(points) / 2
	for i, at := range points[:half] {
		t.Run(fmt.Sprintf("%s,%s", at, points[half+i]), func(t *testing.T) {
			t.Parallel()
			killChain(t, at, points[half+i])
		})
	}
}

// Each pair of crash points, one right after the other.
func TestKillAtEveryPairOfCrashPoints(t *testing.T) {
	stacktest.OnlyWith(t, "about 200 pairs of crash points", "fault.long")
	for _, a := range points {
		for _, b := range points {
			t.Run(fmt.Sprintf("%s,%s", a, b), func(t *testing.T) {
				t.Parallel()
				killChain(t, a, b)
			})
		}
	}
}

// killChain kills an owner with SIGKILL, then one owner at each of the points. The last owner delivers the
// rest.
func killChain(t *testing.T, at ...string) {
	s := kit.New(t, kit.Options{Set: shortLeases(nil)})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	load := s.StartLoad(kit.Load{Rate: float64(chooseRounds(30, 400))})
	first := s.StartRelay()
	first.WaitTookOver()
	topics.WaitDistinct(200)
	first.Kill()
	for _, point := range at {
		p := s.StartCrashing(point)
		switch {
		case strings.HasSuffix(point, "-release"):
			p.WaitTookOver()
			topics.WaitDistinct(s.Ledger.CountCommitted())
			p.Terminate()
		case strings.HasPrefix(point, "mid-claim-write"):
			// A scheduled event is claimed before it is sent.
			s.Schedule("order", 1, 1, time.Now(), time.Second)
		}
		if !p.Killed() {
			t.Fatalf("the relay did not die at %s\n%s", point, p.ReadLog())
		}
		t.Logf("killed at %s with %d events committed", point, s.Ledger.CountCommitted())
	}

	last := s.StartRelay()
	last.WaitTookOver()
	load.Stop()
	t.Log(s.CheckDelivery(topics))
	s.CheckDead()
	history.CheckHistory()
	last.Terminate()
	if code := last.WaitExit(); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}
}

// All events of a transaction with 10,000 events share one time. If an owner dies in the middle of it, its
// successor has to find out for each event whether it was sent.
func TestKillInTheMiddleOfAHugeTransaction(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(nil)})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	// A request has at most 4 MiB, so each owner before the last one has several of them to send.
	events := make([]event.Event, 10_000)
	for i := range events {
		events[i] = kit.NewEvent("order", fmt.Sprintf("k%d", i%23), i, 1500)
	}

	s.AppendEvents(s.Outbox(), events...)
	for _, point := range []string{"after-produce-before-ack:2", "after-ack-before-position:5", "after-checkpoint:1"} {
		s.StartCrashing(point).WaitExit()
	}

	s.StartRelay().WaitTookOver()
	t.Log(s.CheckDelivery(topics))
	history.CheckHistory()
}
