package pipeline

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// followerLog is a Follower that keeps the notifications.
type followerLog struct {
	mu   sync.Mutex
	list []string
}

func (h *followerLog) Acked(tp record.TopicPartition, offset int64) {
	h.appendEntry(fmt.Sprintf("%s/%d@%d", tp.Topic, tp.Partition, offset))
}

func (h *followerLog) NotSent(topic, state string) {
	h.appendEntry(fmt.Sprint(topic, " ", state, " false"))
}

func (h *followerLog) Rejected(topic, class string) {
	h.appendEntry(fmt.Sprint(topic, " ", class, " true"))
}

func (h *followerLog) appendEntry(s string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.list = append(h.list, s)
}

func TestAFollowerGetsEachRecordOnce(t *testing.T) {
	t.Parallel()
	d, s, m := newTestDispatcher(t, Config{})
	s.reject["bad"] = &record.Rejection{Class: record.MessageTooLarge, Reason: "3 MB, limit 1 MB"}
	s.hold = map[string]error{"parked": record.ErrParked}
	var one, other followerLog
	it := &Item{CommitMS: 1, Follow: &one, Raw: []byte{5, 0, 0, 0, 0}}
	for _, topic := range []string{"a", "bad", "parked", "late"} {
		it.Records = append(it.Records, record.Record{Topic: topic})
	}
	if err := d.Deliver(t.Context(), it); err != nil {
		t.Fatal(err)
	}

	for _, in := range []*Item{{CommitMS: 1, Follow: &other, Records: []record.Record{{Topic: "a"}}}, itemOfSize("a", 1)} {
		if err := d.Deliver(t.Context(), in); err != nil {
			t.Fatal(err)
		}
	}

	d.Acked(record.TopicPartition{Topic: "a", Partition: 2}, 40, []record.Ticket{0, 1, 2}, 0)
	d.Withdrawn([]record.Withdrawn{{Ticket: 0, Topic: "late", Rejection: &record.Rejection{Class: record.RecordRejected}}})
	m.storeQueued()
	slices.Sort(one.list)
	want := []string{"a/2@40", "bad message_too_large true", "late record_rejected true", "parked " + string(waiting.Parked) + " false"}
	if diff := cmp.Diff(want, one.list); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"a/2@41"}, other.list); diff != "" {
		t.Error(diff)
	}
	if n := d.followers.count.Load(); n != 0 || len(d.followers.byTicket) != 0 {
		t.Errorf("%d are still followed", n)
	}
}

func TestFollowingNobodyAllocatesNothing(t *testing.T) {
	var f followers
	tickets := make([]record.Ticket, 512)
	if n := testing.AllocsPerRun(100, func() { f.notifyAcked(record.TopicPartition{Topic: "a"}, 0, tickets) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A delivery that is traced and sampled reports to both.
func TestAGroupOfFollowersGetsTheSame(t *testing.T) {
	t.Parallel()
	var one, two followerLog
	g := group{&one, &two}
	g.Acked(record.TopicPartition{Topic: "a"}, 7)
	g.NotSent("b", "parked")
	g.Rejected("c", "malformed")
	if want := []string{"a/0@7", "b parked false", "c malformed true"}; !slices.Equal(one.list, want) || !slices.Equal(two.list, want) {
		t.Errorf("%v and %v, want %v", one.list, two.list, want)
	}
}
