package config

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// decoder turns what was read into the struct, and everything that does not fit into problems.
type decoder struct {
	problems *Problems
	expand   func(string) (string, error)
	refers   map[string]resolved // by path
}

// resolved is a text with references, as it was written, and what it stands for.
type resolved struct{ text, value string }

// expanded resolves the references in the text at path.
func (d *decoder) expanded(path, text string) (string, error) {
	out, err := d.expand(text)
	if err == nil && out != text {
		d.refers[path] = resolved{text, out}
	}
	return out, err
}

// structure decodes a mapping into the struct v.
func (d *decoder) structure(m map[string]any, v reflect.Value, prefix string) {
	fields := fieldsOf(v.Type())
	for name, value := range m {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
		if i < 0 {
			d.problems.add(prefix+name, "unknown key", suggestion(prefix+name))
			continue
		}
		if value == nil {
			continue // a key without a value keeps its default
		}
		d.value(value, v.Field(fields[i].index), fields[i], prefix+name)
	}
}

// suggestion is the key that was probably meant by an unknown one: a sibling, else the same name elsewhere.
func suggestion(path string) string {
	prefix, name := "", path
	if i := strings.LastIndexByte(path, '.'); i >= 0 {
		prefix, name = path[:i+1], path[i+1:]
	}
	general := indices.ReplaceAllString(prefix, "")
	var siblings, elsewhere []string
	add := func(key string, _ reflect.Type) {
		if rest, ok := strings.CutPrefix(key, general); ok && !strings.Contains(rest, ".") {
			siblings = append(siblings, rest)
		}
		if key[strings.LastIndexByte(key, '.')+1:] == name {
			elsewhere = append(elsewhere, key)
		}
	}
	for _, key := range Keys() {
		add(key, nil)
	}
	paths(reflect.TypeFor[Rule](), "topics.rules.", add)
	if near := nearest(name, siblings); near != "" {
		return "did you mean " + prefix + near + "?"
	}
	if len(elsewhere) > 0 {
		return "did you mean " + strings.Join(elsewhere, " or ") + "?"
	}
	if len(siblings) == 0 {
		if near := nearest(path, Keys()); near != "" {
			return "did you mean " + near + "?"
		}
		return ""
	}
	return "known here: " + strings.Join(siblings, ", ")
}

func (d *decoder) value(in any, out reflect.Value, f field, path string) {
	if s, ok := section(f.typ); ok {
		m, ok := in.(map[string]any)
		if !ok {
			d.problems.add(path, "found "+kind(in), "expected a section with keys")
			return
		}
		target := out
		if out.Kind() == reflect.Pointer {
			target = reflect.New(s)
			out.Set(target)
			target = target.Elem()
			target.Set(reflect.ValueOf(sectionDefault(s)))
		}
		d.structure(m, target, path+".")
		return
	}
	switch {
	case f.typ.Kind() == reflect.Slice:
		d.list(in, out, f, path)
	case f.typ.Kind() == reflect.Map:
		d.strings(in, out, path)
	default:
		d.scalar(in, out, f, path)
	}
}

// sectionDefault is what an optional section holds before anything was read into it.
func sectionDefault(t reflect.Type) any {
	if t == reflect.TypeFor[Create]() {
		return Create{Partitions: -1, Replication: -1}
	}
	if t == reflect.TypeFor[Admin]() {
		return Admin{Listen: "127.0.0.1:9465", Anonymous: "none", Payloads: "operator", Rate: 50}
	}
	return reflect.Zero(t).Interface()
}

func (d *decoder) list(in any, out reflect.Value, f field, path string) {
	elem := f.typ.Elem()
	items, ok := in.([]any)
	if text, isText := in.(string); isText && elem.Kind() == reflect.String {
		items, ok = d.split(text, path)
	}
	if !ok {
		if !d.problems.has(path) {
			d.problems.add(path, "found "+kind(in), "expected a list")
		}
		return
	}
	made := reflect.MakeSlice(f.typ, len(items), len(items))
	for i, item := range items {
		at := path + "[" + strconv.Itoa(i) + "]"
		if item == nil {
			d.problems.add(at, "found nothing", "expected "+article(elem))
			continue
		}
		d.value(item, made.Index(i), field{typ: elem}, at)
	}
	out.Set(made)
}

// split makes a list of a text with commas, after references were resolved, so that one variable can hold a list.
func (d *decoder) split(text, path string) ([]any, bool) {
	text, err := d.expanded(path, text)
	if err != nil {
		d.problems.add(path, err.Error(), "")
		return nil, false
	}
	var items []any
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			items = append(items, strings.ReplaceAll(part, "${", "$${"))
		}
	}
	return items, true
}

func (d *decoder) strings(in any, out reflect.Value, path string) {
	m, ok := in.(map[string]any)
	if !ok {
		d.problems.add(path, "found "+kind(in), "expected a mapping of names to values")
		return
	}
	made := make(map[string]string, len(m))
	for name, value := range m {
		text, ok := scalarText(value)
		if !ok {
			d.problems.add(path+"."+name, "found "+kind(value), "expected one value")
			continue
		}
		text, err := d.expanded(path+"."+name, text)
		if err != nil {
			d.problems.add(path+"."+name, err.Error(), "")
			continue
		}
		made[name] = text
	}
	out.Set(reflect.ValueOf(made))
}

func (d *decoder) scalar(in any, out reflect.Value, f field, path string) {
	raw, ok := scalarText(in)
	if !ok {
		d.problems.add(path, "found "+kind(in), "expected "+article(f.typ))
		return
	}
	text, err := d.expanded(path, raw)
	if err != nil {
		d.problems.add(path, err.Error(), "")
		return
	}
	if err := assign(text, in, out, f); err != nil {
		found := "found " + strconv.Quote(raw) // the reference as it was written, not what it stands for
		if f.typ == secretType || f.typ == uriType {
			found = "found " + kind(in)
		}
		d.problems.add(path, found, err.Error())
	}
}

// assign parses text into out. The error says what is allowed.
func assign(text string, in any, out reflect.Value, f field) error {
	_, isText := in.(string)
	switch f.typ {
	case secretType, uriType:
		if !isText {
			return fmt.Errorf("expected a text; put it in quotes")
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
			return fmt.Errorf("expected a duration such as 250ms, 5s, 24h or 7d")
		}
		out.SetInt(int64(v))
		return nil
	case sizeType:
		v, err := ParseSize(text)
		if err != nil {
			return fmt.Errorf("expected a size such as 900KiB or 32MiB")
		}
		out.SetInt(int64(v))
		return nil
	case startType:
		v, err := ParseStart(text)
		if err != nil {
			return fmt.Errorf("expected backlog, now or a time such as 2026-11-20T08:00:00Z")
		}
		out.Set(reflect.ValueOf(v))
		return nil
	}
	return assignBasic(text, out, f)
}

func assignBasic(text string, out reflect.Value, f field) error {
	switch out.Kind() {
	case reflect.Bool:
		v, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("expected true or false")
		}
		out.SetBool(v)
	case reflect.Int:
		v, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return fmt.Errorf("expected a whole number")
		}
		out.SetInt(v)
	default:
		if f.enum != nil && !slices.Contains(f.enum, text) {
			hint := "expected one of " + strings.Join(f.enum, ", ")
			if near := nearest(text, f.enum); near != "" {
				hint += " (did you mean " + near + "?)"
			}
			return fmt.Errorf("%s", hint)
		}
		out.SetString(text)
	}
	return nil
}

// scalarText is the text of a value that is neither a list nor a mapping.
func scalarText(in any) (string, bool) {
	switch v := in.(type) {
	case string:
		return v, true
	case bool, int, int64, uint64, float64:
		return fmt.Sprint(v), true
	case time.Time: // YAML knows times
		return v.Format(time.RFC3339Nano), true
	}
	return "", false
}

// kind names what was found without showing it.
func kind(in any) string {
	switch in.(type) {
	case nil:
		return "nothing"
	case map[string]any:
		return "a section"
	case []any:
		return "a list"
	case string:
		return "a text"
	case bool:
		return "true or false"
	case int, int64, uint64, float64:
		return "a number"
	}
	return "something else"
}

func article(t reflect.Type) string {
	if _, ok := section(t); ok {
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
