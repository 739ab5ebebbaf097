package admin

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// Redaction is what is never shown of an envelope or a saga, whoever asks.
type Redaction struct {
	headers []string
	paths   [][]step
}

// redacted stands for a value.
const redacted = "***"

// step is one step of a path: a name, an index, any (*), or any depth before a name.
type step struct {
	name  string
	index int // of an array, if name is ""
	any   bool
	deep  bool // the name at any depth
}

var pathStep = regexp.MustCompile(`^(?:(\.\.?)([A-Za-z0-9_-]+)|\[(\*|[0-9]+)\])`)

// NewRedaction reads rules: names of headers, in which * and ? may stand and case does not count, and paths into payloads
// that are JSON: $.card.number, $.items[*].price, $.list[0], $..password (the name at any depth).
func NewRedaction(headers, paths []string) (Redaction, error) {
	var r Redaction
	for _, h := range headers {
		if _, err := path.Match(h, ""); err != nil || h == "" {
			return r, fmt.Errorf("%q is not the name of a header, in which * and ? may stand", h)
		}
		r.headers = append(r.headers, strings.ToLower(h))
	}
	for _, p := range paths {
		steps, ok := parsePath(p)
		if !ok {
			return r, fmt.Errorf("%q is not a path such as $.card.number, $.items[*].price or $..password", p)
		}
		r.paths = append(r.paths, steps)
	}
	return r, nil
}

func parsePath(p string) ([]step, bool) {
	rest, ok := strings.CutPrefix(p, "$")
	if !ok || rest == "" {
		return nil, false
	}
	var steps []step
	for rest != "" {
		m := pathStep.FindStringSubmatch(rest)
		if m == nil {
			return nil, false
		}
		rest = rest[len(m[0]):]
		switch {
		case m[2] != "":
			steps = append(steps, step{name: m[2], deep: m[1] == ".."})
		case m[3] == "*":
			steps = append(steps, step{any: true})
		default:
			n, err := strconv.Atoi(m[3])
			if err != nil {
				return nil, false
			}
			steps = append(steps, step{index: n})
		}
	}
	return steps, true
}

// header reports whether the value of that header is hidden.
func (r Redaction) header(name string) bool {
	for _, p := range r.headers {
		if ok, _ := path.Match(p, strings.ToLower(name)); ok {
			return true
		}
	}
	return false
}

// tree hides what the paths name in a decoded JSON value.
func (r Redaction) tree(v any) any {
	for _, p := range r.paths {
		v = hide(v, p)
	}
	return v
}

func hide(v any, p []step) any {
	if len(p) == 0 {
		return redacted
	}
	s := p[0]
	switch x := v.(type) {
	case map[string]any:
		for name, child := range x {
			switch {
			case s.any, s.name != "" && s.name == name:
				x[name] = hide(child, p[1:])
			}
			if s.deep {
				x[name] = hide(x[name], p)
			}
		}
	case []any:
		for i, child := range x {
			switch {
			case s.any, s.name == "" && s.index == i:
				x[i] = hide(child, p[1:])
			case s.deep:
				x[i] = hide(child, p)
			}
		}
	}
	return v
}

// envelope applies the rules to an envelope in Extended JSON, as DeadShow gives it; payload is whether it holds the payload, or
// what stands for it.
func (r Redaction) envelope(raw json.RawMessage, payload bool) json.RawMessage {
	if len(r.headers) == 0 && len(r.paths) == 0 || raw == nil {
		return raw
	}
	var doc map[string]any
	if decodeJSON(raw, &doc) != nil {
		return nil
	}
	if list, ok := doc["headers"]; ok && len(r.headers) > 0 {
		doc["headers"] = r.headerList(list)
	}
	if p, ok := doc["payload"]; ok && len(r.paths) > 0 && payload {
		doc["payload"] = r.payload(p)
	}
	out, err := json.Marshal(doc)
	if err != nil {
		return nil
	}
	return out
}

// headerList hides the values of headers by their name. What is not a header of the two forms that an envelope may have is
// hidden whole: nobody can tell under which name a value stands in it.
func (r Redaction) headerList(v any) any {
	switch list := v.(type) {
	case nil:
		return nil
	case []any:
		for i, h := range list {
			one, _ := h.(map[string]any)
			name, isName := one["k"].(string)
			_, hasValue := one["v"]
			switch {
			case !isName || !hasValue || len(one) != 2:
				list[i] = redacted
			case r.header(name):
				one["v"] = redacted
			}
		}
		return list
	case map[string]any:
		for name, value := range list {
			if _, text := value.(string); !text || strings.HasPrefix(name, "$") || r.header(name) {
				list[name] = redacted
			}
		}
		return list
	}
	return redacted
}

// payload applies the paths. A payload in which they cannot be looked for, because it is no JSON, is hidden whole: rules
// say that there is something to hide.
func (r Redaction) payload(p any) any {
	switch x := p.(type) {
	case nil:
		return nil
	case string:
		var v any
		if decodeJSON([]byte(x), &v) != nil {
			return redacted
		}
		return reencoded(r.tree(v))
	case map[string]any:
		if binary, ok := x["$binary"].(map[string]any); ok {
			text, _ := binary["base64"].(string)
			data, err := base64.StdEncoding.DecodeString(text)
			var v any
			if err != nil || decodeJSON(data, &v) != nil {
				return redacted
			}
			binary["base64"] = base64.StdEncoding.EncodeToString([]byte(reencoded(r.tree(v))))
			return x
		}
	}
	return r.tree(p)
}

func reencoded(v any) string {
	out, err := json.Marshal(v)
	if err != nil {
		return redacted
	}
	return string(out)
}

// decodeJSON keeps numbers as they were written.
func decodeJSON(raw []byte, v any) error {
	d := json.NewDecoder(strings.NewReader(string(raw)))
	d.UseNumber()
	if err := d.Decode(v); err != nil {
		return err
	}
	if d.More() {
		return fmt.Errorf("more than one value")
	}
	return nil
}

// JSON applies the paths to any JSON.
func (r Redaction) json(raw json.RawMessage) json.RawMessage {
	if len(r.paths) == 0 || raw == nil {
		return raw
	}
	var v any
	if decodeJSON(raw, &v) != nil {
		return json.RawMessage(`"` + redacted + `"`)
	}
	return json.RawMessage(reencoded(r.tree(v)))
}
