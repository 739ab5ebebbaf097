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

// reportReference adds a problem for a reference at path that cannot be resolved. If what it names may be absent here, it excludes
// the value at path from the checks instead.
func (d *decoder) reportReference(path string, err error) {
	_, absent := errors.AsType[*absentError](err)
	d.problems.reportFile(Problem{Path: path, Found: err.Error(), absent: absent})
}

// decodeStruct decodes a mapping into the struct section.
func (d *decoder) decodeStruct(given map[string]any, section reflect.Value, prefix string) {
	fields := fieldsOf(section.Type())
	for name, value := range given {
		i := slices.IndexFunc(fields, func(field field) bool { return field.name == name })
		if i < 0 {
			d.problems.report(prefix+name, "unknown key", suggestKey(prefix+name))
			continue
		}

		// A key without a value keeps its default.
		if value == nil {
			continue
		}
		d.decodeValue(value, section.Field(fields[i].index), fields[i], prefix+name)
	}
}

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

func (d *decoder) decodeValue(given any, out reflect.Value, field field, path string) {
	if goType, ok := sectionType(field.typ); ok {
		// A text or a list in the place of a section is a mistake of indentation.
		fields, ok := given.(map[string]any)
		if !ok {
			d.problems.report(path, "found "+describeValue(given), describeSection(goType, out.Kind() == reflect.Pointer))
			return
		}

		target := out
		if out.Kind() == reflect.Pointer {
			target = reflect.New(goType)
			out.Set(target)
			target = target.Elem()
			// A section that is present begins with its defaults, and the document overrides them.
			target.Set(reflect.ValueOf(sectionDefault(goType)))
		}
		d.decodeStruct(fields, target, path+".")
		return
	}

	switch field.typ.Kind() {
	case reflect.Slice:
		d.decodeList(given, out, field, path)
	case reflect.Map:
		d.decodeMap(given, out, path)
	default:
		d.decodeScalar(given, out, field, path)
	}
}

// sectionDefault returns the default content of an optional section that is set. goType is its type.
func sectionDefault(goType reflect.Type) any {
	if goType == reflect.TypeFor[Admin]() {
		return DefaultAdmin()
	}
	return reflect.Zero(goType).Interface()
}

func (d *decoder) decodeList(given any, out reflect.Value, key field, path string) {
	elem := key.typ.Elem()
	items, ok := given.([]any)
	// The environment and flags have only texts, so a list of words may be one text.
	if text, isText := given.(string); isText && elem.Kind() == reflect.String {
		items, ok = d.splitText(text, path)
	}
	if !ok {
		if !d.problems.hasProblem(path) {
			d.problems.report(path, "found "+describeValue(given), "expected a list")
		}
		return
	}

	// Without elements, a list that has no default stays as it is.
	if len(items) == 0 && out.Len() == 0 {
		return
	}
	list := reflect.MakeSlice(key.typ, len(items), len(items))
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
		d.reportReference(path, err)
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
func (d *decoder) decodeMap(given any, out reflect.Value, path string) {
	fields, ok := given.(map[string]any)
	if !ok {
		d.problems.report(path, "found "+describeValue(given), "expected a mapping of names to values")
		return
	}

	// Without entries, a map that has no default stays as it is.
	if len(fields) == 0 && out.Len() == 0 {
		return
	}
	texts := make(map[string]string, len(fields))
	for name, value := range fields {
		text, ok := scalarText(value)
		if !ok {
			d.problems.report(path+"."+name, "found "+describeValue(value), "expected one value")
			continue
		}
		text, err := d.expandText(path+"."+name, text)
		if err != nil {
			d.reportReference(path+"."+name, err)
			continue
		}
		texts[name] = text
	}
	out.Set(reflect.ValueOf(texts))
}

func (d *decoder) decodeScalar(given any, out reflect.Value, field field, path string) {
	raw, ok := scalarText(given)
	if !ok {
		d.problems.report(path, "found "+describeValue(given), "expected "+describeType(field.typ))
		return
	}
	text, err := d.expandText(path, raw)
	if err != nil {
		d.reportReference(path, err)
		// Other checks depend on whether there is a secret, and not on its text.
		if field.typ == secretType {
			out.Set(reflect.ValueOf(NewSecret("the secret of " + path)))
		}
		return
	}

	err = assignText(text, given, out, field)
	if secret, ok := out.Interface().(Secret); ok && err == nil && raw != text && strings.Contains(raw, "${file:") {
		secret.written = &raw
		out.Set(reflect.ValueOf(secret))
	}
	if err != nil {
		// Quote the reference as it was written, not its value, and never quote a secret.
		found := "found " + strconv.Quote(raw)
		if field.typ == secretType || field.typ == uriType {
			found = "found " + describeValue(given)
		}
		d.problems.report(path, found, err.Error())
	}
}

// assignText parses text and assigns it to out. The error describes the allowed values.
func assignText(text string, given any, out reflect.Value, field field) error {
	_, isText := given.(string)
	// A number would lose its leading zeros as a secret.
	switch field.typ {
	case secretType, uriType:
		if !isText {
			return errors.New("expected a text; put it in quotes")
		}
		if field.typ == uriType {
			out.Set(reflect.ValueOf(NewURI(text)))
		} else {
			out.Set(reflect.ValueOf(NewSecret(text)))
		}
		return nil

	case durationType:
		duration, err := ParseDuration(text)
		if err != nil && text != "0" {
			return errors.New(forms["duration"].expected)
		}
		out.SetInt(int64(duration))
		return nil

	case sizeType:
		size, err := parseSize(text)
		if err != nil {
			return errors.New(forms["size"].expected)
		}
		out.SetInt(int64(size))
		return nil

	case startType:
		start, err := parseStart(text)
		if err != nil {
			return errors.New(forms["start"].expected)
		}
		out.Set(reflect.ValueOf(start))
		return nil
	}
	return assignBasic(text, out)
}

func assignBasic(text string, out reflect.Value) error {
	switch out.Kind() {
	case reflect.Bool:
		value, err := strconv.ParseBool(text)
		if err != nil {
			return errors.New(forms["boolean"].expected)
		}
		out.SetBool(value)

	case reflect.Int:
		value, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return errors.New(forms["number"].expected)
		}
		out.SetInt(value)

	// The other kinds are texts.
	default:
		out.SetString(text)
	}
	return nil
}

// scalarText returns the text of a value. ok is false for lists and mappings.
func scalarText(given any) (text string, ok bool) {
	switch typed := given.(type) {
	case string:
		return typed, true
	case bool, int, int64, uint64, float64:
		return fmt.Sprint(typed), true
	case time.Time:
		// The YAML library parses timestamps.
		return typed.Format(time.RFC3339Nano), true
	}
	return "", false
}

// describeValue names the kind of a value without showing it.
func describeValue(given any) string {
	switch typed := given.(type) {
	case nil:
		return "nothing"
	case map[string]any:
		return "a section"
	case []any:
		return "a list"
	case string:
		return "a text"
	case bool:
		return strconv.FormatBool(typed)
	case int, int64, uint64, float64:
		return "a number"
	}

	return "something else"
}

// describeType names the kind of value that a type needs.
func describeType(goType reflect.Type) string {
	if _, ok := sectionType(goType); ok {
		return "a section with keys"
	}

	switch goType {
	case durationType:
		return "a duration such as 5s"
	case sizeType:
		return "a size such as 32MiB"
	}

	switch goType.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	}
	return "a text"
}

// describeSection names the keys of a section. An optional section may be empty, for its defaults.
func describeSection(goType reflect.Type, optional bool) string {
	fields := fieldsOf(goType)
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
