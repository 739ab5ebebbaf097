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
	var redaction Redaction
	for _, h := range headers {
		if _, err := path.Match(h, ""); err != nil || h == "" {
			return redaction, fmt.Errorf("%q is not a header name (the wildcards * and ? are allowed)", h)
		}
		redaction.headers = append(redaction.headers, strings.ToLower(h))
	}

	for _, p := range paths {
		elements, ok := parsePath(p)
		if !ok {
			return redaction, fmt.Errorf("%q is not a path such as $.card.number, $.items[*].price or $..password", p)
		}
		redaction.paths = append(redaction.paths, elements)
	}
	return redaction, nil
}

func parsePath(path string) ([]pathElement, bool) {
	rest, ok := strings.CutPrefix(path, "$")
	if !ok || rest == "" {
		return nil, false
	}

	var elements []pathElement
	for rest != "" {
		match := pathElementPattern.FindStringSubmatch(rest)
		if match == nil {
			return nil, false
		}
		rest = rest[len(match[0]):]

		switch {
		case match[2] != "":
			elements = append(elements, pathElement{name: match[2], recursive: match[1] == ".."})
		case match[3] == "*":
			elements = append(elements, pathElement{wildcard: true})
		default:
			n, err := strconv.Atoi(match[3])
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
func (r Redaction) checkEdit(edit DeadEdit) error {
	if len(r.paths) > 0 && strings.Contains(string(edit.Payload), placeholder) {
		return invalidRequest("the new payload contains %s, which stands for a hidden value: "+
			"write the value itself, or leave the payload as it is", placeholder)
	}
	for _, h := range edit.Headers {
		if r.hidesHeader(h[0]) && h[1] == placeholder {
			return invalidRequest("the new header %s is %s, which stands for a hidden value: "+
				"write the value itself, or leave the headers as they are", h[0], placeholder)
		}
	}
	return nil
}

// redactTree applies the paths to a decoded JSON value. It changes value and returns the result.
func (r Redaction) redactTree(value any) any {
	for _, p := range r.paths {
		value = redactPath(value, p)
	}
	return value
}

// redactPath hides the values in value that path matches.
func redactPath(value any, path []pathElement) any {
	if len(path) == 0 {
		return placeholder
	}

	element := path[0]
	switch typed := value.(type) {
	case map[string]any:
		for name, child := range typed {
			if element.wildcard || element.name != "" && element.name == name {
				typed[name] = redactPath(child, path[1:])
			}
			// The name may occur again at a lower level.
			if element.recursive {
				typed[name] = redactPath(typed[name], path)
			}
		}

	case []any:
		for i, child := range typed {
			switch {
			case element.wildcard, element.name == "" && element.index == i:
				typed[i] = redactPath(child, path[1:])
			case element.recursive:
				typed[i] = redactPath(child, path)
			}
		}
	}
	return value
}

// redactEnvelope applies the rules to an envelope in Extended JSON.
// hasPayload is false if the envelope contains a replacement for the payload. The result is nil if
// the envelope cannot be parsed.
func (r Redaction) redactEnvelope(raw json.RawMessage, hasPayload bool, mapping *envelope.Mapping) json.RawMessage {
	if len(r.headers) == 0 && len(r.paths) == 0 || raw == nil {
		return raw
	}
	var doc map[string]any
	if decodeJSON(raw, &doc) != nil {
		return nil
	}

	// A mapping gives these fields other names.
	headers, payload := mapping.Name("headers"), mapping.Name("payload")
	if list, ok := doc[headers]; ok && len(r.headers) > 0 {
		doc[headers] = r.redactHeaders(list)
	}
	if stored, ok := doc[payload]; ok && len(r.paths) > 0 && hasPayload {
		doc[payload] = r.redactPayload(stored)
	}
	// With a mapping of whole documents, every field may be a part of the payload.
	if mapping.Whole() && len(r.paths) > 0 && hasPayload {
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
func (r Redaction) redactHeaders(headers any) any {
	switch list := headers.(type) {
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
func (r Redaction) redactPayload(payload any) any {
	switch typed := payload.(type) {
	case nil:
		return nil

	case string:
		var value any
		if decodeJSON([]byte(typed), &value) != nil {
			return placeholder
		}
		return encodeOrHide(r.redactTree(value))

	case map[string]any:
		// Extended JSON contains binary data as base64. A document may have a field of this name as well.
		if binary, ok := binaryOf(typed); ok {
			text, _ := binary["base64"].(string)
			data, err := base64.StdEncoding.DecodeString(text)
			var value any
			if err != nil || decodeJSON(data, &value) != nil {
				return placeholder
			}
			binary["base64"] = base64.StdEncoding.EncodeToString([]byte(encodeOrHide(r.redactTree(value))))
			return typed
		}
	}
	return r.redactTree(payload)
}

// binaryOf returns the inner document of a binary value in Extended JSON.
func binaryOf(fields map[string]any) (map[string]any, bool) {
	binary, ok := fields["$binary"].(map[string]any)
	_, hasData := binary["base64"].(string)
	_, hasType := binary["subType"].(string)
	return binary, ok && len(fields) == 1 && len(binary) == 2 && hasData && hasType
}

// encodeOrHide returns value as JSON, or the placeholder if that fails.
func encodeOrHide(value any) string {
	out, err := json.Marshal(value)
	if err != nil {
		return placeholder
	}
	return string(out)
}

// decodeJSON decodes a single JSON value. Numbers keep their text.
func decodeJSON(raw []byte, value any) error {
	decoder := json.NewDecoder(strings.NewReader(string(raw)))
	decoder.UseNumber()
	if err := decoder.Decode(value); err != nil {
		return err
	}
	if decoder.More() {
		return fmt.Errorf("more than one value")
	}
	return nil
}

// redactJSON applies the paths to any JSON value.
func (r Redaction) redactJSON(raw json.RawMessage) json.RawMessage {
	if len(r.paths) == 0 || raw == nil {
		return raw
	}

	var value any
	if decodeJSON(raw, &value) != nil {
		return json.RawMessage(`"` + placeholder + `"`)
	}
	return json.RawMessage(encodeOrHide(r.redactTree(value)))
}
