package admin

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/envelope"
)

// Redaction hides parts of envelopes and sagas from all operators.
type Redaction struct {
	headers []string
	paths   [][]pathElement
}

// placeholder replaces a hidden value.
const placeholder = "***"

// pathElement is one element of a path: a name, an index, or a wildcard.
type pathElement struct {
	name      string
	index     int // of an array, if name is ""
	wildcard  bool
	recursive bool // matches the name at any depth
}

var pathElementPattern = regexp.MustCompile(`^(?:(\.\.?)([A-Za-z0-9_-]+)|\[(\*|[0-9]+)\])`)

// NewRedaction parses rules. headers are names of headers with the wildcards * and ?; case does not
// count. paths apply to JSON payloads: $.card.number, $.items[*].price, $.list[0], or $..password
// for a name at any depth.
func NewRedaction(headers, paths []string) (Redaction, error) {
	var r Redaction
	for _, h := range headers {
		if _, err := path.Match(h, ""); err != nil || h == "" {
			return r, fmt.Errorf("%q is not a header name (the wildcards * and ? are allowed)", h)
		}
		r.headers = append(r.headers, strings.ToLower(h))
	}

	for _, p := range paths {
		elements, ok := parsePath(p)
		if !ok {
			return r, fmt.Errorf("%q is not a path such as $.card.number, $.items[*].price or $..password", p)
		}
		r.paths = append(r.paths, elements)
	}
	return r, nil
}

func parsePath(p string) ([]pathElement, bool) {
	rest, ok := strings.CutPrefix(p, "$")
	if !ok || rest == "" {
		return nil, false
	}

	var elements []pathElement
	for rest != "" {
		m := pathElementPattern.FindStringSubmatch(rest)
		if m == nil {
			return nil, false
		}
		rest = rest[len(m[0]):]

		switch {
		case m[2] != "":
			elements = append(elements, pathElement{name: m[2], recursive: m[1] == ".."})
		case m[3] == "*":
			elements = append(elements, pathElement{wildcard: true})
		default:
			n, err := strconv.Atoi(m[3])
			if err != nil {
				return nil, false
			}
			elements = append(elements, pathElement{index: n})
		}
	}
	return elements, true
}

// hidesHeader reports whether the value of the named header is hidden.
func (r Redaction) hidesHeader(name string) bool {
	for _, p := range r.headers {
		if ok, _ := path.Match(p, strings.ToLower(name)); ok {
			return true
		}
	}
	return false
}

// checkEdit returns an error if the edit writes the placeholder of a hidden value.
func (r Redaction) checkEdit(e DeadEdit) error {
	if len(r.paths) > 0 && strings.Contains(string(e.Payload), placeholder) {
		return invalidRequest("the new payload contains %s, which stands for a hidden value: "+
			"write the value itself, or leave the payload as it is", placeholder)
	}
	for _, h := range e.Headers {
		if r.hidesHeader(h[0]) && h[1] == placeholder {
			return invalidRequest("the new header %s is %s, which stands for a hidden value: "+
				"write the value itself, or leave the headers as they are", h[0], placeholder)
		}
	}
	return nil
}

// redactTree applies the paths to a decoded JSON value. It changes v and returns the result.
func (r Redaction) redactTree(v any) any {
	for _, p := range r.paths {
		v = redactPath(v, p)
	}
	return v
}

// redactPath hides the values in v that p matches.
func redactPath(v any, p []pathElement) any {
	if len(p) == 0 {
		return placeholder
	}

	e := p[0]
	switch x := v.(type) {
	case map[string]any:
		for name, child := range x {
			if e.wildcard || e.name != "" && e.name == name {
				x[name] = redactPath(child, p[1:])
			}
			// The name may occur again at a lower level.
			if e.recursive {
				x[name] = redactPath(x[name], p)
			}
		}

	case []any:
		for i, child := range x {
			switch {
			case e.wildcard, e.name == "" && e.index == i:
				x[i] = redactPath(child, p[1:])
			case e.recursive:
				x[i] = redactPath(child, p)
			}
		}
	}
	return v
}

// redactEnvelope applies the rules to an envelope in Extended JSON.
// hasPayload is false if the envelope contains a replacement for the payload. The result is nil if
// the envelope cannot be parsed.
func (r Redaction) redactEnvelope(raw json.RawMessage, hasPayload bool, m *envelope.Mapping) json.RawMessage {
	if len(r.headers) == 0 && len(r.paths) == 0 || raw == nil {
		return raw
	}
	var doc map[string]any
	if decodeJSON(raw, &doc) != nil {
		return nil
	}

	// A mapping gives these fields other names.
	headers, payload := m.Name("headers"), m.Name("payload")
	if list, ok := doc[headers]; ok && len(r.headers) > 0 {
		doc[headers] = r.redactHeaders(list)
	}
	if p, ok := doc[payload]; ok && len(r.paths) > 0 && hasPayload {
		doc[payload] = r.redactPayload(p)
	}
	// With a mapping of whole documents, every field may be a part of the payload.
	if m.Whole() && len(r.paths) > 0 && hasPayload {
		if redacted, ok := r.redactPayload(doc).(map[string]any); ok {
			doc = redacted
		}
	}

	// An envelope that cannot be encoded again is hidden: the original has values that the rules hide.
	out, err := json.Marshal(doc)
	if err != nil {
		return nil
	}
	return out
}

// redactHeaders hides the values of headers by their name. An envelope may have headers in two
// forms. An entry in any other form is hidden completely, because the name of a value in it is
// unknown.
func (r Redaction) redactHeaders(v any) any {
	switch list := v.(type) {
	case nil:
		return nil

	case []any:
		for i, h := range list {
			entry, _ := h.(map[string]any)
			name, isName := entry["k"].(string)
			_, hasValue := entry["v"]
			switch {
			case !isName || !hasValue || len(entry) != 2:
				list[i] = placeholder
			case r.hidesHeader(name):
				entry["v"] = placeholder
			}
		}
		return list

	case map[string]any:
		for name, value := range list {
			if _, text := value.(string); !text || strings.HasPrefix(name, "$") || r.hidesHeader(name) {
				list[name] = placeholder
			}
		}
		return list
	}
	return placeholder
}

// redactPayload applies the paths to a payload. A payload that is not JSON is hidden completely:
// the rules state that there is something to hide, and the paths cannot be found in it.
func (r Redaction) redactPayload(p any) any {
	switch x := p.(type) {
	case nil:
		return nil

	case string:
		var v any
		if decodeJSON([]byte(x), &v) != nil {
			return placeholder
		}
		return encodeOrHide(r.redactTree(v))

	case map[string]any:
		// Extended JSON contains binary data as base64. A document may have a field of this name as well.
		if binary, ok := binaryOf(x); ok {
			text, _ := binary["base64"].(string)
			data, err := base64.StdEncoding.DecodeString(text)
			var v any
			if err != nil || decodeJSON(data, &v) != nil {
				return placeholder
			}
			binary["base64"] = base64.StdEncoding.EncodeToString([]byte(encodeOrHide(r.redactTree(v))))
			return x
		}
	}
	return r.redactTree(p)
}

// binaryOf returns the inner document of a binary value in Extended JSON.
func binaryOf(x map[string]any) (map[string]any, bool) {
	binary, ok := x["$binary"].(map[string]any)
	_, hasData := binary["base64"].(string)
	_, hasType := binary["subType"].(string)
	return binary, ok && len(x) == 1 && len(binary) == 2 && hasData && hasType
}

// encodeOrHide returns v as JSON, or the placeholder if that fails.
func encodeOrHide(v any) string {
	out, err := json.Marshal(v)
	if err != nil {
		return placeholder
	}
	return string(out)
}

// decodeJSON decodes a single JSON value. Numbers keep their text.
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

// redactJSON applies the paths to any JSON value.
func (r Redaction) redactJSON(raw json.RawMessage) json.RawMessage {
	if len(r.paths) == 0 || raw == nil {
		return raw
	}

	var v any
	if decodeJSON(raw, &v) != nil {
		return json.RawMessage(`"` + placeholder + `"`)
	}
	return json.RawMessage(encodeOrHide(r.redactTree(v)))
}
