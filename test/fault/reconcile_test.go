//go:build unix

package fault

import (
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/kit"
)

// quick are leases that a test need not wait long for.
func quick(more map[string]any) map[string]any {
	set := map[string]any{"lease.ttl": "1s", "lease.renew": "250ms"}
	for k, v := range more {
		set[k] = v
	}
	return set
}

// die lets one owner after the other die, each at a crash point, or after a while if it never comes there.
func die(t *testing.T, s *kit.Scene, points ...string) {
	t.Helper()
	for _, point := range points {
		p := s.StartCrashing(point)
		t.Logf("%s: reached %v", point, p.KilledWithin(8*time.Second))
	}
}

// A topic is missing while owners die, is made, and owners die while what was parked is delivered. Half of what is for it
// is for another topic as well.
func TestParkedTopicWhileOwnersDie(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}, Set: quick(nil)})
	s.Set("topics.rules", []any{map[string]any{
		"match": map[string]any{"aggregatetype": "both"}, "to": []string{s.Topic("order"), s.Topic("invoice")},
	}})
	s.Route = func(aggregateType string) []string {
		if aggregateType == "both" {
			return []string{s.Topic("order"), s.Topic("invoice")}
		}
		return []string{s.Topic(aggregateType)}
	}
	history := s.Follow()
	topics := s.Read("order", "invoice")
	loads := []*kit.Writing{s.Write(kit.Load{Rate: 200}), s.Write(kit.Load{Rate: 100, Type: "invoice"}), s.Write(kit.Load{Rate: 100, Type: "both", Prefix: "both-"})}
	p := s.Start()
	p.TookOver()
	kit.Eventually(t, "something is parked", func() bool { return s.Held("parked") > 200 })
	p.Kill()
	die(t, s, "mid-exception-write:3", "after-ack-before-watermark:20", "before-checkpoint:4")
	s.CreateTopic("invoice", 6, 1)
	die(t, s, "after-produce-before-ack:12", "mid-exception-write:4", "after-ack-before-watermark:40", "after-checkpoint:5", "mid-read-back")
	for range rounds(1, 20) {
		p := s.Start()
		p.TookOver()
		topics.Distinct(s.Ledger.Committed() / 2)
		p.Kill()
	}
	for _, l := range loads {
		l.Stop()
	}
	s.Start().TookOver()
	t.Log(s.Check(topics))
	s.NoneHeld()
	history.Check()
}

// Thousands become due while owners die, with events of the same keys beside them.
func TestScheduledWhileOwnersDie(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: quick(nil)})
	history := s.Follow()
	topics := s.Read()
	n := rounds(3000, 30_000)
	all := s.Schedule("order", n, 20, time.Now().Add(2*time.Second), time.Duration(rounds(6, 60))*time.Second)
	box, err := outbox.New(s.DB)
	must(t, err)
	cancelled := map[string]bool{}
	for i := 50; i < n; i += 97 {
		if err := box.Cancel(t.Context(), all[i].ID()); err == nil {
			id := all[i].ID().String()
			cancelled[id] = true
			s.Ledger.Dead(s.DB.Name()+".outbox", id)
		}
	}
	load := s.Write(kit.Load{Rate: 200})
	die(t, s, "after-claim:3", "before-scheduled-publish:200", "after-scheduled-publish:300", "after-produce-before-ack:30",
		"mid-exception-write:3", "after-ack-before-watermark:30")
	load.Stop()
	s.Start().TookOver()
	t.Logf("%s; %d cancelled", s.Check(topics), len(cancelled))
	s.NoneHeld()
	history.Check()
}

// What was sent outside of the stream's order and not written down is not sent again, however late its turn comes.
func TestScheduledSentButNotFinished(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: quick(nil)})
	topics := s.Read()
	s.Schedule("order", 2000, 20, time.Now(), 0)
	die(t, s, "mid-exception-write:1", "mid-exception-write:1", "mid-exception-write:2")
	s.Append(s.Outbox(), func() (l []event.Event) {
		for i := range 200 {
			l = append(l, kit.Event("order", fmt.Sprintf("w%d-k%d", i%4, i%20), i, 50))
		}
		return l
	}()...)
	s.Start().TookOver()
	t.Log(s.Check(topics))
	s.NoneHeld()
	if n := s.Count(bson.D{{Key: "claim", Value: bson.D{{Key: "$exists", Value: true}}}}); n > 0 {
		t.Errorf("%d envelopes bear a claim", n)
	}
}
