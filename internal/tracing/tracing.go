// Package tracing makes spans of what the relay sends, and exports them and the metrics by OTLP over HTTP.
//
// What it promises: nothing of it blocks the way of an event. A span is made of a record whose service had sampled its
// trace, within a share and a rate; every other record costs a look at its headers and no allocation, and without an
// exporter no more than that. Spans go out in batches from a queue of bounded length; when the collector is away they are
// dropped, and the relay works on. Order: a span ends when Kafka has acknowledged its record, so spans come in the order of
// the acks. No span holds a payload, a key or a header other than the event's id.
package tracing

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// The signals, as they are counted and logged.
const (
	Traces  = "traces"
	Metrics = "metrics"
)

const (
	maxQueuedSpans      = 8192 // spans that wait for their export
	exportEvery         = 2 * time.Second
	exportTimeout       = 10 * time.Second // of one request with its repetitions
	defaultFlushTimeout = 3 * time.Second  // at the end
)

// detached is the parent of every span: none.
var detached = context.Background()

// Config is what an Exporter needs.
type Config struct {
	Endpoint string      // URL of the collector; a login in it becomes basic authentication
	Token    string      // bearer token; empty sends none
	TLS      *tls.Config // nil takes the system's roots

	SamplePercent   int           // of the traces that the services sampled; 0 makes no spans
	SpansPerSecond  int           // must be positive
	MetricsInterval time.Duration // 0 exports no metrics

	Version, Node, Watcher string
	Gatherer               prometheus.Gatherer            // of the metrics; nil exports none
	Exported               func(signal string, err error) // hears of each export; nil for nobody
	Limited                func()                         // hears of spans that the rate did not allow; nil for nobody
	Log                    *slog.Logger                   // must not be nil
}

// Exporter sends spans and metrics to a collector while [Exporter.Run] runs. A nil Exporter is one that is turned off.
type Exporter struct {
	cfg          Config
	base         *url.URL
	headers      map[string]string
	tracer       atomic.Pointer[trace.Tracer] // while it runs
	rate         rateWindow
	flushTimeout time.Duration // at the end
}

// New checks cfg; it connects to nothing and starts nothing. Without an endpoint the Exporter is nil, which is no error.
func New(cfg Config) (*Exporter, error) {
	if cfg.Endpoint == "" {
		return nil, nil
	}
	u, err := url.Parse(cfg.Endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, errors.New("the endpoint is no http or https URL") // which is not quoted: it may hold a login
	}
	e := &Exporter{cfg: cfg, headers: map[string]string{"User-Agent": "outrelay/" + cfg.Version}, rate: rateWindow{limit: cfg.SpansPerSecond}, flushTimeout: defaultFlushTimeout}
	switch password, _ := u.User.Password(); {
	case cfg.Token != "":
		e.headers["Authorization"] = "Bearer " + cfg.Token
	case u.User != nil:
		e.headers["Authorization"] = "Basic " + base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password))
	}
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	u.Path = strings.TrimSuffix(u.Path, "/")
	e.base = u
	return e, nil
}

// tracerFor is the tracer if n spans may be made for the trace, else nil.
func (e *Exporter) tracerFor(id trace.TraceID, n int) trace.Tracer {
	if e == nil {
		return nil
	}
	tracer := e.tracer.Load()
	if tracer == nil || !isSampled(id, e.cfg.SamplePercent) {
		return nil
	}
	if !e.rate.allow(time.Now(), n) {
		if e.cfg.Limited != nil {
			e.cfg.Limited()
		}
		return nil
	}
	return *tracer
}

// Run exports until ctx ends, then what is left, for at most three seconds. A collector that does not answer is logged when
// that begins and ends, and is no error. On a nil Exporter it returns at once.
func (e *Exporter) Run(ctx context.Context) error {
	if e == nil {
		return nil
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = e.cfg.TLS
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: exportTimeout}
	about := resource.NewWithAttributes(semconv.SchemaURL, semconv.ServiceName("outrelay"), semconv.ServiceVersion(e.cfg.Version),
		semconv.ServiceInstanceID(e.cfg.Node), attribute.String("outrelay.watcher", e.cfg.Watcher))
	var shut []func(context.Context) error
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.flushTimeout)
		defer cancel()
		e.tracer.Store(nil)
		var wg sync.WaitGroup
		for _, f := range shut {
			wg.Go(func() {
				if err := f(end); err != nil {
					e.cfg.Log.Debug("the last spans or metrics were not exported", "reason", err)
				}
			})
		}
		wg.Wait()
	}()
	if e.cfg.SamplePercent > 0 {
		provider, err := e.newTracerProvider(ctx, client, about)
		if err != nil {
			return err
		}
		shut = append(shut, provider.Shutdown)
		tracer := provider.Tracer("github.com/outrelay/outrelay", trace.WithInstrumentationVersion(e.cfg.Version), trace.WithSchemaURL(semconv.SchemaURL))
		e.tracer.Store(&tracer)
	}
	if e.cfg.MetricsInterval > 0 && e.cfg.Gatherer != nil {
		provider, err := e.newMeterProvider(ctx, client, about)
		if err != nil {
			return err
		}
		shut = append(shut, provider.Shutdown)
	}
	<-ctx.Done()
	return nil
}

func (e *Exporter) newTracerProvider(ctx context.Context, client *http.Client, about *resource.Resource) (*sdktrace.TracerProvider, error) {
	out, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(e.base.JoinPath("v1", "traces").String()), otlptracehttp.WithHTTPClient(client),
		otlptracehttp.WithHeaders(e.headers), otlptracehttp.WithCompression(otlptracehttp.GzipCompression),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: true, InitialInterval: time.Second, MaxInterval: 5 * time.Second, MaxElapsedTime: exportTimeout}))
	if err != nil {
		return nil, fmt.Errorf("exporting traces: %w", err)
	}
	return sdktrace.NewTracerProvider(
		sdktrace.WithResource(about),
		sdktrace.WithSampler(sdktrace.AlwaysSample()), // what is not to be sampled never gets here
		sdktrace.WithBatcher(&quietSpans{SpanExporter: out, report: e.newExportReporter(Traces)},
			sdktrace.WithMaxQueueSize(maxQueuedSpans), sdktrace.WithBatchTimeout(exportEvery), sdktrace.WithExportTimeout(exportTimeout)),
	), nil
}

func (e *Exporter) newMeterProvider(ctx context.Context, client *http.Client, about *resource.Resource) (*sdkmetric.MeterProvider, error) {
	out, err := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(e.base.JoinPath("v1", "metrics").String()), otlpmetrichttp.WithHTTPClient(client),
		otlpmetrichttp.WithHeaders(e.headers), otlpmetrichttp.WithCompression(otlpmetrichttp.GzipCompression),
		otlpmetrichttp.WithRetry(otlpmetrichttp.RetryConfig{Enabled: true, InitialInterval: time.Second, MaxInterval: 5 * time.Second, MaxElapsedTime: exportTimeout}))
	if err != nil {
		return nil, fmt.Errorf("exporting metrics: %w", err)
	}
	told := e.newExportReporter(Metrics)
	return sdkmetric.NewMeterProvider(sdkmetric.WithResource(about), sdkmetric.WithReader(sdkmetric.NewPeriodicReader(
		&quietMetrics{Exporter: out, report: told},
		// The time may be longer than the interval: none begins before the last has ended.
		sdkmetric.WithInterval(e.cfg.MetricsInterval), sdkmetric.WithTimeout(exportTimeout),
		sdkmetric.WithProducer(quietProducer{bridge.NewMetricProducer(bridge.WithGatherer(e.cfg.Gatherer)), e.cfg.Log}),
	))), nil
}
