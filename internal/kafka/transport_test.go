package kafka

import (
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// The library that serves take-overs asks for the layout of the cluster again and again. That must cost the same however many
// topics the cluster has.
func TestTakeOversReadNoMetadataOfAllTopics(t *testing.T) {
	t.Parallel()
	cluster, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var all, asked atomic.Int32
	cluster.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		asked.Add(1)
		if m, ok := req.(*kmsg.MetadataRequest); ok && m.Topics == nil {
			all.Add(1)
		}
		return nil, nil, false
	})
	c := newClient(t, Config{Brokers: brokers})
	if h, err := c.fence.Health(t.Context(), []string{"a"}); err != nil || h.Counts["a"] != 1 {
		t.Errorf("%+v, %v", h, err)
	}
	if all.Load() > 0 || asked.Load() < 2 {
		t.Errorf("%d of %d requests for metadata were for all topics", all.Load(), asked.Load())
	}
}
