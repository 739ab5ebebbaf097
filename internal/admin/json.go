package admin

import (
	"bytes"
	"encoding/json"
	"io"
	"reflect"
	"strings"
	"time"
)

// maxText is how many bytes of a text that a service chooses are shown in lists.
const maxText = 4 << 10

// clip cuts a text for a list. The result does not keep the document in memory that it comes from.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.Clone(strings.ToValidUTF8(s[:maxText], "")) + "…"
}

// WriteJSON writes v to w as JSON, indented if indent is not "". A date that JSON cannot express, because a service wrote one
// beyond the year 9999, becomes the nearest that it can: one envelope must not make a whole list unreadable.
func WriteJSON(w io.Writer, v any, indent string) error {
	var out bytes.Buffer
	err := encodeJSON(&out, v, indent)
	if err != nil {
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
			v.Set(fitted(v.Elem()))
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			v.SetMapIndex(key, fitted(v.MapIndex(key)))
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
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fitDates(v.Field(i))
			}
		}
	}
}

// fitted is a copy of v, which cannot be changed in its place.
func fitted(v reflect.Value) reflect.Value {
	c := reflect.New(v.Type()).Elem()
	c.Set(v)
	fitDates(c)
	return c
}
