package config

import (
	"reflect"
	"slices"
	"strings"
	"time"
)

// The types with a reading of their own.
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
	goDoc string // Struct.Field, where its description is found
}

func fieldsOf(t reflect.Type) []field {
	fields := make([]field, t.NumField())
	for i := range fields {
		f := t.Field(i)
		fields[i] = field{name: f.Tag.Get("yaml"), index: i, typ: f.Type, goDoc: t.Name() + "." + f.Name}
		if e := f.Tag.Get("enum"); e != "" {
			fields[i].enum = strings.Split(e, ",")
		}
	}
	return fields
}

// section is the struct behind t if t is a section of the configuration, directly or optional.
func section(t reflect.Type) (reflect.Type, bool) {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || t == secretType || t == uriType || t == startType {
		return nil, false
	}
	return t, true
}

// paths lists every key from t downwards, sections before what they hold, with the type of each.
func paths(t reflect.Type, prefix string, visit func(path string, t reflect.Type)) {
	for _, f := range fieldsOf(t) {
		visit(prefix+f.name, f.typ)
		if s, ok := section(f.typ); ok {
			paths(s, prefix+f.name+".", visit)
		}
	}
}

var (
	keyTypes = func() map[string]reflect.Type {
		m := make(map[string]reflect.Type)
		paths(reflect.TypeFor[Config](), "", func(path string, t reflect.Type) { m[path] = t })
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

// EnvName is the environment variable of a key: its path in capitals with underscores.
func EnvName(path string) string {
	return "OUTRELAY_" + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// Keys lists the paths of all keys, sorted.
func Keys() []string {
	keys := make([]string, 0, len(keyTypes))
	for k := range keyTypes {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
