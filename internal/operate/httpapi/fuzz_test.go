package httpapi

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

var long = flag.Bool("httpapi.long", false, "send many more made-up requests to the API")

// maker makes requests from the description: most are valid, and some are not.
type maker struct {
	r     *rand.Rand
	doc   *document
	known map[string][]any // values that exist, by the name of the field
}

// texts are inputs that people send, and inputs that no one sends.
var texts = []string{
	"", "x", "orders", "a.b", "0", "-1", "null", "true", "..", "%", "/", "\\", "'", `"`, "$where", "{$gt: 1}", "\x00", "a\x00b", "\n", "\u202e", "😀", "ß", "\ufffd",
	"[a", "*", "(", "2026-11-20T08:00:00Z", "9999-12-31T23:59:59Z", "0000-01-01T00:00:00Z", "system.users", "admin.system", strings.Repeat("x", 300), strings.Repeat("é", 5000), "018f0000-0000-7000-8000-000000000000",
}

func (m *maker) pick(list []string) string { return list[m.r.IntN(len(list))] }

// value returns a random value of a shape. With wild, it need not fit the shape.
func (m *maker) value(name string, s *shape, wild bool, depth int) any {
	for s != nil && s.Ref != "" {
		s = m.doc.Components.Schemas[s.Ref[strings.LastIndexByte(s.Ref, '/')+1:]]
	}

	if s == nil || wild && m.r.IntN(4) == 0 {
		return m.anything(depth)
	}
	if list := m.known[name]; len(list) > 0 && m.r.IntN(2) == 0 {
		return list[m.r.IntN(len(list))]
	}
	if len(s.Enum) > 0 && !wild {
		return s.Enum[m.r.IntN(len(s.Enum))]
	}

	switch s.kind() {
	case "object":
		return m.object(s, wild, depth)
	case "array":
		out := []any{}
		for range m.r.IntN(4) {
			out = append(out, m.value(name, s.Items, wild, depth+1))
		}
		return out
	case "boolean":
		return m.r.IntN(2) == 0
	case "integer", "number":
		return m.number(s, wild)
	}

	if s.Format == "date-time" && !wild {
		return time.Unix(m.r.Int64N(4e9), 0).UTC().Format(time.RFC3339)
	}

	return m.text(s, wild)
}

func (m *maker) object(s *shape, wild bool, depth int) map[string]any {
	out := map[string]any{}
	for _, name := range slices.Sorted(keysOf(s.Properties)) {
		if must := slices.Contains(s.Required, name); must && !wild || m.r.IntN(3) == 0 {
			out[name] = m.value(name, s.Properties[name], wild, depth+1)
		}
	}
	if wild && m.r.IntN(5) == 0 || s.Properties == nil {
		out[m.pick(texts)] = m.pick(texts)
	}
	return out
}

func keysOf[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func (m *maker) number(s *shape, wild bool) any {
	if wild {
		return []any{-1, 0, math.MaxInt64, math.MinInt64, 1e308, -0.5, json.Number("1e999"), json.Number("99999999999999999999")}[m.r.IntN(8)]
	}
	low, high := 0.0, 1000.0
	if s.Minimum != nil {
		low = *s.Minimum
	}
	if s.Maximum != nil {
		high = min(*s.Maximum, low+1e6)
	}
	return int64(low) + m.r.Int64N(max(int64(high-low), 1))
}

func (m *maker) text(s *shape, wild bool) string {
	t := m.pick(texts)
	if !wild && s.MaxLength != nil && len(t) > *s.MaxLength {
		return t[:min(*s.MaxLength, 1)]
	}
	return t
}

func (m *maker) anything(depth int) any {
	if depth > 3 {
		return nil
	}
	return []any{nil, true, -1, 1e300, m.pick(texts), []any{}, []any{m.pick(texts)}, map[string]any{}, map[string]any{"$gt": ""}}[m.r.IntN(9)]
}

// request returns a random request for an operation.
func (m *maker) request(method, path string, op *operation) (target, body string, header []string) {
	wild := m.r.IntN(3) == 0
	q := url.Values{}
	for _, p := range op.Parameters {
		if !p.Required && m.r.IntN(2) == 0 {
			continue
		}
		text := fmt.Sprint(m.value(p.Name, p.Schema, wild, 3))
		switch p.In {
		case "path":
			if text == "" || strings.Trim(text, ".") == "" {
				text = "orders"
			}
			path = strings.ReplaceAll(path, "{"+p.Name+"}", url.PathEscape(text))
		case "query":
			q.Add(p.Name, text)
		case "header":
			header = append(header, p.Name, m.pick([]string{`"0"`, "0", "*", `W/"1"`, "x"}))
		}
	}
	if target = path; len(q) > 0 {
		target += "?" + q.Encode()
	}
	if wild && m.r.IntN(4) == 0 {
		target += map[bool]string{true: "?", false: "&"}[len(q) == 0] + m.pick([]string{"limit=%ff", "a=b", "after=%00", "limit=1&limit=2", ";", "id=" + strings.Repeat("1,", 500)})
	}
	if op.RequestBody == nil {
		return target, "", header
	}

	raw, err := json.Marshal(m.value("", op.RequestBody.Content["application/json"].Schema, wild, 0))
	if err != nil {
		return target, "{", header
	}
	if wild && m.r.IntN(6) == 0 {
		return target, m.pick([]string{"", "{", "[]", "null", "\xff", string(raw) + "x", strings.Repeat("[", 20_000)}), header
	}

	return target, string(raw), header
}

// TestTheWholeAPISurvivesHostileRequests makes requests from the description, most of them allowed and some not, and wants an
// response to each that is not the server's fault.
func TestTheWholeAPISurvivesHostileRequests(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	// A request that hangs ends after this time.
	s.client.Timeout = 45 * time.Second
	for i := range 5 {
		s.insertDead(fmt.Sprint("d", i))
	}
	if _, err := s.outbox.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "e1"}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "OrderPlaced"}, {Key: "payload", Value: planted}, {Key: "dueAt", Value: time.Now().Add(time.Hour)}}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.outbox.Database().Collection("inbox_offsets").InsertOne(t.Context(), bson.D{{Key: "x", Value: 1}}); err != nil {
		t.Fatal(err)
	}

	seed, each := rand.Uint64(), 5
	if *long {
		each = 300
	}

	t.Logf("seed %d", seed)
	m := &maker{r: rand.New(rand.NewPCG(seed, 1)), doc: readSpec(t), known: map[string][]any{
		"collection": {s.ns, "a.b"}, "collections": {s.ns}, "database": {s.outbox.Database().Name()}, "id": {"d0", "e1"}, "ids": {"d1", "e1"}, "watcher": {"orders"}, "key": {"7"},
		"what": {"dead", "envelopes", "audit"}, "confirm": {"clear orders"}, "node": {"n1"}, "class": {"record_rejected"},
	}}

	responses := map[int]int{}
	for _, path := range slices.Sorted(keysOf(m.doc.Paths)) {
		for method, op := range m.doc.Paths[path] {
			for range each {
				target, body, header := m.request(method, path, op)
				if path == livePath {
					continue
				}
				r := s.call(strings.ToUpper(method), target, body, header...)
				if responses[r.status]++; r.status == http.StatusRequestHeaderFieldsTooLarge {
					// The listener rejects the request before there is an operation.
					continue
				}
				wrong := r.status >= 500 && r.status != http.StatusServiceUnavailable || r.status == 401 || r.status >= 400 && !strings.HasPrefix(r.header.Get("Content-Type"), "application/problem+json")
				if wrong || !json.Valid(r.body) {
					t.Errorf("%s %s %.500s: %d %s %.500s", method, target, body, r.status, r.header.Get("Content-Type"), r.body)
				}
				if r.status == http.StatusServiceUnavailable {
					t.Errorf("%s %s %.500s: not responded: %.500s", method, target, body, r.body)
				}
				if op.Responses[fmt.Sprint(r.status)] == nil && r.status != http.StatusRequestEntityTooLarge && r.status != http.StatusMethodNotAllowed {
					t.Errorf("%s %s: status %d is not in the description", method, path, r.status)
				}
			}
		}
	}

	t.Logf("responses by status: %v", responses)
	if responses[200] == 0 || responses[422] == 0 {
		t.Errorf("the requests are one-sided: %v", responses)
	}
}
