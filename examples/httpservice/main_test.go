package main

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outboxtest"
	"github.com/outrelay/outrelay/pkg/servertest"
)

func TestAnOrderIsStoredWithItsEvent(t *testing.T) {
	t.Parallel()
	env := servertest.Start(t)
	listener, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	env.Run(func(ctx context.Context) error { return serve(ctx, env.DB, listener) })

	post := func(body string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+listener.Addr().String()+"/orders", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = res.Body.Close(); http.DefaultClient.CloseIdleConnections() })
		return res
	}
	if res := post(`{"cents": -1}`); res.StatusCode != http.StatusBadRequest {
		t.Errorf("a wrong order: got status %d, want 400", res.StatusCode)
	}
	res := post(`{"cents": 4200}`)
	var answer struct{ ID string }
	if err := json.NewDecoder(res.Body).Decode(&answer); err != nil || res.StatusCode != http.StatusCreated {
		t.Fatalf("got status %d, %v; want 201", res.StatusCode, err)
	}

	box, err := outbox.New(env.DB)
	if err != nil {
		t.Fatal(err)
	}
	placed := outboxtest.RequireAppended(t, box, OrderPlaced)
	if placed.Aggregate.ID != answer.ID || placed.Payload.Cents != 4200 {
		t.Errorf("event: got %+v, want that of order %s", placed, answer.ID)
	}
}
