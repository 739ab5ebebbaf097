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
	typ   reflect.Type
	goDoc string // Struct.Field, the key of its description
}

func fieldsOf(t reflect.Type) []field {
	fields := make([]field, t.NumField())
	for i := range fields {
		f := t.Field(i)
		fields[i] = field{name: f.Tag.Get("yaml"), index: i, typ: f.Type, goDoc: t.Name() + "." + f.Name}
		switch e := f.Tag.Get("enum"); e {
		case "":
		case "@sasl":
			fields[i].enum = sasl.Names()
		default:
			fields[i].enum = strings.Split(e, ",")
		}
	}
	return fields
}

// sectionType returns the struct of a section. t is the struct, or a pointer to it for an optional
// section. ok is false if t is no section.
func sectionType(t reflect.Type) (section reflect.Type, ok bool) {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || t == secretType || t == uriType || t == startType {
		return nil, false
	}
	return t, true
}

// visitPaths calls visit for each key below t with its type. A section comes before its keys.
func visitPaths(t reflect.Type, prefix string, visit func(path string, t reflect.Type)) {
	for _, f := range fieldsOf(t) {
		visit(prefix+f.name, f.typ)
		if s, ok := sectionType(f.typ); ok {
			visitPaths(s, prefix+f.name+".", visit)
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
