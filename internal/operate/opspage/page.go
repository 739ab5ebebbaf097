package opspage

import (
	"cmp"
	"context"
	"errors"
	"html/template"
	"log/slog"
	"net/http"
	"net/url"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// Options configure the page.
type Options struct {
	// UseCases returns the use-cases for an actor and a watcher; "" is the configured watcher. Actions
	// on the lease are restricted to slot; "" means all slots. Required.
	UseCases func(a admin.Actor, watcher, slot string) UseCases

	Watcher       string        // the configured watcher; required
	Node, Version string        // of this process, for the footer
	Log           *slog.Logger  // nil disables logging
	Read          time.Duration // bounds a query; defaults to 5 s
	Act           time.Duration // bounds an action, whose finished part remains; defaults to 35 s
}

// The defaults of Options.
const (
	defaultRead = 5 * time.Second
	defaultAct  = 35 * time.Second
)

// page is the handler of the operator's page.
type page struct {
	o       Options
	mux     *http.ServeMux
	screens map[string]*template.Template
	assets  *assets
	notices notices
}

// New returns the page, to be mounted at /.
func New(o Options) http.Handler {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Read = cmp.Or(o.Read, defaultRead)
	o.Act = cmp.Or(o.Act, defaultAct)

	p := &page{o: o, mux: http.NewServeMux(), assets: loadAssets()}
	p.screens = loadTemplates(p.assets)
	for _, s := range screens {
		p.mux.HandleFunc("GET "+s.path, p.handle(o.Read, p.showScreen(s)))
	}
	// Every action is a POST with a preview first, so that a link can change nothing.
	p.mux.HandleFunc("POST /confirm/{action}", p.handleAction(p.confirm))
	p.mux.HandleFunc("POST /act/{action}", p.handleAction(p.executeAction))
	p.mux.HandleFunc("GET /history", p.handle(o.Read, p.showHistory))
	p.mux.HandleFunc("GET /strip", p.handle(o.Read, p.showStrip))
	p.mux.HandleFunc("GET /dead/download", p.handle(o.Act, p.download))
	p.mux.Handle("GET /static/", p.assets)
	p.mux.HandleFunc("/", p.handle(o.Read, p.serveNotFound))

	// The listener in front does the same. But a page with actions must be safe wherever it is
	// mounted.
	return withHeaders(http.NewCrossOriginProtection().Handler(p.mux))
}

// contentPolicy allows only files of this page: no inline script or style, no other origin, and no
// frame around the page.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

func withHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
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

	filter func(*call) *filter // of its list; nil if it has none
}

// call is one request of a caller.
type call struct {
	ctx    context.Context
	q      url.Values // of the address, or of the form of an action
	who    admin.Caller
	use    UseCases
	v      *view
	action action // the zero action for a query
	back   string // of an action: link to the page to which it belongs
}

var errNoCaller = errors.New("the listener did not set the caller")

// handle returns a handler that calls serve for the caller of the request, with a time limit.
func (p *page) handle(limit time.Duration, serve func(http.ResponseWriter, *http.Request, *call)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		who, known := admin.CallerOf(r.Context())
		if !known {
			p.o.Log.Error("the operator's page was requested without a caller", "error", errNoCaller)
			http.Error(w, errNoCaller.Error(), http.StatusForbidden)
			return
		}

		ctx, cancel := context.WithTimeout(r.Context(), limit)
		defer cancel()
		q := r.URL.Query()
		watcher := q.Get("watcher")
		c := &call{ctx: ctx, q: q, who: who, use: p.o.UseCases(who.Actor, watcher, "")}
		c.v = &view{
			Caller:     who,
			Watcher:    cmp.Or(watcher, p.o.Watcher),
			Configured: p.o.Watcher,
			Node:       p.o.Node,
			Version:    p.o.Version,
			Now:        time.Now(),
			Query:      q,
			Path:       r.URL.Path,
		}
		serve(w, r, c)
	}
}

// showScreen returns a handler that shows a screen. For a repeated request of the script, it renders
// only the live block.
func (p *page) showScreen(s screen) func(http.ResponseWriter, *http.Request, *call) {
	return func(w http.ResponseWriter, r *http.Request, c *call) {
		c.v.Title = s.title
		c.v.Area = s.area
		if s.filter != nil {
			c.v.Filter = s.filter(c)
		}
		if id := c.q.Get("done"); id != "" {
			c.v.Notice = p.notices.find(id, c.who.Actor.Name)
		}

		data, err := s.data(c)
		if err != nil {
			p.serveProblem(w, r, c, err)
			return
		}
		c.v.Data = data
		block := "layout"
		if s.live && isFragment(r) {
			block = "live"
		}
		p.render(w, http.StatusOK, s.name, block, c.v)
	}
}

// isFragment reports whether the script requests a part of a page.
func isFragment(r *http.Request) bool { return r.Header.Get("HX-Request") == "true" }

// showStrip shows the line of figures that all pages except the overview have.
func (p *page) showStrip(w http.ResponseWriter, r *http.Request, c *call) {
	o, err := c.use.Operator.Overview(c.ctx)
	if err != nil {
		p.serveProblem(w, r, c, err)
		return
	}
	c.v.Data = newOverview(o, c.v.Watcher)
	p.render(w, http.StatusOK, "overview", "strip", c.v)
}

func (p *page) serveNotFound(w http.ResponseWriter, r *http.Request, c *call) {
	c.v.Title = "Not found"
	c.v.Problem = &problem{Status: http.StatusNotFound, Title: "There is no such page", Fix: "begin at the overview"}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		c.v.Problem.Status = http.StatusMethodNotAllowed
		c.v.Problem.Title = "This address does not support the method of the request"
	}
	p.render(w, c.v.Problem.Status, "problem", "layout", c.v)
}

// problem is an error that a page shows.
type problem struct {
	Status int
	Title  string
	Detail string
	Fix    string
	Again  bool   // the same request may be repeated
	Back   string // link to the page from which the request came
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
	admin.FailUnavailable: {http.StatusServiceUnavailable, "The servers did not answer"},
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
	t, ok := problemTitles[kind]
	if !ok {
		t = problemTitles[admin.FailUnavailable]
	}
	return &problem{Status: t.status, Title: t.title, Detail: err.Error(), Fix: fix}
}

// serveProblem shows an error as a page. For a repeated request of the script it responds with text,
// which the script shows above the last figures.
func (p *page) serveProblem(w http.ResponseWriter, r *http.Request, c *call, err error) {
	problem := newProblem(err)
	if problem.Status >= http.StatusInternalServerError && r.Context().Err() == nil {
		p.o.Log.Warn("a request of the operator's page failed", "path", r.URL.Path, "error", err)
	}

	if isFragment(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(problem.Status)
		_, _ = w.Write([]byte(problem.Title + ": " + problem.Detail))
		return
	}

	problem.Again = r.Method == http.MethodGet
	problem.Back = c.back
	c.v.Problem = problem
	p.render(w, problem.Status, "problem", "layout", c.v)
}
