// Package httpapi serves the operators' API: the use-cases of package admin as operations below
// /api/, with a description in OpenAPI. The listener authenticates callers, checks their roles, and
// limits their requests. The caller of the package supplies the handler of the operators' page.
//
// Blocking: a request has a limit of time by its kind, and a stream ends with its client. Cost: the number of
// requests at a time is bounded, with separate places for operators and for viewers. All clients of the live overview
// share one read of MongoDB in each interval.
package httpapi

import (
	"cmp"
	"context"
	"io"
	"net/http"
	"net/url"
	"path"
	"reflect"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/tasks"
)

const (
	apiVersion = "1.0.0" // of the API, not of the program
	readTime   = 20 * time.Second
	actionTime = 5 * time.Minute
	smallBody  = 1 << 20
	largeBody  = 24 << 20 // an envelope of 15 MiB in base64
)

// api contains the operations of one deployment.
type api struct {
	huma.API
	operator admin.Operator // of this process
	prefix   string         // the path below which clients reach the API
	live     *live
	tasks    *tasks.Runner
}

// Scope is part of each request about a watcher.
type Scope struct {
	Watcher string `query:"watcher" pattern:"^[A-Za-z0-9._-]{1,100}$" doc:"The watcher. Default: the configured watcher of this process."`
}

func (s Scope) watcher() string { return s.Watcher }

// scoped is a request about a watcher.
type scoped interface{ watcher() string }

// slotted is a request that may be restricted to one slot.
type slotted interface{ slot() string }

// jsonResponse is a response with a body. It has one type, because the library's function for an operation is compiled for each
// pair of types of a request and a response. [responseWith] declares the body.
type jsonResponse struct{ Body any }

// newAPI returns the handler of all paths below /api/. prefix is the path below which clients reach them.
func newAPI(op admin.Operator, prefix string) http.Handler {
	mux := http.NewServeMux()
	newOperations(mux, op, prefix)
	mux.HandleFunc("/api/", func(response http.ResponseWriter, request *http.Request) { serveNotFound(response, request, mux) })

	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		if !isText(request.URL) {
			writeProblem(response, request, http.StatusBadRequest, "the address is not UTF-8, or its query cannot be parsed",
				"encode it as UTF-8, and escape characters that are not letters or digits")
			return
		}
		mux.ServeHTTP(response, request)
	})
}

// isText reports whether an address is UTF-8. MongoDB rejects other text.
func isText(address *url.URL) bool {
	query, err := url.QueryUnescape(address.RawQuery)
	if err == nil {
		_, err = url.ParseQuery(address.RawQuery)
	}
	return err == nil && utf8.ValidString(query) && utf8.ValidString(address.Path)
}

// newOperations registers all operations.
func newOperations(mux humago.Mux, op admin.Operator, prefix string) *api {
	replaceLibraryErrors()
	cfg := huma.DefaultConfig("outrelay", apiVersion)
	cfg.Info.Description = "The actions and queries of the command line, for a running deployment. " +
		"Errors are problem+json with the fix. Lists have a cursor in `next`. " +
		"Actions are written to the audit log with their actor. " +
		"A long action goes on after its request: if it takes more than 5 minutes, or 2 seconds with `Prefer: respond-async`, the response has the status 202, " +
		"and `GET /api/v1/actions/{id}` shows its progress and then its result."
	cfg.OpenAPIPath = "/api/openapi"
	if prefix != "" {
		cfg.Servers = []*huma.Server{{URL: prefix}}
	}
	cfg.DocsPath = ""
	cfg.SchemasPath = ""
	// The default hook would add a link to a schema to each response.
	cfg.CreateHooks = nil

	// admin.WriteJSON also writes dates that JSON cannot express.
	cfg.Formats = map[string]huma.Format{}
	for name, format := range huma.DefaultFormats {
		format.Marshal = func(out io.Writer, value any) error { return admin.WriteJSON(out, value, "") }
		cfg.Formats[name] = format
	}
	// A mistyped filter would otherwise select everything.
	cfg.RejectUnknownQueryParameters = true
	cfg.Components.Schemas = huma.NewMapRegistry("#/components/schemas/", nameSchema)
	cfg.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"token": {Type: "http", Scheme: "bearer", Description: "http.admin.token or http.admin.viewer_token"},
		"login": {Type: "http", Scheme: "basic", Description: "any user name, with the token as the password"},
		"mtls":  {Type: "mutualTLS", Description: "a client certificate that http.admin.tls.client_ca signed"},
	}
	cfg.Security = []map[string][]string{{"token": {}}, {"login": {}}, {"mtls": {}}, {}}

	api := &api{API: humago.New(mux, cfg), operator: op, prefix: prefix, live: newLive(), tasks: tasks.NewRunner(op.Log)}
	api.addWatchers()
	api.addNodes()
	api.addTopics()
	api.addGroups()
	api.addWaiting()
	api.addHandlerWaiting()
	api.addScheduled()
	api.addDead()
	api.addReplays()
	api.addLookup()
	api.addConversation()
	api.addSagas()
	api.addInboxes()
	api.addMaintenance()
	api.addFigures()
	api.addActions()
	return api
}

// namePrefixes are the prefixes of the types of packages, whose names are short.
var namePrefixes = map[string]string{"letters": "Dead", "problems": "Watcher"}

// nameSchema gives types of the same name in two packages different names.
func nameSchema(goType reflect.Type, hint string) string {
	name := huma.DefaultSchemaNamer(goType, hint)
	for goType.Kind() == reflect.Pointer || goType.Kind() == reflect.Slice {
		goType = goType.Elem()
	}
	return namePrefixes[path.Base(goType.PkgPath())] + name
}

// option changes an operation.
type option func(*huma.Operation)

// roleExtension is the extension of an operation that contains the required role.
const roleExtension = "x-role"

// forViewers lets viewers call an operation that uses POST but changes nothing.
func forViewers(op *huma.Operation) { op.Extensions[roleExtension] = admin.RoleViewer }

// addQuery registers an operation that changes nothing. Every caller may use it.
func addQuery[I scoped, O any](api *api, path, id, summary string, run func(context.Context, admin.Operator, *I) (O, error)) {
	addRead(api, path, id, summary, bodyOf[O](api), withBody(run))
}

// addList registers a query whose response contains a list under this name.
func addList[I scoped, T any](
	api *api, path, id, summary, name string, run func(context.Context, admin.Operator, *I) ([]T, error),
) {
	body := &huma.Schema{
		Type: huma.TypeObject, AdditionalProperties: false, Required: []string{name}, Properties: map[string]*huma.Schema{name: bodyOf[[]T](api)},
	}
	addRead(api, path, id, summary, body, withBody(func(ctx context.Context, op admin.Operator, input *I) (map[string][]T, error) {
		list, err := run(ctx, op, input)
		return map[string][]T{name: list}, err
	}))
}

// addRead registers an operation that changes nothing and responds with body.
func addRead[I scoped](
	api *api, path, id, summary string, body *huma.Schema, run func(context.Context, admin.Operator, *I) (*jsonResponse, error),
) {
	addOperation(api, huma.Operation{
		Method:      http.MethodGet,
		Path:        path,
		OperationID: id,
		Summary:     summary,
		Responses:   responseWith(body),
		Extensions:  map[string]any{roleExtension: admin.RoleViewer},
	}, readTime, run)
}

// addAction registers an operation that changes something. Only operators may use it.
func addAction[I scoped, O any](
	api *api, path, id, summary string, run func(context.Context, admin.Operator, *I) (O, error), opts ...option,
) {
	addOperation(api, huma.Operation{
		Method:        http.MethodPost,
		Path:          path,
		OperationID:   id,
		Summary:       summary,
		DefaultStatus: http.StatusOK,
		Responses:     responseWith(bodyOf[O](api)),
		MaxBodyBytes:  smallBody,
		Extensions:    map[string]any{roleExtension: admin.RoleOperator},
	}, actionTime, withBody(run), opts...)
}

// bodyOf returns the schema of a body of type O.
func bodyOf[O any](api *api) *huma.Schema {
	return api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[O](), true, "")
}

// responseWith declares the response of an operation.
func responseWith(body *huma.Schema) map[string]*huma.Response {
	return map[string]*huma.Response{
		strconv.Itoa(http.StatusOK): {Content: map[string]*huma.MediaType{"application/json": {Schema: body}}},
	}
}

// withBody makes the result of run the body of the response.
func withBody[I, O any](
	run func(context.Context, admin.Operator, *I) (O, error),
) func(context.Context, admin.Operator, *I) (*jsonResponse, error) {
	return func(ctx context.Context, op admin.Operator, input *I) (*jsonResponse, error) {
		out, err := run(ctx, op, input)
		if err != nil {
			return nil, err
		}
		return &jsonResponse{out}, nil
	}
}

// addOperation registers an operation whose response is the result of run, which may have headers.
// run gets the operator of the caller, for the requested watcher and slot. limit bounds its time.
func addOperation[I scoped, O any](
	api *api, op huma.Operation, limit time.Duration, run func(context.Context, admin.Operator, *I) (*O, error), opts ...option,
) {
	op.Path = "/api/v1" + op.Path
	op.Errors = []int{400, 401, 403, 404, 409, 421, 422, 424, 429, 431, 500, 503}
	op.BodyReadTimeout = adminRead
	// Roles are checked for each operation, because viewers and operators share a listener.
	op.Middlewares = append(op.Middlewares, api.checkRole, extendDeadline(limit))
	for _, o := range opts {
		o(&op)
	}

	huma.Register(api.API, op, func(ctx context.Context, input *I) (*O, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()

		// Requests name a watcher, and some of them a slot; the use cases are bound to both.
		operator := api.operatorFor(ctx, (*input).watcher())
		if slotted, ok := any(*input).(slotted); ok {
			operator = operator.ForSlot(slotted.slot())
		}
		out, err := run(ctx, operator, input)
		return out, problemOf(err)
	})
}

// operatorFor returns the operator of the caller, for the requested watcher.
func (a *api) operatorFor(ctx context.Context, watcher string) admin.Operator {
	// The door rejects requests without a caller.
	caller, _ := admin.CallerOf(ctx)
	return a.operator.For(caller.Actor).ForWatcher(watcher)
}

// checkRole rejects requests that the caller's role does not allow.
func (a *api) checkRole(ctx huma.Context, next func(huma.Context)) {
	caller, ok := admin.CallerOf(ctx.Context())
	switch {
	case !ok:
		_ = huma.WriteErr(a.API, ctx, http.StatusUnauthorized, "the request has no login")
	case ctx.Operation().Extensions[roleExtension] == admin.RoleOperator && !caller.Operator():
		_ = huma.WriteErr(a.API, ctx, http.StatusForbidden, caller.Actor.Name+" is a viewer; this action requires the role operator")
	default:
		next(ctx)
	}
}

// extendDeadline replaces the listener's time limit of a response by that of the operation.
func extendDeadline(limit time.Duration) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		if _, response := humago.Unwrap(ctx); limit > adminWrite/2 {
			// A writer that does not support deadlines has none to extend.
			_ = http.NewResponseController(response).SetWriteDeadline(time.Now().Add(limit + adminWrite/2))
		}
		next(ctx)
	}
}

// serveNotFound responds to unknown paths, and to unsupported methods of known paths.
func serveNotFound(response http.ResponseWriter, request *http.Request, mux *http.ServeMux) {
	probe := request.Clone(request.Context())
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPatch} {
		// The mux cannot list the methods of a path, so each method is tried.
		probe.Method = method
		if _, pattern := mux.Handler(probe); pattern != "/api/" && pattern != "" && method != request.Method {
			response.Header().Add("Allow", method)
		}
	}

	if response.Header().Get("Allow") != "" {
		writeProblem(response, request, http.StatusMethodNotAllowed, "the path does not support this method",
			"use a method that Allow lists")
		return
	}
	writeProblem(response, request, http.StatusNotFound, "nothing is served here",
		cmp.Or(formerPaths[request.URL.Path], "/api/openapi.json lists the paths"))
}

// Paging is part of each request for a list.
type Paging struct {
	Limit int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of entries of the page."`
	After string `query:"after" maxLength:"8192" doc:"The cursor in next of the previous page. Default: the first page."`
}
