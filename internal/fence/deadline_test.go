package fence

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/record"
)

// A request for thousands of topics or partitions gets more time than one for a single one: a broker that needs a second for it
// is not given up after the time of a small one.
func TestDeadlineOfARequestGrowsWithItsSize(t *testing.T) {
	t.Parallel()
	const n, least = 3000, 300 * time.Millisecond
	names, parts := make([]string, n), make([]record.TopicPartition, n)
	for i := range names {
		names[i], parts[i] = fmt.Sprint("t", i), record.TopicPartition{Topic: "a", Partition: int32(i)}
	}
	for what, c := range map[string]struct {
		key kmsg.Key
		ask func(c *Client, n int) error
	}{
		"metadata": {kmsg.Metadata, func(c *Client, n int) error {
			_, err := c.Health(t.Context(), names[:n])
			return err
		}},
		"partitions of a transaction": {kmsg.AddPartitionsToTxn, func(c *Client, n int) error {
			err := c.add(t.Context(), "id", Producer{}, parts[:n], map[record.TopicPartition]error{})
			if _, refused := errors.AsType[kafka.Error](err); refused {
				return nil // it was answered
			}
			return err
		}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(cluster.Close)
			x := client(t, cluster.ListenAddrs()...)
			x.Timeout = patient
			if err := c.ask(x, 1); err != nil { // the connections are there
				t.Fatal(err)
			}
			cluster.ControlKey(int16(c.key), func(req kmsg.Request) (kmsg.Response, error, bool) {
				cluster.KeepControl()
				if m, ok := req.(*kmsg.MetadataRequest); !ok || len(m.Topics) > 1 {
					cluster.SleepControl(func() { <-time.After(3 * least) })
				}
				return nil, nil, false
			})
			x.Timeout = least
			if err := c.ask(x, n); err != nil {
				t.Errorf("%d items: %v", n, err)
			}
		})
	}
}
