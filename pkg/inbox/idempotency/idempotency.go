// Package idempotency makes HTTP requests with the header Idempotency-Key take effect once, and responds to each repetition with the
// first response:
//
//	once, err := idempotency.New(in, tenantOf) // in: inbox.New(db)
//	mux.Handle("POST /orders", once(http.HandlerFunc(placeOrder)))
//
// # One transaction
//
// The handler runs in a transaction, which its request's context carries. The writes with this context, the events that it appends to
// an outbox, and the response commit together, or not at all. MongoDB may roll the transaction back and run the handler again before
// the commit, so other effects must be repeatable. Pass the key on to services that accept one.
//
// # Responses
//
//	first request                       the handler's response; it is stored with its status, headers and body
//	the key again                       the stored response, with the header Idempotent-Replayed: true
//	the key, another request            422 Unprocessable Content
//	the key, while the first one runs   409 Conflict, with Retry-After, in all processes
//	500 and above, 408, 425, 429        the handler's response; nothing is committed or stored: the next request runs the handler
//	no key                              the handler runs without this package; with WithRequired 400 Bad Request
//
// Two requests are the same if method, path, query, content type and body are. A key belongs to one tenant, method and path.
// The responses of this package are problem details in JSON (RFC 9457).
//
// # Cost and limits
//
// A first request needs the transaction with two writes, and three writes outside of it. A repetition needs three writes and a read.
// Bodies of requests (WithMaxBody) and responses (inbox.MaxResult) are in memory. A response cannot be streamed, and is stored as long as the markers of
// the inbox: seven days by default (inbox.WithRetention).
package idempotency

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// The headers of requests and responses.
const (
	HeaderKey      = "Idempotency-Key"
	HeaderReplayed = "Idempotent-Replayed" // "true": the response is that of an earlier request
)

const (
	maxKeyBytes    = 255
	maxScopeBytes  = 1024 // of an inbox
	defaultMaxBody = 1 << 20

	// retryAfter is the header Retry-After of a request that may succeed soon, in seconds.
	retryAfter = 1
)

// Option is an option of New.
type Option interface{ applyTo(m *middleware) }

type option func(m *middleware)

func (o option) applyTo(middleware *middleware) { o(middleware) }

// WithRequired rejects requests without a key. By default they pass to the handler, without a transaction.
func WithRequired() Option {
	return option(func(middleware *middleware) { middleware.required = true })
}

// WithMethods sets the methods of the requests with keys. Requests of other methods pass to the handler. Defaults to POST and PATCH:
// the other methods of HTTP are idempotent by their definition.
func WithMethods(methods ...string) Option {
	return option(func(middleware *middleware) {
		if len(methods) > 0 {
			middleware.methods = slices.Clone(methods)
		}
	})
}

// WithMaxBody limits the body of a request with a key, in bytes. A larger one is rejected with 413. Defaults to 1 MiB, because each
// running request holds its body in memory. A negative number means no limit.
func WithMaxBody(limit int64) Option {
	return option(func(middleware *middleware) { middleware.maxBody = cmp.Or(limit, defaultMaxBody) })
}

// WithLogger sets the logger for requests that fail in MongoDB. Keys and bodies are never logged. Defaults to slog.Default.
func WithLogger(log *slog.Logger) Option {
	return option(func(middleware *middleware) { middleware.log = cmp.Or(log, slog.Default()) })
}

// middleware has the settings of New.
type middleware struct {
	in       *inbox.Inbox
	tenant   func(r *http.Request) string
	methods  []string
	required bool
	maxBody  int64
	log      *slog.Logger
}

// New returns a middleware that uses the inbox in. tenant returns the client that sent a request, after its authentication, such as
// the id of the account: clients choose their keys, so a key must never give one client the response of another. A service with a
// single client returns a constant.
//
// New does no I/O. Call EnsureIndexes of the inbox at the start. The error reports an argument that is nil.
func New(in *inbox.Inbox, tenant func(r *http.Request) string, opts ...Option) (func(next http.Handler) http.Handler, error) {
	var problems []error
	if in == nil {
		problems = append(problems, errors.New("the inbox is nil"))
	}
	if tenant == nil {
		problems = append(problems, errors.New("the function for the tenant is nil: without it, a client could get the response of another"))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("idempotency: %w", err)
	}

	middleware := &middleware{
		in: in, tenant: tenant, methods: []string{http.MethodPost, http.MethodPatch}, maxBody: defaultMaxBody, log: slog.Default(),
	}
	for _, o := range opts {
		if o != nil {
			o.applyTo(middleware)
		}
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { middleware.serve(w, r, next) })
	}, nil
}

// serve responds to one request.
func (m *middleware) serve(w http.ResponseWriter, request *http.Request, next http.Handler) {
	if !slices.Contains(m.methods, request.Method) {
		next.ServeHTTP(w, request)
		return
	}
	id, problem := readKey(request)
	switch {
	case problem != "":
		writeProblem(w, http.StatusBadRequest, problem)
		return
	case id == "" && m.required:
		writeProblem(w, http.StatusBadRequest, "the header "+HeaderKey+" is missing: send a new unique value, such as a UUID, with each new request")
		return
	case id == "":
		next.ServeHTTP(w, request)
		return
	}

	body, ok := m.readBody(w, request)
	if !ok {
		return
	}
	// The tenant may be a value of the form.
	request.Body = io.NopCloser(bytes.NewReader(body))
	m.handle(w, request, body, next, inbox.Key{Scope: m.scope(request), ID: id})
}

// readKey returns the key of the request, or "" if it has none. problem states why the header is invalid.
func readKey(request *http.Request) (key, problem string) {
	values := request.Header.Values(HeaderKey)
	if len(values) == 0 {
		return "", ""
	}
	if len(values) > 1 {
		return "", fmt.Sprintf("the header %s occurs %d times: send it once", HeaderKey, len(values))
	}

	// A structured field is a quoted string, and many clients leave the quotes out.
	key = strings.TrimSpace(values[0])
	if len(key) >= 2 && key[0] == '"' && key[len(key)-1] == '"' {
		key = key[1 : len(key)-1]
	}
	isBad := func(char rune) bool { return char < ' ' || char > '~' }
	if key == "" || len(key) > maxKeyBytes || strings.ContainsFunc(key, isBad) {
		return "", fmt.Sprintf("the header %s must have 1 to %d printable ASCII characters", HeaderKey, maxKeyBytes)
	}
	return key, ""
}

// readBody reads the body of the request. If that fails, it responds to the request and returns false.
func (m *middleware) readBody(w http.ResponseWriter, request *http.Request) (body []byte, ok bool) {
	reader := request.Body
	if reader == nil {
		return nil, true
	}
	if m.maxBody >= 0 {
		reader = http.MaxBytesReader(w, reader, m.maxBody)
	}
	body, err := io.ReadAll(reader)

	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		writeProblem(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body has more than %d bytes", m.maxBody))
		return nil, false
	}
	if err != nil {
		writeProblem(w, http.StatusBadRequest, "the body cannot be read: send the request again")
		return nil, false
	}
	return body, true
}

// scope returns the scope of the keys of a request.
func (m *middleware) scope(request *http.Request) string {
	// Method and path contain no space, so only the tenant may.
	scope := "http " + m.tenant(request) + " " + request.Method + " " + request.URL.EscapedPath()
	if len(scope) > maxScopeBytes {
		return fmt.Sprintf("http sha256:%x", sha256.Sum256([]byte(scope)))
	}
	return scope
}

// handle runs the handler for the request, or replays the first response.
func (m *middleware) handle(w http.ResponseWriter, request *http.Request, body []byte, next http.Handler, key inbox.Key) {
	fingerprint := inbox.WithFingerprint([]byte(request.URL.RawQuery), []byte(request.Header.Get("Content-Type")), body)
	first, repeated, err := inbox.OnceValue(request.Context(), m.in, key, func(ctx context.Context) (response, error) {
		// The transaction may run more than once, so each run gets a request of its own.
		own := request.Clone(ctx)
		own.Body = io.NopCloser(bytes.NewReader(body))
		recorder := &recorder{header: http.Header{}}
		next.ServeHTTP(recorder, own)

		if recorder.isTooLarge {
			return response{}, inbox.ErrResultTooLarge
		}
		recorded := recorder.response()
		if isTemporary(recorded.Status) {
			return response{}, &temporaryError{recorded}
		}
		return recorded, nil
	}, fingerprint, inbox.WithCodec(responseCodec{}), inbox.WithClaim(0), inbox.WithoutWaiting())
	if err != nil {
		m.respondError(w, request, err)
		return
	}

	if repeated {
		first.Header.Set(HeaderReplayed, "true")
	}
	first.write(w)
}

// respondError responds to a request without a stored response.
func (m *middleware) respondError(w http.ResponseWriter, request *http.Request, err error) {
	if temporary, ok := errors.AsType[*temporaryError](err); ok {
		temporary.response.write(w)
		return
	}

	switch {
	case errors.Is(err, inbox.ErrMismatch), errors.Is(err, inbox.ErrNoResult):
		writeProblem(w, http.StatusUnprocessableEntity, "the "+HeaderKey+" was used before for another request: send a new key with each new request")
	case errors.Is(err, inbox.ErrInProgress), errors.Is(err, inbox.ErrClaimLost):
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
		writeProblem(w, http.StatusConflict, "a request with this "+HeaderKey+" is running: repeat the request to get its response")
	case errors.Is(err, inbox.ErrResultTooLarge):
		m.log.ErrorContext(request.Context(), "response is too large to be stored, so the request was rolled back",
			"method", request.Method, "path", request.URL.Path, "limit", inbox.MaxResult)
		writeProblem(w, http.StatusInternalServerError, fmt.Sprintf("the response is larger than %d bytes, so it cannot be stored for the %s; nothing was done",
			inbox.MaxResult, HeaderKey))
	default:
		// Often the client is gone, but the context may also be that of a deadline or of the server's end. So the client gets a response in any case.
		if request.Context().Err() == nil {
			m.log.ErrorContext(request.Context(), "request with an idempotency key fails", "method", request.Method, "path", request.URL.Path, "error", err)
		}
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
		// The outcome of the commit may be unknown.
		writeProblem(w, http.StatusServiceUnavailable, "the request may not be recorded: send it again with the same "+HeaderKey+", so that it takes effect once")
	}
}

// isTemporary reports whether a later request may get another status.
func isTemporary(status int) bool {
	return status >= http.StatusInternalServerError || status == http.StatusRequestTimeout || status == http.StatusTooEarly || status == http.StatusTooManyRequests
}

// temporaryError is the response of a handler that must not be stored. It rolls the transaction back.
type temporaryError struct{ response response }

func (e *temporaryError) Error() string {
	return fmt.Sprintf("the handler responded with status %d", e.response.Status)
}

// writeProblem responds with problem details.
func writeProblem(w http.ResponseWriter, status int, detail string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	// A client that is gone gets no response.
	_ = json.NewEncoder(w).Encode(struct {
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail"`
	}{http.StatusText(status), status, detail})
}

// response is a stored response.
type response struct {
	Status int         `bson:"s"`
	Header http.Header `bson:"h"`
	Body   []byte      `bson:"b"`
}

// write sends the response.
func (r response) write(w http.ResponseWriter) {
	for name, values := range r.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(r.Status)
	_, _ = w.Write(r.Body)
}

// responseCodec encodes a response as BSON, so that the body needs no more bytes than it has.
type responseCodec struct{}

func (responseCodec) ContentType() string { return "application/bson" }

func (responseCodec) Encode(value any) ([]byte, error) { return bson.Marshal(value) }

func (responseCodec) Decode(_ context.Context, data []byte, into any) error {
	return bson.Unmarshal(data, into)
}

// recorder is an http.ResponseWriter that keeps the response.
type recorder struct {
	header     http.Header
	sent       http.Header // the headers when the handler wrote the status
	status     int         // 0: not written
	body       bytes.Buffer
	isTooLarge bool
}

func (r *recorder) Header() http.Header { return r.header }

// WriteHeader keeps the status and the headers of the first call. Informational responses are not sent.
func (r *recorder) WriteHeader(status int) {
	if r.status != 0 || status < http.StatusOK {
		return
	}
	r.status, r.sent = status, r.header.Clone()
}

// Write keeps the data, up to the size that can be stored.
func (r *recorder) Write(data []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	if r.body.Len()+len(data) > inbox.MaxResult {
		r.isTooLarge = true
		return 0, inbox.ErrResultTooLarge
	}
	return r.body.Write(data)
}

// response returns the response that the handler has written.
func (r *recorder) response() response {
	r.WriteHeader(http.StatusOK)
	recorded := response{Status: r.status, Header: r.sent, Body: r.body.Bytes()}
	// The server guesses the type from the body that the handler writes, so a replay must not guess from another one.
	if recorded.Header.Get("Content-Type") == "" && len(recorded.Body) > 0 {
		recorded.Header.Set("Content-Type", http.DetectContentType(recorded.Body))
	}
	return recorded
}
