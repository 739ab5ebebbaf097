// Embeddedrelay runs the relay inside the service: there is no other process to deploy. The instances of the service share the
// lease, and one of them relays the events of all.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… KAFKA_BROKERS=… go run ./examples/embeddedrelay
//	curl localhost:8080/relay/readyz
package main

import (
	"context"
	"errors"
	"log"
	"net"
	"net/http"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/relay"
)

func main() {
	local.Main(func(ctx context.Context, db *mongo.Database) error {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "localhost:8080")
		if err != nil {
			return err
		}
		cfg := relay.Default()
		cfg.MongoDB.URI = relay.NewURI(local.MongoURI())
		cfg.Kafka.Brokers = local.Brokers()
		cfg.Watch = []string{db.Name() + ".outbox"}
		// Development: topics are created when the first event needs them.
		cfg.Topics.Create = &relay.Create{Partitions: 3}
		return run(ctx, listener, cfg)
	})
}

// run serves HTTP and relays events until ctx ends. The relay then sends what it has read, and releases its lease.
func run(ctx context.Context, listener net.Listener, cfg relay.Config) error {
	r, err := relay.New(cfg, relay.WithStatusHook(func(s relay.Status) {
		log.Println("relay:", s.Role, "ready:", s.Ready, s.Reasons)
	}))
	if err != nil {
		return err
	}

	mux := http.NewServeMux()
	mux.Handle("/relay/", http.StripPrefix("/relay", r.Handler())) // livez, readyz, metrics
	// Here follow the paths of the service.

	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return r.Run(ctx) })
	g.Go(func() error {
		defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
		if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	return g.Wait()
}
