// Service accepts orders over HTTP and records the result of their payment.
//
//	POST /orders        {"id": "o-1", "customer": "c-1", "cents": 4200}
//	GET  /orders/{id}
//
// One transaction stores the change of an order and its event, so neither exists without the other.
// The relay sends the events to Kafka. You can run any number of instances: they form one consumer
// group, and a message that two of them receive has its effect once.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/examples/orders/shop"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
)

func main() { shop.Main(buildParts) }

// service stores the orders.
type service struct {
	*shop.Shop
	orders *entity.Collection[shop.Order, string]
}

// buildParts registers the handlers for the results of payments.
func buildParts(_ context.Context, s *shop.Shop) ([]func(context.Context) error, error) {
	orders, err := entity.New(s.DB.Collection("orders"), func(o *shop.Order) *string { return &o.ID })
	if err != nil {
		return nil, err
	}

	svc := &service{s, orders}
	c, err := s.Consumer("orders", "payment")
	if err != nil {
		return nil, err
	}

	err = errors.Join(
		c.Handle("pay-orders", consumer.Func(svc.settleOrder("paid", shop.OrderPaid), shop.PaymentTaken.Name)),
		c.Handle("cancel-orders", consumer.Func(svc.settleOrder("cancelled", shop.OrderCancelled), shop.PaymentRejected.Name)),
	)
	if err != nil {
		return nil, err
	}

	return []func(context.Context) error{c.Run, svc.runServer}, nil
}

// placeOrder stores an order and appends its event. If an order with this id exists, placeOrder
// returns it and does nothing. So a client without an answer can repeat its request.
func (s *service) placeOrder(ctx context.Context, o shop.Order) (shop.Order, error) {
	o.Status = "placed"
	err := s.Outbox.Transaction(ctx, func(ctx context.Context) error {
		if existing, ok, err := s.orders.Find(ctx, o.ID); ok || err != nil {
			o = existing
			return err
		}
		if _, err := s.orders.Insert(ctx, o); err != nil {
			return err
		}

		return s.Outbox.Append(ctx, shop.OrderPlaced.New(o.ID, o))
	})
	return o, err
}

// settleOrder returns the handler of a message that ends the payment of an order. It runs in the
// transaction of the message, which also commits the order, the event and the mark in the inbox.
func (s *service) settleOrder(status string, settled event.Type[shop.Order]) consumer.HandlerFunc {
	return func(ctx context.Context, m *consumer.Message) error {
		o, err := s.orders.Load(ctx, m.Aggregate.ID)
		if errors.Is(err, entity.ErrMissing) {
			return consumer.Discard(err)
		}
		if err != nil {
			return err
		}

		o.Status = status
		if _, err := s.orders.Update(ctx, o); err != nil {
			return err
		}

		return s.Outbox.Append(ctx, settled.New(o.ID, o))
	}
}

// runServer serves requests until ctx ends. Then it waits up to 5 s for running requests.
func (s *service) runServer(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", s.postOrder)
	mux.HandleFunc("GET /orders/{id}", s.getOrder)

	srv := &http.Server{
		Addr:              cmp.Or(os.Getenv("SHOP_LISTEN"), "127.0.0.1:8080"),
		Handler:           http.TimeoutHandler(mux, 20*time.Second, "too busy"),
		ReadHeaderTimeout: 5 * time.Second,
	}

	done := make(chan error, 1)
	go func() {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		done <- srv.Shutdown(stop)
	}()

	if err := srv.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}

	return <-done
}

// postOrder places the order in the request.
func (s *service) postOrder(w http.ResponseWriter, r *http.Request) {
	var o shop.Order
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&o)
	if err != nil || o.ID == "" || o.Customer == "" || o.Cents <= 0 {
		http.Error(w, "an order has an id, a customer and an amount", http.StatusBadRequest)
		return
	}

	o, err = s.placeOrder(r.Context(), o)
	// If two requests have the same id, one of them has inserted the order. The other one finds it
	// now.
	if mongo.IsDuplicateKeyError(err) {
		o, err = s.placeOrder(r.Context(), o)
	}

	writeResponse(w, o, err)
}

// getOrder returns the order in the path.
func (s *service) getOrder(w http.ResponseWriter, r *http.Request) {
	var o shop.Order
	err := s.Outbox.Transaction(r.Context(), func(ctx context.Context) (err error) {
		o, err = s.orders.Load(ctx, r.PathValue("id"))
		return err
	})
	writeResponse(w, o, err)
}

// writeResponse writes the order or the status for the error.
func writeResponse(w http.ResponseWriter, o shop.Order, err error) {
	switch {
	case errors.Is(err, entity.ErrMissing):
		http.Error(w, "no such order", http.StatusNotFound)
	case err != nil:
		http.Error(w, "not now", http.StatusServiceUnavailable)
	default:
		w.Header().Set("Content-Type", "application/json")
		// A client that has disconnected repeats its request.
		_ = json.NewEncoder(w).Encode(o)
	}
}
