package opspage

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// base is the path below which browsers reach the page: "" or, for example, /outrelay. Every address in the page comes from it:
// addresses that templates contain as text get it when they are loaded, see [loadTemplates].
type base string

// address returns the address of a path of the page.
func (b base) address(path string) string { return string(b) + path }

// view is the data of every template.
type view struct {
	base base

	Title, Area         string
	Path                string
	Query               url.Values
	Caller              admin.Caller
	Watcher, Configured string
	Node, Version       string
	Now                 time.Time
	Notice              *notice
	Problem             *problem
	Said                *problem   // why an action of this page was not planned
	SaidInForm          bool       // the form of the action shows Said
	Entered             url.Values // the form of that action; nil otherwise
	Filter              *filter    // of a list
	Data                any
}

// HasSession reports whether the caller logged in with the form, and so can log out.
func (v *view) HasSession() bool { return v.Caller.Actor.Source == "page/session" }

// Link returns an address of the page for the same watcher. pairs are names and values of its query.
// Empty values are left out.
func (v *view) Link(path string, pairs ...any) string {
	values := url.Values{}
	if v.Watcher != v.Configured {
		values.Set("watcher", v.Watcher)
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		if text := fmt.Sprint(pairs[i+1]); text != "" {
			values.Set(fmt.Sprint(pairs[i]), text)
		}
	}
	return joinQuery(v.base.address(path), values)
}

// With returns the address of this page with one value of its query changed.
func (v *view) With(name, value string) string {
	values := v.queryWithout(name, "done")
	if value != "" {
		values.Set(name, value)
	}
	return joinQuery(v.base.address(v.Path), values)
}

// List returns the query of this page, for the forms that act on its list.
func (v *view) List() string { return v.queryWithout("done", "watcher").Encode() }

// queryWithout returns a copy of the query without two names.
func (v *view) queryWithout(a, b string) url.Values {
	query := url.Values{}
	for name, values := range v.Query {
		if name != a && name != b {
			query[name] = values
		}
	}
	return query
}

func joinQuery(path string, values url.Values) string {
	if len(values) == 0 {
		return path
	}
	return path + "?" + values.Encode()
}

// Asked returns a value that the caller entered: in the form that is shown again, or in the query.
func (v *view) Asked(name string) string {
	if v.Entered.Has(name) {
		return v.Entered.Get(name)
	}
	return v.Query.Get(name)
}

// Download returns the address of the file with all entries of the list.
func (v *view) Download() string {
	return joinQuery(v.base.address(v.Path+"/download"), v.queryWithout("done", "limit"))
}

// Other returns the watcher if it is not the configured one.
func (v *view) Other() string {
	if v.Watcher == v.Configured {
		return ""
	}
	return v.Watcher
}

// Operator reports whether the page shows actions.
func (v *view) Operator() bool { return v.Caller.Operator() }

// localAddress is the start of an address of the page in the text of a template.
var localAddress = regexp.MustCompile(`\b(action|formaction|href|src)="/`)

// loadTemplates returns the templates by name, each with the layout and the shared parts. It puts the prefix of the page in front
// of addresses such as action="/confirm/retry".
func loadTemplates(assets *assets) map[string]*template.Template {
	glossary := loadGlossary()
	funcs := template.FuncMap{
		"ago":       formatAgo,
		"address":   assets.base.address,
		"areas":     listAreas,
		"asset":     assets.link,
		"at":        formatTime,
		"bytes":     formatBytes,
		"byterate":  func(perSecond float64) string { return formatBytes(int(perSecond)) + "/s" },
		"clearable": admin.Clearable,
		"clears":    describeClear,
		"clock":     func(page time.Time) string { return page.UTC().Format("15:04:05Z") },
		"deref":     func(number *float64) float64 { return *number },
		"dict":      newMap,
		"intime":    formatInput,
		"filled":    findFilled,
		"halves":    splitMiddle,
		"iso":       formatISO,
		"join":      strings.Join,
		"len64":     func(list any) int64 { return int64(reflect.ValueOf(list).Len()) },
		"manual":    func() string { return manual },
		"meaning":   findMeaning(glossary),
		"meanings":  func() []meaning { return glossary },
		"neg":       func(n int64) int64 { return -n },
		"num":       formatNumber,
		"details":   parseDetails,
		"pairs":     parsePairs,
		"pretty":    formatJSON,
		"rate":      formatRate,
		"share":     formatShare,
		"span":      formatSpan,
		"spark":     newSpark,
		"latencies": newLatencySpark,
		"lag":       formatLag,
		"spanms":    func(ms int64) string { return formatSpan(float64(ms) / 1000) },
		"millis":    formatMillis,
		"title":     upperFirst,
		"unix":      time.Time.UnixMilli,

		"watcherlink": func(name string) string { return joinQuery(assets.base.address("/"), url.Values{"watcher": {name}}) },
	}

	// Each screen gets its own copy of the layout, because all of them define the same block names.
	shared := template.New("").Funcs(funcs)
	parse := func(into *template.Template, name string) *template.Template {
		// The files are embedded.
		text, _ := files.ReadFile("templates/" + name + ".html")
		return template.Must(into.Parse(localAddress.ReplaceAllString(string(text), `${1}="`+string(assets.base)+"/")))
	}
	parse(shared, "layout")
	parse(shared, "parts")
	templates := map[string]*template.Template{}
	entries, _ := files.ReadDir("templates")
	for _, number := range entries {
		name, _ := strings.CutSuffix(number.Name(), ".html")
		if name == "layout" || name == "parts" {
			continue
		}
		templates[name] = parse(template.Must(shared.Clone()), name)
	}
	return templates
}

// render writes a block of a template. It executes the template in memory first, so that a response
// is either complete or an error.
func (p *page) render(response http.ResponseWriter, status int, name, block string, view *view) {
	var buffer bytes.Buffer
	if err := p.screens[name].ExecuteTemplate(&buffer, block, view); err != nil {
		p.o.Log.Error("a page cannot be rendered", "page", name, "error", err)
		http.Error(response, "the page cannot be rendered; the log contains the cause", http.StatusInternalServerError)
		return
	}

	response.Header().Set("Content-Type", "text/html; charset=utf-8")
	response.WriteHeader(status)

	// The error is ignored: the client is gone.
	_, _ = response.Write(buffer.Bytes())
}

// newMap returns a map of names and values, for templates with several arguments.
func newMap(pairs ...any) map[string]any {
	fields := map[string]any{}
	for i := 0; i+1 < len(pairs); i += 2 {
		fields[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return fields
}

// halves are the parts of a text in a cell. A narrow cell shortens Head at its end, so the ellipsis is in the middle of the text.
type halves struct{ Head, Tail string }

// The lengths of the parts, in characters. A cell shows the tail in any case: enough for the end of an id or a topic.
const (
	shortText = 12 // is not split
	maxTail   = 8
)

func splitMiddle(text string) halves {
	characters := []rune(text)
	if len(characters) <= shortText {
		return halves{Head: text}
	}
	split := len(characters) - min(maxTail, len(characters)/2)
	return halves{string(characters[:split]), string(characters[split:])}
}

// findFilled returns which of the fields have a value in any entry of a list of structs. Templates leave out the columns of the others.
func findFilled(list any, names ...string) (map[string]bool, error) {
	filled := map[string]bool{}
	entries := reflect.ValueOf(list)

	for i := range entries.Len() {
		for _, name := range names {
			field := reflect.Indirect(entries.Index(i)).FieldByName(name)
			if !field.IsValid() {
				return nil, fmt.Errorf("%T has no field %s", list, name)
			}
			filled[name] = filled[name] || hasValue(field)
		}
	}
	return filled, nil
}

// hasValue reports whether a field has something to show. A list of zeros, such as the minutes of an idle topic, has nothing.
func hasValue(field reflect.Value) bool {
	if field.Kind() != reflect.Slice {
		return !field.IsZero()
	}
	for i := range field.Len() {
		if !field.Index(i).IsZero() {
			return true
		}
	}
	return false
}

// upperFirst makes the first letter of a text upper case.
func upperFirst(text string) string {
	if text == "" {
		return ""
	}
	first, size := utf8.DecodeRuneInString(text)
	return string(unicode.ToUpper(first)) + text[size:]
}

// formatShare returns the finished part of a job in percent.
func formatShare(done, skipped, total int64) int64 {
	if total <= 0 {
		return 100
	}
	return min(100*(done+skipped)/total, 100)
}

// formatNumber separates thousands.
func formatNumber(n any) string {
	if known, isOptional := n.(*int64); isOptional {
		if known == nil {
			return "–"
		}
		n = *known
	}
	text := fmt.Sprint(n)
	sign := ""
	if strings.HasPrefix(text, "-") {
		sign, text = "−", text[1:]
	}
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return sign + text
}

func formatRate(number float64) string {
	if number < 10 {
		return strconv.FormatFloat(math.Round(number*10)/10, 'f', -1, 64) + "/s"
	}
	return formatNumber(int64(math.Round(number))) + "/s"
}

// formatSpan formats seconds.
func formatSpan(seconds float64) string {
	sign := ""
	if seconds < 0 {
		sign, seconds = "−", -seconds
	}

	span := time.Duration(seconds * float64(time.Second))
	switch {
	case seconds < 10:
		return sign + strconv.FormatFloat(math.Round(seconds*100)/100, 'f', -1, 64) + " s"
	case seconds < 120:
		return sign + strconv.Itoa(int(seconds)) + " s"
	case seconds < 2*3600:
		return fmt.Sprintf("%s%d min", sign, int(span.Minutes()))
	case seconds < 48*3600:
		return fmt.Sprintf("%s%d h %d min", sign, int(span.Hours()), int(span.Minutes())%60)
	}
	return fmt.Sprintf("%s%d d", sign, int(span.Hours()/24))
}

// formatLag formats a lag in seconds, which is nil if it is unknown.
func formatLag(seconds *float64) string {
	if seconds == nil {
		return "–"
	}
	return formatSpan(*seconds)
}

// timeOf returns the time of a time.Time or *time.Time, or the zero time.
func timeOf(value any) time.Time {
	switch typed := value.(type) {
	case time.Time:
		return typed
	case *time.Time:
		if typed != nil {
			return *typed
		}
	}
	return time.Time{}
}

func formatTime(value any) string {
	if at := timeOf(value); !at.IsZero() {
		return at.UTC().Format("2006-01-02 15:04:05Z")
	}
	return "–"
}

func formatISO(value any) string {
	if at := timeOf(value); !at.IsZero() {
		return at.UTC().Format(time.RFC3339)
	}
	return ""
}

// formatAgo formats the time between value and now.
func formatAgo(now time.Time, value any) string {
	at := timeOf(value)
	if at.IsZero() {
		return ""
	}
	seconds := now.Sub(at).Seconds()
	// The clocks of two machines differ a little, and the figures may be newer than the request.
	if seconds < 0 && seconds > -1 {
		seconds = 0
	}
	if seconds >= 0 {
		return formatSpan(seconds) + " ago"
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
	var buffer bytes.Buffer
	if json.Indent(&buffer, raw, "", "  ") != nil {
		return string(raw)
	}
	return buffer.String()
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
	decoder := json.NewDecoder(bytes.NewReader(raw))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return nil
	}

	var list []row
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return list
		}
		var value json.RawMessage
		if decoder.Decode(&value) != nil {
			return list
		}

		list = append(list, row{fmt.Sprint(name), formatLogValue(fmt.Sprint(name), value)})
	}
	return list
}

// parseDetails is parsePairs without the actor, which has a column, and its source.
func parseDetails(raw json.RawMessage) []row {
	return slices.DeleteFunc(parsePairs(raw), func(row row) bool { return row.Name == "actor" || row.Name == "source" })
}
