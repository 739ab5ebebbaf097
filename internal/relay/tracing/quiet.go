package tracing

import (
	"context"
	"encoding/hex"
	"log/slog"
	"sync"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// The library passes errors to a handler of the whole process, which prints them for each batch. The types
// here write them to the relay's log instead: once when exports start to fail, and once when they succeed
// again.

// newExportReporter returns a function that counts an export of the signal, and logs when exports start to fail
// and when they succeed again.
func (e *Exporter) newExportReporter(signal string) func(error) {
	var mu sync.Mutex
	var failing bool
	return func(err error) {
		if e.cfg.OnExport != nil {
			e.cfg.OnExport(signal, err)
		}

		// One line for each change: exports repeat every few seconds.
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil && !failing:
			e.cfg.Log.Warn("cannot export to the collector; data is dropped until it succeeds", "signal", signal,
				"collector", e.base.Host, "error", err)
		case err == nil && failing:
			e.cfg.Log.Info("export to the collector succeeds again", "signal", signal, "collector", e.base.Host)
		}
		failing = err != nil
	}
}

type quietSpans struct {
	sdktrace.SpanExporter
	report func(error)
}

// ExportSpans implements sdktrace.SpanExporter.
func (q *quietSpans) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	q.report(q.SpanExporter.ExportSpans(ctx, spans))
	return nil
}

type quietMetrics struct {
	sdkmetric.Exporter
	report func(error)
}

// Export implements sdkmetric.Exporter.
func (q *quietMetrics) Export(ctx context.Context, rm *metricdata.ResourceMetrics) error {
	q.report(q.Exporter.Export(ctx, rm))
	return nil
}

type quietProducer struct {
	sdkmetric.Producer
	log *slog.Logger
}

// Produce implements sdkmetric.Producer. It exports the gathered metrics also if others could not be gathered.
func (q quietProducer) Produce(ctx context.Context) ([]metricdata.ScopeMetrics, error) {
	list, err := q.Producer.Produce(ctx)
	for _, scope := range list {
		for i := range scope.Metrics {
			if histogram, ok := scope.Metrics[i].Data.(metricdata.Histogram[float64]); ok {
				decodeExemplarIDs(histogram)
			}
		}
	}

	if err != nil {
		q.log.Debug("cannot gather some metrics for the collector", "error", err)
	}
	return list, nil
}

// decodeExemplarIDs decodes the ids of exemplars. The bridge copies them from labels as hexadecimal text, but
// OTLP requires bytes.
func decodeExemplarIDs(histogram metricdata.Histogram[float64]) {
	for i := range histogram.DataPoints {
		for j := range histogram.DataPoints[i].Exemplars {
			exemplar := &histogram.DataPoints[i].Exemplars[j]
			if len(exemplar.TraceID) == 32 {
				exemplar.TraceID = decodedOrSame(exemplar.TraceID)
			}
			if len(exemplar.SpanID) == 32 || len(exemplar.SpanID) == 16 {
				exemplar.SpanID = decodedOrSame(exemplar.SpanID)
			}
		}
	}
}

// decodedOrSame returns the bytes of the hexadecimal text, or text itself if it is not hexadecimal.
func decodedOrSame(text []byte) []byte {
	raw := make([]byte, len(text)/2)
	if _, err := hex.Decode(raw, text); err != nil {
		return text
	}
	return raw
}
