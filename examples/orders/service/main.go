// The order service takes orders over HTTP and follows what becomes of their payment.
//
//	POST /orders        {"id": "o-1", "customer": "c-1", "cents": 4200}
//	GET  /orders/{id}
//
// Every change of an order and the event that tells of it are one transaction: there is no order without its event, and no
// event without its order. The relay brings the events to Kafka. Run as many instances as you like: they are one consumer
// group, and what two of them are given twice has its effect once.
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
	"github.com/outrelay/outrelay/pkg/outbox"
)

func main() { shop.Main(build) }

type service struct {
	*shop.Shop
	orders *entity.Collection[shop.Order, string]
}

func build(_ context.Context, s *shop.Shop) ([]func(context.Context) error, error) {
	orders, err := entity.New(s.DB.Collection("orders"), func(o *shop.Order) *string { return &o.ID })
	if err != nil {
		return nil, err
	}
	svc := &service{s, orders}
	c, err := s.Consumer("orders", "payment")
	if err != nil {
		return nil, err
	}
	if err := errors.Join(
		c.Handle(shop.PaymentTaken, svc.settle("paid", shop.OrderPaid)),
		c.Handle(shop.PaymentRefused, svc.settle("cancelled", shop.OrderCancelled)),
	); err != nil {
		return nil, err
	}
	return []func(context.Context) error{c.Run, svc.serve}, nil
}

// place stores an order and appends its event. Placed again under the same id it is the same order: nothing happens twice
// because a client did not get its answer and asked again.
func (s *service) place(ctx context.Context, o shop.Order) (shop.Order, error) {
	o.Status = "placed"
	err := outbox.Transaction(ctx, s.Client, func(ctx context.Context) error {
		if there, ok, err := s.orders.Find(ctx, o.ID); ok || err != nil {
			o = there
			return err
		}
		if _, err := s.orders.Insert(ctx, o); err != nil {
			return err
		}
		return s.tell(ctx, shop.OrderPlaced, o)
	})
	return o, err
}

// settle is the handler of a message that ends the payment of an order. It runs in the transaction of its message: the
// order, the event and the inbox's mark are committed together.
func (s *service) settle(status, typ string) consumer.HandlerFunc {
	orderOf := func(m *consumer.Message) (string, error) { return m.AggregateID, nil }
	return entity.Required(s.orders, orderOf, func(ctx context.Context, _ *consumer.Message, o shop.Order) error {
		o.Status = status
		if _, err := s.orders.Update(ctx, o); err != nil {
			return err
		}
		return s.tell(ctx, typ, o)
	})
}

// tell appends an event with the order as it is now, in the transaction of ctx.
func (s *service) tell(ctx context.Context, typ string, o shop.Order) error {
	ev, err := shop.Event("order", o.ID, typ, o)
	if err != nil {
		return err
	}
	return s.Outbox.Append(ctx, ev)
}

// serve answers requests until ctx ends, and lets those that are under way finish.
func (s *service) serve(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", s.postOrder)
	mux.HandleFunc("GET /orders/{id}", s.getOrder)
	srv := &http.Server{
		Addr: cmp.Or(os.Getenv("SHOP_LISTEN"), "127.0.0.1:8080"), Handler: http.TimeoutHandler(mux, 20*time.Second, "too busy"),
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

func (s *service) postOrder(w http.ResponseWriter, r *http.Request) {
	var o shop.Order
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&o)
	if err != nil || o.ID == "" || o.Customer == "" || o.Cents <= 0 {
		http.Error(w, "an order has an id, a customer and an amount", http.StatusBadRequest)
		return
	}
	o, err = s.place(r.Context(), o)
	// Two requests with the same id at once: one has inserted the order, the other finds it now.
	if mongo.IsDuplicateKeyError(err) {
		o, err = s.place(r.Context(), o)
	}
	answer(w, o, err)
}

func (s *service) getOrder(w http.ResponseWriter, r *http.Request) {
	var o shop.Order
	err := outbox.Transaction(r.Context(), s.Client, func(ctx context.Context) (err error) {
		o, err = s.orders.Load(ctx, r.PathValue("id"))
		return err
	})
	answer(w, o, err)
}

func answer(w http.ResponseWriter, o shop.Order, err error) {
	switch {
	case errors.Is(err, entity.ErrMissing):
		http.Error(w, "no such order", http.StatusNotFound)
	case err != nil:
		http.Error(w, "not now", http.StatusServiceUnavailable)
	default:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(o) // a client that went away asks again
	}
}
