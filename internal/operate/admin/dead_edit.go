package admin

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/relay/stored/requeues"
)

// The BSON types that an edited payload may have.
const (
	payloadBinary = "binary" // the bytes as they are
	payloadString = "string"
	payloadJSON   = "json" // a document or an array, from Extended JSON
	PayloadNull   = "null" // a tombstone
)

// DeadEdit is a change to an envelope, as text that operators type.
type DeadEdit struct {
	Version int32 // of the letter, as the letter was shown

	Payload   []byte // nil keeps the payload
	PayloadAs string // one of the constants; "" keeps the type of the payload

	Headers [][2]string       // replace all headers; nil keeps them
	Fields  map[string]string // other fields by name; partition is a number, time and expiresAt are RFC 3339
	Unset   []string          // fields to remove
}

// toEdit converts the change to BSON. raw is the envelope that is edited.
func (e DeadEdit) toEdit(raw bson.Raw, mapping *envelope.Mapping) (requeues.Edit, error) {
	edit := requeues.Edit{Version: e.Version, Unset: e.Unset}
	if e.Payload != nil || e.PayloadAs != "" {
		value, err := e.payloadValue(raw, mapping)
		if err != nil {
			return edit, err
		}
		edit.Set = append(edit.Set, bson.E{Key: "payload", Value: value})
	}

	if e.Headers != nil {
		old, _ := raw.LookupErr(cmp.Or(mapping.Name("headers"), "headers"))
		list := replaceHeaders(e.Headers, readHeaders(old), headerText, func(name, text string) any {
			return bson.D{{Key: "k", Value: name}, {Key: "v", Value: bson.Binary{Data: []byte(text)}}}
		})
		// Headers are replaced as a whole: their names may repeat, so a single one has no identity.
		edit.Set = append(edit.Set, bson.E{Key: "headers", Value: list})
	}

	// Sorted, so that the same edit always writes the same document.
	for _, name := range slices.Sorted(maps.Keys(e.Fields)) {
		value, err := parseFieldValue(name, e.Fields[name])
		if err != nil {
			return edit, err
		}
		edit.Set = append(edit.Set, bson.E{Key: name, Value: value})
	}
	return edit, nil
}

// replaceHeaders returns the headers of an edit. Of a stored header with the same name and text, it keeps the value as it is: a text cannot
// express whether a value is null, and of which type it is.
func replaceHeaders[T any](
	edited [][2]string, stored []T, textOf func(stored T) (name, text string), newHeader func(name, text string) T,
) []T {
	list, rest := []T{}, slices.Clone(stored)
	for _, header := range edited {
		same := slices.IndexFunc(rest, func(stored T) bool {
			name, text := textOf(stored)
			return name == header[0] && text == header[1]
		})
		if same < 0 {
			list = append(list, newHeader(header[0], header[1]))
			continue
		}

		list = append(list, rest[same])
		rest = slices.Delete(rest, same, same+1)
	}
	return list
}

// readHeaders returns the headers of an envelope as they are stored, or none if they are no list.
func readHeaders(value bson.RawValue) (headers []any) {
	array, _ := value.ArrayOK()
	elements, _ := array.Values()
	for _, element := range elements {
		headers = append(headers, element)
	}
	return headers
}

// headerText returns the name and the text of a stored header. The text of null is "".
func headerText(stored any) (name, text string) {
	doc, _ := stored.(bson.RawValue).DocumentOK()
	name, _ = doc.Lookup("k").StringValueOK()
	value := doc.Lookup("v")
	if _, data, ok := value.BinaryOK(); ok {
		return name, string(data)
	}
	text, _ = value.StringValueOK()
	return name, text
}

// parseFieldValue converts text to the BSON type of the named field.
func parseFieldValue(name, text string) (any, error) {
	switch name {
	case "payload", "headers":
		return nil, fmt.Errorf("%s cannot be set as a field: it has its own parameter", name)

	case "partition":
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("partition %q is not a number from 0 on", text)
		}
		return int32(n), nil

	case "time", "expiresAt":
		at, err := time.Parse(time.RFC3339, text)
		if err != nil {
			return nil, fmt.Errorf("%s %q is not a time such as 2026-11-20T08:00:00Z", name, text)
		}
		return bson.NewDateTimeFromTime(at), nil
	}

	// BSON strings have to be UTF-8.
	if !utf8.ValidString(text) {
		return nil, fmt.Errorf("%s is not UTF-8", name)
	}
	return text, nil
}

// payloadValue returns the new payload with the requested BSON type, or with the type of the
// payload in raw.
func (e DeadEdit) payloadValue(raw bson.Raw, mapping *envelope.Mapping) (any, error) {
	// The payload may have another field name, and its type is a contract with the consumers.
	old, _ := raw.LookupErr(cmp.Or(mapping.Name("payload"), "payload"))
	as := e.PayloadAs
	if as == "" {
		switch old.Type {
		case bson.TypeBinary:
			as = payloadBinary
		case bson.TypeString:
			as = payloadString
		case bson.TypeEmbeddedDocument, bson.TypeArray:
			as = payloadJSON
		default:
			return nil, fmt.Errorf("the dead letter has no payload whose type could be kept; choose the type of the new payload: "+
				"%s, %s, %s or %s", payloadBinary, payloadString, payloadJSON, PayloadNull)
		}
	}

	switch as {
	case payloadBinary:
		// The new bytes keep the subtype, such as that of a UUID.
		subtype, _, _ := old.BinaryOK()
		return bson.Binary{Subtype: subtype, Data: e.Payload}, nil

	case payloadString:
		if !utf8.Valid(e.Payload) {
			return nil, errors.New("the payload is a string, and the new one is not UTF-8; make it binary")
		}
		return string(e.Payload), nil

	case payloadJSON:
		return parsePayloadJSON(e.Payload)

	case PayloadNull:
		if len(e.Payload) > 0 {
			return nil, errors.New("a null payload has no bytes")
		}
		return nil, nil // null is the value
	}
	return nil, fmt.Errorf("payload type %q does not exist; use %s, %s, %s or %s",
		as, payloadBinary, payloadString, payloadJSON, PayloadNull)
}

// parsePayloadJSON parses a payload of Extended JSON, which must be a document or an array.
func parsePayloadJSON(payload []byte) (any, error) {
	if !json.Valid(payload) {
		return nil, errors.New("the new payload is not JSON; make it a string or binary, or correct it")
	}

	// The payload is wrapped because an array alone is not a document. bson.D keeps the order of
	// the fields.
	var parsed struct {
		P any `bson:"p"`
	}
	wrapped := append(append([]byte(`{"p":`), payload...), '}')
	if err := bson.UnmarshalExtJSON(wrapped, false, &parsed); err != nil {
		return nil, errors.New("the new payload is JSON but not Extended JSON: a value that begins with $ is wrong; " +
			"make it a string or binary, or correct it")
	}

	switch parsed.P.(type) {
	case bson.D, bson.A:
		return parsed.P, nil
	}
	return nil, errors.New("the new payload is JSON but neither a document nor an array; make it a string or binary")
}
