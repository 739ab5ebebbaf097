package kafkalog_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkalog"
)

// The leader names a replica in the rack of the reader, which reads there. When the replica fails, the leader is read.
func TestAReplicaInTheRackIsReadUntilItFails(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(2), kfake.SeedTopics(1, "orders"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	if err := cluster.MoveTopicPartition("orders", 0, 0); err != nil {
		t.Fatal(err)
	}

	// The real response of the leader is passed on, unless the request has the rack.
	var atReplica atomic.Int32
	var away atomic.Bool
	cluster.ControlKey(int16(kmsg.Fetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		fetch := req.(*kmsg.FetchRequest)
		replica := cluster.CurrentNode() == 1
		if !replica && fetch.Rack != "b" {
			return nil, nil, false
		}

		part := kmsg.NewFetchResponseTopicPartition()
		part.PreferredReadReplica = 1
		if replica {
			atReplica.Add(1)
			part.PreferredReadReplica = -1
			if away.Load() {
				part.ErrorCode = kerr.NotLeaderForPartition.Code
			}
		}
		topic := kmsg.NewFetchResponseTopic()
		topic.Topic = fetch.Topics[0].Topic
		topic.Partitions = append(topic.Partitions, part)
		resp := fetch.ResponseKind().(*kmsg.FetchResponse)
		resp.Topics = append(resp.Topics, topic)
		return resp, nil, true
	})

	c, err := kafkalog.New(transport.Config{Brokers: cluster.ListenAddrs(), Rack: "b", MaxWait: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if err := c.Publish(t.Context(), "orders", []transport.Record{{Key: []byte("k"), Value: []byte("v")}}); err != nil {
		t.Fatal(err)
	}

	r := c.Reader([]string{"orders"})
	fetch := func() int {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		f, err := r.Fetch(ctx, transport.TopicPartition{Topic: "orders"}, transport.FetchFrom{}, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		return len(f.Records)
	}
	if n := fetch(); n != 0 || atReplica.Load() != 0 {
		t.Errorf("the leader sent %d records instead of the name of the replica", n)
	}
	if fetch(); atReplica.Load() != 1 {
		t.Error("the replica is not read")
	}
	away.Store(true)
	if n := fetch(); n != 0 || atReplica.Load() != 2 {
		t.Errorf("the failed replica sent %d records", n)
	}
	if n := fetch(); n != 1 || atReplica.Load() != 2 {
		t.Errorf("%d records of the leader, and %d fetches from the replica", n, atReplica.Load())
	}
}
