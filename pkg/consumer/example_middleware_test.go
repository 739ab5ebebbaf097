package consumer_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// A middleware that checks the body of a message by its type, before the handler runs. Any library of schemas fits into such a
// function. Another attempt cannot repair a wrong body, so the message becomes a dead letter at once.
func ExampleMiddleware_validation() {
	validators := map[string]func(body []byte) error{
		"OrderPlaced": func(body []byte) error {
			var order struct{ Customer string }
			if err := json.Unmarshal(body, &order); err != nil || order.Customer == "" {
				// The error is logged, so it contains no part of the body.
				return errors.New("the order has no customer")
			}
			return nil
		},
	}
	validate := func(next consumer.HandlerFunc) consumer.HandlerFunc {
		return func(ctx context.Context, m *consumer.Message) error {
			if check, ok := validators[m.Name]; ok && !m.Tombstone() {
				if err := check(m.Value); err != nil {
					return consumer.Reject(err)
				}
			}
			return next(ctx, m)
		}
	}

	// In a service: consumer.New(group, db, consumer.WithMiddleware(validate)).
	handler := validate(func(_ context.Context, m *consumer.Message) error {
		fmt.Println("handling", m.ID)
		return nil
	})
	for _, m := range []*consumer.Message{
		{ID: "1", Name: "OrderPlaced", Value: []byte(`{"customer": "ann"}`)},
		{ID: "2", Name: "OrderPlaced", Value: []byte(`{}`)},
	} {
		if err := handler(context.Background(), m); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// handling 1
	// the handler rejected the message: the order has no customer
}
