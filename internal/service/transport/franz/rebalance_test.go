package franz_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/franz"
)

const patience = 2 * time.Minute

// member is a member of a group. The test decides when its changes are done.
type member struct {
	t       *testing.T
	changes chan transport.Change
	g       chan transport.Generation
	stop    func()
}

func (m *member) Serve(ctx context.Context, g transport.Generation) error {
	m.g <- g
	for {
		select {
		case c := <-g.Changes():
			m.changes <- c
		case <-ctx.Done():
			return nil
		}
	}
}

func (m *member) Fault(err error) { m.t.Logf("the transport reports: %v", err) }

// join joins the group with an instance id, or with none.
func join(t *testing.T, group, topic, instance string) *member {
	t.Helper()
	tr, err := franz.New(transport.Config{
		Brokers: stacktest.Brokers(t), SessionTimeout: 20 * time.Second, HeartbeatInterval: 100 * time.Millisecond,
		RebalanceTimeout: 20 * time.Second, JoinBackoff: 100 * time.Millisecond, MaxWait: 100 * time.Millisecond,
		WatchPartitions: time.Second, InstanceID: instance,
	})
	if err != nil {
		t.Fatal(err)
	}

	m := &member{t: t, changes: make(chan transport.Change, 10), g: make(chan transport.Generation, 10)}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- tr.Join(ctx, group, []string{topic}, m) }()
	m.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Join: %v", err)
		}
		done <- nil
	}

	t.Cleanup(m.stop)
	return m
}

// next returns the next change.
func (m *member) next() transport.Change {
	m.t.Helper()
	select {
	case c := <-m.changes:
		return c
	case <-time.After(patience):
		m.t.Fatalf("no change within %v", patience)
		return transport.Change{}
	}
}

// quiet fails the test if the member has a change within the time of some heartbeats.
func (m *member) quiet() {
	m.t.Helper()
	select {
	case c := <-m.changes:
		m.t.Errorf("the group was rebalanced: %+v", c)
	case <-time.After(2 * time.Second):
	}
}

func numbers(c transport.Change) []int32 {
	var list []int32
	for _, tp := range c.Added {
		list = append(list, tp.Partition)
	}
	for _, tp := range c.Revoked {
		list = append(list, tp.Partition)
	}
	slices.Sort(list)
	return list
}

// While a member gives partitions away, it continues to read and commit the partitions that it keeps.
// Only the others move.
func TestARebalanceStopsOnlyThePartitionsThatMove(t *testing.T) {
	t.Parallel()
	topic, group := stacktest.Topic(t, 4), stacktest.Name(t)
	one := join(t, group, topic, "")
	g := <-one.g
	all := one.next()
	all.Done()
	if got := numbers(all); !slices.Equal(got, []int32{0, 1, 2, 3}) {
		t.Fatalf("the first member has the partitions %v", got)
	}

	two := join(t, group, topic, "")
	moving := one.next()
	if len(moving.Revoked) != 2 || len(moving.Added) != 0 {
		t.Fatalf("a second member takes %+v, want 2 of 4 partitions", moving)
	}
	for _, tp := range all.Added {
		if slices.Contains(moving.Revoked, tp) {
			continue
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if _, err := g.Fetch(ctx, tp, transport.FetchFrom{}, 1<<20); err != nil {
			t.Errorf("a partition that stays cannot be read: %v", err)
		}
		if err := g.Commit(ctx, map[transport.TopicPartition]transport.GroupOffset{tp: {}}); err != nil {
			t.Errorf("a partition that stays cannot be committed: %v", err)
		}
		cancel()
	}
	select {
	case c := <-two.changes:
		t.Errorf("the second member got %+v before the first one gave it back", c)
	default:
	}

	moving.Done()
	got := two.next()
	got.Done()
	if !slices.Equal(numbers(got), numbers(moving)) {
		t.Errorf("the second member got %v, want %v", numbers(got), numbers(moving))
	}
	one.quiet()

	two.stop()
	back := one.next()
	back.Done()
	if !slices.Equal(numbers(back), numbers(moving)) || len(back.Revoked) != 0 {
		t.Errorf("after the second member has left, the first one got %+v", back)
	}
}

// A static member that restarts within the session timeout gets its partitions back. The others notice nothing.
func TestAStaticMemberRestartsWithoutARebalance(t *testing.T) {
	t.Parallel()
	topic, group := stacktest.Topic(t, 4), stacktest.Name(t)
	one, two := join(t, group, topic, "one"), join(t, group, topic, "two")
	g := <-one.g
	owned := map[*member][]int32{}
	for len(owned[one]) != 2 || len(owned[two]) != 2 {
		for _, m := range []*member{one, two} {
			select {
			case c := <-m.changes:
				for _, tp := range c.Added {
					owned[m] = append(owned[m], tp.Partition)
				}
				owned[m] = slices.DeleteFunc(owned[m], func(p int32) bool {
					return slices.Contains(c.Revoked, transport.TopicPartition{Topic: topic, Partition: p})
				})
				c.Done()
			case <-time.After(10 * time.Millisecond):
			}
		}
		if t.Context().Err() != nil {
			t.Fatalf("the members have %v", owned)
		}
	}
	one.quiet()
	before := g.ID()

	two.stop()
	again := join(t, group, topic, "two")
	back := again.next()
	back.Done()
	slices.Sort(owned[two])
	if got := numbers(back); !slices.Equal(got, owned[two]) {
		t.Errorf("after the restart the member has %v, before it had %v", got, owned[two])
	}
	one.quiet()
	if after := g.ID(); after != before {
		t.Errorf("the group went from generation %d to %d", before, after)
	}
}

// A second process with the same instance id takes the place of the first one, whose commits are rejected.
func TestAStaticMemberIsFencedByItsSuccessor(t *testing.T) {
	t.Parallel()
	topic, group := stacktest.Topic(t, 1), stacktest.Name(t)
	one := join(t, group, topic, "same")
	g := <-one.g
	c := one.next()
	c.Done()

	two := join(t, group, topic, "same")
	taken := two.next()
	taken.Done()
	err := g.Commit(t.Context(), map[transport.TopicPartition]transport.GroupOffset{c.Added[0]: {}})
	if !errors.Is(err, transport.ErrGenerationOver) {
		t.Errorf("a commit of the fenced member: %v, want ErrGenerationOver", err)
	}
	two.stop()
	one.stop()
}

// A member that the group has removed gives its partitions up without a commit, and joins again.
func TestAMemberThatWasRemovedJoinsAgain(t *testing.T) {
	t.Parallel()
	topic, group := stacktest.Topic(t, 1), stacktest.Name(t)
	one := join(t, group, topic, "")
	g := <-one.g
	c := one.next()
	c.Done()

	client, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	groups, err := kadm.NewClient(client).DescribeGroups(t.Context(), group)
	if err != nil || len(groups[group].Members) != 1 {
		t.Fatalf("the group has %+v, %v", groups, err)
	}
	req := kmsg.NewPtrLeaveGroupRequest()
	req.Group = group
	gone := kmsg.NewLeaveGroupRequestMember()
	gone.MemberID = groups[group].Members[0].MemberID
	req.Members = append(req.Members, gone)
	if _, err := req.RequestWith(t.Context(), client); err != nil {
		t.Fatal(err)
	}

	select {
	case <-one.g:
	case <-time.After(patience):
		t.Fatal("the member does not join again")
	}
	err = g.Commit(t.Context(), map[transport.TopicPartition]transport.GroupOffset{c.Added[0]: {}})
	if !errors.Is(err, transport.ErrGenerationOver) {
		t.Errorf("a commit of the first membership: %v, want ErrGenerationOver", err)
	}
	again := one.next()
	again.Done()
	if len(again.Added) != 1 {
		t.Errorf("after it has joined again, the member has %+v", again)
	}
}
