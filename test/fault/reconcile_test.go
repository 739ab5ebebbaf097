//go:build unix

package fault

import (
	"fmt"
	"maps"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/kit"
)

// quick returns a configuration with short leases.
func shortLeases(more map[string]any) map[string]any {
	set := map[string]any{"lease.ttl": "1s", "lease.renew": "250ms"}
	for k, v := range more {
		set[k] = v
	}
	return set
}

// killOwners lets one owner after the other die at a crash point. Without -fault.long it uses half of the points.
func killOwners(t *testing.T, s *kit.Scene, points ...string) {
	t.Helper()
	for _, point := range points[:chooseRounds((len(points)+1)/2, len(points))] {
		if p := s.StartCrashing(point); !p.KilledByCrashPoint(kit.Patience) {
			t.Errorf("no owner died at %s", point)
		}
	}
}

// ageSetting limits the age of a record at the brokers. If it is shorter than the delivery of an event takes,
// the brokers reject each record individually.
const ageSetting = "message.timestamp.before.max.ms"

// Owners die while a topic is missing, and again while its parked events are delivered after it was created.
// Half of its events have a second topic.
func TestParkedTopicWhileOwnersDie(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}, Set: shortLeases(nil)})
	s.SetConfig("topics.rules", []any{map[string]any{
		"match": map[string]any{"aggregatetype": "both"}, "to": []string{s.TopicOf("order"), s.TopicOf("invoice")},
	}})

	s.Route = func(aggregateType string) []string {
		if aggregateType == "both" {
			return []string{s.TopicOf("order"), s.TopicOf("invoice")}
		}
		return []string{s.TopicOf(aggregateType)}
	}

	history := s.FollowWatcher()
	topics := s.ReadTopics("order", "invoice")
	loads := []*kit.RunningLoad{s.StartLoad(kit.Load{Rate: steadyRate()}), s.StartLoad(kit.Load{Rate: steadyRate(), Type: "invoice"}), s.StartLoad(kit.Load{Rate: steadyRate(), Type: "both", Prefix: "both-"})}
	p := s.StartRelay()
	p.WaitTookOver()
	s.WaitHeld(200)
	p.Kill()
	killOwners(t, s, "mid-waiting-write:3", "after-ack-before-position:20", "before-checkpoint:3")
	s.CreateTopic("invoice", 6, 1)
	killOwners(t, s, "mid-waiting-write", "after-produce-before-ack:12", "after-ack-before-position:40", "after-checkpoint:5", "mid-read-back")
	for range chooseRounds(1, 20) {
		p := s.StartRelay()
		p.WaitTookOver()
		topics.WaitDistinct(s.Ledger.CountCommitted() / 2)
		p.Kill()
	}

	for _, l := range loads {
		l.Stop()
	}

	s.StartRelay().WaitTookOver()
	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()
	history.CheckHistory()
}

// Owners die while thousands of scheduled events become due, next to other events with the same keys.
func TestScheduledWhileOwnersDie(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(nil)})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	n := chooseRounds(1500, 30_000)
	all := s.Schedule("order", n, 20, time.Now().Add(2*time.Second), time.Duration(chooseRounds(4, 60))*time.Second)
	box, err := outbox.New(s.DB)
	mustSucceed(t, err)
	cancelled := map[string]bool{}
	for i := 50; i < n; i += 97 {
		if err := box.Cancel(t.Context(), all[i].ID()); err == nil {
			id := all[i].ID().String()
			cancelled[id] = true
			s.Ledger.MarkCancelled(s.DB.Name()+".outbox", id)
		}
	}

	load := s.StartLoad(kit.Load{Rate: steadyRate()})
	killOwners(t, s, "after-claim", "before-scheduled-publish:200", "after-scheduled-publish:300", "after-produce-before-ack:30",
		"mid-claim-write:3", "after-ack-before-position:30")
	load.Stop()
	s.StartRelay().WaitTookOver()
	t.Logf("%s; %d cancelled", s.CheckDelivery(topics), len(cancelled))
	s.WaitNoneHeld()
	history.CheckHistory()
}

// An event that was sent outside of the order of the stream, and not recorded, is not sent again, even if its
// turn comes much later.
func TestScheduledSentButNotFinished(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(nil)})
	topics := s.ReadTopics()
	s.Schedule("order", 2000, 20, time.Now(), 0)
	killOwners(t, s, "mid-claim-write:2", "mid-claim-write", "mid-claim-write")
	s.AppendEvents(s.Outbox(), func() (l []event.Event) {
		for i := range 200 {
			l = append(l, kit.NewEvent("order", fmt.Sprintf("w%d-k%d", i%4, i%20), i, 50))
		}
		return l
	}()...)

	s.StartRelay().WaitTookOver()
	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()
	if n := s.CountOutbox(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}}); n > 0 {
		t.Errorf("%d envelopes are still scheduled, want 0", n)
	}
}

// Brokers reject records because of a setting of their topic, while owners die. Each failure counts as one
// attempt, and the key is blocked. When the topic accepts the records, all follow in order.
func TestRejectedRecordsWhileOwnersDie(t *testing.T) {
	stacktest.OnlyWith(t, "eight owners die one after the other", "fault.long")
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{
		Stack: stack, Types: []string{"order"},
		Set: shortLeases(map[string]any{"retry.base": "500ms", "retry.cap": "1s", "retry.max_attempts": 1000}),
	})
	s.CreateTopic("payment", 6, 1, kafka.ConfigEntry{ConfigName: ageSetting, ConfigValue: "1"})
	history := s.FollowWatcher()
	topics := s.ReadTopics("order", "payment")
	loads := []*kit.RunningLoad{s.StartLoad(kit.Load{Rate: steadyRate()}), s.StartLoad(kit.Load{Rate: steadyRate(), Type: "payment"})}
	killOwners(t, s, "mid-waiting-write:6", "after-ack-before-position:20", "mid-waiting-write:12", "before-checkpoint:3", "after-produce-before-ack:9")
	stacktest.Eventually(t, "some are rejected, some wait after them", func() bool { return s.CountHeld("retry") > 0 && s.CountHeld("blocked") > 0 })
	checkAttempts(t, s)
	loads[1].Stop()
	s.SetTopicConfig("payment", ageSetting, "86400000")
	killOwners(t, s, "mid-waiting-write", "after-produce-before-ack:5", "after-ack-before-position:15")
	loads[0].Stop()
	s.StartRelay().WaitTookOver()

	// On a busy machine a transaction marker is older than the setting allows too. The coordinator does not
	// repeat a rejected marker until its broker restarts, so the partitions of that transaction stay parked.
	broker := stack.Kafkas()[0]
	mustSucceed(t, broker.Kill())
	mustSucceed(t, broker.Restart(t.Context()))

	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()
	history.CheckHistory()
}

// checkAttempts compares the number of attempts of envelopes before a retry with their recorded failures.
func checkAttempts(t *testing.T, s *kit.Scene) {
	t.Helper()
	cur, err := s.State.Collection("waiting").Find(t.Context(), bson.D{{Key: "reason", Value: "retry"}})
	mustSucceed(t, err)
	var list []struct {
		ID       bson.RawValue `bson:"_id"`
		Attempts int           `bson:"attempts"`
		History  []bson.Raw    `bson:"history"`
	}

	mustSucceed(t, cur.All(t.Context(), &list))
	for _, d := range list {
		if d.Attempts < 1 || d.Attempts <= 50 && d.Attempts != len(d.History) {
			t.Errorf("%v: %d attempts with %d failures", d.ID, d.Attempts, len(d.History))
		}
	}
}

// Each delivered envelope is marked with its offset, or deleted, although owners die. Without that setting, no
// envelope is written to, not even one without a server timestamp, for ids of any kind.
func TestRecordedWhileOwnersDie(t *testing.T) {
	t.Parallel()
	for _, recording := range []string{"position", "mark", "delete"}[:chooseRounds(2, 3)] {
		t.Run(recording, func(t *testing.T) {
			t.Parallel()
			s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"recording": recording})})
			history := s.FollowWatcher()
			topics := s.ReadTopics("order", "late")
			s.Schedule("order", 300, 20, time.Now().Add(time.Second), 5*time.Second)
			loads := []*kit.RunningLoad{s.StartLoad(kit.Load{Rate: steadyRate()}), s.StartLoad(kit.Load{Rate: steadyRate(), Type: "late"})}
			killOwners(t, s, "after-ack-before-position:30", "before-checkpoint:3")
			insertForeign(t, s, 100, func(i int) any { return foreignID(i, time.Now(), "some") })
			killOwners(t, s, "mid-waiting-write:2", "after-produce-before-ack:20")
			s.CreateTopic("late", 3, 1)
			insertForeign(t, s, 100, func(i int) any { return foreignID(i, time.Now(), "more") })
			killOwners(t, s, "after-checkpoint:4", "after-ack-before-position:50")
			for _, l := range loads {
				l.Stop()
			}

			s.StartRelay().WaitTookOver()
			t.Log(s.CheckDelivery(topics))
			s.WaitNoneHeld()
			checkRecorded(t, s, topics, recording)
			history.CheckHistory()
		})
	}
}

// checkRecorded compares the deliveries recorded in the outbox with the topics.
func checkRecorded(t *testing.T, s *kit.Scene, topics *kit.Topics, recording string) {
	t.Helper()
	where := map[string]string{}
	for _, r := range topics.AllRecords() {
		where[r.Header("id")] = fmt.Sprintf("%s/%d@%d", r.Topic, r.Partition, r.Offset)
	}

	unmarked := bson.D{{Key: "sentAt", Value: nil}}
	switch recording {
	case "delete":
		stacktest.Eventually(t, "nothing is left", func() bool { return s.CountOutbox(bson.D{}) == 0 })
		return
	case "mark":
		stacktest.Eventually(t, "everything is marked", func() bool { return s.CountOutbox(unmarked) == 0 })
	case "position":
		written := bson.D{{Key: "aggregateid", Value: bson.Regex{Pattern: "^foreign"}}, {Key: "$or", Value: bson.A{
			bson.D{{Key: "sentAt", Value: bson.D{{Key: "$ne", Value: nil}}}}, bson.D{{Key: "ts", Value: bson.D{{Key: "$ne", Value: nil}}}},
		}}}
		if n := s.CountOutbox(written); n > 0 {
			t.Errorf("%d delivered envelopes without a stamp were changed", n)
		}
		return
	}

	cur, err := s.Outbox().Find(t.Context(), bson.D{})
	mustSucceed(t, err)
	wrong, n := 0, 0
	for cur.Next(t.Context()) {
		var d struct {
			ID   string `bson:"_id"`
			Sent []struct {
				Topic     string
				Partition int
				Offset    int64
			}
		}
		id := cur.Current.Lookup("_id")
		mustSucceed(t, bson.Unmarshal(cur.Current, &struct {
			Sent *[]struct {
				Topic     string
				Partition int
				Offset    int64
			}
		}{&d.Sent}))

		d.ID = idText(id)
		n++
		got := ""
		if len(d.Sent) == 1 {
			got = fmt.Sprintf("%s/%d@%d", d.Sent[0].Topic, d.Sent[0].Partition, d.Sent[0].Offset)
		}
		if got != where[d.ID] {
			if wrong++; wrong <= 5 {
				t.Errorf("%s is marked as sent to %v, but is at %s", d.ID, d.Sent, where[d.ID])
			}
		}
	}

	mustSucceed(t, cur.Err())
	t.Logf("%d envelopes are marked, %d wrongly", n, wrong)
}

// text returns an id in the format of the record header.
func idText(v bson.RawValue) string {
	if _, b, ok := v.BinaryOK(); ok && len(b) == 16 {
		return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
	}
	if id, ok := v.ObjectIDOK(); ok {
		return id.Hex()
	}
	return v.StringValue()
}

// resumable matches the message of a replay that has waited in vain for a watcher.
var resumable = regexp.MustCompile(`outrelay replay --resume ([\w-]+)`)

// firstReplay is the number of the deliveries of the first replay (waiting.NextDelivery). A requeue adds 1 to that of its letter.
const firstReplay = "1000"

// Dead letters are requeued and delivered envelopes replayed, while owners die. Each is delivered exactly once
// more, with the right flag.
func TestRequeueAndReplayWhileOwnersDie(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}, Set: shortLeases(map[string]any{"retry.max_attempts": 1})})
	s.CreateTopic("payment", 6, 1, kafka.ConfigEntry{ConfigName: ageSetting, ConfigValue: "1"})
	history := s.FollowWatcher()
	topics := s.ReadTopics("order", "payment")
	n := chooseRounds(300, 3000)
	events := make([]event.Event, n)
	for i := range events {
		events[i] = kit.NewEvent("payment", fmt.Sprintf("p%d", i), i, 50)
	}

	s.AppendEvents(s.Outbox(), events...)
	s.StartLoad(kit.Load{Events: n, PerTx: 5}).WaitDone()
	end := operationTime(t, s)
	p := s.StartRelay()
	p.WaitTookOver()
	topics.WaitDistinct(n)
	dead := s.State.Collection("letters")
	letters := int64(0)
	// The first attempt has the time of the commit, which was before the relay started, so the brokers reject
	// nearly all records. A retry would have the time of its sending, and a fast machine sends within the
	// allowed millisecond.
	stacktest.Eventually(t, "payments are dead, or delivered", func() bool {
		letters, _ = dead.CountDocuments(t.Context(), bson.D{})
		return letters > int64(n/50) && s.CountHeld() == 0 && int(letters)+len(topics.AllRecords()) >= 2*n
	})

	s.SetTopicConfig("payment", ageSetting, "86400000")
	// A replay starts with events that the position has passed.
	history.WaitFor("a position after all of it", func(v kit.Version) bool { return !v.ClusterTime.Before(end) })
	p.Kill()
	before := topics.Deliveries()
	type outcome struct {
		code   int
		output string
	}
	replayed, requeued := make(chan outcome, 1), make(chan outcome, 1)
	config := s.WriteConfig("operator", "off")
	command := func(to chan<- outcome, args ...string) {
		code, out, errOut := kit.RunCommand(t, nil, append(args, "--config", config)...)
		to <- outcome{code, out + errOut}
	}

	go command(replayed, "replay", "--from", "20m", "--aggregate-type", "order", "--yes", "--json")
	go command(requeued, "dead", "requeue", "--all", "--yes", "--json")
	// An owner that dies at its first write may have sent everything, so the next one would send nothing.
	killOwners(t, s, "after-produce-before-ack:2", "mid-waiting-write", "mid-waiting-write", "before-checkpoint:3")
	s.StartRelay().WaitTookOver()
	for name, c := range map[string]chan outcome{"replay": replayed, "dead requeue": requeued} {
		o := <-c
		// If no owner lived long enough, continue the job.
		if again := resumable.FindStringSubmatch(o.output); o.code != 0 && again != nil {
			t.Logf("%s: %s", name, o.output)
			o.code, o.output, _ = kit.RunCommand(t, nil, "replay", "--resume", again[1], "--yes", "--json", "--config", config)
		}
		if o.code != 0 {
			t.Errorf("%s: exit code %d\n%s", name, o.code, o.output)
		} else {
			t.Logf("%s: %s", name, o.output)
		}
	}

	s.WaitNoneHeld()
	topics.WaitForEnd()
	wrong := 0
	want := func(id string, of map[string]int) {
		if got := topics.Deliveries()[id]; !maps.Equal(got, of) {
			if wrong++; wrong < 6 {
				t.Errorf("deliveries of %s: %v, want %v", id, got, of)
			}
		}
	}

	again := 0
	for _, e := range s.Ledger.ExpectedEntries() {
		switch {
		case strings.HasSuffix(e.Topics[0], ".order"):
			want(e.ID, map[string]int{"": 1, firstReplay: 1})
			again++
		case before[e.ID] == nil:
			want(e.ID, map[string]int{"1": 1})
			again++
		default:
			want(e.ID, map[string]int{"": 1})
		}
	}

	for _, r := range topics.AllRecords() {
		replay := strings.HasSuffix(r.Topic, ".order") && r.Header(record.HeaderDelivery) == firstReplay
		if flagged := r.Header(record.HeaderRedelivered) != ""; flagged != replay {
			t.Errorf("%s at %s/%d@%d: flagged %v, replayed %v", r.Header("id"), r.Topic, r.Partition, r.Offset, flagged, replay)
			break
		}
	}

	t.Logf("%d letters requeued, %d deliveries again, %d wrong", letters, again, wrong)
	if left, err := dead.CountDocuments(t.Context(), bson.D{{Key: "requeued", Value: nil}}); wrong > 0 {
		n, _ := dead.CountDocuments(t.Context(), bson.D{})
		t.Logf("%d of %d letters were not requeued, %v", left, n, err)
	}

	history.CheckHistory()
}

// An owner with parked, retried and scheduled envelopes is frozen for longer than its lease. Afterwards it
// writes to no topic and no document.
func TestZombieWithWaitingEnvelopes(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(nil)})
	history := s.FollowWatcher()
	topics := s.ReadTopics("order", "late")
	owner := s.StartRelay()
	owner.WaitTookOver()
	loads := []*kit.RunningLoad{s.StartLoad(kit.Load{Rate: steadyRate()}), s.StartLoad(kit.Load{Rate: steadyRate(), Type: "late"})}
	s.WaitHeld(100)
	s.CreateTopic("late", 3, 1)
	for range chooseRounds(1, 15) {
		s.Schedule("order", 400, 20, time.Now().Add(500*time.Millisecond), 2*time.Second)
		var standby *kit.Process
		owner, standby = s.StartStandby(owner)
		stacktest.Eventually(t, "some of them were sent", func() bool {
			return s.CountOutbox(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$exists", Value: true}}}}) < 380
		})

		owner.Freeze()
		standby.WaitTookOver()
		topics.WaitDistinct(s.Ledger.CountCommitted()/2 + 100)
		owner.Continue()
		owner.WaitForLog("lease lost")
		topics.WaitDistinct(s.Ledger.CountCommitted()/2 + 200)
		owner.Kill()
		owner = standby
	}

	for _, l := range loads {
		l.Stop()
	}

	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()
	history.CheckHistory()
	checkEpochs(t, topics)
}
