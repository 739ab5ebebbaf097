package idempotency_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/inbox/idempotency"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// shop is a service with one handler, which stores an order and its event.
type shop struct {
	*testing.T
	db     *mongo.Database
	box    *outbox.Box
	orders *mongo.Collection

	// handle runs before the order is stored. If it has responded, it returns true.
	handle func(w http.ResponseWriter, r *http.Request) bool
}

func newShop(t *testing.T, opts ...*options.ClientOptions) *shop {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t, opts...))
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	s := &shop{T: t, db: db, box: box, orders: db.Collection("orders")}

	for _, name := range []string{"orders", "outbox"} {
		if err := db.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	in, err := inbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	if err := in.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// process returns the handler of one process of the service.
func (s *shop) process(opts ...idempotency.Option) http.Handler {
	s.Helper()
	in, err := inbox.New(s.db)
	if err != nil {
		s.Fatal(err)
	}
	once, err := idempotency.New(in, func(r *http.Request) string { return r.Header.Get("Account") }, opts...)
	if err != nil {
		s.Fatal(err)
	}
	return once(http.HandlerFunc(s.placeOrder))
}

// placeOrder stores the order in the transaction of the request, and responds with its number.
func (s *shop) placeOrder(w http.ResponseWriter, r *http.Request) {
	if s.handle != nil && s.handle(w, r) {
		return
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		_, err = s.orders.InsertOne(r.Context(), bson.D{{Key: "order", Value: string(body)}})
	}
	if err == nil && outbox.CheckTransaction(r.Context()) == nil {
		err = s.box.Append(r.Context(), event.New(event.Aggregate{Type: "order", ID: string(body)}, "OrderPlaced", event.Payload{}))
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}

	w.Header().Set("Location", "/orders/1")
	w.Header().Add("Warning", "a")
	w.Header().Add("Warning", "b")
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, "placed %s", body)
}

// send sends a request. change may be nil.
func send(process http.Handler, key, body string, change func(r *http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(body))
	r.Header.Set("Account", "alice")
	r.Header.Set("Content-Type", "text/plain")
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	if change != nil {
		change(r)
	}
	w := httptest.NewRecorder()
	process.ServeHTTP(w, r)
	return w
}

// checkEffects checks how many orders and events are stored.
func (s *shop) checkEffects(orders, events int) {
	s.Helper()
	for name, want := range map[string]int{"orders": orders, "outbox": events} {
		if n, err := s.db.Collection(name).CountDocuments(s.Context(), bson.D{}); int(n) != want || err != nil {
			s.Errorf("%s: %d documents (%v), want %d", name, n, err, want)
		}
	}
}

// checkProblem checks the status and that the response is a problem whose detail contains text.
func (s *shop) checkProblem(w *httptest.ResponseRecorder, status int, text string) {
	s.Helper()
	var problem struct {
		Status int
		Detail string
	}
	err := json.Unmarshal(w.Body.Bytes(), &problem)
	if err != nil || w.Code != status || problem.Status != status || !strings.Contains(problem.Detail, text) || w.Header().Get("Content-Type") != "application/problem+json" {
		s.Errorf("response %d %v %s (%v), want %d and %q", w.Code, w.Header(), w.Body, err, status, text)
	}
}

func TestARepeatedRequestGetsTheFirstResponse(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	first := send(s.process(), "k-1", "book", nil)
	if first.Code != http.StatusCreated || first.Body.String() != "placed book" || first.Header().Get(idempotency.HeaderReplayed) != "" {
		t.Fatalf("first: %d %v %s", first.Code, first.Header(), first.Body)
	}

	s.handle = func(http.ResponseWriter, *http.Request) bool {
		t.Error("the handler ran for a repetition")
		return false
	}
	// The quotes belong to the syntax of the header.
	for i, key := range []string{"k-1", `"k-1"`} {
		again := send(s.process(), key, "book", nil)
		if again.Header().Get("Idempotent-Replayed") != "true" {
			t.Errorf("repetition %d is not marked: %v", i, again.Header())
		}
		again.Header().Del("Idempotent-Replayed")
		if again.Code != first.Code || !bytes.Equal(again.Body.Bytes(), first.Body.Bytes()) || fmt.Sprint(again.Header()) != fmt.Sprint(first.Header()) {
			t.Errorf("repetition %d: %d %v %s, want %d %v %s", i, again.Code, again.Header(), again.Body, first.Code, first.Header(), first.Body)
		}
	}
	s.checkEffects(1, 1)
}

func TestAnotherRequestUnderAKeyIsRejected(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	process := s.process()
	send(process, "k-1", "book", nil)
	for name, change := range map[string]func(r *http.Request){
		"query":        func(r *http.Request) { r.URL.RawQuery = "express=1" },
		"content type": func(r *http.Request) { r.Header.Set("Content-Type", "application/json") },
		"body":         func(r *http.Request) { r.Body = io.NopCloser(strings.NewReader("bool")) },
	} {
		w := send(process, "k-1", "book", change)
		t.Run(name, func(*testing.T) { s.checkProblem(w, http.StatusUnprocessableEntity, "another request") })
	}
	s.checkEffects(1, 1)

	// A key belongs to one tenant, method and path.
	for name, change := range map[string]func(r *http.Request){
		"tenant": func(r *http.Request) { r.Header.Set("Account", "bob") },
		"path":   func(r *http.Request) { r.URL.Path = "/orders/2" },
		"method": func(r *http.Request) { r.Method = http.MethodPatch },
		"long":   func(r *http.Request) { r.Header.Set("Account", strings.Repeat("x", 5000)) },
	} {
		if w := send(process, "k-1", "book", change); w.Code != http.StatusCreated || w.Header().Get("Idempotent-Replayed") != "" {
			t.Errorf("another %s: %d %v %s", name, w.Code, w.Header(), w.Body)
		}
	}
	s.checkEffects(5, 5)
}

func TestARequestIsRejectedWhileTheFirstOneRuns(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	same, other := s.process(), s.process()
	nested := false
	s.handle = func(http.ResponseWriter, *http.Request) bool {
		if nested {
			t.Error("two requests ran at the same time")
			return false
		}
		nested = true
		for _, process := range []http.Handler{same, other} {
			w := send(process, "k-1", "book", nil)
			s.checkProblem(w, http.StatusConflict, "is running")
			if w.Header().Get("Retry-After") != "1" {
				t.Errorf("headers %v", w.Header())
			}
		}
		return false
	}

	if w := send(same, "k-1", "book", nil); w.Code != http.StatusCreated {
		t.Errorf("first: %d %s", w.Code, w.Body)
	}
	s.checkEffects(1, 1)
}

func TestAFailedRequestLeavesNothingAndRunsAgain(t *testing.T) {
	t.Parallel()
	for _, status := range []int{http.StatusInternalServerError, http.StatusServiceUnavailable, http.StatusTooManyRequests, http.StatusRequestTimeout} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			process := s.process()
			s.handle = func(w http.ResponseWriter, r *http.Request) bool {
				if _, err := s.orders.InsertOne(r.Context(), bson.D{}); err != nil {
					t.Error(err)
				}
				w.Header().Set("Retry-After", "7")
				w.WriteHeader(status)
				fmt.Fprint(w, "later")
				return true
			}
			if w := send(process, "k-1", "book", nil); w.Code != status || w.Body.String() != "later" || w.Header().Get("Retry-After") != "7" {
				t.Errorf("failed: %d %v %s", w.Code, w.Header(), w.Body)
			}
			s.checkEffects(0, 0)

			s.handle = nil
			if w := send(process, "k-1", "book", nil); w.Code != http.StatusCreated || w.Header().Get("Idempotent-Replayed") != "" {
				t.Errorf("again: %d %v %s", w.Code, w.Header(), w.Body)
			}
			s.checkEffects(1, 1)
		})
	}
}

// A client that reads that nothing was done would send the request with a new key, and order twice.
func TestARequestWithAnUnknownOutcomePromisesNothing(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	s := newShop(t, options.Client().SetAppName(app))
	process := s.process()
	stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"commitTransaction"}},
		{Key: "errorCode", Value: 50},
		{Key: "errorLabels", Value: bson.A{"UnknownTransactionCommitResult"}},
	})

	w := send(process, "k-1", "book", nil)
	if text := w.Body.String(); w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" ||
		strings.Contains(text, "nothing was done") || !strings.Contains(text, "same Idempotency-Key") {
		t.Errorf("got %d %s, want 503 and the advice to send it again", w.Code, text)
	}
}

// The context may be that of a deadline or of a server that ends, and the client waits. Without a response it would get the status 200.
func TestARequestWhoseContextEndsIsNotASuccess(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	process := s.process()
	ctx, cancel := context.WithCancel(t.Context())
	s.handle = func(w http.ResponseWriter, r *http.Request) bool {
		if _, err := s.orders.InsertOne(r.Context(), bson.D{}); err != nil {
			t.Error(err)
		}
		w.WriteHeader(http.StatusCreated)
		cancel()
		return true
	}

	w := send(process, "k-1", "book", func(r *http.Request) { *r = *r.WithContext(ctx) })
	s.checkProblem(w, http.StatusServiceUnavailable, "send it again")
	s.checkEffects(0, 0)

	s.handle = nil
	if w := send(process, "k-1", "book", nil); w.Code != http.StatusCreated {
		t.Errorf("again: %d %s", w.Code, w.Body)
	}
	s.checkEffects(1, 1)
}

func TestATenantMayBeAFieldOfTheForm(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	in, err := inbox.New(s.db)
	if err != nil {
		t.Fatal(err)
	}
	once, err := idempotency.New(in, func(r *http.Request) string { return r.FormValue("account") })
	if err != nil {
		t.Fatal(err)
	}

	process := once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.PostFormValue("item")) }))
	isForm := func(r *http.Request) { r.Header.Set("Content-Type", "application/x-www-form-urlencoded") }

	// Equal keys of two tenants are two requests.
	for _, account := range []string{"alice", "bob"} {
		if w := send(process, "k-1", "item=book&account="+account, isForm); w.Body.String() != "book" || w.Header().Get("Idempotent-Replayed") != "" {
			t.Errorf("%s: %d %s", account, w.Code, w.Body)
		}
	}
}

// The server of net/http recovers the panic, and the client repeats its request at once.
func TestARequestWhoseHandlerPanicsRunsAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	process := s.process()
	s.handle = func(http.ResponseWriter, *http.Request) bool { panic("boom") }
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the middleware has recovered the panic")
			}
		}()
		send(process, "k-1", "book", nil)
	}()

	s.handle = nil
	if w := send(process, "k-1", "book", nil); w.Code != http.StatusCreated {
		t.Errorf("again: %d %v %s", w.Code, w.Header(), w.Body)
	}
	s.checkEffects(1, 1)
}

// The response to a wrong request does not change, and neither does that without a body.
func TestARejectionIsStoredAsWell(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	process := s.process()
	runs := 0
	s.handle = func(w http.ResponseWriter, _ *http.Request) bool {
		runs++
		w.WriteHeader(http.StatusNotFound)
		return true
	}

	for range 2 {
		if w := send(process, "k-1", "book", nil); w.Code != http.StatusNotFound || w.Body.Len() != 0 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	}
	if runs != 1 {
		t.Errorf("the handler ran %d times", runs)
	}
}

func TestAResponseThatIsTooLargeRollsBack(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.handle = func(w http.ResponseWriter, r *http.Request) bool {
		if _, err := s.orders.InsertOne(r.Context(), bson.D{}); err != nil {
			t.Error(err)
		}
		for range 3 {
			if _, err := w.Write(make([]byte, inbox.MaxResult/2)); err != nil {
				break
			}
		}
		return true
	}

	s.checkProblem(send(s.process(), "k-1", "book", nil), http.StatusInternalServerError, "larger than 1048576 bytes")
	s.checkEffects(0, 0)
}

func TestRequestsWithoutAValidKey(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	process := s.process(idempotency.WithMaxBody(10))
	// Without a key there is no transaction, and so no event.
	if w := send(process, "", "book", nil); w.Code != http.StatusCreated {
		t.Errorf("without a key: %d %s", w.Code, w.Body)
	}
	if w := send(process, "k-1", "book", func(r *http.Request) { r.Method = http.MethodPut }); w.Code != http.StatusCreated {
		t.Errorf("another method: %d %s", w.Code, w.Body)
	}
	s.checkEffects(2, 0)

	s.checkProblem(send(s.process(idempotency.WithRequired()), "", "book", nil), http.StatusBadRequest, "is missing")
	for _, key := range []string{`""`, strings.Repeat("x", 256), "schlüssel", "a\tb"} {
		s.checkProblem(send(process, key, "book", nil), http.StatusBadRequest, "1 to 255 printable")
	}
	s.checkProblem(send(process, "a", "book", func(r *http.Request) { r.Header.Add("Idempotency-Key", "b") }), http.StatusBadRequest, "occurs 2 times")
	s.checkProblem(send(process, "k-2", "eleven byte", nil), http.StatusRequestEntityTooLarge, "more than 10 bytes")
	s.checkEffects(2, 0)

	put := s.process(idempotency.WithMethods(http.MethodPut), idempotency.WithMaxBody(-1))
	for range 2 {
		send(put, "k-3", "eleven byte", func(r *http.Request) { r.Method = http.MethodPut })
	}
	s.checkEffects(3, 1)
}

func TestNewReportsWhatIsMissing(t *testing.T) {
	t.Parallel()
	_, err := idempotency.New(nil, nil)
	for _, want := range []string{"the inbox is nil", "tenant is nil"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
}

// MongoDB rolls the transaction back and runs the handler again, with the whole body.
func TestTheHandlerRunsAgainAfterARollback(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	s := newShop(t, options.Client().SetAppName(app))
	stacktest.FailCommand(t, app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"commitTransaction"}},
		{Key: "errorCode", Value: 251},
		{Key: "errorLabels", Value: bson.A{"TransientTransactionError"}},
	})
	runs := 0
	s.handle = func(w http.ResponseWriter, _ *http.Request) bool {
		runs++
		w.Header().Add("Run", fmt.Sprint(runs))
		return false
	}

	w := send(s.process(), "k-1", "book", nil)
	if w.Code != http.StatusCreated || w.Body.String() != "placed book" || runs != 2 || fmt.Sprint(w.Header().Values("Run")) != "[2]" {
		t.Errorf("%d %v %s after %d runs", w.Code, w.Header(), w.Body, runs)
	}
	s.checkEffects(1, 1)
}

// TestCommandsOfARequest checks the cost that the documentation states.
func TestCommandsOfARequest(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var sent []string
	s := newShop(t, options.Client().SetMonitor(&mongoevent.CommandMonitor{Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
		mu.Lock()
		defer mu.Unlock()
		if coll, ok := e.Command.Lookup(e.CommandName).StringValueOK(); ok {
			sent = append(sent, e.CommandName+" "+coll)
		}
	}}))
	s.handle = func(http.ResponseWriter, *http.Request) bool { return true }
	process := s.process()

	for _, want := range [][]string{
		{"findAndModify inbox_claims", "findAndModify inbox", "update inbox", "update inbox", "delete inbox_claims"},
		{"findAndModify inbox_claims", "findAndModify inbox", "delete inbox_claims", "find inbox"},
	} {
		mu.Lock()
		sent = nil
		mu.Unlock()
		send(process, "k-1", "book", nil)
		mu.Lock()
		if !slices.Equal(sent, want) {
			t.Errorf("commands: got %q, want %q", sent, want)
		}
		mu.Unlock()
	}
}
