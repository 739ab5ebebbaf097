package telemetry

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Prometheus is a Sink that keeps metrics in memory and serves them to a Prometheus server. It is safe for concurrent use.
type Prometheus struct {
	Discard
	mu     sync.Mutex
	series map[Measurement]*series // by their labels
}

// series has the values of one metric with the same labels.
type series struct {
	last      Measurement
	total     int64         // sum of N
	times     int64         // number of measurements
	took      time.Duration // sum of Took
	perBucket []int64       // measurements by the first bucket that contains Took
}

// NewPrometheus returns a Prometheus without series. The names of its metrics begin with outrelay_.
func NewPrometheus() *Prometheus { return &Prometheus{series: map[Measurement]*series{}} }

// Measure records one measurement.
func (p *Prometheus) Measure(measurement Measurement) {
	key := measurement
	key.N, key.Took = 0, 0

	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.series[key]
	if known == nil {
		known = &series{perBucket: make([]int64, len(buckets)+1)}
		p.series[key] = known
	}

	known.last = measurement
	known.total += measurement.N
	known.times++
	known.took += measurement.Took
	bucket, _ := slices.BinarySearch(buckets, measurement.Took.Seconds())
	known.perBucket[bucket]++
}

// ServeHTTP writes the metrics in the text format of Prometheus.
func (p *Prometheus) ServeHTTP(response http.ResponseWriter, _ *http.Request) {
	response.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = response.Write(p.page())
}

// page returns all series in the text format, in a fixed order.
func (p *Prometheus) page() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()

	var out bytes.Buffer
	// A fixed order of metrics and labels keeps the diff of two scrapes small.
	for _, d := range definitions {
		lines := map[string]*series{} // by their labels
		for key, s := range p.series {
			if key.Metric == d.metric {
				lines[d.formatLabels(&key)] = s
			}
		}
		if len(lines) == 0 {
			continue
		}

		name, kind := d.exposed()
		fmt.Fprintf(&out, "# HELP %s %s\n# TYPE %s %s\n", name, d.help, name, kind)
		for _, labels := range slices.Sorted(maps.Keys(lines)) {
			d.write(&out, name, labels, lines[labels])
		}
	}
	return out.Bytes()
}

// exposed returns the name and the type of the metric on the page.
func (d *definition) exposed() (name, kind string) {
	switch d.kind {
	case counter, occasions:
		return d.name + "_total", "counter"
	case histogram:
		return d.name, "histogram"
	default:
		return d.name, "gauge"
	}
}

// labelEscaper escapes the value of a label.
var labelEscaper = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// formatLabels returns the labels of a series, without braces.
func (d *definition) formatLabels(measurement *Measurement) string {
	pairs := make([]string, len(d.labels))
	for i, name := range d.labels {
		pairs[i] = name + `="` + labelEscaper.Replace(strings.ToValidUTF8(measurement.label(name), "\uFFFD")) + `"`
	}
	return strings.Join(pairs, ",")
}

// write writes the lines of one series.
func (d *definition) write(out *bytes.Buffer, name, labels string, series *series) {
	inBraces, andMore := "", ""
	if labels != "" {
		inBraces, andMore = "{"+labels+"}", labels+","
	}

	var value float64
	switch d.kind {
	case counter:
		value = float64(series.total)
	case occasions:
		value = float64(series.times)
	case gauge:
		value = float64(series.last.N)
	case age:
		value = series.last.Took.Seconds()
	case histogram:
		var below int64
		for i, n := range series.perBucket {
			bound := "+Inf"
			if i < len(buckets) {
				bound = formatFloat(buckets[i])
			}
			// A bucket counts the values of the smaller ones too.
			below += n
			fmt.Fprintf(out, "%s_bucket{%sle=%q} %d\n", name, andMore, bound, below)
		}
		fmt.Fprintf(out, "%s_sum%s %s\n%s_count%s %d\n", name, inBraces, formatFloat(series.took.Seconds()), name, inBraces, series.times)
		return
	}
	fmt.Fprintf(out, "%s%s %s\n", name, inBraces, formatFloat(value))
}

func formatFloat(number float64) string { return strconv.FormatFloat(number, 'g', -1, 64) }
