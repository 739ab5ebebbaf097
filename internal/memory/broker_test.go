package memory

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/consumertest"
)

func TestTransportContract(t *testing.T) {
	t.Parallel()
	consumertest.Run(t, func(*testing.T) consumertest.Fixture {
		b := NewBroker(0)
		var n atomic.Int32
		return consumertest.Fixture{
			Transport: func(*testing.T) consumer.Transport { return b },
			Topic: func(_ *testing.T, partitions int) string {
				name := fmt.Sprint("topic-", n.Add(1))
				b.CreateTopic(name, partitions)
				return name
			},
			Later: func(*testing.T) (string, func()) {
				return "later", func() { b.CreateTopic("later", defaultPartitions+1) }
			},
		}
	})
}
