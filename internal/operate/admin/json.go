package admin

import (
	"bytes"
	"encoding/json"
	"io"
	"reflect"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// maxTextBytes bounds a text in a list if a service chooses the text.
const maxTextBytes = 4 << 10

// truncateText shortens a text for a list. The result does not keep the document in memory from
// which s comes.
func truncateText(s string) string { return record.Shorten(s, maxTextBytes) }

// WriteJSON writes v to w as JSON, indented unless indent is "". A service may write a date after
// the year 9999, which JSON cannot express. Such a date becomes the nearest possible one, so that
// one envelope does not make a whole list unreadable.
func WriteJSON(w io.Writer, v any, indent string) error {
	var out bytes.Buffer
	err := encodeJSON(&out, v, indent)
	if err != nil {
		// Only an error is worth a walk over all values.
		fit := reflect.New(reflect.TypeOf(&v).Elem()).Elem()
		fit.Set(reflect.ValueOf(&v).Elem())
		fitDates(fit)

		out.Reset()
		err = encodeJSON(&out, fit.Interface(), indent)
	}
	if err != nil {
		return err
	}

	_, err = w.Write(out.Bytes())
	return err
}

func encodeJSON(w io.Writer, v any, indent string) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	return e.Encode(v)
}

// The first and the last date of JSON.
var (
	firstDate = time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC)
	lastDate  = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
)

// fitDates replaces the dates in v that JSON cannot express.
func fitDates(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			fitDates(v.Elem())
		}

	case reflect.Interface:
		if !v.IsNil() && v.CanSet() {
			v.Set(fitCopy(v.Elem()))
		}

	case reflect.Map:
		for _, key := range v.MapKeys() {
			// Values of a map cannot be changed in place.
			v.SetMapIndex(key, fitCopy(v.MapIndex(key)))
		}

	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			fitDates(v.Index(i))
		}

	case reflect.Struct:
		if at, ok := v.Interface().(time.Time); ok {
			switch {
			case !v.CanSet():
			case at.Year() > 9999:
				v.Set(reflect.ValueOf(lastDate))
			case at.Year() < 0:
				v.Set(reflect.ValueOf(firstDate))
			}
			return
		}
		// Reflection cannot set unexported fields, and JSON does not contain them.
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fitDates(v.Field(i))
			}
		}
	}
}

// fitCopy returns a copy of v with the dates replaced, for values that cannot be changed in place.
func fitCopy(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	c.Set(v)
	fitDates(c)
	return c
}
