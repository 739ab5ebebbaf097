package codec

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"reflect"
)

// Raw returns a codec that passes bytes through. Encode accepts slices of bytes and strings of any
// type, and Decode accepts pointers to them. The content type is contentType, or
// application/octet-stream if it is empty.
func Raw(contentType string) Codec {
	return raw{cmp.Or(contentType, "application/octet-stream")}
}

type raw struct{ contentType string }

func (r raw) ContentType() string { return r.contentType }

func (raw) Encode(value any) ([]byte, error) {
	switch val := reflect.ValueOf(value); {
	case isBytes(val):
		return append([]byte{}, val.Bytes()...), nil
	case val.Kind() == reflect.String:
		return []byte(val.String()), nil
	default:
		return nil, newTypeError("Raw", value, "bytes or a string")
	}
}

func (raw) Decode(_ context.Context, data []byte, into any) error {
	ptr := reflect.ValueOf(into)
	if ptr.Kind() != reflect.Pointer || ptr.IsNil() {
		return newTypeError("Raw", into, "a pointer to bytes or to a string")
	}

	switch val := ptr.Elem(); {
	case isBytes(val):
		// The caller keeps data and may change it.
		val.SetBytes(bytes.Clone(data))
	case val.Kind() == reflect.String:
		val.SetString(string(data))
	default:
		return newTypeError("Raw", into, "a pointer to bytes or to a string")
	}
	return nil
}

func isBytes(value reflect.Value) bool {
	return value.Kind() == reflect.Slice && value.Type().Elem().Kind() == reflect.Uint8
}

func newTypeError(codec string, value any, want string) error {
	return fmt.Errorf("codec.%s does not support %T: pass %s", codec, value, want)
}
