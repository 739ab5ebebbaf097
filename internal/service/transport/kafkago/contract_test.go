package kafkago_test

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/transporttest"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
)

func TestKafkaTransportContract(t *testing.T) {
	t.Parallel()
	transporttest.Run(t, func(*testing.T) transporttest.Fixture {
		return transporttest.Fixture{
			Transport: func(t *testing.T) transport.Transport {
				k, err := kafkago.New(transport.Config{
					Brokers: stacktest.Brokers(t), SessionTimeout: 20 * time.Second, HeartbeatInterval: 100 * time.Millisecond,
					RebalanceTimeout: 20 * time.Second, JoinBackoff: 100 * time.Millisecond, MaxWait: 100 * time.Millisecond,
					WatchPartitions: 200 * time.Millisecond,
				})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(k.Close)
				return k
			},
			Topic: func(t *testing.T, partitions int) string { return stacktest.Topic(t, partitions) },
			Later: func(t *testing.T) (string, func()) {
				name := stacktest.Name(t)
				return name, func() { stacktest.CreateTopic(t, name, 2) }
			},
		}
	})
}
