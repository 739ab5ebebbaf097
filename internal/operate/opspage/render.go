package opspage

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// view is the data of every template.
type view struct {
	Title, Area         string
	Path                string
	Query               url.Values
	Caller              admin.Caller
	Watcher, Configured string
	Node, Version       string
	Now                 time.Time
	Notice              *notice
	Problem             *problem
	Filter              *filter // of a list
	Data                any
}

// HasSession reports whether the caller logged in with the form, and so can log out.
func (v *view) HasSession() bool { return v.Caller.Actor.Source == "page/session" }

// Link returns an address of the page for the same watcher. pairs are names and values of its query.
// Empty values are left out.
func (v *view) Link(path string, pairs ...any) string {
	q := url.Values{}
	if v.Watcher != v.Configured {
		q.Set("watcher", v.Watcher)
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		if s := fmt.Sprint(pairs[i+1]); s != "" {
			q.Set(fmt.Sprint(pairs[i]), s)
		}
	}
	return joinQuery(path, q)
}

// With returns the address of this page with one value of its query changed.
func (v *view) With(name, value string) string {
	q := v.queryWithout(name, "done")
	if value != "" {
		q.Set(name, value)
	}
	return joinQuery(v.Path, q)
}

// List returns the query of this page, for the forms that act on its list.
func (v *view) List() string { return v.queryWithout("done", "watcher").Encode() }

// queryWithout returns a copy of the query without two names.
func (v *view) queryWithout(a, b string) url.Values {
	q := url.Values{}
	for name, values := range v.Query {
		if name != a && name != b {
			q[name] = values
		}
	}
	return q
}

func joinQuery(path string, q url.Values) string {
	if len(q) == 0 {
		return path
	}
	return path + "?" + q.Encode()
}

// Asked returns a value of the query.
func (v *view) Asked(name string) string { return v.Query.Get(name) }

// Other returns the watcher if it is not the configured one.
func (v *view) Other() string {
	if v.Watcher == v.Configured {
		return ""
	}
	return v.Watcher
}

// Operator reports whether the page shows actions.
func (v *view) Operator() bool { return v.Caller.Operator() }

// loadTemplates returns the templates by name, each with the layout and the shared parts.
func loadTemplates(a *assets) map[string]*template.Template {
	glossary := loadGlossary()
	funcs := template.FuncMap{
		"ago":       formatAgo,
		"areas":     listAreas,
		"asset":     a.link,
		"at":        formatTime,
		"bytes":     formatBytes,
		"byterate":  func(perSecond float64) string { return formatBytes(int(perSecond)) + "/s" },
		"clearable": admin.Clearable,
		"clock":     func(t time.Time) string { return t.UTC().Format("15:04:05Z") },
		"deref":     func(f *float64) float64 { return *f },
		"dict":      newMap,
		"intime":    formatInput,
		"iso":       formatISO,
		"join":      strings.Join,
		"manual":    func() string { return manual },
		"meaning":   findMeaning(glossary),
		"meanings":  func() []meaning { return glossary },
		"neg":       func(n int64) int64 { return -n },
		"num":       formatNumber,
		"pairs":     parsePairs,
		"pretty":    formatJSON,
		"rate":      formatRate,
		"span":      formatSpan,
		"spanms":    func(ms int64) string { return formatSpan(float64(ms) / 1000) },
		"millis":    formatMillis,
		"object":    titleOfCheck,
		"title":     func(s string) string { return strings.ToUpper(s[:1]) + s[1:] },
		"unix":      time.Time.UnixMilli,

		"watcherlink": func(name string) string { return joinQuery("/", url.Values{"watcher": {name}}) },
	}

	// Each screen gets its own copy of the layout, because all of them define the same block names.
	shared := template.New("").Funcs(funcs)
	template.Must(shared.ParseFS(files, "templates/layout.html", "templates/parts.html"))
	templates := map[string]*template.Template{}
	entries, _ := files.ReadDir("templates")
	for _, f := range entries {
		name, _ := strings.CutSuffix(f.Name(), ".html")
		if name == "layout" || name == "parts" {
			continue
		}
		t := template.Must(shared.Clone())
		templates[name] = template.Must(t.ParseFS(files, "templates/"+f.Name()))
	}
	return templates
}

// render writes a block of a template. It executes the template in memory first, so that a response
// is either complete or an error.
func (p *page) render(w http.ResponseWriter, status int, name, block string, v *view) {
	var b bytes.Buffer
	if err := p.screens[name].ExecuteTemplate(&b, block, v); err != nil {
		p.o.Log.Error("a page cannot be rendered", "page", name, "error", err)
		http.Error(w, "the page cannot be rendered; the log contains the cause", http.StatusInternalServerError)
		return
	}

	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)

	// The error is ignored: the client is gone.
	_, _ = w.Write(b.Bytes())
}

// newMap returns a map of names and values, for templates with several arguments.
func newMap(pairs ...any) map[string]any {
	m := map[string]any{}
	for i := 0; i+1 < len(pairs); i += 2 {
		m[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return m
}

// formatNumber separates thousands.
func formatNumber(n any) string {
	s := fmt.Sprint(n)
	sign := ""
	if strings.HasPrefix(s, "-") {
		sign, s = "−", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

func formatRate(f float64) string {
	if f < 10 {
		return strconv.FormatFloat(math.Round(f*10)/10, 'f', -1, 64) + "/s"
	}
	return formatNumber(int64(math.Round(f))) + "/s"
}

// formatSpan formats seconds.
func formatSpan(s float64) string {
	sign := ""
	if s < 0 {
		sign, s = "−", -s
	}

	d := time.Duration(s * float64(time.Second))
	switch {
	case s < 10:
		return sign + strconv.FormatFloat(math.Round(s*100)/100, 'f', -1, 64) + " s"
	case s < 120:
		return sign + strconv.Itoa(int(s)) + " s"
	case s < 2*3600:
		return fmt.Sprintf("%s%d min", sign, int(d.Minutes()))
	case s < 48*3600:
		return fmt.Sprintf("%s%d h %d min", sign, int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%s%d d", sign, int(d.Hours()/24))
}

// timeOf returns the time of a time.Time or *time.Time, or the zero time.
func timeOf(t any) time.Time {
	switch t := t.(type) {
	case time.Time:
		return t
	case *time.Time:
		if t != nil {
			return *t
		}
	}
	return time.Time{}
}

func formatTime(t any) string {
	if at := timeOf(t); !at.IsZero() {
		return at.UTC().Format("2006-01-02 15:04:05Z")
	}
	return "–"
}

func formatISO(t any) string {
	if at := timeOf(t); !at.IsZero() {
		return at.UTC().Format(time.RFC3339)
	}
	return ""
}

// formatAgo formats the time between t and now.
func formatAgo(now time.Time, t any) string {
	at := timeOf(t)
	if at.IsZero() {
		return ""
	}
	if s := now.Sub(at).Seconds(); s >= 0 {
		return formatSpan(s) + " ago"
	}
	return "in " + formatSpan(at.Sub(now).Seconds())
}

func formatBytes(n int) string {
	switch {
	case n < 1<<10:
		return strconv.Itoa(n) + " B"
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

// formatMillis formats milliseconds. 0 means that nothing was measured.
func formatMillis(ms float64) string {
	switch {
	case ms == 0:
		return "–"
	case ms < 10:
		return strconv.FormatFloat(math.Round(ms*10)/10, 'f', -1, 64) + " ms"
	case ms < 1000:
		return strconv.Itoa(int(math.Round(ms))) + " ms"
	}
	return formatSpan(ms / 1000)
}

// formatJSON indents JSON.
func formatJSON(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Indent(&b, raw, "", "  ") != nil {
		return string(raw)
	}
	return b.String()
}

// formatLogValue returns the value of a field of the audit log as people read it: also a time, a
// duration and a list.
func formatLogValue(name string, raw json.RawMessage) string {
	var ms float64
	if strings.HasSuffix(name, "_ms") && json.Unmarshal(raw, &ms) == nil {
		return formatSpan(ms / 1000)
	}

	var list []string
	if json.Unmarshal(raw, &list) == nil && list != nil {
		return strings.Join(list, ", ")
	}

	var stamp struct {
		Timestamp *struct{ T int64 } `json:"$timestamp"`
	}
	if json.Unmarshal(raw, &stamp) == nil && stamp.Timestamp != nil {
		return formatTime(time.Unix(stamp.Timestamp.T, 0))
	}
	return formatValue(raw)
}

// parsePairs returns the fields of a JSON document in their order. Strings have no quotes.
func parsePairs(raw json.RawMessage) []row {
	d := json.NewDecoder(bytes.NewReader(raw))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil
	}

	var list []row
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return list
		}
		var value json.RawMessage
		if d.Decode(&value) != nil {
			return list
		}

		list = append(list, row{fmt.Sprint(name), formatLogValue(fmt.Sprint(name), value)})
	}
	return list
}
