package fence

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/kafkawire"
)

// TestTakeOversReadNoMetadataOfAllTopics: the library that serves takeovers reads the metadata of
// the cluster regularly. The cost must not depend on the number of topics in the cluster.
func TestTakeOversReadNoMetadataOfAllTopics(t *testing.T) {
	t.Parallel()
	cluster := newFakeCluster(t, kfake.SeedTopics(1, "a"))
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

// A user who may not use the transactional ids of the relay gets the rights that are missing, with the error of each takeover.
func TestAForbiddenTransactionalIDNamesTheRights(t *testing.T) {
	t.Parallel()
	for _, key := range []kmsg.Key{kmsg.FindCoordinator, kmsg.InitProducerID} {
		cluster := newFakeCluster(t)
		cluster.Fault(kfake.Fault{Keys: []kmsg.Key{key}, Err: kerr.TransactionalIDAuthorizationFailed, Count: 1})
		brokers, err := kafkawire.NewClient(kafkawire.Config{Brokers: cluster.ListenAddrs()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(brokers.Close)

		_, err = NewClient(brokers).Init(t.Context(), "outrelay.a", anyEpoch, Patience{Total: 10 * time.Second})
		if !errors.Is(err, ErrIDForbidden) || !strings.Contains(err.Error(), "grant this user WRITE and DESCRIBE") {
			t.Errorf("%v: %v", key, err)
		}
	}
}

// TestAPartitionThatIsUnreadableAtItsStartIsQuarantined: a broker rejects the start of a log, too. The takeover releases the other
// partitions, and ends.
func TestAPartitionThatIsUnreadableAtItsStartIsQuarantined(t *testing.T) {
	t.Parallel()
	cluster := newFakeCluster(t, kfake.SeedTopics(2, "a"))
	owner := newOwner(t, "a", 2)
	client := newClient(t, cluster.ListenAddrs()...)
	owner.takeAll(t, client)

	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Topic: "a", Partitions: []int32{1}, Err: kerr.OffsetOutOfRange, Count: -1})
	out := owner.take(t, client, func(in *In) { in.Idle = time.Second })
	if out.Released[at("a", 0)] == nil || len(out.Quarantined) != 1 || !strings.Contains(out.Quarantined[at("a", 1)].Cause, "Offset Out Of Range") {
		t.Errorf("quarantined %v, released %v", out.Quarantined, out.Released)
	}
}
