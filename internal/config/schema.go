package config

import (
	"bytes"
	_ "embed"
	"encoding"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"strings"
	"time"
)

// SchemaID names the schema.
const SchemaID = "https://raw.githubusercontent.com/outrelay/outrelay/main/outrelay.schema.json"

// source holds the doc comments that become descriptions.
//
//go:embed config.go
var source string

// Schema is the JSON Schema (draft 2020-12) of the configuration file, made from the struct and its comments. Every value
// may also be a text with a reference, as in ${env:NAME}; defaults are those of [Default].
func Schema() []byte {
	g := generator{docs: comments()}
	root := g.object(reflect.ValueOf(Default()))
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["$id"] = SchemaID
	root["title"] = "outrelay configuration"
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(root); err != nil {
		panic("config: a schema that is no JSON: " + err.Error()) // maps, strings and numbers always are
	}
	return b.Bytes()
}

type schema = map[string]any

type generator struct{ docs map[string]string }

// object describes the section v, whose fields hold the defaults.
func (g generator) object(v reflect.Value) schema {
	properties := schema{}
	for _, f := range fieldsOf(v.Type()) {
		property := g.property(f, v.Field(f.index))
		if doc := g.docs[f.goDoc]; doc != "" {
			property["description"] = doc
		}
		properties[f.name] = property
	}
	return schema{"type": "object", "additionalProperties": false, "properties": properties}
}

func (g generator) property(f field, value reflect.Value) schema {
	if s, ok := section(f.typ); ok {
		if f.typ.Kind() == reflect.Pointer {
			value = reflect.ValueOf(sectionDefault(s))
		}
		property := g.object(value)
		property["type"] = []string{"object", "null"}
		property["description"] = g.docs[s.Name()]
		return property
	}
	property := g.shape(f.typ, f.enum)
	if d, ok := defaultOf(value); ok {
		property["default"] = d
	}
	return property
}

// reference is the shape of a text with ${…} in it.
func reference() schema {
	return schema{"type": "string", "pattern": `\$\{(env|file):`}
}

func (g generator) shape(t reflect.Type, enum []string) schema {
	pattern := func(p string) schema { return schema{"type": "string", "pattern": p} }
	switch t {
	case secretType, uriType:
		return schema{"type": "string"}
	case durationType:
		return schema{"anyOf": []any{pattern(`^([0-9]+d)?([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))*$`), schema{"const": 0}, reference()}}
	case sizeType:
		return schema{"anyOf": []any{pattern(`^[0-9]+(\.[0-9]+)? *(B|kB|KB|MB|GB|KiB|MiB|GiB)?$`), schema{"type": "integer", "minimum": 0}, reference()}}
	case startType:
		return schema{"anyOf": []any{schema{"enum": []string{"backlog", "now"}}, pattern(`^[0-9]{4}-[0-9]{2}-[0-9]{2}`), reference()}}
	}
	switch t.Kind() {
	case reflect.Slice:
		items := schema{"type": "string"}
		if elem := t.Elem(); elem.Kind() == reflect.Struct {
			items = g.object(reflect.Zero(elem))
			return schema{"type": "array", "items": items}
		}
		return schema{"anyOf": []any{schema{"type": "array", "items": items}, schema{"type": "string"}}}
	case reflect.Map:
		return schema{"type": "object", "additionalProperties": schema{"type": []string{"string", "number", "boolean"}}}
	case reflect.Bool:
		return schema{"anyOf": []any{schema{"type": "boolean"}, reference()}}
	case reflect.Int:
		return schema{"anyOf": []any{schema{"type": "integer"}, reference()}}
	}
	if enum != nil {
		return schema{"anyOf": []any{schema{"enum": enum}, reference()}}
	}
	return schema{"type": "string"}
}

// defaultOf is the default to show: none for what is empty unless set.
func defaultOf(v reflect.Value) (any, bool) {
	if v.Type() == startType {
		return v.Interface().(Start).String(), true
	}
	if v.Kind() == reflect.Bool {
		return v.Bool(), true
	}
	if v.IsZero() {
		return nil, false
	}
	switch d := v.Interface().(type) {
	case time.Duration:
		return short(d), true
	case encoding.TextMarshaler:
		text, _ := d.MarshalText() // those of Size and Start have no error
		return string(text), true
	}
	return v.Interface(), true
}

// short is a duration without trailing zero units: 24h, not 24h0m0s.
func short(d time.Duration) string {
	s := d.String()
	if rest, ok := strings.CutSuffix(s, "m0s"); ok {
		s = rest + "m"
	}
	if rest, ok := strings.CutSuffix(s, "h0m"); ok {
		s = rest + "h"
	}
	return s
}

// comments maps Struct and Struct.Field to their doc comments as plain paragraphs.
func comments() map[string]string {
	docs := make(map[string]string)
	file, err := parser.ParseFile(token.NewFileSet(), "config.go", source, parser.ParseComments)
	if err != nil {
		panic("config: " + err.Error()) // the compiler has read the same bytes
	}
	for _, declaration := range file.Decls {
		general, ok := declaration.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range general.Specs {
			named, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			docs[named.Name.Name] = paragraph(general.Doc)
			if s, ok := named.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					docs[named.Name.Name+"."+f.Names[0].Name] = paragraph(f.Doc)
				}
			}
		}
	}
	return docs
}

func paragraph(c *ast.CommentGroup) string {
	return strings.Join(strings.Fields(c.Text()), " ")
}
