package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// The sender of a webhook repeats it until it gets a response. The payment is captured at a provider,
// so a claim prevents that two processes capture it at the same time. While one of them works, the
// other rejects the request with an error after which the sender retries. In production, the
// inboxes come from inbox.New.
func ExampleInbox_Once_webhook() {
	db := memory.NewDB()
	captured := memory.NewTable[string, string](db, "captured")

	// receive returns the HTTP handler of one process.
	receive := func(capture func()) http.HandlerFunc {
		in, err := memory.NewInbox(db)
		if err != nil {
			log.Fatal(err)
		}

		return func(w http.ResponseWriter, r *http.Request) {
			key := inbox.Key{Scope: "payments", ID: r.Header.Get("Webhook-Id")}
			err := in.Once(r.Context(), key, func(ctx context.Context) error {
				capture()
				return captured.Put(ctx, key.ID, "ok")
			}, inbox.WithClaim(30*time.Second), inbox.WithoutWaiting())

			var progress *inbox.InProgressError
			switch {
			case err == nil || errors.Is(err, inbox.ErrDuplicate):
				w.WriteHeader(http.StatusNoContent)
			case errors.As(err, &progress):
				wait := max(1, math.Ceil(time.Until(progress.Until).Seconds()))
				w.Header().Set("Retry-After", strconv.Itoa(int(wait)))
				w.WriteHeader(http.StatusTooManyRequests)
			default:
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}
	}

	deliver := func(process http.HandlerFunc) {
		r := httptest.NewRequest(http.MethodPost, "/webhooks", nil)
		r.Header.Set("Webhook-Id", "evt-1")
		w := httptest.NewRecorder()
		process(w, r)
		fmt.Println(w.Code, w.Header())
	}

	other := receive(func() { fmt.Println("captured twice") })
	first := receive(func() {
		fmt.Println("captured")
		deliver(other) // the sender is impatient
	})
	deliver(first)
	deliver(other)
	// Output:
	// captured
	// 429 map[Retry-After:[30]]
	// 204 map[]
	// 204 map[]
}

// The result is stored in the transaction of the effect, so a repeated call gets the first result. In production, the inbox comes from
// inbox.New.
func ExampleOnceValue() {
	db := memory.NewDB()
	orders := memory.NewTable[string, int](db, "orders")
	in, err := memory.NewInbox(db)
	if err != nil {
		log.Fatal(err)
	}

	type receipt struct {
		Order string `json:"order"`
		Cents int    `json:"cents"`
	}
	placeOrder := func(ctx context.Context, client, key, order string, cents int) {
		placed, repeated, err := inbox.OnceValue(ctx, in.Inbox, inbox.Key{Scope: "orders of " + client, ID: key}, func(ctx context.Context) (receipt, error) {
			return receipt{order, cents}, orders.Insert(ctx, order, cents)
		})
		fmt.Println(placed, repeated, err)
	}

	ctx := context.Background()
	placeOrder(ctx, "alice", "k-1", "o-1", 4200)
	placeOrder(ctx, "alice", "k-1", "o-2", 4200) // the same request again
	placeOrder(ctx, "bob", "k-1", "o-3", 100)    // another client
	// Output:
	// {o-1 4200} false <nil>
	// {o-1 4200} true <nil>
	// {o-3 100} false <nil>
}

// The service creates the indexes of the inbox when it starts.
func ExampleNew() {
	var (
		ctx context.Context
		db  *mongo.Database
	)
	in, err := inbox.New(db, inbox.WithRetention(90*24*time.Hour))
	if err != nil {
		log.Fatal(err)
	}
	if err := in.EnsureIndexes(ctx); err != nil {
		log.Fatal(err)
	}
}
