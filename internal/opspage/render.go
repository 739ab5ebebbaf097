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

	"github.com/outrelay/outrelay/internal/admin"
)

// view is what every template gets.
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
	Data                any
}

// Link is an address of the page that stays at the watcher which is looked at. pairs are names and values of its query;
// empty values are left out.
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
	if len(q) == 0 {
		return path
	}
	return path + "?" + q.Encode()
}

// With is the same page with one value of its query changed.
func (v *view) With(name, value string) string {
	q := url.Values{}
	for k, list := range v.Query {
		if k != name && k != "done" {
			q[k] = list
		}
	}
	if value != "" {
		q.Set(name, value)
	}
	if len(q) == 0 {
		return v.Path
	}
	return v.Path + "?" + q.Encode()
}

// List is the query of this page, for the forms that act on what it lists.
func (v *view) List() string {
	q := url.Values{}
	for k, list := range v.Query {
		if k != "done" && k != "watcher" {
			q[k] = list
		}
	}
	return q.Encode()
}

// Asked is a value of the query.
func (v *view) Asked(name string) string { return v.Query.Get(name) }

// Other is the watcher where it is not the configured one.
func (v *view) Other() string {
	if v.Watcher == v.Configured {
		return ""
	}
	return v.Watcher
}

// Operator reports whether the actions are shown.
func (v *view) Operator() bool { return v.Caller.Operator() }

func loadTemplates(a *assets) map[string]*template.Template {
	funcs := template.FuncMap{
		"asset": a.link, "num": number, "rate": rate, "span": span, "spanms": spanMS, "at": instant, "iso": iso, "ago": ago,
		"bytes": size, "pretty": pretty, "pairs": pairs, "join": strings.Join, "dict": dict, "classes": admin.Classes,
		"clearable": admin.Clearable, "states": func() []string { return []string{"retry", "blocked", "parked"} }, "clock": func(t time.Time) string { return t.UTC().Format("15:04:05Z") },
		"title": func(s string) string { return strings.ToUpper(s[:1]) + s[1:] },
		"unix":  func(t time.Time) int64 { return t.UnixMilli() }, "deref": func(f *float64) float64 { return *f },
	}
	shared := template.Must(template.New("").Funcs(funcs).ParseFS(files, "templates/layout.html", "templates/parts.html"))
	out := map[string]*template.Template{}
	names, _ := files.ReadDir("templates")
	for _, f := range names {
		name, _ := strings.CutSuffix(f.Name(), ".html")
		if name == "layout" || name == "parts" {
			continue
		}
		out[name] = template.Must(template.Must(shared.Clone()).ParseFS(files, "templates/"+f.Name()))
	}
	return out
}

// render writes a block. It is made in memory first: an answer is whole or an error.
func (p *page) render(w http.ResponseWriter, status int, name, block string, v *view) {
	var b bytes.Buffer
	if err := p.screens[name].ExecuteTemplate(&b, block, v); err != nil {
		p.o.Log.Error("a page could not be made", "page", name, "reason", err)
		http.Error(w, "the page could not be made; the log says why", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes()) // somebody who went away is not our concern
}

// dict makes a map of names and values, for templates that take several.
func dict(pairs ...any) map[string]any {
	m := map[string]any{}
	for i := 0; i+1 < len(pairs); i += 2 {
		m[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return m
}

// number has its thousands set apart.
func number(n any) string {
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

func rate(f float64) string {
	if f < 10 {
		return strconv.FormatFloat(math.Round(f*10)/10, 'f', -1, 64) + "/s"
	}
	return number(int64(math.Round(f))) + "/s"
}

func spanMS(ms int64) string { return span(float64(ms) / 1000) }

// span is a time in seconds for people.
func span(s float64) string {
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

func moment(t any) time.Time {
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

func instant(t any) string {
	if m := moment(t); !m.IsZero() {
		return m.UTC().Format("2006-01-02 15:04:05Z")
	}
	return "–"
}

func iso(t any) string {
	if m := moment(t); !m.IsZero() {
		return m.UTC().Format(time.RFC3339)
	}
	return ""
}

// ago is how long before now that was, or how far ahead it is.
func ago(now time.Time, t any) string {
	m := moment(t)
	if m.IsZero() {
		return ""
	}
	if d := now.Sub(m).Seconds(); d >= 0 {
		return span(d) + " ago"
	}
	return "in " + span(m.Sub(now).Seconds())
}

func size(n int) string {
	switch {
	case n < 1<<10:
		return strconv.Itoa(n) + " B"
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

// pretty indents JSON.
func pretty(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Indent(&b, raw, "", "  ") != nil {
		return string(raw)
	}
	return b.String()
}

// pair is a field of an entry of the log.
type pair struct{ Name, Value string }

// pairs are the fields of a document in their order, values as they are written.
func pairs(raw json.RawMessage) []pair {
	d := json.NewDecoder(bytes.NewReader(raw))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil
	}
	var out []pair
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return out
		}
		var v json.RawMessage
		if d.Decode(&v) != nil {
			return out
		}
		text := string(v)
		var s string
		if json.Unmarshal(v, &s) == nil {
			text = s
		}
		out = append(out, pair{fmt.Sprint(name), text})
	}
	return out
}
