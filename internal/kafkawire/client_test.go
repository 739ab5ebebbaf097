package kafkawire

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func TestMain(m *testing.M) {
	// The fake cluster leaks a goroutine if it is closed while one of its control functions sleeps.
	fake := goleak.IgnoreAnyFunction("github.com/twmb/franz-go/pkg/kfake.(*Cluster).runControl.func1")
	goleak.VerifyTestMain(stacktest.Settled(m, func(...goleak.Option) error { return goleak.Find(fake) }), fake)
}

func newFakeCluster(t *testing.T, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	c, err := kfake.NewCluster(opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func newClient(t *testing.T, cfg Config) *Client {
	t.Helper()
	c, err := NewClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// TestMetadataOfASlowClusterIsWaitedFor: a slow cluster still works, so the last broker that can
// respond gets more time.
func TestMetadataOfASlowClusterIsWaitedFor(t *testing.T) {
	t.Parallel()
	kc := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"), kfake.SleepOutOfOrder())
	c := newClient(t, Config{Brokers: kc.ListenAddrs()})
	kc.ControlKey(int16(kmsg.Metadata), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		kc.SleepControl(func() {
			select {
			case <-time.After(metaTimeout + connectSlack + time.Second):
			case <-t.Context().Done():
			}
		})
		return nil, nil, false
	})

	l, err := c.Metadata(t.Context(), []string{"a"})
	if err != nil || len(l.Topics["a"].Partitions) != 1 {
		t.Errorf("layout %+v, error %v, want one partition of topic a", l, err)
	}
}

// deadlineConn notes the longest deadline that was set.
type deadlineConn struct {
	net.Conn
	longest *longest
}

type longest struct {
	mu sync.Mutex
	d  time.Duration
}

func (c deadlineConn) SetReadDeadline(t time.Time) error {
	c.longest.mu.Lock()
	c.longest.d = max(c.longest.d, time.Until(t))
	c.longest.mu.Unlock()
	return c.Conn.SetReadDeadline(t)
}

// TestDeadlineOfARequestGrowsWithItsSize: a request for thousands of topics or partitions gets more
// time than a request for one.
func TestDeadlineOfARequestGrowsWithItsSize(t *testing.T) {
	t.Parallel()
	brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a")).ListenAddrs()
	const n = 10_000
	names := make([]string, n)
	parts := make([]record.TopicPartition, n)
	for i := range names {
		names[i] = fmt.Sprint("t", i)
		parts[i] = record.TopicPartition{Topic: "a", Partition: int32(i)}
	}

	for name, call := range map[string]func(c *Client, n int) error{
		"metadata": func(c *Client, n int) error {
			_, err := c.Metadata(t.Context(), names[:n])
			return err
		},
		"configurations": func(c *Client, n int) error {
			_, err := c.DescribeTopics(t.Context(), names[:n])
			return err
		},
		"offsets": func(c *Client, n int) error {
			layout, err := c.Metadata(t.Context(), []string{"a"})
			if err == nil {
				// The topic has only the first partition.
				leaders := map[record.TopicPartition]int32{}
				for _, tp := range parts[:n] {
					leaders[tp] = layout.Topics["a"].Partitions[0].Leader
				}
				_, _ = c.ListOffsets(t.Context(), leaders)
			}
			return err
		},
		"partitions of a transaction": func(c *Client, n int) error {
			_, err := c.AddPartitions(t.Context(), "id", batch.Producer{}, parts[:n])
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got [2]time.Duration
			for i, size := range []int{1, n} {
				var l longest
				dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
					return deadlineConn{conn, &l}, err
				}
				c := newClient(t, Config{Brokers: brokers, Dial: dial})
				if err := call(c, size); err != nil {
					t.Fatal(err)
				}
				got[i] = l.d
			}
			if got[1] < got[0]+n*perItem/2 {
				t.Errorf("timeout %s for one item and %s for %d, want at least %s more", got[0], got[1], n, n*perItem/2)
			}
		})
	}
}
