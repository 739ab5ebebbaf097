package sink

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// Kafka mutes the connection of a client that does not wait for its quota, which looks like a broker that hangs. The sink
// waits, and says why.
func TestQuotaIsHonoredAndNamed(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	id := "outrelay." + topic
	cl, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	adm := kadm.NewClient(cl)
	setQuota := func(op kadm.AlterClientQuotaOp) {
		t.Helper()
		entity := kadm.ClientQuotaEntity{{Type: "client-id", Name: &id}}
		altered, err := adm.AlterClientQuotas(t.Context(), []kadm.AlterClientQuotaEntry{{Entity: entity, Ops: []kadm.AlterClientQuotaOp{op}}})
		if err != nil || altered[0].Err != nil {
			t.Fatal(err, altered)
		}
	}
	setQuota(kadm.AlterClientQuotaOp{Key: "producer_byte_rate", Value: 200_000})

	set := metrics.New("")
	// The time limit is far below the delay of the quota.
	r := openSink(t, sinkOptions{cfg: testConfig{ClientID: id, RequestTimeout: 500 * time.Millisecond, Metrics: set, MaxBatchBytes: 600_000, MaxRequestBytes: 1 << 20}})
	random := rand.NewChaCha8([32]byte{1})
	const records = 40
	send := func(i int) {
		rec := newRecord(topic, "k", fmt.Sprintf("k/%d", i))
		pad := make([]byte, 100_000)
		_, _ = random.Read(pad)
		rec.Headers = append(rec.Headers, record.Header{Key: []byte("pad"), Value: pad})
		r.send(t, rec)
		r.Flush()
	}
	for i := range records {
		send(i)
	}

	named := false
	stacktest.Eventually(t, "the records are delivered", func() bool {
		for _, b := range r.State() {
			named = named || b.Kind == kindThrottled && strings.Contains(b.Reason(), "quota of Kafka") && strings.Contains(b.Reason(), id)
			if b.Kind == kindUnreachable {
				t.Errorf("the broker counts as unreachable: %s", b.Reason())
			}
		}
		// The rest need not wait.
		if named && throttledSeconds(t, set) > 0 {
			setQuota(kadm.AlterClientQuotaOp{Key: "producer_byte_rate", Value: 1 << 30})
		}
		r.acks.mu.Lock()
		defer r.acks.mu.Unlock()
		return len(r.acks.acked) == records
	})
	if waited := throttledSeconds(t, set); !named || waited == 0 {
		t.Errorf("named: %t, %.1f s of waiting were counted", named, waited)
	}
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 1, records)
}

func throttledSeconds(t *testing.T, set *metrics.Set) float64 {
	t.Helper()
	var m dto.Metric
	if err := set.ThrottledSeconds.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetCounter().GetValue()
}
