package config

import (
	"bytes"
	"embed"
	"encoding"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"strings"
	"time"
)

// schemaID is the $id of the schema.
const schemaID = "https://raw.githubusercontent.com/outrelay/outrelay/main/outrelay.schema.json"

// sources are the files with the doc comments that become descriptions.
//
//go:embed config.go records.go
var sources embed.FS

// Schema returns the JSON Schema (draft 2020-12) of the configuration file. It is generated from the
// struct and its comments. Each value may also be a text with a reference such as ${env:NAME}. The
// defaults are those of [Default].
func Schema() []byte {
	generator := generator{docs: fieldComments()}
	root := generator.sectionSchema(reflect.ValueOf(Default()))
	root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	root["$id"] = schemaID
	root["title"] = "outrelay configuration"

	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")

	// The schema contains only maps, lists, strings, booleans and numbers, which can always be encoded.
	if err := encoder.Encode(root); err != nil {
		panic("config: encoding the schema: " + err.Error())
	}
	return buffer.Bytes()
}

type schema = map[string]any

type generator struct{ docs map[string]string }

// sectionSchema describes the section value. The fields of value hold the defaults.
func (g generator) sectionSchema(value reflect.Value) schema {
	properties := schema{}
	for _, f := range fieldsOf(value.Type()) {
		property := g.propertySchema(f, value.Field(f.index))
		if doc := g.docs[f.goDoc]; doc != "" {
			property["description"] = describeKey(f.goDoc, doc)
		}
		properties[f.name] = property
	}
	return schema{"type": "object", "additionalProperties": false, "properties": properties}
}

// propertySchema describes one key with its default value.
func (g generator) propertySchema(field field, value reflect.Value) schema {
	if goType, ok := sectionType(field.typ); ok {
		if field.typ.Kind() == reflect.Pointer {
			value = reflect.ValueOf(sectionDefault(goType))
		}
		property := g.sectionSchema(value)
		property["type"] = []string{"object", "null"}
		property["description"] = describeKey(goType.Name(), g.docs[goType.Name()])
		return property
	}

	property := g.typeSchema(field.typ, field.enum)
	if field.form != "" {
		property = formSchema(field.typ, forms[field.form])
	}
	if shown, ok := shownDefault(value); ok {
		property["default"] = shown
	}
	return property
}

// describeKey returns the doc comment of a type or a field without its name, which users do not know: "Start is where a watcher
// begins." becomes "Where a watcher begins."
func describeKey(name, doc string) string {
	name = name[strings.LastIndexByte(name, '.')+1:]
	rest, found := strings.CutPrefix(doc, name+" ")
	if !found {
		return doc
	}
	for _, verb := range []string{"is ", "are "} {
		rest = strings.TrimPrefix(rest, verb)
	}
	return strings.ToUpper(rest[:1]) + rest[1:]
}

// formSchema describes a text, or the texts of a list, of a form. One expression also has the references, because a message about two
// alternatives would name neither. Editors show patternErrorMessage in place of the expression.
func formSchema(goType reflect.Type, form form) schema {
	reference := referenceSchema()["pattern"].(string)
	describe := func(kind any, pattern string) schema {
		return schema{"type": kind, "pattern": pattern + "|" + reference, "patternErrorMessage": form.expected}
	}

	item := describe("string", "^("+form.pattern+")$")
	switch {
	case goType.Kind() == reflect.Slice:
		// A list of words may be one text with commas.
		list := describe([]string{"array", "string"}, `^(\s*(`+form.pattern+`)?\s*(,|$))*$`)
		list["items"] = item
		return list
	case goType == durationType:
		item["type"], item["minimum"], item["maximum"] = []string{"string", "integer"}, 0, 0
	case goType == sizeType:
		item["type"], item["minimum"] = []string{"string", "integer"}, 0
	case goType == startType:
		// Editors complete them.
		item["examples"] = []string{"backlog", "now"}
	}
	return item
}

// referenceSchema describes a text with a reference in it.
func referenceSchema() schema {
	return schema{"type": "string", "pattern": `\$\{(env|file):`}
}

// typeSchema describes the values of a type.
func (g generator) typeSchema(goType reflect.Type, enum []string) schema {
	anyOf := func(schemas ...any) schema { return schema{"anyOf": schemas} }

	// References such as ${env:NAME} are allowed where a text is parsed of any type.
	if goType == secretType || goType == uriType {
		return schema{"type": "string"}
	}

	switch goType.Kind() {
	case reflect.Slice:
		if elem := goType.Elem(); elem.Kind() == reflect.Struct {
			return schema{"type": "array", "items": g.sectionSchema(reflect.Zero(elem))}
		}
		// A list of words may be one text with commas.
		return anyOf(schema{"type": "array", "items": schema{"type": "string"}}, schema{"type": "string"})
	case reflect.Map:
		return schema{"type": "object", "additionalProperties": schema{"type": []string{"string", "number", "boolean"}}}
	case reflect.Bool:
		return anyOf(schema{"type": "boolean"}, referenceSchema())
	case reflect.Int:
		return anyOf(schema{"type": "integer"}, referenceSchema())
	}

	if enum != nil {
		return anyOf(schema{"enum": enum}, referenceSchema())
	}
	return schema{"type": "string"}
}

// shownDefault returns the default value for the schema. A zero value has none, except for booleans and Start.
func shownDefault(value reflect.Value) (any, bool) {
	if value.Type() == startType {
		return value.Interface().(Start).String(), true
	}
	if value.Kind() == reflect.Bool {
		return value.Bool(), true
	}
	if value.IsZero() {
		return nil, false
	}

	switch typed := value.Interface().(type) {
	case time.Duration:
		return shortDuration(typed), true
	case encoding.TextMarshaler:
		// Size and Start never return an error.
		text, _ := typed.MarshalText()
		return string(text), true
	}
	return value.Interface(), true
}

// shortDuration formats duration without zero units at the end: 24h, not 24h0m0s.
func shortDuration(duration time.Duration) string {
	text := duration.String()
	if rest, ok := strings.CutSuffix(text, "m0s"); ok {
		text = rest + "m"
	}
	if rest, ok := strings.CutSuffix(text, "h0m"); ok {
		text = rest + "h"
	}
	return text
}

// fieldComments returns the doc comments of the structs and their fields, each on one line. The keys
// are Struct and Struct.Field.
func fieldComments() map[string]string {
	docs := make(map[string]string)
	for _, name := range []string{"config.go", "records.go"} {
		// The compiler has read the same file, so there is no error.
		text, err := sources.ReadFile(name)
		if err != nil {
			panic("config: " + err.Error())
		}

		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ParseComments)
		if err != nil {
			panic("config: " + err.Error())
		}
		addFieldComments(docs, file)
	}
	return docs
}

// addFieldComments adds the doc comments of a file to docs.
func addFieldComments(docs map[string]string, file *ast.File) {
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

			docs[named.Name.Name] = joinLines(general.Doc)
			if structType, ok := named.Type.(*ast.StructType); ok {
				for _, f := range structType.Fields.List {
					docs[named.Name.Name+"."+f.Names[0].Name] = joinLines(f.Doc)
				}
			}
		}
	}
}

// joinLines returns the text of a comment on one line.
func joinLines(comment *ast.CommentGroup) string {
	return strings.Join(strings.Fields(comment.Text()), " ")
}
