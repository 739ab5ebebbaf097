//go:build unix

package fault

import (
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// Owners are killed one after the other while they sweep a collection that got a watched name. The position stays before that, so
// each of the next owners sweeps it again, and the last one loses nothing.
func TestN27_OwnersAreKilledWhileTheySweepACollection(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"that the configuration names later", "that is renamed"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"lease.checkpoint": "10ms", "start": "backlog"})})
			history := s.FollowWatcher()
			topics := s.ReadTopics()
			later := s.DB.Collection("later")
			rename := func(from, to string) {
				t.Helper()
				command := bson.D{{Key: "renameCollection", Value: s.DB.Name() + "." + from}, {Key: "to", Value: s.DB.Name() + "." + to}}
				if err := s.Client.Database("admin").RunCommand(t.Context(), command).Err(); err != nil {
					t.Fatal(err)
				}
			}
			appendLater := func(from, to int) {
				t.Helper()
				var events []event.Event
				for i := from; i < to; i++ {
					events = append(events, kit.NewEvent("order", fmt.Sprintf("later-%d", i%7), i, 50))
				}
				s.AppendEvents(later, events...)
			}

			// The position passes the inserts without the name.
			p := s.StartRelay()
			p.WaitTookOver()
			for i := range 20 {
				appendLater(100*i, 100*i+100)
			}
			s.StartLoad(kit.Load{Events: 200}).WaitDone()
			topics.WaitDistinct(200)
			p.Terminate()
			p.WaitExit()

			if name == "that is renamed" {
				rename("later", "archive")
				s.SetConfig("watch", []string{s.DB.Name() + ".outbox", s.DB.Name() + ".later"})
				p = s.StartRelay()
				p.WaitTookOver()
				p.Terminate()
				p.WaitExit()
				rename("archive", "later")
			}
			s.SetConfig("watch", []string{s.DB.Name() + ".outbox", s.DB.Name() + ".later"})
			live := s.StartLoad(kit.Load{Rate: steadyRate()})
			for i, at := range []string{"mid-sweep", "mid-sweep:100", "mid-sweep:1500", "mid-sweep:2000"} {
				if p := s.StartCrashing(at); !p.Killed() {
					t.Fatalf("the relay did not die at %s\n%s", at, p.ReadLog())
				}
				appendLater(2000+i*10, 2010+i*10)
			}

			s.StartRelay().WaitTookOver()
			live.Stop()
			checkSwept(t, s, topics)
			history.CheckHistory()
		})
	}
}
