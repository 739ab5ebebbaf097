// Httpservice takes orders over HTTP. An order and its event are one transaction: either both are stored, or none.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… go run ./examples/httpservice
//	curl -d '{"cents": 4200}' localhost:8080/orders
package main

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Order is the body of a request and the payload of OrderPlaced.
type Order struct {
	Cents int64 `json:"cents"`
}

// OrderPlaced reports a new order.
var OrderPlaced = event.Type[Order]{Aggregate: "order", Name: "OrderPlaced"}

func main() {
	local.Main(func(ctx context.Context, db *mongo.Database) error {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "localhost:8080")
		if err != nil {
			return err
		}
		return serve(ctx, db, listener)
	})
}

// serve answers requests until ctx ends, and then finishes those that it has begun.
func serve(ctx context.Context, db *mongo.Database, listener net.Listener) error {
	box, err := outbox.New(db)
	if err != nil {
		return err
	}
	s := &service{box: box, orders: db.Collection("orders")}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", s.place)

	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	drained := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		// Requests that are running may end, up to this limit.
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		drained <- srv.Shutdown(limited)
	})
	defer stop()

	log.Println("listening on", listener.Addr())
	if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	// Serve returns when the shutdown begins.
	return <-drained
}

type service struct {
	box    *outbox.Box
	orders *mongo.Collection
}

// place stores an order with its event.
func (s *service) place(w http.ResponseWriter, r *http.Request) {
	var order Order
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&order); err != nil || order.Cents <= 0 {
		http.Error(w, `expected {"cents": <a positive number>}`, http.StatusBadRequest)
		return
	}

	id := uuid.NewString()
	err := s.box.Transaction(r.Context(), func(ctx context.Context) error {
		if _, err := s.orders.InsertOne(ctx, bson.D{{Key: "_id", Value: id}, {Key: "cents", Value: order.Cents}}); err != nil {
			return err
		}
		return s.box.Append(ctx, OrderPlaced.New(id, order))
	})
	if err != nil {
		log.Println("placing an order:", err)
		http.Error(w, "the order was not placed", http.StatusServiceUnavailable)
		return
	}

	w.WriteHeader(http.StatusCreated)
	// An error means that the client has disconnected. The order is stored.
	_ = json.NewEncoder(w).Encode(map[string]string{"id": id})
}
