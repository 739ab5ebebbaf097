package tracing

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// MongoDB does not check that strings are UTF-8. An _id that is not costs the spans of all services in the batch of the export.
func TestInvalidIDsCostNoSpansOfOthers(t *testing.T) {
	var bytesIn atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		bytesIn.Add(n)
	}))
	defer srv.Close()
	var exports, failed atomic.Int64
	var lastErr atomic.Value
	e, err := New(Config{Endpoint: srv.URL, SamplePercent: 100, SpansPerSecond: 1000, Log: slog.New(slog.DiscardHandler), OnExport: func(signal string, err error) {
		exports.Add(1)
		if err != nil {
			failed.Add(1)
			lastErr.Store(err.Error())
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()

	for e.tracer.Load() == nil {
		<-time.After(time.Millisecond)
	}
	tap := NewTap(e, nil, time.Now)
	for i := range 100 {
		id := "good"
		if i == 50 {
			id = "\xff\xfe"
		}
		d := tap.Begin([]record.Record{{Topic: "orders", Value: []byte("x"), Headers: newHeaders("id", id, "traceparent", parent)}}, []byte("shop"), []byte("outbox"), 5)
		d.Acked(record.TopicPartition{Topic: "orders"}, int64(i))
	}
	cancel()
	<-ran
	if failed.Load() > 0 || exports.Load() == 0 || bytesIn.Load() == 0 {
		t.Errorf("%d of %d exports failed: %v", failed.Load(), exports.Load(), lastErr.Load())
	}
}
