package idempotency_test

import (
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/pkg/inbox/idempotency"
)

// A client repeats a request of which it got no response. In production, the inbox comes from inbox.New.
func ExampleNew() {
	db := memory.NewDB()
	orders := memory.NewTable[string, int](db, "orders")
	in, err := memory.NewInbox(db)
	if err != nil {
		log.Fatal(err)
	}

	account := func(r *http.Request) string { return r.Header.Get("Account") } // in production: of the authenticated client
	once, err := idempotency.New(in.Inbox, account, idempotency.WithRequired())
	if err != nil {
		log.Fatal(err)
	}
	number := 0
	api := once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		number++
		id := fmt.Sprintf("o-%d", number)
		// The context has the transaction that also stores the response.
		if err := orders.Insert(r.Context(), id, 4200); err != nil {
			http.Error(w, "try again", http.StatusServiceUnavailable)
			return
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, id)
	}))

	for _, request := range [][2]string{{"k-1", "book"}, {"k-1", "book"}, {"k-1", "lamp"}, {"k-2", "lamp"}, {"", "lamp"}} {
		r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(request[1]))
		r.Header.Set("Account", "alice")
		if request[0] != "" {
			r.Header.Set(idempotency.HeaderKey, request[0])
		}
		w := httptest.NewRecorder()
		api.ServeHTTP(w, r)
		fmt.Println(w.Code, w.Header().Get(idempotency.HeaderReplayed), strings.TrimSpace(w.Body.String()))
	}
	// Output:
	// 201  o-1
	// 201 true o-1
	// 422  {"title":"Unprocessable Entity","status":422,"detail":"the Idempotency-Key was used before for another request: send a new key with each new request"}
	// 201  o-2
	// 400  {"title":"Bad Request","status":400,"detail":"the header Idempotency-Key is missing: send a new unique value, such as a UUID, with each new request"}
}
