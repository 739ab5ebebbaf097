package franz_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/franz"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
)

// owner counts the partitions of a member.
type owner struct {
	t      *testing.T
	counts chan int
	faults chan error
}

func newOwner(t *testing.T) *owner {
	t.Helper()
	return &owner{t: t, counts: make(chan int, 1000), faults: make(chan error, 1000)}
}

func (o *owner) Serve(ctx context.Context, g transport.Generation) error {
	n := len(g.Partitions())
	for {
		o.counts <- n
		select {
		case c := <-g.Changes():
			n += len(c.Added) - len(c.Revoked)
			c.Done()
		case <-ctx.Done():
			o.counts <- 0
			return nil
		}
	}
}

func (o *owner) Fault(err error) { o.faults <- err }

// await waits until the member has n partitions.
func (o *owner) await(n int) {
	o.t.Helper()
	for late := time.After(patience); ; {
		select {
		case got := <-o.counts:
			if got == n {
				return
			}
		case <-late:
			o.t.Fatalf("the member never had %d partitions", n)
		}
	}
}

// An exclusive group may have members of both libraries. The member with the highest priority has all partitions, and
// another member takes over.
func TestAnExclusiveGroupOfBothLibraries(t *testing.T) {
	t.Parallel()
	topic, group := stacktest.Topic(t, 3), stacktest.Name(t)
	start := func(priority int32, open func(cfg transport.Config) (transport.Transport, error)) (*owner, func()) {
		tr, err := open(transport.Config{
			Brokers: stacktest.Brokers(t), SessionTimeout: 20 * time.Second, HeartbeatInterval: 100 * time.Millisecond,
			JoinBackoff: 100 * time.Millisecond, WatchPartitions: time.Second, Exclusive: true, Priority: priority,
		})
		if err != nil {
			t.Fatal(err)
		}
		o := newOwner(t)
		ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
		done := make(chan error, 1)
		go func() { done <- tr.Join(ctx, group, []string{topic}, o) }()
		stop := func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Join: %v", err)
			}
			done <- nil
		}
		t.Cleanup(stop)
		return o, stop
	}
	withFranz := func(cfg transport.Config) (transport.Transport, error) { return franz.New(cfg) }
	withKafkaGo := func(cfg transport.Config) (transport.Transport, error) { return kafkago.New(cfg) }

	low, _ := start(1, withKafkaGo)
	low.await(3)
	high, stop := start(2, withFranz)
	high.await(3)
	low.await(0)
	lowest, _ := start(0, withFranz)
	stop()
	low.await(3)
	for len(lowest.counts) > 0 {
		if n := <-lowest.counts; n != 0 {
			t.Errorf("the member with the lowest priority has %d partitions", n)
		}
	}
}

// For all bytes of a listener or of another member of the group, the member stays alive and reports the problem.
func TestHostileBrokersAreReported(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	cluster.ControlKey(int16(kmsg.SyncGroup), func(req kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		resp := req.ResponseKind().(*kmsg.SyncGroupResponse)
		resp.MemberAssignment = stacktest.HugeArray(2)
		return resp, nil, true
	})
	for name, c := range map[string]struct{ addr, want string }{
		"versions":         {stacktest.Hostile(t, stacktest.HugeVersions), "does not speak the Kafka protocol"},
		"metadata":         {stacktest.Hostile(t, stacktest.HugeMetadata), "does not speak the Kafka protocol"},
		"a web server":     {stacktest.WebServer(t), "does not speak the Kafka protocol"},
		"a group's leader": {cluster.ListenAddrs()[0], "joining the group"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tr, err := franz.New(transport.Config{Brokers: []string{c.addr}, JoinBackoff: 10 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			o := newOwner(t)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- tr.Join(ctx, "g", []string{"a"}, o) }()

			var reported []string
			matches := func() bool {
				return slices.ContainsFunc(reported, func(s string) bool { return strings.Contains(s, c.want) })
			}
			for !matches() && ctx.Err() == nil {
				select {
				case err := <-o.faults:
					reported = append(reported, err.Error())
				case <-ctx.Done():
					t.Errorf("reported: %q, want %s", reported, c.want)
				}
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}
