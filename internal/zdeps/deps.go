// Package zdeps keeps modules in go.mod until they are used.
package zdeps

import (
	_ "github.com/chromedp/chromedp"
	_ "github.com/coreos/go-systemd/v22/daemon"
	_ "github.com/danielgtaylor/huma/v2"
	_ "github.com/danielgtaylor/huma/v2/adapters/humago"
	_ "github.com/spf13/cobra/doc"
	_ "go.opentelemetry.io/contrib/bridges/prometheus"
	_ "go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	_ "go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	_ "go.opentelemetry.io/otel/sdk/metric"
	_ "go.opentelemetry.io/otel/sdk/trace"
	_ "golang.org/x/time/rate"
)
