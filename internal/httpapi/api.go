// Package httpapi serves the operators' API: the use cases of package admin as operations below /api/, with their checks and
// their description in OpenAPI, on a listener with authentication, roles and bounds. The operators' page is a handler that
// it is given.
package httpapi

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"path"
	"reflect"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/outrelay/outrelay/internal/admin"
)

const (
	apiVersion = "1.0.0" // of the API, not of the program
	lookTime   = 20 * time.Second
	actTime    = 5 * time.Minute
	smallBody  = 1 << 20
	largeBody  = 24 << 20 // an envelope of 15 MiB in base64
)

// api is the API of one deployment.
type api struct {
	huma.API
	operator admin.Operator // of this process
	live     *live
}

// Scope is in each request that is about a watcher.
type Scope struct {
	Watcher string `query:"watcher" pattern:"^[A-Za-z0-9._-]{1,100}$" doc:"The watcher; by default that of this process's configuration."`
}

func (s Scope) watcher() string { return s.Watcher }

// scoped is a request that is about a watcher.
type scoped interface{ watcher() string }

// slotted is a request that may be about one slot alone.
type slotted interface{ slot() string }

// answerOf is a response with a body.
type answerOf[T any] struct{ Body T }

// newAPI is the handler of everything below /api/.
func newAPI(o AdminOptions) http.Handler {
	mux := http.NewServeMux()
	describe(mux, o.Operator)
	mux.HandleFunc("/api/", func(w http.ResponseWriter, r *http.Request) { nothing(w, r, mux) })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !readable(r.URL) {
			writeProblem(w, r, http.StatusBadRequest, "the address is not UTF-8, or its query cannot be read", "encode it as UTF-8 and escape what is not a letter or a digit")
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// readable reports whether an address is text: the database takes nothing else.
func readable(u *url.URL) bool {
	query, err := url.QueryUnescape(u.RawQuery)
	if err == nil {
		_, err = url.ParseQuery(u.RawQuery)
	}
	return err == nil && utf8.ValidString(query) && utf8.ValidString(u.Path)
}

// describe registers all operations.
func describe(mux humago.Mux, operator admin.Operator) *api {
	c := huma.DefaultConfig("outrelay", apiVersion)
	c.Info.Description = "Everything that the command line does to a running deployment. Errors are problem+json with a hint; lists have a cursor in `next`; actions are written to the events log with who did them."
	c.OpenAPIPath, c.DocsPath, c.SchemasPath, c.CreateHooks = "/api/openapi", "", "", nil
	c.Formats = map[string]huma.Format{}
	for name, format := range huma.DefaultFormats {
		format.Marshal = func(w io.Writer, v any) error { return admin.WriteJSON(w, v, "") }
		c.Formats[name] = format
	}
	c.RejectUnknownQueryParameters = true
	c.Components.Schemas = huma.NewMapRegistry("#/components/schemas/", schemaName)
	c.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"token": {Type: "http", Scheme: "bearer", Description: "http.admin.token or http.admin.viewer_token"},
		"login": {Type: "http", Scheme: "basic", Description: "any user name, with the token as the password"},
		"mtls":  {Type: "mutualTLS", Description: "a client certificate that http.admin.tls.client_ca signed"},
	}
	c.Security = []map[string][]string{{"token": {}}, {"login": {}}, {"mtls": {}}, {}}
	a := &api{API: humago.New(mux, c), operator: operator, live: newLive()}
	a.watchers()
	a.nodes()
	a.waiting()
	a.scheduled()
	a.dead()
	a.replays()
	a.services()
	a.maintenance()
	a.figures()
	// The library has no word for an object that may be null.
	status := c.Components.Schemas.Map()["MigrationStatus"]
	status.Properties["lock"] = &huma.Schema{AnyOf: []*huma.Schema{status.Properties["lock"], {Type: "null"}}}
	return a
}

// schemaName tells types of the same name apart.
func schemaName(t reflect.Type, hint string) string {
	name := huma.DefaultSchemaNamer(t, hint)
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if path.Base(t.PkgPath()) == "migrate" {
		return "Migration" + name
	}
	return name
}

// OpenAPI is the description of the API, as it is served at /api/openapi.json.
func OpenAPI() ([]byte, error) {
	return describe(http.NewServeMux(), admin.Operator{}).OpenAPI().MarshalJSON()
}

// option changes an operation.
type option func(*huma.Operation)

// role names the extension that says who may.
const role = "x-role"

// look registers something that anybody who is let in may see.
func look[I scoped, O any](a *api, at, id, summary string, f func(context.Context, admin.Operator, *I) (O, error), opts ...option) {
	register(a, huma.Operation{Method: http.MethodGet, Path: at, OperationID: id, Summary: summary, Extensions: map[string]any{role: admin.RoleViewer}}, lookTime, f, opts)
}

// act registers something that changes something.
func act[I scoped, O any](a *api, at, id, summary string, f func(context.Context, admin.Operator, *I) (O, error), opts ...option) {
	register(a, huma.Operation{Method: http.MethodPost, Path: at, OperationID: id, Summary: summary, DefaultStatus: http.StatusOK, MaxBodyBytes: smallBody, Extensions: map[string]any{role: admin.RoleOperator}}, actTime, f, opts)
}

// register adds an operation whose answer is what f returns. f gets a desk of the caller.
func register[I scoped, O any](a *api, op huma.Operation, limit time.Duration, f func(context.Context, admin.Operator, *I) (O, error), opts []option) {
	direct(a, op, limit, func(ctx context.Context, op admin.Operator, in *I) (*answerOf[O], error) {
		out, err := f(ctx, op, in)
		if err != nil {
			return nil, err
		}
		return &answerOf[O]{out}, nil
	}, opts)
}

// direct adds an operation with headers of its own.
func direct[I scoped, O any](a *api, op huma.Operation, limit time.Duration, f func(context.Context, admin.Operator, *I) (*O, error), opts []option) {
	op.Path = "/api/v1" + op.Path
	op.Errors = []int{400, 401, 403, 404, 409, 421, 422, 424, 429, 431, 500, 503}
	op.BodyReadTimeout = adminRead
	op.Middlewares = append(op.Middlewares, a.admit, extend(limit))
	for _, o := range opts {
		o(&op)
	}
	huma.Register(a.API, op, func(ctx context.Context, in *I) (*O, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		desk := a.desk(ctx, (*in).watcher())
		if one, ok := any(*in).(slotted); ok {
			desk = desk.ForSlot(one.slot())
		}
		out, err := f(ctx, desk, in)
		return out, problemOf(err)
	})
}

// desk is that of the caller, at the watcher that is asked for.
func (a *api) desk(ctx context.Context, watcher string) admin.Operator {
	c, _ := admin.CallerOf(ctx) // the door lets nobody in who is not known
	return a.operator.For(c.Actor).ForWatcher(watcher)
}

// admit refuses what the caller's role does not allow.
func (a *api) admit(ctx huma.Context, next func(huma.Context)) {
	c, ok := admin.CallerOf(ctx.Context())
	switch {
	case !ok:
		_ = huma.WriteErr(a.API, ctx, http.StatusUnauthorized, "nobody is logged in")
	case ctx.Operation().Extensions[role] == admin.RoleOperator && !c.Operator():
		_ = huma.WriteErr(a.API, ctx, http.StatusForbidden, c.Actor.Name+" may look and not act: it takes the role operator")
	default:
		next(ctx)
	}
}

// extend gives an operation the time that it may take, instead of the listener's.
func extend(limit time.Duration) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		if _, w := humago.Unwrap(ctx); limit > adminWrite/2 {
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit + adminWrite/2)) // a writer without deadlines has none to move
		}
		next(ctx)
	}
}

// nothing answers for what is not there, and for methods that a path has not.
func nothing(w http.ResponseWriter, r *http.Request, mux *http.ServeMux) {
	probe := r.Clone(r.Context())
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPatch} {
		probe.Method = method
		if _, pattern := mux.Handler(probe); pattern != "/api/" && pattern != "" && method != r.Method {
			w.Header().Add("Allow", method)
		}
	}
	if w.Header().Get("Allow") != "" {
		writeProblem(w, r, http.StatusMethodNotAllowed, "the path is there, and this method of it is not", "use a method that Allow names")
		return
	}
	writeProblem(w, r, http.StatusNotFound, "nothing is served here", "the paths are in /api/openapi.json")
}

// Paging is in each request for a list.
type Paging struct {
	Limit int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Entries of the page."`
	After string `query:"after" maxLength:"8192" doc:"The cursor that the page before gave in next; none is the first page."`
}
