// Webhook books payments that a provider reports over HTTP. The provider repeats a report until it gets an answer, possibly to
// several instances at once. The inbox books each report once.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… go run ./examples/webhook
//	curl -H 'Webhook-Id: evt-1' -d '{"order": "o-1", "cents": 4200}' localhost:8080/webhooks/payments
package main

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"net"
	"net/http"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Payment is the body of a report and the payload of PaymentReceived.
type Payment struct {
	Order string `json:"order" bson:"order"`
	Cents int64  `json:"cents" bson:"cents"`
}

// PaymentReceived reports a booked payment.
var PaymentReceived = event.Type[Payment]{Aggregate: "payment", Name: "PaymentReceived"}

func main() {
	local.Main(func(ctx context.Context, db *mongo.Database) error {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "localhost:8080")
		if err != nil {
			return err
		}
		return serve(ctx, db, listener)
	})
}

// serve answers reports until ctx ends.
func serve(ctx context.Context, db *mongo.Database, listener net.Listener) error {
	box, err := outbox.New(db)
	if err != nil {
		return err
	}
	in, err := inbox.New(db)
	if err != nil {
		return err
	}
	if err := in.EnsureIndexes(ctx); err != nil {
		return err
	}

	s := &service{box: box, inbox: in, payments: db.Collection("payments")}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /webhooks/payments", s.receive)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

type service struct {
	box      *outbox.Box
	inbox    *inbox.Inbox
	payments *mongo.Collection
}

// receive books a payment. The mark of the report, the payment and the event are one transaction.
func (s *service) receive(w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get("Webhook-Id")
	var payment Payment
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&payment); err != nil || id == "" {
		http.Error(w, "expected a header Webhook-Id and a JSON object", http.StatusBadRequest)
		return
	}

	err := s.inbox.Once(r.Context(), inbox.Key{Scope: "payments", ID: id}, func(ctx context.Context) error {
		if _, err := s.payments.InsertOne(ctx, bson.D{{Key: "_id", Value: id}, {Key: "payment", Value: payment}}); err != nil {
			return err
		}
		return s.box.Append(ctx, PaymentReceived.New(payment.Order, payment))
	})
	switch {
	case err == nil, errors.Is(err, inbox.ErrDuplicate):
		w.WriteHeader(http.StatusNoContent)
	default:
		// The provider repeats the report.
		log.Printf("booking report %q: %v", id, err)
		http.Error(w, "the payment was not booked", http.StatusServiceUnavailable)
	}
}
