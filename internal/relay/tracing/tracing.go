// Package tracing makes spans of the records that the relay sends, and exports spans and metrics by OTLP over
// HTTP.
//
// Nothing blocks the delivery of an event. A record gets a span if its service sampled its trace, and the share
// and the rate permit it. All other records cost one look at their headers and no allocation, also without an
// exporter. Spans are exported in batches from a bounded queue. While the collector is not available, spans are
// dropped and the relay continues. A span ends when Kafka has acknowledged its record, so spans are in the
// order of the acks. No span has a payload, a key, or a header other than the id of the event.
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
	"golang.org/x/time/rate"

	"github.com/outrelay/outrelay/internal/base/webclient"
)

// The names of the signals in metrics and logs.
const (
	signalTraces  = "traces"
	signalMetrics = "metrics"
)

const (
	maxQueuedSpans      = 8192
	exportEvery         = 2 * time.Second
	exportTimeout       = 10 * time.Second // of one request, with its retries
	defaultFlushTimeout = 3 * time.Second  // of the last export
)

// detached is the parent context of every span. It is empty.
var detached = context.Background()

// Config configures an Exporter.
type Config struct {
	Endpoint string      // URL of the collector; a login in it is used for basic authentication
	Token    string      // bearer token; empty sends none
	TLS      *tls.Config // nil uses the root certificates of the system

	SamplePercent   int           // share of the traces that services sampled; 0 makes no spans
	SpansPerSecond  int           // must be positive
	MetricsInterval time.Duration // 0 exports no metrics

	Version, Node, Watcher string
	Gatherer               prometheus.Gatherer            // of the metrics; nil exports none
	OnExport               func(signal string, err error) // called after each export; may be nil
	OnLimited              func()                         // called if the rate permits no spans; may be nil
	Log                    *slog.Logger                   // must not be nil
}

// Exporter sends spans and metrics to a collector while [Exporter.Run] runs. A nil Exporter exports nothing.
type Exporter struct {
	cfg          Config
	base         *url.URL
	headers      map[string]string
	tracer       atomic.Pointer[trace.Tracer] // nil while Run does not run
	spans        *rate.Limiter
	flushTimeout time.Duration
}

// New validates cfg and returns an Exporter. It does no I/O and starts nothing. Without an endpoint it returns nil
// and no error.
func New(cfg Config) (*Exporter, error) {
	if cfg.Endpoint == "" {
		return nil, nil
	}

	// The error does not quote the endpoint, because it may contain a login.
	address, err := url.Parse(cfg.Endpoint)
	if err != nil || address.Host == "" || address.Scheme != "http" && address.Scheme != "https" {
		return nil, errors.New("the endpoint is not an http or https URL")
	}

	headers := map[string]string{"User-Agent": "outrelay/" + cfg.Version}
	password, _ := address.User.Password()
	switch {
	case cfg.Token != "":
		headers["Authorization"] = "Bearer " + cfg.Token
	case address.User != nil:
		login := address.User.Username() + ":" + password
		headers["Authorization"] = "Basic " + base64.StdEncoding.EncodeToString([]byte(login))
	}

	address.User, address.RawQuery, address.Fragment = nil, "", ""
	address.Path = strings.TrimSuffix(address.Path, "/")
	return &Exporter{
		cfg: cfg, base: address, headers: headers,
		spans: newSpanLimit(cfg.SpansPerSecond), flushTimeout: defaultFlushTimeout,
	}, nil
}

func newSpanLimit(perSecond int) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(perSecond), perSecond)
}

// tracerFor returns the tracer if n spans may be made for the trace, or nil.
func (e *Exporter) tracerFor(id trace.TraceID, n int) trace.Tracer {
	if e == nil {
		return nil
	}
	tracer := e.tracer.Load()
	if tracer == nil || !isSampled(id, e.cfg.SamplePercent) {
		return nil
	}

	// An envelope with more targets than the limit gets its spans if nothing else did for a second.
	if !e.spans.AllowN(time.Now(), min(n, e.spans.Burst())) {
		if e.cfg.OnLimited != nil {
			e.cfg.OnLimited()
		}
		return nil
	}
	return *tracer
}

// Run exports until ctx ends. Then it exports the rest, for at most three seconds. If the collector is not
// available, Run logs the start and the end of the outage, and returns no error. On a nil Exporter it returns at
// once.
func (e *Exporter) Run(ctx context.Context) error {
	if e == nil {
		return nil
	}

	// The exporters share the connections, with the certificates of this configuration.
	transport := webclient.NewTransport(e.cfg.TLS)
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: exportTimeout}
	about := resource.NewWithAttributes(semconv.SchemaURL,
		semconv.ServiceName("outrelay"),
		semconv.ServiceVersion(e.cfg.Version),
		semconv.ServiceInstanceID(e.cfg.Node),
		attribute.String("outrelay.watcher", e.cfg.Watcher))

	var shutdowns []func(context.Context) error
	defer func() { e.shutDown(ctx, shutdowns) }()

	if e.cfg.SamplePercent > 0 {
		provider, err := e.newTracerProvider(ctx, client, about)
		if err != nil {
			return err
		}
		shutdowns = append(shutdowns, provider.Shutdown)
		tracer := provider.Tracer("github.com/outrelay/outrelay",
			trace.WithInstrumentationVersion(e.cfg.Version), trace.WithSchemaURL(semconv.SchemaURL))
		e.tracer.Store(&tracer)
	}

	if e.cfg.MetricsInterval > 0 && e.cfg.Gatherer != nil {
		provider, err := e.newMeterProvider(ctx, client, about)
		if err != nil {
			return err
		}
		shutdowns = append(shutdowns, provider.Shutdown)
	}

	<-ctx.Done()
	return nil
}

// shutDown exports the rest by the shutdown functions of the providers, concurrently, within e.flushTimeout.
func (e *Exporter) shutDown(ctx context.Context, shutdowns []func(context.Context) error) {
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.flushTimeout)
	defer cancel()
	e.tracer.Store(nil)

	var wg sync.WaitGroup
	for _, shutdown := range shutdowns {
		wg.Go(func() {
			if err := shutdown(end); err != nil {
				e.cfg.Log.Debug("cannot export the last spans or metrics", "error", err)
			}
		})
	}
	wg.Wait()
}

// exportRetry is how an export is repeated, of spans and of metrics.
var exportRetry = otlptracehttp.RetryConfig{
	Enabled: true, InitialInterval: time.Second, MaxInterval: 5 * time.Second, MaxElapsedTime: exportTimeout,
}

func (e *Exporter) newTracerProvider(
	ctx context.Context, client *http.Client, about *resource.Resource,
) (*sdktrace.TracerProvider, error) {
	out, err := otlptracehttp.New(ctx,
		otlptracehttp.WithEndpointURL(e.base.JoinPath("v1", "traces").String()),
		otlptracehttp.WithHTTPClient(client),
		otlptracehttp.WithHeaders(e.headers),
		otlptracehttp.WithCompression(otlptracehttp.GzipCompression),
		otlptracehttp.WithRetry(exportRetry))
	if err != nil {
		return nil, fmt.Errorf("exporting traces: %w", err)
	}

	// The Tap has sampled already, so the provider must not drop spans.
	return sdktrace.NewTracerProvider(
		sdktrace.WithResource(about),
		sdktrace.WithSampler(sdktrace.AlwaysSample()),
		sdktrace.WithBatcher(&quietSpans{SpanExporter: out, report: e.newExportReporter(signalTraces)},
			sdktrace.WithMaxQueueSize(maxQueuedSpans),
			sdktrace.WithBatchTimeout(exportEvery),
			sdktrace.WithExportTimeout(exportTimeout)),
	), nil
}

func (e *Exporter) newMeterProvider(
	ctx context.Context, client *http.Client, about *resource.Resource,
) (*sdkmetric.MeterProvider, error) {
	out, err := otlpmetrichttp.New(ctx,
		otlpmetrichttp.WithEndpointURL(e.base.JoinPath("v1", "metrics").String()),
		otlpmetrichttp.WithHTTPClient(client),
		otlpmetrichttp.WithHeaders(e.headers),
		otlpmetrichttp.WithCompression(otlpmetrichttp.GzipCompression),
		otlpmetrichttp.WithRetry(otlpmetrichttp.RetryConfig(exportRetry)))
	if err != nil {
		return nil, fmt.Errorf("exporting metrics: %w", err)
	}

	// The timeout may exceed the interval, because an export starts only after the previous one has ended.
	reader := sdkmetric.NewPeriodicReader(
		&quietMetrics{Exporter: out, report: e.newExportReporter(signalMetrics)},
		sdkmetric.WithInterval(e.cfg.MetricsInterval),
		sdkmetric.WithTimeout(exportTimeout),
		sdkmetric.WithProducer(quietProducer{bridge.NewMetricProducer(bridge.WithGatherer(e.cfg.Gatherer)), e.cfg.Log}))
	return sdkmetric.NewMeterProvider(sdkmetric.WithResource(about), sdkmetric.WithReader(reader)), nil
}
