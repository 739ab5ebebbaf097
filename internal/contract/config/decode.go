package config

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// decoder decodes the merged sources into the struct, and adds a problem for each value that does not fit.
type decoder struct {
	problems   *Problems
	expand     func(string) (string, error)
	references map[string]resolvedText // by path
}

// resolvedText is a text with references, as it was written, and its value.
type resolvedText struct{ text, value string }

// expandText resolves the references in the text at path.
func (d *decoder) expandText(path, text string) (string, error) {
	out, err := d.expand(text)
	if err == nil && out != text {
		d.references[path] = resolvedText{text, out}
	}
	return out, err
}

// decodeStruct decodes a mapping into the struct v.
func (d *decoder) decodeStruct(m map[string]any, v reflect.Value, prefix string) {
	fields := fieldsOf(v.Type())
	for name, value := range m {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
		if i < 0 {
			d.problems.report(prefix+name, "unknown key", suggestKey(prefix+name))
			continue
		}

		// A key without a value keeps its default.
		if value == nil {
			continue
		}
		d.decodeValue(value, v.Field(fields[i].index), fields[i], prefix+name)
	}
}

// movedKeys are former keys with their successors.
var movedKeys = map[string]string{"mongodb.state": "state.database"}

// removedKeys are former keys without a successor, with what takes their place.
var removedKeys = map[string]string{"kafka.delivery": "delete it: every record is sent by an idempotent, fenced producer"}

// suggestKey returns a hint for an unknown key: its successor, a similar key of the section, the same name in
// another section, or the known keys of the section.
func suggestKey(path string) string {
	if successor, moved := movedKeys[path]; moved {
		return successor + " replaces it"
	}
	if instead, removed := removedKeys[path]; removed {
		return instead
	}

	prefix, name := "", path
	if i := strings.LastIndexByte(path, '.'); i >= 0 {
		prefix, name = path[:i+1], path[i+1:]
	}

	// Indices of a list are not part of the known keys.
	prefixWithoutIndices := indexPattern.ReplaceAllString(prefix, "")
	var siblings, elsewhere []string
	// The nearest place comes first: a misspelled name, then a misplaced one, then the whole list.
	addCandidate := func(key string, _ reflect.Type) {
		if rest, ok := strings.CutPrefix(key, prefixWithoutIndices); ok && !strings.Contains(rest, ".") {
			siblings = append(siblings, rest)
		}
		if key[strings.LastIndexByte(key, '.')+1:] == name {
			elsewhere = append(elsewhere, key)
		}
	}
	for _, key := range Keys() {
		addCandidate(key, nil)
	}
	// Keys does not include the keys of list elements.
	visitPaths(reflect.TypeFor[Rule](), "topics.rules.", addCandidate)

	if near := NearestName(name, siblings); near != "" {
		return "did you mean " + prefix + near + "?"
	}
	if len(elsewhere) > 0 {
		return "did you mean " + strings.Join(elsewhere, " or ") + "?"
	}
	if len(siblings) > 0 {
		return "known keys here: " + strings.Join(siblings, ", ")
	}
	if near := NearestName(path, Keys()); near != "" {
		return "did you mean " + near + "?"
	}
	return ""
}

func (d *decoder) decodeValue(in any, out reflect.Value, f field, path string) {
	if s, ok := sectionType(f.typ); ok {
		// A text or a list in the place of a section is a mistake of indentation.
		m, ok := in.(map[string]any)
		if !ok {
			d.problems.report(path, "found "+describeValue(in), describeSection(s, out.Kind() == reflect.Pointer))
			return
		}

		target := out
		if out.Kind() == reflect.Pointer {
			target = reflect.New(s)
			out.Set(target)
			target = target.Elem()
			// A section that is present begins with its defaults, and the document overrides them.
			target.Set(reflect.ValueOf(sectionDefault(s)))
		}
		d.decodeStruct(m, target, path+".")
		return
	}

	switch f.typ.Kind() {
	case reflect.Slice:
		d.decodeList(in, out, f, path)
	case reflect.Map:
		d.decodeMap(in, out, path)
	default:
		d.decodeScalar(in, out, f, path)
	}
}

// sectionDefault returns the default content of an optional section that is set. t is its type.
func sectionDefault(t reflect.Type) any {
	if t == reflect.TypeFor[Admin]() {
		return Admin{Listen: "127.0.0.1:9465", Anonymous: "none", Payloads: "operator", Rate: 50, Session: 12 * time.Hour}
	}
	return reflect.Zero(t).Interface()
}

func (d *decoder) decodeList(in any, out reflect.Value, f field, path string) {
	elem := f.typ.Elem()
	items, ok := in.([]any)
	// The environment and flags have only texts, so a list of words may be one text.
	if text, isText := in.(string); isText && elem.Kind() == reflect.String {
		items, ok = d.splitText(text, path)
	}
	if !ok {
		if !d.problems.hasProblem(path) {
			d.problems.report(path, "found "+describeValue(in), "expected a list")
		}
		return
	}

	// Without elements, a list that has no default stays as it is.
	if len(items) == 0 && out.Len() == 0 {
		return
	}
	list := reflect.MakeSlice(f.typ, len(items), len(items))
	for i, item := range items {
		at := path + "[" + strconv.Itoa(i) + "]"
		if item == nil {
			d.problems.report(at, "found nothing", "expected "+describeType(elem))
			continue
		}
		d.decodeValue(item, list.Index(i), field{typ: elem}, at)
	}
	out.Set(list)
}

// splitText splits a text at its commas. It resolves references first, so that one variable can hold a list.
func (d *decoder) splitText(text, path string) ([]any, bool) {
	text, err := d.expandText(path, text)
	if err != nil {
		d.problems.report(path, err.Error(), "")
		return nil, false
	}

	var items []any
	for part := range strings.SplitSeq(text, ",") {
		// decodeScalar expands each item again, so "${" is escaped here.
		if part = strings.TrimSpace(part); part != "" {
			items = append(items, strings.ReplaceAll(part, "${", "$${"))
		}
	}
	return items, true
}

// decodeMap decodes a mapping of names to texts.
func (d *decoder) decodeMap(in any, out reflect.Value, path string) {
	m, ok := in.(map[string]any)
	if !ok {
		d.problems.report(path, "found "+describeValue(in), "expected a mapping of names to values")
		return
	}

	// Without entries, a map that has no default stays as it is.
	if len(m) == 0 && out.Len() == 0 {
		return
	}
	texts := make(map[string]string, len(m))
	for name, value := range m {
		text, ok := scalarText(value)
		if !ok {
			d.problems.report(path+"."+name, "found "+describeValue(value), "expected one value")
			continue
		}
		text, err := d.expandText(path+"."+name, text)
		if err != nil {
			d.problems.report(path+"."+name, err.Error(), "")
			continue
		}
		texts[name] = text
	}
	out.Set(reflect.ValueOf(texts))
}

func (d *decoder) decodeScalar(in any, out reflect.Value, f field, path string) {
	raw, ok := scalarText(in)
	if !ok {
		d.problems.report(path, "found "+describeValue(in), "expected "+describeType(f.typ))
		return
	}
	text, err := d.expandText(path, raw)
	if err != nil {
		d.problems.report(path, err.Error(), "")
		return
	}

	err = assignText(text, in, out, f)
	if secret, ok := out.Interface().(Secret); ok && err == nil && raw != text && strings.Contains(raw, "${file:") {
		secret.written = &raw
		out.Set(reflect.ValueOf(secret))
	}
	if err != nil {
		// Quote the reference as it was written, not its value, and never quote a secret.
		found := "found " + strconv.Quote(raw)
		if f.typ == secretType || f.typ == uriType {
			found = "found " + describeValue(in)
		}
		d.problems.report(path, found, err.Error())
	}
}

// assignText parses text and assigns it to out. The error describes the allowed values.
func assignText(text string, in any, out reflect.Value, f field) error {
	_, isText := in.(string)
	// A number would lose its leading zeros as a secret.
	switch f.typ {
	case secretType, uriType:
		if !isText {
			return errors.New("expected a text; put it in quotes")
		}
		if f.typ == uriType {
			out.Set(reflect.ValueOf(NewURI(text)))
		} else {
			out.Set(reflect.ValueOf(NewSecret(text)))
		}
		return nil

	case durationType:
		v, err := ParseDuration(text)
		if err != nil && text != "0" {
			return errors.New("expected a duration such as 250ms, 5s, 24h or 7d")
		}
		out.SetInt(int64(v))
		return nil

	case sizeType:
		v, err := parseSize(text)
		if err != nil {
			return errors.New("expected a size such as 900KiB or 32MiB")
		}
		out.SetInt(int64(v))
		return nil

	case startType:
		v, err := parseStart(text)
		if err != nil {
			return errors.New("expected backlog, now or a time such as 2026-11-20T08:00:00Z")
		}
		out.Set(reflect.ValueOf(v))
		return nil
	}
	return assignBasic(text, out)
}

func assignBasic(text string, out reflect.Value) error {
	switch out.Kind() {
	case reflect.Bool:
		v, err := strconv.ParseBool(text)
		if err != nil {
			return errors.New("expected true or false")
		}
		out.SetBool(v)

	case reflect.Int:
		v, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return errors.New("expected a whole number")
		}
		out.SetInt(v)

	// The other kinds are texts.
	default:
		out.SetString(text)
	}
	return nil
}

// scalarText returns the text of a value. ok is false for lists and mappings.
func scalarText(in any) (text string, ok bool) {
	switch v := in.(type) {
	case string:
		return v, true
	case bool, int, int64, uint64, float64:
		return fmt.Sprint(v), true
	case time.Time:
		// The YAML library parses timestamps.
		return v.Format(time.RFC3339Nano), true
	}
	return "", false
}

// describeValue names the kind of a value without showing it.
func describeValue(in any) string {
	switch v := in.(type) {
	case nil:
		return "nothing"
	case map[string]any:
		return "a section"
	case []any:
		return "a list"
	case string:
		return "a text"
	case bool:
		return strconv.FormatBool(v)
	case int, int64, uint64, float64:
		return "a number"
	}
	return "something else"
}

// describeType names the kind of value that a type needs.
func describeType(t reflect.Type) string {
	if _, ok := sectionType(t); ok {
		return "a section with keys"
	}

	switch t {
	case durationType:
		return "a duration such as 5s"
	case sizeType:
		return "a size such as 32MiB"
	}

	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	}
	return "a text"
}

// describeSection names the keys of a section. An optional section may be empty, for its defaults.
func describeSection(t reflect.Type, optional bool) string {
	fields := fieldsOf(t)
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
	}

	text := "expected a section with keys: " + strings.Join(names, ", ")
	if optional {
		text += "; {} takes their defaults"
	}
	return text
}
