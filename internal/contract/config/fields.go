package config

import (
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// The types that are parsed from one text.
var (
	secretType   = reflect.TypeFor[Secret]()
	uriType      = reflect.TypeFor[URI]()
	sizeType     = reflect.TypeFor[Size]()
	startType    = reflect.TypeFor[Start]()
	durationType = reflect.TypeFor[time.Duration]()
)

// field is one key of a struct.
type field struct {
	name  string // its YAML name
	index int
	enum  []string
	form  string // of the value or of each item: a key of forms, or ""
	typ   reflect.Type
	goDoc string // Struct.Field, the key of its description
}

func fieldsOf(goType reflect.Type) []field {
	fields := make([]field, goType.NumField())
	for i := range fields {
		structField := goType.Field(i)
		fields[i] = field{name: structField.Tag.Get("yaml"), index: i, typ: structField.Type, goDoc: goType.Name() + "." + structField.Name, form: structField.Tag.Get("form")}
		if name, ok := formsOfTypes[structField.Type]; ok {
			fields[i].form = name
		}
		switch choices := structField.Tag.Get("enum"); choices {
		case "":
		case "@sasl":
			fields[i].enum = sasl.Names()
		default:
			fields[i].enum = strings.Split(choices, ",")
		}
	}
	return fields
}

// sectionType returns the struct of a section. goType is the struct, or a pointer to it for an optional
// section. ok is false if goType is no section.
func sectionType(goType reflect.Type) (section reflect.Type, ok bool) {
	if goType.Kind() == reflect.Pointer {
		goType = goType.Elem()
	}
	if goType.Kind() != reflect.Struct || goType == secretType || goType == uriType || goType == startType {
		return nil, false
	}
	return goType, true
}

// visitPaths calls visit for each key below goType with its type. A section comes before its keys.
func visitPaths(goType reflect.Type, prefix string, visit func(path string, goType reflect.Type)) {
	for _, f := range fieldsOf(goType) {
		visit(prefix+f.name, f.typ)
		if section, ok := sectionType(f.typ); ok {
			visitPaths(section, prefix+f.name+".", visit)
		}
	}
}

var (
	keyTypes = func() map[string]reflect.Type {
		m := make(map[string]reflect.Type)
		visitPaths(reflect.TypeFor[Config](), "", func(path string, t reflect.Type) { m[path] = t })
		return m
	}()

	envKeys = func() map[string]string {
		m := make(map[string]string)
		for path := range keyTypes {
			m[EnvName(path)] = path
		}
		return m
	}()
)

// EnvName returns the environment variable of a key: OUTRELAY_ and its path in capitals with underscores.
func EnvName(path string) string {
	return "OUTRELAY_" + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// Keys returns the paths of all keys, sorted.
func Keys() []string {
	keys := make([]string, 0, len(keyTypes))
	for k := range keyTypes {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
