package config

import (
	"reflect"
	"slices"
)

// Differing lists the keys in which two configurations differ, sorted. It names keys and never shows a value. A section that only
// one of them has is one key.
func Differing(a, b Config) []string {
	var keys []string
	differing(reflect.ValueOf(a), reflect.ValueOf(b), "", &keys)
	slices.Sort(keys)
	return keys
}

func differing(a, b reflect.Value, prefix string, keys *[]string) {
	for _, f := range fieldsOf(a.Type()) {
		x, y, path := a.Field(f.index), b.Field(f.index), prefix+f.name
		if reflect.DeepEqual(x.Interface(), y.Interface()) {
			continue
		}
		_, deeper := section(f.typ)
		if deeper && f.typ.Kind() == reflect.Pointer {
			if deeper = !x.IsNil() && !y.IsNil(); deeper {
				x, y = x.Elem(), y.Elem()
			}
		}
		if deeper {
			differing(x, y, path+".", keys)
		} else {
			*keys = append(*keys, path)
		}
	}
}
