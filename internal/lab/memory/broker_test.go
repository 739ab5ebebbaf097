package memory

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/transporttest"
	"github.com/outrelay/outrelay/internal/service/transport"
)

func TestTransportContract(t *testing.T) {
	t.Parallel()
	transporttest.Run(t, func(*testing.T) transporttest.Fixture {
		b := NewBroker(0)
		var n atomic.Int32
		return transporttest.Fixture{
			Transport: func(*testing.T) transport.Transport { return b },
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
