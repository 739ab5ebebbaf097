package opspage

import (
	"cmp"
	"context"
	"errors"
	"html/template"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/tasks"
)

// Options configure the page.
type Options struct {
	// UseCases returns the use-cases for an actor and a watcher; "" is the configured watcher. Actions
	// on the lease are restricted to slot; "" means all slots. Required.
	UseCases func(a admin.Actor, watcher, slot string) UseCases

	Prefix        string        // the path below which browsers reach the page, such as /outrelay; "" is the root
	Watcher       string        // the configured watcher; required
	Node, Version string        // of this process, for the footer
	Log           *slog.Logger  // nil disables logging
	Read          time.Duration // bounds a query; defaults to 5 s
	Act           time.Duration // bounds the plan of an action; defaults to 35 s
	Patience      time.Duration // how long a request waits for its action before it shows the progress; defaults to 2 s
}

// The defaults of Options.
const (
	defaultRead     = 5 * time.Second
	defaultAct      = 35 * time.Second
	defaultPatience = 2 * time.Second
)

// page is the handler of the operator's page.
type page struct {
	o       Options
	mux     *http.ServeMux
	screens map[string]*template.Template
	assets  *assets
	notices notices
	tasks   *tasks.Runner
}

// New returns the page. Its addresses begin with the prefix, and the caller removes the prefix from each request.
func New(options Options) http.Handler {
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	options.Read = cmp.Or(options.Read, defaultRead)
	options.Act = cmp.Or(options.Act, defaultAct)
	options.Patience = cmp.Or(options.Patience, defaultPatience)

	page := &page{o: options, mux: http.NewServeMux(), assets: loadAssets(base(options.Prefix)), tasks: tasks.NewRunner(options.Log)}
	page.screens = loadTemplates(page.assets)
	for _, s := range screens {
		page.mux.HandleFunc("GET "+s.path, page.handle(options.Read, page.showScreen(&s)))
	}
	// Every action is a POST with a preview first, so that a link can change nothing.
	page.mux.HandleFunc("POST /confirm/{action}", page.handleAction(page.confirm))
	page.mux.HandleFunc("POST /act/{action}", page.handleAction(page.executeAction))
	page.mux.HandleFunc("GET /history", page.handle(options.Read, page.showHistory))
	page.mux.HandleFunc("GET /strip", page.handle(options.Read, page.showStrip))
	page.mux.HandleFunc("GET /dead/download", page.handle(options.Act, page.download))
	page.mux.Handle("GET /static/", page.assets)
	page.mux.HandleFunc("/", page.handle(options.Read, page.serveNotFound))

	// The listener in front does the same. But a page with actions must be safe wherever it is
	// mounted.
	return withHeaders(http.NewCrossOriginProtection().Handler(page.mux))
}

// contentPolicy allows only files of this page: no inline script or style, no other origin, and no
// frame around the page.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

func withHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		header := response.Header()
		header.Set("Content-Security-Policy", contentPolicy)
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("X-Frame-Options", "DENY")
		header.Set("Referrer-Policy", "same-origin")
		header.Set("Cross-Origin-Opener-Policy", "same-origin")
		header.Set("Cache-Control", "no-store")
		next.ServeHTTP(response, request)
	})
}

// screen is one page of the site.
type screen struct {
	path  string
	name  string // of its template
	title string
	area  string // of the navigation
	live  bool   // the script requests its block "live" repeatedly
	data  func(*call) (any, error)

	filter     func(*call) *filter // of its list; nil if it has none
	saysInForm bool                // its own form shows why an action cannot be planned
}

// address returns the path of the screen in links.
func (s *screen) address() string { return strings.TrimSuffix(s.path, "{$}") }

// findScreen returns the screen with this path, or nil.
func findScreen(path string) *screen {
	for i := range screens {
		if screens[i].address() == path {
			return &screens[i]
		}
	}
	return nil
}

// call is one request of a caller.
type call struct {
	ctx context.Context
	q   url.Values // of the address, or of the form of an action
	who admin.Caller
	use UseCases
	v   *view

	tasks *tasks.Runner
	did   func(done int64) // of an action: reports the progress

	refresh bool   // the script requests the live block
	action  action // the zero action for a query
	from    string // of an action: path of the screen from which the person acts
	back    string // of an action: link to that screen
}

var errNoCaller = errors.New("the listener did not set the caller")

// handle returns a handler that calls serve for the caller of the request, with a time limit.
func (p *page) handle(limit time.Duration, serve func(http.ResponseWriter, *http.Request, *call)) http.HandlerFunc {
	return func(response http.ResponseWriter, request *http.Request) {
		who, known := admin.CallerOf(request.Context())
		if !known {
			p.o.Log.Error("the operator's page was requested without a caller", "error", errNoCaller)
			http.Error(response, errNoCaller.Error(), http.StatusForbidden)
			return
		}

		ctx, cancel := context.WithTimeout(request.Context(), limit)
		defer cancel()
		values := request.URL.Query()
		watcher := values.Get("watcher")
		call := &call{ctx: ctx, q: values, who: who, use: p.o.UseCases(who.Actor, watcher, ""), tasks: p.tasks}
		call.v = &view{
			base:       p.assets.base,
			Caller:     who,
			Watcher:    cmp.Or(watcher, p.o.Watcher),
			Configured: p.o.Watcher,
			Node:       p.o.Node,
			Version:    p.o.Version,
			Now:        time.Now(),
			Query:      values,
			Path:       request.URL.Path,
		}
		serve(response, request, call)
	}
}

// showScreen returns a handler that shows a screen. For a repeated request of the script, it renders
// only the live block.
func (p *page) showScreen(screen *screen) func(http.ResponseWriter, *http.Request, *call) {
	return func(response http.ResponseWriter, request *http.Request, call *call) {
		call.v.Title = screen.title
		if id := call.q.Get("done"); id != "" {
			call.v.Notice = p.notices.find(id, call.who.Actor.Name)
		}
		call.refresh = screen.live && isFragment(request)
		p.renderScreen(response, request, screen, call, http.StatusOK)
	}
}

// renderScreen reads the data of a screen and renders it, or only its live block for a refresh.
func (p *page) renderScreen(response http.ResponseWriter, request *http.Request, screen *screen, call *call, status int) {
	call.v.Area = screen.area
	if screen.filter != nil {
		call.v.Filter = screen.filter(call)
	}
	data, err := screen.data(call)
	var invalid *admin.InvalidError
	switch {
	// A condition that cannot be used is changed in the form.
	case errors.As(err, &invalid) && screen.filter != nil && !call.refresh && call.v.Said == nil:
		call.v.Said = newProblem(err)
		call.v.Said.Title = "The filter cannot be used"
		data, status = nil, call.v.Said.Status
	case err != nil:
		p.serveProblem(response, request, call, err)
		return
	}

	call.v.Data = data
	block := "layout"
	if call.refresh {
		block = "live"
	}
	p.render(response, status, screen.name, block, call.v)
}

// isFragment reports whether the script requests a part of a page.
func isFragment(request *http.Request) bool { return request.Header.Get("HX-Request") == "true" }

// showStrip shows the line of figures that all pages except the overview have.
func (p *page) showStrip(response http.ResponseWriter, request *http.Request, call *call) {
	overview, err := call.use.Operator.Overview(call.ctx)
	if err != nil {
		p.serveProblem(response, request, call, err)
		return
	}
	call.v.Data = newOverview(overview, call.v)
	p.render(response, http.StatusOK, "overview", "strip", call.v)
}

func (p *page) serveNotFound(response http.ResponseWriter, request *http.Request, call *call) {
	call.v.Title = "Not found"
	call.v.Problem = &problem{Status: http.StatusNotFound, Title: "There is no such page", Fix: "begin at the overview"}
	if request.Method != http.MethodGet && request.Method != http.MethodHead {
		call.v.Problem.Status = http.StatusMethodNotAllowed
		call.v.Problem.Title = "This address does not support the method of the request"
	}
	p.render(response, call.v.Problem.Status, "problem", "layout", call.v)
}

// problem is an error that a page shows.
type problem struct {
	Status int
	Title  string
	Detail string
	Fix    string
	Again  bool   // the same request may be repeated
	Back   string // link to the page from which the request came
	Done   int64  // entries that an action has processed before it failed
}

var problemTitles = map[admin.Failure]struct {
	status int
	title  string
}{
	admin.FailInvalid:     {http.StatusBadRequest, "The request is not valid"},
	admin.FailNotFound:    {http.StatusNotFound, "It does not exist"},
	admin.FailConflict:    {http.StatusConflict, "It conflicts with the current state"},
	admin.FailChanged:     {http.StatusConflict, "It was changed in the meantime"},
	admin.FailForbidden:   {http.StatusForbidden, "The relay's user may not do that"},
	admin.FailUnavailable: {http.StatusServiceUnavailable, "The servers did not respond"},
}

// errRole is the error of an action that a viewer requests.
var errRole = errors.New("this action requires the role operator")

func newProblem(err error) *problem {
	if errors.Is(err, errRole) {
		return &problem{
			Status: http.StatusForbidden,
			Title:  "You may look, not act",
			Detail: err.Error(),
			Fix:    "log in as an operator",
		}
	}

	kind, fix := admin.Explain(err)
	known, ok := problemTitles[kind]
	if !ok {
		known = problemTitles[admin.FailUnavailable]
	}
	return &problem{Status: known.status, Title: known.title, Detail: err.Error(), Fix: fix}
}

// serveProblem shows an error as a page. For a repeated request of the script it responds with text,
// which the script shows above the last figures.
func (p *page) serveProblem(response http.ResponseWriter, request *http.Request, call *call, err error) {
	p.serveFailure(response, request, call, err, 0)
}

// serveFailure is serveProblem for an action that has processed done entries before it failed.
func (p *page) serveFailure(response http.ResponseWriter, request *http.Request, call *call, err error, done int64) {
	problem := newProblem(err)
	problem.Done = done
	if problem.Status >= http.StatusInternalServerError && request.Context().Err() == nil {
		p.o.Log.Warn("a request of the operator's page failed", "path", request.URL.Path, "error", err)
	}

	if isFragment(request) {
		response.Header().Set("Content-Type", "text/plain; charset=utf-8")
		response.WriteHeader(problem.Status)
		_, _ = response.Write([]byte(problem.Title + ": " + problem.Detail))
		return
	}

	problem.Again = request.Method == http.MethodGet
	problem.Back = call.back
	call.v.Problem = problem
	p.render(response, problem.Status, "problem", "layout", call.v)
}
