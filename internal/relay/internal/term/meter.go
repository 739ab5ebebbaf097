package term

import (
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
)

// meter counts what becomes of the envelopes of a term. It is safe for concurrent use.
type meter struct {
	shared   *Shared
	metrics  *metrics.Set
	activity *activity.Log

	acked atomic.Int64 // records acked by Kafka
}

func newMeter(shared *Shared, metricSet *metrics.Set) *meter {
	return &meter{shared: shared, metrics: metricSet, activity: activity.New(shared.Clock.Now)}
}

// observeAcked counts a batch that Kafka acknowledged.
func (m *meter) observeAcked(batch *record.AckedBatch) {
	m.acked.Add(int64(batch.Records))
	m.shared.LastAck.Store(time.Now().UnixNano())
	m.metrics.ObservePublish(batch.TP.Topic, metrics.Acked, batch.Records)
	batch.EachLatency(m.metrics.ObserveLatency)
	m.activity.Observe(batch)
}

// observeDead counts a dead letter. Without a topic, the envelope was dead before it had one.
func (m *meter) observeDead(topic string, class record.Class) {
	m.metrics.DeadLetters.WithLabelValues(string(class)).Inc()
	if topic != "" {
		m.metrics.ObservePublish(topic, metrics.Rejected, 1)
	}
}

// observeHeld counts envelopes that were stored as waiting.
func (m *meter) observeHeld(reason string, n int) {
	m.metrics.Reconciled.WithLabelValues(reason).Add(float64(n))
}

// countOutcome counts the outcome of an envelope that was sent outside of the order of the stream.
func (m *meter) countOutcome(outcome *ledger.Outcome) {
	if outcome.Doc == nil && outcome.Claim == nil {
		return
	}

	class := string(outcome.Rejection.Class)
	m.metrics.Reconciled.WithLabelValues(outcome.End.String()).Inc()
	if outcome.End == ledger.Dropped {
		m.metrics.Dropped.WithLabelValues(class).Inc()
	}
	if outcome.End == ledger.Dead {
		m.metrics.DeadLetters.WithLabelValues(class).Inc()
	}
}

// countDropped counts an envelope of the stream that is discarded.
func (m *meter) countDropped(class record.Class) {
	if class == record.Expired {
		m.metrics.Reconciled.WithLabelValues("expired_dropped").Inc()
	}
	m.metrics.Dropped.WithLabelValues(string(class)).Inc()
}
