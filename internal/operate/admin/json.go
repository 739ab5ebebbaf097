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
// which text comes.
func truncateText(text string) string { return record.Shorten(text, maxTextBytes) }

// WriteJSON writes value to writer as JSON, indented unless indent is "". A service may write a date after
// the year 9999, which JSON cannot express. Such a date becomes the nearest possible one, so that
// one envelope does not make a whole list unreadable.
func WriteJSON(writer io.Writer, value any, indent string) error {
	var out bytes.Buffer
	err := encodeJSON(&out, value, indent)
	if err != nil {
		// Only an error is worth a walk over all values.
		fit := reflect.New(reflect.TypeOf(&value).Elem()).Elem()
		fit.Set(reflect.ValueOf(&value).Elem())
		fitDates(fit)

		out.Reset()
		err = encodeJSON(&out, fit.Interface(), indent)
	}
	if err != nil {
		return err
	}

	_, err = writer.Write(out.Bytes())
	return err
}

func encodeJSON(out io.Writer, value any, indent string) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", indent)
	return encoder.Encode(value)
}

// The first and the last date of JSON.
var (
	firstDate = time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC)
	lastDate  = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
)

// fitDates replaces the dates in value that JSON cannot express.
func fitDates(value reflect.Value) {
	switch value.Kind() {
	case reflect.Pointer:
		if !value.IsNil() {
			fitDates(value.Elem())
		}

	case reflect.Interface:
		if !value.IsNil() && value.CanSet() {
			value.Set(fitCopy(value.Elem()))
		}

	case reflect.Map:
		for _, key := range value.MapKeys() {
			// Values of a map cannot be changed in place.
			value.SetMapIndex(key, fitCopy(value.MapIndex(key)))
		}

	case reflect.Slice, reflect.Array:
		for i := range value.Len() {
			fitDates(value.Index(i))
		}

	case reflect.Struct:
		if at, ok := value.Interface().(time.Time); ok {
			switch {
			case !value.CanSet():
			case at.Year() > 9999:
				value.Set(reflect.ValueOf(lastDate))
			case at.Year() < 0:
				value.Set(reflect.ValueOf(firstDate))
			}
			return
		}
		// Reflection cannot set unexported fields, and JSON does not contain them.
		for i := range value.NumField() {
			if value.Type().Field(i).IsExported() {
				fitDates(value.Field(i))
			}
		}
	}
}

// fitCopy returns a copy of value with the dates replaced, for values that cannot be changed in place.
func fitCopy(value reflect.Value) reflect.Value {
	copied := reflect.New(value.Type()).Elem()
	copied.Set(value)
	fitDates(copied)
	return copied
}
