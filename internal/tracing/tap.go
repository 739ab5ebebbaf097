package tracing

import (
	"encoding/binary"
	"strconv"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/outrelay/outrelay/internal/record"
)

// exemplarEvery is the time between two exemplars: a scrape keeps one for each bucket, so more would be thrown away.
const exemplarEvery = 100 * time.Millisecond

// Tap decides which deliveries are followed, and follows them. Its methods may be called from any goroutine, never block,
// and allocate nothing for a delivery that is not followed. A nil Tap follows none.
type Tap struct {
	exporter *Exporter
	exemplar func(took time.Duration, traceID, spanID string)
	now      func() time.Time
	next     atomic.Int64 // when the next exemplar may be taken, Unix nanoseconds
}

// NewTap makes a Tap. exporter may be nil: then there are no spans, and only exemplar hears, of some deliveries, how long
// they took from the commit to the ack, and of which trace they are. exemplar may be nil as well. now is the clock by which
// commits are measured.
func NewTap(exporter *Exporter, exemplar func(took time.Duration, traceID, spanID string), now func() time.Time) *Tap {
	return &Tap{exporter: exporter, exemplar: exemplar, now: now}
}

// Begin follows one envelope on its way to the topics of recs. It is nil, in the usual case, if that is not to be done:
// the service did not sample its trace, or the share or the rate of spans does not allow it. commitMS is when the envelope
// was committed, 0 if that says nothing about its way. Neither recs nor db and coll are kept.
func (t *Tap) Begin(recs []record.Record, db, coll []byte, commitMS int64) *Delivery {
	if t == nil || len(recs) == 0 {
		return nil
	}
	c, ok := Stored(recs[0].Headers) // the targets of an envelope share their headers
	if !ok {
		return nil
	}
	tracer := t.exporter.tracerFor(c.TraceID, len(recs))
	sample := commitMS > 0 && t.exemplar != nil && t.exemplarDue()
	if tracer == nil && !sample {
		return nil
	}
	d := &Delivery{tap: t, stored: c, commitMS: commitMS, sample: sample}
	d.stored.state = nil // aliases the record
	if tracer != nil {
		d.startSpans(tracer, c.spanContext(), recs, string(db)+"."+string(coll))
	}
	return d
}

// exemplarDue reports whether it is time for an exemplar.
func (t *Tap) exemplarDue() bool {
	now, next := t.now().UnixNano(), t.next.Load()
	return now >= next && t.next.CompareAndSwap(next, now+int64(exemplarEvery))
}

// Delivery is one envelope on its way: a span for each of its records. Different records may be told of at once; each
// record is told of once.
type Delivery struct {
	tap      *Tap
	stored   Context
	commitMS int64
	sample   bool
	spans    []recordSpan
}

type recordSpan struct {
	topic string
	span  trace.Span
	ended atomic.Bool
}

// startSpans begins the spans. Each is a trace of its own, linked to that of the service: the relay works for many traces at
// once and long after, and its spans must not keep one open.
func (d *Delivery) startSpans(tracer trace.Tracer, from trace.SpanContext, recs []record.Record, collection string) {
	d.spans = make([]recordSpan, len(recs))
	for i := range recs {
		r := &recs[i]
		attrs := make([]attribute.KeyValue, 0, 11)
		attrs = append(attrs,
			semconv.MessagingSystemKafka, semconv.MessagingOperationName("send"), semconv.MessagingOperationTypeSend,
			semconv.MessagingDestinationName(r.Topic), semconv.MessagingMessageBodySize(len(r.Value)),
			attribute.String("outrelay.collection", collection))
		if len(r.Headers) > 0 {
			attrs = append(attrs, semconv.MessagingMessageID(string(r.Headers[0].Value))) // N7: the id comes first
		}
		if r.Value == nil {
			attrs = append(attrs, semconv.MessagingKafkaMessageTombstone(true))
		}
		d.spans[i].topic = r.Topic
		_, d.spans[i].span = tracer.Start(detached, "send "+r.Topic, trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindProducer),
			trace.WithLinks(trace.Link{SpanContext: from}), trace.WithAttributes(attrs...))
	}
}

// Acked says that the record for the topic stands in its partition.
func (d *Delivery) Acked(tp record.TopicPartition, offset int64) {
	if d.commitMS > 0 {
		took := max(d.tap.now().Sub(time.UnixMilli(d.commitMS)), 0)
		if d.sample {
			d.tap.exemplar(took, d.stored.TraceID.String(), d.stored.SpanID.String())
		}
		d.endSpan(tp.Topic, func(s trace.Span) {
			s.SetAttributes(semconv.MessagingDestinationPartitionID(strconv.Itoa(int(tp.Partition))), semconv.MessagingKafkaOffset(int(offset)),
				attribute.Float64("outrelay.commit_to_ack_ms", float64(took.Microseconds())/1e3))
		})
		return
	}
	d.endSpan(tp.Topic, func(s trace.Span) {
		s.SetAttributes(semconv.MessagingDestinationPartitionID(strconv.Itoa(int(tp.Partition))), semconv.MessagingKafkaOffset(int(offset)))
	})
}

// Left says that the record for the topic was not sent now, and what became of it instead: the state in which its envelope
// waits, or the class of its refusal. The envelope's later delivery has spans of its own.
func (d *Delivery) Left(topic, fate string, refused bool) {
	d.endSpan(topic, func(s trace.Span) {
		if refused {
			s.SetStatus(codes.Error, fate) // the class alone: a reason may quote what a trace must not hold
			s.SetAttributes(semconv.ErrorTypeKey.String(fate))
			return
		}
		s.SetAttributes(attribute.String("outrelay.state", fate))
	})
}

func (d *Delivery) endSpan(topic string, with func(trace.Span)) {
	for i := range d.spans {
		if s := &d.spans[i]; s.topic == topic && !s.ended.Swap(true) {
			with(s.span)
			s.span.End()
			return
		}
	}
}

// isSampled reports whether percent of all traces take in this one. It is decided as the ratio sampler of OpenTelemetry does,
// by the trace id's last bytes, so that every process decides alike.
func isSampled(id trace.TraceID, percent int) bool {
	if percent >= 100 {
		return true
	}
	return binary.BigEndian.Uint64(id[8:])>>1 < uint64(percent)*(1<<63/100)
}
