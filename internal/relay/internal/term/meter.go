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

func newMeter(s *Shared, m *metrics.Set) *meter {
	return &meter{shared: s, metrics: m, activity: activity.New(s.Clock.Now)}
}

// observeAcked counts a batch that Kafka acknowledged.
func (m *meter) observeAcked(b *record.AckedBatch) {
	m.acked.Add(int64(b.Records))
	m.shared.LastAck.Store(time.Now().UnixNano())
	m.metrics.ObservePublish(b.TP.Topic, metrics.Acked, b.Records)
	b.EachLatency(m.metrics.ObserveLatency)
	m.activity.Observe(b)
}

// observeDead counts a dead letter. Without a topic, the envelope was dead before it had one.
func (m *meter) observeDead(topic string, class record.Class) {
	m.metrics.DeadLetters.WithLabelValues(string(class)).Inc()
	if topic != "" {
		m.metrics.ObservePublish(topic, metrics.Refused, 1)
	}
}

// observeHeld counts envelopes that were stored as waiting.
func (m *meter) observeHeld(reason string, n int) {
	m.metrics.Reconciled.WithLabelValues(reason).Add(float64(n))
}

// countOutcome counts the outcome of an envelope that was sent outside of the order of the stream.
func (m *meter) countOutcome(o *ledger.Outcome) {
	if o.Doc == nil {
		return
	}

	class := string(o.Refusal.Class)
	m.metrics.Reconciled.WithLabelValues(o.End.String()).Inc()
	if o.End == ledger.Dropped {
		m.metrics.Dropped.WithLabelValues(class).Inc()
	}
	if o.End == ledger.Dead {
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
