// Package inbox makes an effect happen once, even if its cause arrives several times: webhooks, HTTP
// requests with an idempotency key, messages of any broker. Package consumer uses the same mechanism
// for Kafka, so handlers of a consumer need no calls of this package.
//
//	in, err := inbox.New(db)
//	err = in.EnsureIndexes(ctx)
//	…
//	err = in.Once(ctx, inbox.Key{Scope: "stripe", ID: hook.ID}, func(ctx context.Context) error {
//		_, err := payments.InsertOne(ctx, payment)
//		return err
//	})
//	if errors.Is(err, inbox.ErrDuplicate) { … } // it was handled before
//
// OnceValue also stores the result of the function, and returns it for a repeated key. Package idempotency does that for the responses
// of an HTTP handler.
//
// # Guarantees
//
// Once writes a marker for the key in the transaction of the effect. So effects that are written with
// the context of the function are committed at most once for each key within the retention (seven
// days by default). If the function fails, nothing is stored, and the next call runs it again. All
// times refer to the server's clock.
//
// An effect outside of the database, for example at a payment provider, cannot be part of the
// transaction. WithClaim lets only one process at a time run the function for a key. If that process
// dies, the effect may happen a second time when the lease of the claim is over. Pass the key to the
// provider as well, if it accepts one.
//
// # Keys
//
// The scope separates the users of one inbox. Callers with the same scope handle each id once among
// all of them. Callers with different scopes are independent, also of the handlers of a consumer that
// uses the same collections.
//
// # Cost
//
// Once needs one read and one write in the transaction, and with WithClaim four more writes outside of
// it. OnceValue needs one write more. Nothing runs in the background, except for the renewal of a claim while its function runs.
package inbox
