//go:build unix

package fault

import (
	"flag"
	"fmt"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

var long = flag.Bool("fault.long", false, "run the long loops as well")

func TestMain(m *testing.M) { kit.Main(m) }

// points are the crash points, each with the pass at which it kills: those on the way of the events a while into the
// load, those of a take-over at once.
var points = []string{
	"after-lease", "after-init", "after-barrier", "mid-read-back", "after-open",
	"after-getmore:12", "before-produce:9", "after-produce-before-ack:8", "after-ack-before-watermark:11",
	"before-checkpoint:3", "after-checkpoint:3", "mid-exception-write", "before-release", "after-release",
}

// Every owner dies in the middle of its work: the first by a SIGKILL from outside, then one at a crash point during or
// after its take-over, then another at another point, two in a row. Each point has its turn; all pairs are a part of the
// long run. Nothing may be lost, repeated or out of order.
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

// Every pair of crash points, one right after the other.
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

// killChain lets an owner die by SIGKILL, then one at each of the points, and then one deliver the rest.
func killChain(t *testing.T, at ...string) {
	s := kit.New(t, kit.Options{Set: quick(nil)})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	load := s.StartLoad(kit.Load{Rate: float64(rounds(80, 400))})
	first := s.StartRelay()
	first.WaitTookOver()
	topics.WaitDistinct(200)
	first.Kill()
	for i, point := range at {
		p := s.StartCrashing(point)
		switch {
		case strings.HasSuffix(point, "-release"):
			p.WaitTookOver()
			topics.WaitDistinct(s.Ledger.CountCommitted())
			p.Terminate()
		case strings.HasPrefix(point, "mid-exception"):
			s.AppendMalformed(fmt.Sprintf("bad-%d", i))
		}
		if !p.Killed() {
			t.Fatalf("it was to die at %s\n%s", point, p.ReadLog())
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

// A transaction of 10,000 events shares one time: an owner that dies in the middle of it leaves a successor to find out,
// event by event, what is there already.
func TestKillInTheMiddleOfAHugeTransaction(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: quick(nil)})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	events := make([]event.Event, 10_000)
	for i := range events {
		events[i] = kit.NewEvent("order", fmt.Sprintf("k%d", i%23), i, 100)
	}

	s.AppendEvents(s.Outbox(), events...)
	for _, point := range []string{"after-produce-before-ack:2", "after-ack-before-watermark:5", "after-checkpoint:1"} {
		s.StartCrashing(point).WaitExit()
	}

	s.StartRelay().WaitTookOver()
	t.Log(s.CheckDelivery(topics))
	history.CheckHistory()
}
