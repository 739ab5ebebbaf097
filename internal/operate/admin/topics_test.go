package admin_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// storeReport stores the report of the owner of a slot.
func (f *office) storeReport(slot string, r activity.Report) {
	f.t.Helper()
	if err := nodes.NewHistory(f.state.Collection("history")).SaveActivity(f.t.Context(), slot, r); err != nil {
		f.t.Fatal(err)
	}
}

// lastHour returns the parts of an hour that end with these numbers.
func lastHour(last ...int32) []int32 { return append(make([]int32, 20-len(last)), last...) }

func sum(list []int32) (total int32) {
	for _, n := range list {
		total += n
	}
	return total
}

func topicOf(t *testing.T, list admin.TopicList, name string) admin.TopicFigures {
	t.Helper()
	for _, topic := range list.Topics {
		if topic.Topic == name {
			return topic
		}
	}
	t.Fatalf("topic %q is not in %+v", name, list.Topics)
	return admin.TopicFigures{}
}

// The topics contain the reports of the owners of all slots, the waiting events, and the dead letters of both
// sides.
func TestTopicsOfAWatcher(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	if list, err := f.newDesk().Activity().Topics(t.Context()); err != nil || len(list.Topics) != 0 || list.At != nil {
		t.Fatalf("before the first report: %+v, %v", list, err)
	}

	// A desk that has counted would show its last figures.
	k := f.newDesk()
	k.HandlerLetters = f.op.HandlerLetters
	now := time.Now().UTC().Truncate(time.Millisecond)
	f.storeReport("orders/0of2", activity.Report{At: now, Others: activity.Others{Topics: 2, Rate: 1}, Topics: []activity.Topic{
		{Topic: "orders", Rate: 30, Bytes: 3000, P50MS: 1, P99MS: 8, Records: 300, LastAt: now.Add(-time.Second), Partition: 1, Offset: 7, Recent: lastHour(30, 300), RecentP50: lastHour(100, 1000), RecentP99: lastHour(200, 8000)},
		{Topic: "quiet", LastAt: now.Add(-time.Hour), Offset: 3},
	}})
	f.storeReport("orders/1of2", activity.Report{At: now.Add(-time.Second), Topics: []activity.Topic{
		{Topic: "orders", Rate: 10, Bytes: 500, P50MS: 5, P99MS: 20, Records: 100, LastAt: now, Partition: 4, Offset: 9, Recent: lastHour(10, 100), RecentP50: lastHour(50, 5000), RecentP99: lastHour(100, 20_000)},
	}})
	f.insertWaiting(f.a, "1", "parked", "k1", "audit", "quiet")
	f.moveToDead(f.a, record.RecordRejected, letterOf("dead1", planted))
	f.moveToDead(f.a, record.RecordRejected, letterOf("dead2", planted))
	f.requeueAndSend("dead2")
	f.giveUp(f.a, deadletter.DefaultCollection, "h1", "m1")
	f.giveUp(f.a, "billing_dead", "h2", "m1")

	list, err := k.Activity().Topics(t.Context())
	if err != nil || len(list.Topics) != 3 || list.Topics[0].Topic != "orders" || list.Topics[1].Topic != "quiet" || list.LettersMore {
		t.Fatalf("%+v, %v", list, err)
	}
	if list.At == nil || !list.At.Equal(now) || list.Others != (activity.Others{Topics: 2, Rate: 1}) {
		t.Errorf("%+v", list)
	}
	o := topicOf(t, list, "orders")
	if o.Rate != 40 || o.BytesRate != 3500 || o.P50MS != 2 || o.P99MS != 20 || o.LastPartition != 4 || o.LastOffset != 9 || !o.LastAt.Equal(now) || o.Dead != 1 || o.HandlerDead != 2 {
		t.Errorf("%+v", o)
	}
	// Between the report and the query, another part may have begun.
	if total, last := sum(o.Recent), len(o.Recent)-1; last != 19 || total != 440 || o.Recent[last]+o.Recent[last-1] < 400 {
		t.Errorf("records of the last hour: %v", o.Recent)
	}
	if p50, p99 := slices.Max(o.RecentP50MS), slices.Max(o.RecentP99MS); p50 != 5 || p99 != 20 || len(o.RecentP50MS) != 20 {
		t.Errorf("latency of the last hour: p50 %v, p99 %v", o.RecentP50MS, o.RecentP99MS)
	}
	if q := topicOf(t, list, "quiet"); q.Waiting != 1 || q.OldestS < 50 || q.Rate != 0 || q.LastOffset != 3 {
		t.Errorf("%+v", q)
	}
	if a := topicOf(t, list, "audit"); a.Waiting != 1 || a.LastAt != nil {
		t.Errorf("%+v", a)
	}
}

// The list is bounded. A topic whose events wait stays in it, however many topics are busier.
func TestTopicsAreBounded(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	now := time.Now()
	var busy []activity.Topic
	for i := range 150 {
		busy = append(busy, activity.Topic{Topic: fmt.Sprint("busy-", i), Rate: float64(1 + i), LastAt: now})
	}
	f.storeReport("orders/0of1", activity.Report{At: now, Topics: busy})
	f.insertWaiting(f.a, "1", "parked", "k1", "stuck")

	list, err := f.newDesk().Activity().Topics(t.Context())
	if err != nil || len(list.Topics) != 100 || list.Topics[0].Topic != "stuck" || list.Topics[1].Topic != "busy-149" || list.Others.Topics != 51 || list.Others.Rate < 51*52/2 {
		t.Fatalf("%d topics, the first %+v, others %+v, %v", len(list.Topics), list.Topics[0], list.Others, err)
	}
	if s := topicOf(t, list, "stuck"); s.Waiting != 1 {
		t.Errorf("%+v", s)
	}
}

func TestRecentEventsOfAWatcher(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	now := time.Now().UTC().Truncate(time.Millisecond)
	f.storeReport("orders/0of2", activity.Report{At: now, Events: []activity.Event{
		{ID: "e3", Type: "OrderPlaced", Key: "k", Collection: "shop.outbox", Topic: "orders", Partition: 1, Offset: 3, CommittedAt: now.Add(-4 * time.Millisecond), AckedAt: now},
		{ID: "e1", Topic: "audit", AckedAt: now.Add(-2 * time.Second)},
	}})
	f.storeReport("orders/1of2", activity.Report{At: now, Events: []activity.Event{{ID: "e2", Topic: "orders", AckedAt: now.Add(-time.Second), CommittedAt: now}}})

	all, err := f.newDesk().Activity().Recent(t.Context(), "")
	if err != nil || len(all.Events) != 3 || all.Events[0].ID != "e3" || all.Events[1].ID != "e2" || all.Events[2].ID != "e1" {
		t.Fatalf("%+v, %v", all, err)
	}
	if e := all.Events[0]; e.LatencyMS == nil || *e.LatencyMS != 4 || e.Type != "OrderPlaced" || e.Key != "k" || e.Collection != "shop.outbox" || e.Partition != 1 || e.Offset != 3 {
		t.Errorf("%+v", e)
	}
	if e := all.Events[1]; e.LatencyMS == nil || *e.LatencyMS != 0 {
		t.Errorf("a clock that is ahead: %+v", e)
	}
	if e := all.Events[2]; !e.CommittedAt.IsZero() || e.LatencyMS != nil {
		t.Errorf("without a commit time: %+v", e)
	}

	some, err := f.newDesk().Activity().Recent(t.Context(), "audit")
	if err != nil || len(some.Events) != 1 || some.Events[0].ID != "e1" {
		t.Errorf("%+v, %v", some, err)
	}
}
