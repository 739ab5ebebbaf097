package tracing

import (
	"encoding/binary"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// exemplarEvery is the time between two exemplars. A scrape returns one per bucket, so more are useless.
const exemplarEvery = 100 * time.Millisecond

// Tap decides which deliveries are traced, and traces them. Its methods are safe for concurrent use, never
// block, and do not allocate for a delivery that is not traced. A nil Tap traces nothing.
type Tap struct {
	exporter *Exporter
	exemplar func(took time.Duration, traceID, spanID string)
	now      func() time.Time
	next     atomic.Int64 // Unix nanoseconds of the next exemplar
}

// NewTap returns a Tap. If exporter is nil, there are no spans. If exemplar is not nil, the Tap calls it for some
// deliveries, with the time from the commit to the ack and the trace. now is the clock for this time.
func NewTap(exporter *Exporter, exemplar func(took time.Duration, traceID, spanID string), now func() time.Time) *Tap {
	return &Tap{exporter: exporter, exemplar: exemplar, now: now}
}

// Begin starts the trace of one envelope's delivery to the topics of recs. Usually it returns nil, which means
// that the delivery is not traced: the service did not sample its trace, or the share or rate of spans does not
// permit it. commitMS is the commit time of the envelope, or 0 if that time is unrelated to the delivery.
// Begin does not retain recs, db and coll.
func (t *Tap) Begin(recs []record.Record, db, coll []byte, commitMS int64) *Delivery {
	if t == nil || len(recs) == 0 {
		return nil
	}

	// The records of an envelope have the same headers.
	context, ok := fromHeaders(recs[0].Headers)
	if !ok {
		return nil
	}
	tracer := t.exporter.tracerFor(context.TraceID, len(recs))
	sample := commitMS > 0 && t.exemplar != nil && t.exemplarDue()
	if tracer == nil && !sample {
		return nil
	}

	delivery := &Delivery{tap: t, stored: context, commitMS: commitMS, sample: sample}
	// The delivery outlives the record, and the state is a subslice of it.
	delivery.stored.state = nil
	if tracer != nil {
		delivery.startSpans(tracer, context.spanContext(), recs, string(db)+"."+string(coll))
	}
	return delivery
}

// exemplarDue reports whether it is time for an exemplar, and if so schedules the next one.
func (t *Tap) exemplarDue() bool {
	now, next := t.now().UnixNano(), t.next.Load()
	return now >= next && t.next.CompareAndSwap(next, now+int64(exemplarEvery))
}

// Delivery is the traced delivery of one envelope. It has one span per record. Its methods may be called
// concurrently for different records, and once per record.
type Delivery struct {
	tap      *Tap
	stored   storedContext
	commitMS int64
	sample   bool
	spans    []recordSpan
}

type recordSpan struct {
	topic string
	span  trace.Span
	ended atomic.Bool
}

// startSpans starts a span per record. Each span starts a new trace with a link to the trace of the service. The
// relay works for many traces at once and long after them, and its spans must not keep these traces open.
func (d *Delivery) startSpans(tracer trace.Tracer, from trace.SpanContext, recs []record.Record, collection string) {
	d.spans = make([]recordSpan, len(recs))
	for i := range recs {
		rec := &recs[i]
		attrs := make([]attribute.KeyValue, 0, 11)
		attrs = append(attrs,
			semconv.MessagingSystemKafka,
			semconv.MessagingOperationName("send"),
			semconv.MessagingOperationTypeSend,
			semconv.MessagingDestinationName(rec.Topic),
			semconv.MessagingMessageBodySize(len(rec.Value)),
			attribute.String("outrelay.collection", validText(collection)))
		if id := rec.Header(record.HeaderID); id != nil {
			attrs = append(attrs, semconv.MessagingMessageID(validText(string(id))))
		}
		if rec.Value == nil {
			attrs = append(attrs, semconv.MessagingKafkaMessageTombstone(true))
		}

		d.spans[i].topic = rec.Topic
		_, d.spans[i].span = tracer.Start(detached, "send "+rec.Topic,
			trace.WithNewRoot(),
			trace.WithSpanKind(trace.SpanKindProducer),
			trace.WithLinks(trace.Link{SpanContext: from}),
			trace.WithAttributes(attrs...))
	}
}

// validText returns text as valid UTF-8. MongoDB does not check its strings, and one that is not UTF-8 makes an exporter drop
// all spans of its batch.
func validText(text string) string { return strings.ToValidUTF8(text, "\uFFFD") }

// Acked ends the span of a record that Kafka has acknowledged in tp at offset.
func (d *Delivery) Acked(tp record.TopicPartition, offset int64) {
	place := func(span trace.Span) {
		span.SetAttributes(
			semconv.MessagingDestinationPartitionID(strconv.Itoa(int(tp.Partition))),
			semconv.MessagingKafkaOffset(int(offset)))
	}
	// An envelope outside of the stream has no commit time.
	if d.commitMS <= 0 {
		d.endSpan(tp.Topic, place)
		return
	}

	took := max(d.tap.now().Sub(time.UnixMilli(d.commitMS)), 0)
	if d.sample {
		d.tap.exemplar(took, d.stored.TraceID.String(), d.stored.SpanID.String())
	}
	d.endSpan(tp.Topic, func(span trace.Span) {
		place(span)
		span.SetAttributes(attribute.Float64("outrelay.commit_to_ack_ms", float64(took.Microseconds())/1e3))
	})
}

// NotSent ends the span of a record that was not sent now, with the state in which its envelope waits. A later delivery of the
// envelope has other spans.
func (d *Delivery) NotSent(topic, state string) {
	d.endSpan(topic, func(span trace.Span) { span.SetAttributes(attribute.String("outrelay.state", state)) })
}

// Rejected ends the span of a record that was rejected. It gets only the class: a reason may quote data that must not be in a trace.
func (d *Delivery) Rejected(topic, class string) {
	d.endSpan(topic, func(span trace.Span) {
		span.SetStatus(codes.Error, class)
		span.SetAttributes(semconv.ErrorTypeKey.String(class))
	})
}

// endSpan ends the first open span of the topic, after setAttributes.
func (d *Delivery) endSpan(topic string, setAttributes func(trace.Span)) {
	for i := range d.spans {
		if span := &d.spans[i]; span.topic == topic && !span.ended.Swap(true) {
			setAttributes(span.span)
			span.span.End()
			return
		}
	}
}

// isSampled reports whether the trace belongs to the sampled percent of all traces. Like the ratio sampler of
// OpenTelemetry it uses the last bytes of the trace id, so that all processes decide alike.
func isSampled(id trace.TraceID, percent int) bool {
	if percent >= 100 {
		return true
	}
	return binary.BigEndian.Uint64(id[8:])>>1 < uint64(percent)*(1<<63/100)
}
