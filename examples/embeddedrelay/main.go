// Embeddedrelay runs the relay inside the service: there is no other process to deploy. The instances of the service share the
// lease, and one of them relays the events of all. The service also serves the operators' page, and lists its dead letters.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… KAFKA_BROKERS=… go run ./examples/embeddedrelay
//	curl localhost:8080/relay/readyz
//	curl localhost:8080/dead-letters
//	curl -u ann:secret localhost:8080/outrelay/
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/operate"
	"github.com/outrelay/outrelay/pkg/relay"
)

func main() {
	local.Main(func(ctx context.Context, _ *mongo.Database) error {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "localhost:8080")
		if err != nil {
			return err
		}
		cfg := relay.Default()
		cfg.MongoDB.URI = relay.NewURI(local.MongoURI())
		cfg.Kafka.Brokers = local.Brokers()
		// The demo has a relay of its own for the database shop. An outbox belongs to one watcher.
		cfg.Watch = []string{"embedded.outbox"}
		// Development: topics are created when the first event needs them.
		cfg.Topics.Create = &relay.Create{Partitions: 3}
		return run(ctx, listener, cfg)
	})
}

// run serves HTTP and relays events until ctx ends. The relay then sends what it has read, and releases its lease.
func run(ctx context.Context, listener net.Listener, cfg relay.Config) error {
	r, err := relay.New(cfg,
		relay.WithStatusHook(func(s relay.Status) { log.Println("relay:", s.Phase, "ready:", s.Ready, s.Reasons) }),
		relay.WithGivenUpHook(func(e relay.GivenUp) { log.Println("given up:", e.Collection, e.ID, e.Class, e.Reason) }),
	)
	if err != nil {
		return err
	}
	op, err := operate.Of(r)
	if err != nil {
		return err
	}
	defer op.Close()
	page, err := op.Handler("/outrelay", authorize)
	if err != nil {
		return err
	}

	mux := http.NewServeMux()
	mux.Handle("/relay/", http.StripPrefix("/relay", r.Handler())) // livez, readyz, metrics
	mux.Handle("/outrelay/", page)
	mux.HandleFunc("GET /dead-letters", func(response http.ResponseWriter, request *http.Request) { listLetters(response, request, op) })
	// Here follow the paths of the service.

	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return r.Run(ctx) })
	g.Go(func() error { return op.Run(ctx) })
	g.Go(func() error {
		defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
		if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	return g.Wait()
}

// authorize returns the person who sends a request to the operators' page. A real service asks its sessions.
func authorize(request *http.Request) (operate.Caller, error) {
	name, password, ok := request.BasicAuth()
	if !ok || password != "secret" {
		return operate.Caller{}, errors.New("log in to the service first")
	}
	return operate.Caller{Name: name, Role: operate.Actor, Payloads: true}, nil
}

// listLetters writes a line for each dead letter that nobody has requeued.
func listLetters(response http.ResponseWriter, request *http.Request, op *operate.Operator) {
	open := false
	for letter, err := range op.Letters(request.Context(), operate.LetterFilter{Requeued: &open}) {
		if err != nil {
			http.Error(response, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(response, letter.DiedAt.Format(time.RFC3339), letter.Type, letter.ID, letter.Class, letter.Reason)
	}
}
