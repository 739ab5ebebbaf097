package main

import (
	"context"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outboxtest"
	"github.com/outrelay/outrelay/pkg/servertest"
)

func TestARepeatedReportIsBookedOnce(t *testing.T) {
	t.Parallel()
	env := servertest.Start(t)
	var addresses []string
	for range 2 {
		listener, err := net.Listen("tcp", "localhost:0")
		if err != nil {
			t.Fatal(err)
		}
		addresses = append(addresses, listener.Addr().String())
		env.Run(func(ctx context.Context) error { return serve(ctx, env.DB, listener) })
	}

	client := &http.Client{}
	defer client.CloseIdleConnections()
	var reports sync.WaitGroup
	for i := range 10 {
		reports.Go(func() {
			body := strings.NewReader(`{"order": "o-1", "cents": 4200}`)
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addresses[i%2]+"/webhooks/payments", body)
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Webhook-Id", "evt-1")
			res, err := client.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = res.Body.Close() }()
			if res.StatusCode != http.StatusNoContent {
				t.Errorf("report %d: got status %d, want 204", i, res.StatusCode)
			}
		})
	}
	reports.Wait()

	box, err := outbox.New(env.DB)
	if err != nil {
		t.Fatal(err)
	}
	if got := outboxtest.RequireAppended(t, box, PaymentReceived); got.Payload.Cents != 4200 {
		t.Errorf("event: got %+v", got)
	}
}
