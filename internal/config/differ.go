package config

import (
	"reflect"
	"slices"
)

// rereadPassword is the key whose file is read again for each connection.
const rereadPassword = "kafka.sasl.password"

// DifferingKeys returns the keys in which two configurations differ, sorted. It never shows a value. An
// optional section that only one of them has is one key.
func DifferingKeys(a, b Config) []string {
	var keys []string
	appendDiffering(reflect.ValueOf(a), reflect.ValueOf(b), "", &keys)
	slices.Sort(keys)
	return keys
}

func appendDiffering(a, b reflect.Value, prefix string, keys *[]string) {
	for _, f := range fieldsOf(a.Type()) {
		x, y, path := a.Field(f.index), b.Field(f.index), prefix+f.name
		if reflect.DeepEqual(x.Interface(), y.Interface()) {
			continue
		}

		// The password is read again for each connection, so its file is all that matters.
		if p, ok := x.Interface().(Secret); ok && path == rereadPassword && p.written != nil && reflect.DeepEqual(p.written, y.Interface().(Secret).written) {
			continue
		}

		_, isSection := sectionType(f.typ)
		if isSection && f.typ.Kind() == reflect.Pointer {
			// A section that only one side has differs as a whole.
			if x.IsNil() || y.IsNil() {
				isSection = false
			} else {
				x, y = x.Elem(), y.Elem()
			}
		}

		if isSection {
			appendDiffering(x, y, path+".", keys)
		} else {
			*keys = append(*keys, path)
		}
	}
}
