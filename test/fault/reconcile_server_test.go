//go:build unix

package fault

import (
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// Kafka is away with a backlog of tens of thousands of events, while some envelopes wait for other reasons. The
// outage uses up no attempts, and makes no envelope dead or parked. All events are in order after it.
func TestKafkaAwayWithABacklog(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{Stack: stack, Set: map[string]any{"kafka.request_timeout": "2s", "retry.base": "200ms", "retry.cap": "500ms"}})
	topics := s.ReadTopics()
	owner := s.StartRelay()
	owner.WaitTookOver()
	s.StartLoad(kit.Load{Events: 500}).WaitDone()
	topics.WaitDistinct(s.Ledger.CountCommitted())
	broker := stack.Kafkas()[0]
	mustSucceed(t, broker.Kill())
	away := time.Now()
	s.Schedule("order", 500, 20, time.Now().Add(time.Second), 5*time.Second)
	appendBulk(t, s, chooseRounds(4_000, 50_000))
	length := time.Duration(chooseRounds(15, 600)) * time.Second
	attempted := bson.D{{Key: "attempts", Value: bson.D{{Key: "$gt", Value: 0}}}}
	for killed := false; time.Since(away) < length; {
		if held, tried := s.CountHeld("parked", "retry"), s.CountState("waiting", attempted); held+tried > 0 {
			t.Errorf("%d envelopes wait because Kafka is away, %d have used attempts, want 0", held, tried)
			break
		}

		// An owner parks what it cannot send for five seconds.
		if !killed && time.Since(away) > 10*time.Second {
			owner.Kill()
			owner, killed = s.StartRelay(), true
		}
		waitFor(t, time.Second)
	}

	mustSucceed(t, broker.Restart(t.Context()))
	back := time.Now()
	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()
	t.Logf("away for %v, all delivered %v after it was back", back.Sub(away).Round(time.Second), time.Since(back).Round(time.Second))
	if dead := s.CountState("letters", bson.D{}); dead > 0 {
		t.Errorf("%d dead letters, want 0", dead)
	}
}

// waitFor waits for d, while the fault lasts.
func waitFor(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
		t.Fatal(t.Context().Err())
	}
}

// appendBulk appends n events with 50 keys in transactions of 1,000.
func appendBulk(t *testing.T, s *kit.Scene, n int) {
	t.Helper()
	for i := 0; i < n; i += 1000 {
		events := make([]event.Event, min(1000, n-i))
		for j := range events {
			events[j] = kit.NewEvent("order", fmt.Sprintf("bulk-%d", (i+j)%50), i+j, 60)
		}
		s.AppendEvents(s.Outbox(), events...)
	}
}

// A takeover with more parked envelopes than the limit of gates for keys is fast and needs little memory. All
// events of each key stay in order, including events appended in the meantime.
func TestTakeOverWithManyParked(t *testing.T) {
	stacktest.OnlyWith(t, "more envelopes are parked than there are gates for keys", "fault.long")
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}, Set: map[string]any{"log.level": "info"}})
	history := s.FollowWatcher()
	topics := s.ReadTopics("order", "late")
	s.StartRelay().WaitTookOver()
	s.StartLoad(kit.Load{Events: 50, Type: "late"}).WaitDone()
	stacktest.Eventually(t, "something is parked", func() bool { return s.CountHeld("parked") > 0 })
	n := chooseRounds(5_000, 150_000)
	begin := time.Now()
	for i := 0; i < n; i += 1000 {
		events := make([]event.Event, 1000)
		for j := range events {
			events[j] = kit.NewEvent("late", fmt.Sprintf("many-%d", (i+j)%(n*9/10)), i+j, 60)
		}
		s.AppendEvents(s.Outbox(), events...)
	}

	stacktest.EventuallyIn(t, 10*kit.Patience, "all of it is parked", func() bool { return s.CountHeld() >= n })
	t.Logf("%d were parked after %v", n, time.Since(begin).Round(time.Millisecond))
	for _, p := range s.Processes() {
		p.Kill()
	}

	begin = time.Now()
	p := s.StartRelay()
	p.WaitTookOver()
	t.Logf("took over %v after the kill (ttl 2 s)", time.Since(begin).Round(time.Millisecond))
	t.Logf("resident memory behind it: %d MiB", p.ResidentMemory()>>20)
	load := s.StartLoad(kit.Load{Rate: steadyRate(), Type: "late"})
	flow := s.StartLoad(kit.Load{Rate: steadyRate()})
	begin = time.Now()
	s.CreateTopic("late", 6, 1)
	stacktest.EventuallyIn(t, 10*kit.Patience, "half is delivered", func() bool { return s.CountHeld() < n/2 })
	p.Kill()
	s.StartRelay().WaitTookOver()
	stacktest.EventuallyIn(t, 10*kit.Patience, "next to nothing is parked", func() bool { return s.CountHeld() < 100 })
	t.Logf("delivered in %v, with a kill on the way", time.Since(begin).Round(time.Millisecond))
	load.Stop()
	flow.Stop()
	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()
	history.CheckHistory()
}

// setTimestamps sets the timestamps of all envelopes to a time, with a different time for each key: the
// purge uses ranges of timestamps.
func setTimestamps(t *testing.T, s *kit.Scene, to bson.Timestamp) {
	t.Helper()
	var keys []string
	mustSucceed(t, s.Outbox().Distinct(t.Context(), "aggregateid", bson.D{}).Decode(&keys))
	for i, key := range keys {
		at := bson.Timestamp{T: to.T, I: to.I - uint32(i)}
		_, err := s.Outbox().UpdateMany(t.Context(), bson.D{{Key: "aggregateid", Value: key}}, bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: at}}}})
		mustSucceed(t, err)
	}
}

// The purge runs while owners die and envelopes wait. It never removes an envelope that was not sent or that
// waits. The test sets the timestamps back, because the purge keeps everything younger than two minutes. Other writers insert
// envelopes without a timestamp, whose ids contain a time that is as old.
func TestPurgeWhileOwnersDie(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"retention": "1m", "purge.interval": "1s", "purge.batch": 10})})
	history := s.FollowWatcher()
	topics := s.ReadTopics("order", "late")
	loads := []*kit.RunningLoad{s.StartLoad(kit.Load{Rate: steadyRate()}), s.StartLoad(kit.Load{Rate: steadyRate(), Type: "late"})}
	p := s.StartRelay()
	p.WaitTookOver()
	s.WaitHeld(50)
	s.Schedule("order", 200, 20, time.Now().Add(4*time.Second), 4*time.Second)
	anHourAgo := time.Now().Add(-time.Hour)
	old := bson.Timestamp{T: uint32(anHourAgo.Unix()), I: 1000}
	setTimestamps(t, s, old)
	insertForeign(t, s, 60, func(i int) any { return foreignID(i, anHourAgo, "some") })
	p.Kill()
	killOwners(t, s, "mid-purge:3", "mid-purge:10", "after-ack-before-position:30")
	s.CreateTopic("late", 3, 1)
	insertForeign(t, s, 60, func(i int) any { return foreignID(i, anHourAgo, "more") })
	killOwners(t, s, "after-produce-before-ack:20")
	for _, l := range loads {
		l.Stop()
	}

	s.StartRelay().WaitTookOver()
	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()
	stacktest.Eventually(t, "the old envelopes are gone", func() bool {
		stamped := bson.D{{Key: "ts", Value: bson.D{{Key: "$lte", Value: old}}}}
		unstamped := bson.D{{Key: "ts", Value: nil}, {Key: "_id", Value: bson.D{{Key: "$type", Value: "objectId"}}}}
		return s.CountOutbox(stamped)+s.CountOutbox(unstamped) == 0
	})

	history.CheckHistory()
}
