package breaker_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/breaker"
)

// Two handlers call the same bank. When the bank fails for one of them, the other one stops as well.
func Example() {
	bank := breaker.New("bank", breaker.WithMinimum(2))
	away := errors.New("the bank does not answer")
	// In a service: c.Handle(name, handler, consumer.WithMiddleware(bank.Middleware()))
	guard := bank.Middleware()
	charge := guard(func(context.Context, *consumer.Message) error { return away })
	refund := guard(func(context.Context, *consumer.Message) error { return nil })

	ctx, m := context.Background(), &consumer.Message{}
	for range 2 {
		fmt.Println(charge(ctx, m))
	}
	fmt.Println(bank.State(), errors.Is(refund(ctx, m), breaker.ErrOpen))
	// Output:
	// the bank does not answer
	// the bank does not answer
	// open true
}
