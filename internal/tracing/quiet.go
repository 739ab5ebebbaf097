package tracing

import (
	"context"
	"encoding/hex"
	"log/slog"
	"sync"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// The library reports what goes wrong to a handler of the whole process, which prints it anew for each batch. Here errors
// end in the relay's own log, once when an export begins to fail and once when it works again.

// newExportReporter counts exports of a signal and tells when they begin or cease to fail.
func (e *Exporter) newExportReporter(signal string) func(error) {
	var mu sync.Mutex
	var failing bool
	return func(err error) {
		if e.cfg.Exported != nil {
			e.cfg.Exported(signal, err)
		}
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil && !failing:
			e.cfg.Log.Warn("the collector does not take what is exported; it is dropped until it does", "signal", signal, "collector", e.base.Host, "reason", err)
		case err == nil && failing:
			e.cfg.Log.Info("the collector takes what is exported again", "signal", signal, "collector", e.base.Host)
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

// Produce implements sdkmetric.Producer. What could be gathered is exported, whatever else could not.
func (q quietProducer) Produce(ctx context.Context) ([]metricdata.ScopeMetrics, error) {
	list, err := q.Producer.Produce(ctx)
	for _, scope := range list {
		for i := range scope.Metrics {
			if h, ok := scope.Metrics[i].Data.(metricdata.Histogram[float64]); ok {
				decodeExemplarIDs(h)
			}
		}
	}
	if err != nil {
		q.log.Debug("some metrics could not be gathered for the collector", "reason", err)
	}
	return list, nil
}

// decodeExemplarIDs turns the ids of exemplars from the hexadecimal text of the labels, which the bridge hands on as it is, into
// the bytes that OTLP has.
func decodeExemplarIDs(h metricdata.Histogram[float64]) {
	for i := range h.DataPoints {
		for j := range h.DataPoints[i].Exemplars {
			e := &h.DataPoints[i].Exemplars[j]
			for _, id := range []*[]byte{&e.TraceID, &e.SpanID} {
				if raw := make([]byte, len(*id)/2); len(*id) == 32 || len(*id) == 16 && id == &e.SpanID {
					if _, err := hex.Decode(raw, *id); err == nil {
						*id = raw
					}
				}
			}
		}
	}
}

// rateWindow allows so many in each second.
type rateWindow struct {
	limit  int
	mu     sync.Mutex
	second int64
	used   int
}

func (w *rateWindow) allow(now time.Time, n int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := now.Unix(); s != w.second {
		w.second, w.used = s, 0
	}
	if w.used > 0 && w.used+n > w.limit { // an envelope with more targets than the limit must not be left out for ever
		return false
	}
	w.used += n
	return true
}
