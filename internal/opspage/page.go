package opspage

import (
	"context"
	"errors"
	"html/template"
	"log/slog"
	"net/http"
	"net/url"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// Options of the page.
type Options struct {
	// UseCases gives the use-cases as that actor at that watcher; "" is the configured one. Actions on the lease are for that
	// slot of it alone; "" is all of them. Required.
	UseCases func(a admin.Actor, watcher, slot string) UseCases
	// Watcher is the configured one. Required.
	Watcher string
	// Node and Version of this process, for the foot of the page.
	Node, Version string
	// Log gets what went wrong on the server's side. Defaults to none.
	Log *slog.Logger
	// Read is how long a question may take. Defaults to 5 s.
	Read time.Duration
	// Act is how long an action may take; what it did until then is done. Defaults to 35 s.
	Act time.Duration
}

// The defaults of Options.
const (
	readWithin = 5 * time.Second
	actWithin  = 35 * time.Second
)

// page is the handler.
type page struct {
	o       Options
	mux     *http.ServeMux
	screens map[string]*template.Template
	assets  *assets
	notices notices
}

// New is the page, to be mounted at /.
func New(o Options) http.Handler {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Read == 0 {
		o.Read = readWithin
	}
	if o.Act == 0 {
		o.Act = actWithin
	}
	p := &page{o: o, mux: http.NewServeMux(), assets: loadAssets()}
	p.screens = loadTemplates(p.assets)
	for _, s := range screens {
		p.mux.HandleFunc("GET "+s.path, func(w http.ResponseWriter, r *http.Request) { p.show(w, r, s) })
	}
	p.mux.HandleFunc("POST /confirm/{action}", p.confirm)
	p.mux.HandleFunc("POST /act/{action}", p.act)
	p.mux.HandleFunc("GET /strip", p.strip)
	p.mux.HandleFunc("GET /dead/download", p.download)
	p.mux.Handle("GET /static/", p.assets)
	p.mux.HandleFunc("/", p.nothing)
	// The listener in front does the same; a page that acts must not depend on where it is mounted.
	return headers(http.NewCrossOriginProtection().Handler(p.mux))
}

// policy forbids everything but files of this page: no script or style in a document, no other origin, no frame around it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

func headers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

// screen is one page.
type screen struct {
	path  string
	name  string // of its template
	title string
	area  string // of the navigation
	live  bool   // its block "live" is fetched again and again while somebody looks
	data  func(*call) (any, error)
}

// call is one request of somebody.
type call struct {
	ctx    context.Context
	q      url.Values // of the address, or of the form of an action
	who    admin.Caller
	use    UseCases
	v      *view
	screen screen
	back   string // of an action: the page that it belongs to
}

var errNobody = errors.New("the listener did not say who calls")

// begin finds out who calls. The caller must call done.
func (p *page) begin(w http.ResponseWriter, r *http.Request, within time.Duration) (c *call, done context.CancelFunc, ok bool) {
	who, known := admin.CallerOf(r.Context())
	if !known {
		p.o.Log.Error("the operator's page was asked without a caller", "reason", errNobody)
		http.Error(w, errNobody.Error(), http.StatusForbidden)
		return nil, nil, false
	}
	ctx, done := context.WithTimeout(r.Context(), within)
	q := r.URL.Query()
	watcher := q.Get("watcher")
	c = &call{ctx: ctx, q: q, who: who, use: p.o.UseCases(who.Actor, watcher, "")}
	c.v = &view{Caller: who, Watcher: watcher, Configured: p.o.Watcher, Node: p.o.Node, Version: p.o.Version, Now: time.Now(), Query: q, Path: r.URL.Path}
	if c.v.Watcher == "" {
		c.v.Watcher = p.o.Watcher
	}
	return c, done, true
}

func (p *page) show(w http.ResponseWriter, r *http.Request, s screen) {
	c, done, ok := p.begin(w, r, p.o.Read)
	if !ok {
		return
	}
	defer done()
	c.screen = s
	c.v.Title, c.v.Area = s.title, s.area
	if id := c.q.Get("done"); id != "" {
		c.v.Notice = p.notices.take(id, c.who.Actor.Name)
	}
	data, err := s.data(c)
	fragment := s.live && r.Header.Get("HX-Request") == "true"
	if err != nil {
		p.fail(w, r, c, err)
		return
	}
	c.v.Data = data
	block := "layout"
	if fragment {
		block = "live"
	}
	p.render(w, http.StatusOK, s.name, block, c.v)
}

// strip is the line of figures on every page but the first.
func (p *page) strip(w http.ResponseWriter, r *http.Request) {
	c, done, ok := p.begin(w, r, p.o.Read)
	if !ok {
		return
	}
	defer done()
	o, err := c.use.Operator.Overview(c.ctx) //nolint:contextcheck // c.ctx is that of the request, with a time-out
	if err != nil {
		p.fail(w, r, c, err)
		return
	}
	c.v.Data = newOverview(o, c.v.Watcher)
	p.render(w, http.StatusOK, "overview", "strip", c.v)
}

func (p *page) nothing(w http.ResponseWriter, r *http.Request) {
	c, done, ok := p.begin(w, r, p.o.Read)
	if !ok {
		return
	}
	defer done()
	c.v.Title = "Not found"
	c.v.Problem = &problem{Status: http.StatusNotFound, Title: "There is no such page", Hint: "begin at the overview"}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		c.v.Problem.Status, c.v.Problem.Title = http.StatusMethodNotAllowed, "This address takes no such request"
	}
	p.render(w, c.v.Problem.Status, "problem", "layout", c.v)
}

// problem is an error state.
type problem struct {
	Status int
	Title  string
	Detail string
	Hint   string
	Again  bool   // the same address can be asked again
	Back   string // where it was asked for
}

var titles = map[admin.Failure]struct {
	status int
	title  string
}{
	admin.FailInvalid:     {http.StatusBadRequest, "This cannot be meant so"},
	admin.FailNotFound:    {http.StatusNotFound, "It is not there"},
	admin.FailConflict:    {http.StatusConflict, "It does not fit what is there now"},
	admin.FailChanged:     {http.StatusConflict, "It was changed meanwhile"},
	admin.FailForbidden:   {http.StatusForbidden, "The relay's user may not do that"},
	admin.FailUnavailable: {http.StatusServiceUnavailable, "The servers did not answer"},
}

// errRole refuses a viewer.
var errRole = errors.New("this needs the role operator")

func explain(err error) *problem {
	if errors.Is(err, errRole) {
		return &problem{Status: http.StatusForbidden, Title: "You may look, not act", Detail: err.Error(), Hint: "log in as somebody who is an operator"}
	}
	kind, hint := admin.Explain(err)
	t, ok := titles[kind]
	if !ok {
		t = titles[admin.FailUnavailable]
	}
	return &problem{Status: t.status, Title: t.title, Detail: err.Error(), Hint: hint}
}

// fail shows the error state: a page, or for what is fetched again the text alone, which the page shows above the figures
// that it still has.
func (p *page) fail(w http.ResponseWriter, r *http.Request, c *call, err error) {
	pr := explain(err)
	if pr.Status >= http.StatusInternalServerError && r.Context().Err() == nil {
		p.o.Log.Warn("the operator's page could not answer", "path", r.URL.Path, "reason", err)
	}
	if r.Header.Get("HX-Request") == "true" {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(pr.Status)
		_, _ = w.Write([]byte(pr.Title + ": " + pr.Detail))
		return
	}
	pr.Again, pr.Back = r.Method == http.MethodGet, c.back
	c.v.Problem = pr
	p.render(w, pr.Status, "problem", "layout", c.v)
}
