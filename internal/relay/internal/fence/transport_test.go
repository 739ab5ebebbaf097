package fence

import (
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/kafkawire"
)

// TestTakeOversReadNoMetadataOfAllTopics: the library that serves takeovers reads the metadata of
// the cluster regularly. The cost must not depend on the number of topics in the cluster.
func TestTakeOversReadNoMetadataOfAllTopics(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	var all, requests atomic.Int32
	cluster.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		requests.Add(1)
		if m, ok := req.(*kmsg.MetadataRequest); ok && m.Topics == nil {
			all.Add(1)
		}
		return nil, nil, false
	})
	brokers, err := kafkawire.NewClient(kafkawire.Config{Brokers: cluster.ListenAddrs()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(brokers.Close)
	c := NewClient(brokers)
	if h, err := c.Health(t.Context(), []string{"a"}); err != nil || len(h.layout.Topics["a"].Partitions) != 1 {
		t.Errorf("health %+v, error %v, want one partition of topic a", h, err)
	}

	if all.Load() > 0 || requests.Load() < 1 {
		t.Errorf("%d of %d metadata requests were for all topics, want none of at least 1", all.Load(), requests.Load())
	}
}
