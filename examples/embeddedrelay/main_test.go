package main

import (
	"context"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/relay"
	"github.com/outrelay/outrelay/pkg/servertest"
)

func TestTheServiceServesTheProbesOfItsRelay(t *testing.T) {
	t.Parallel()
	env := servertest.Start(t)
	state := env.DB.Client().Database(env.DB.Name() + "_state")
	t.Cleanup(func() {
		if err := state.Drop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	listener, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	env.Run(func(ctx context.Context) error {
		cfg := relay.Default()
		cfg.Watcher = "embedded"
		cfg.MongoDB.URI = relay.NewURI(env.MongoURI)
		cfg.State.Database = state.Name()
		cfg.Kafka.Brokers = env.Brokers
		cfg.Watch = []string{env.DB.Name() + ".other"}
		return run(ctx, listener, cfg)
	})

	client := &http.Client{}
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listener.Addr().String()+"/relay/readyz", nil)
		if err != nil {
			t.Fatal(err)
		}
		if res, err := client.Do(req); err == nil {
			_ = res.Body.Close()
			if res.StatusCode == http.StatusOK {
				break
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("the relay did not become ready")
		}
	}

	// The operators' page is for people who have logged in to the service.
	for password, want := range map[string]int{"secret": http.StatusOK, "guess": http.StatusForbidden} {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listener.Addr().String()+"/outrelay/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.SetBasicAuth("ann", password)
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("the page with password %s: status %d, want %d", password, res.StatusCode, want)
		}
	}
}
