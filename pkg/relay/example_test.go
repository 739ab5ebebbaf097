package relay_test

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/pkg/relay"
)

// Each instance of the service runs a relay, and one of them is the owner.
func Example() {
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	cfg := relay.Default()
	cfg.MongoDB.URI = relay.NewURI(os.Getenv("MONGODB_URI"))
	cfg.Kafka.Brokers = []string{"kafka-1:9092", "kafka-2:9092"}
	cfg.Kafka.SASL = &relay.SASL{Mechanism: "scram-sha-512", Username: "relay", Password: relay.NewSecret(os.Getenv("KAFKA_PASSWORD"))}
	cfg.Watch = []string{"shop.outbox"}
	cfg.Lease.TTL = 3 * time.Second
	// Package operate mounts the operators' page, and people log in with this token.
	cfg.HTTP.Admin = relay.DefaultAdmin()
	cfg.HTTP.Admin.Token = relay.NewSecret(os.Getenv("OPERATOR_TOKEN"))
	r, err := relay.New(cfg, relay.WithLogger(log))
	if err != nil {
		// The error lists every problem of the configuration.
		log.Error("the configuration of the relay is invalid", "error", err)
		return
	}

	mux := http.NewServeMux()
	// This serves /relay/livez, /relay/readyz and /relay/metrics.
	mux.Handle("/relay/", http.StripPrefix("/relay", r.Handler()))

	g, ctx := errgroup.WithContext(ctx)
	// Run ends with ctx: it drains the events in flight and releases the lease.
	g.Go(func() error { return r.Run(ctx) })
	g.Go(func() error { return serve(ctx, mux) })
	if err := g.Wait(); err != nil {
		log.Error("the service fails", "error", err)
	}
}

// serve runs the server of the service.
func serve(ctx context.Context, h http.Handler) error {
	srv := &http.Server{Addr: ":8080", Handler: h}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	return srv.ListenAndServe()
}

// The relay of a service may have the same file and environment variables as the program outrelay.
func ExampleLoad() {
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	cfg, err := relay.Load("outrelay.yaml", os.Environ())
	if err != nil {
		log.Error("the configuration of the relay is invalid", "error", err)
		return
	}

	cfg.Watch = []string{"shop.outbox"}
	if _, err := relay.New(cfg, relay.WithLogger(log)); err != nil {
		log.Error("the configuration of the relay is invalid", "error", err)
	}
}
