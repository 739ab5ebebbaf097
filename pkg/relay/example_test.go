package relay_test

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/pkg/relay"
)

// A service that brings its relay along. Each of its instances does; one of them works.
func Example() {
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := relay.New(
		relay.MongoDB(os.Getenv("MONGODB_URI")),
		relay.Brokers("kafka-1:9092", "kafka-2:9092"),
		relay.Watch("shop.outbox"),
		relay.Set("lease.ttl", "3s"),
		relay.Logger(log),
	)
	if err != nil {
		log.Error("the relay's configuration", "error", err) // every problem at once
		return
	}
	mux := http.NewServeMux()
	mux.Handle("/relay/", http.StripPrefix("/relay", r.Handler())) // /relay/readyz, /relay/metrics
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return r.Run(ctx) }) // until ctx ends, then it drains and releases
	g.Go(func() error { return serve(ctx, mux) })
	if err := g.Wait(); err != nil {
		log.Error("the service ends", "error", err)
	}
}

// serve is the service's own server.
func serve(ctx context.Context, h http.Handler) error {
	srv := &http.Server{Addr: ":8080", Handler: h}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	return srv.ListenAndServe()
}
