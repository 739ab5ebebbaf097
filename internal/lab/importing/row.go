package importing

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// row is a document of a source.
type row struct{ raw bson.Raw }

// listSpellings returns the names that a field may have. A name in Pascal case may be in camel case, which is a common
// convention of the driver for .NET.
func listSpellings(name string) []string {
	if !unicode.IsUpper(rune(name[0])) {
		return []string{name}
	}
	return []string{name, strings.ToLower(name[:1]) + name[1:]}
}

// field returns a field, or the zero value.
func (r row) field(name string) bson.RawValue {
	for _, n := range listSpellings(name) {
		if v, err := r.raw.LookupErr(n); err == nil {
			return v
		}
	}
	return bson.RawValue{}
}

func (r row) text(name string) string {
	s, _ := r.field(name).StringValueOK()
	return s
}

func (r row) int(name string) int32 {
	n, _ := r.field(name).AsInt64OK()
	return int32(min(max(n, 0), 1<<31-1))
}

func (r row) isTrue(name string) bool {
	b, ok := r.field(name).BooleanOK()
	return ok && b
}

// ticksOf1970 is the Unix epoch in ticks of .NET, which are 100 ns.
const ticksOf1970 = 621355968000000000

// time returns a time, or the zero time.
func (r row) time(name string) time.Time {
	at, _ := parseTime(r.field(name))
	return at
}

// checkedTime returns a time, the zero time if the field is missing or null, or an error if it contains something else.
func (r row) checkedTime(name string) (time.Time, error) {
	v := r.field(name)
	at, ok := parseTime(v)
	if !ok && v.Type != 0 && v.Type != bson.TypeNull {
		return at, fmt.Errorf("%s: expected a time; found %s", name, v)
	}
	return at, nil
}

// parseTime returns the time in a value, and false if there is none. The driver for .NET stores a DateTimeOffset as a date, as an array of
// ticks and minutes, as a document with both, or as text.
func parseTime(v bson.RawValue) (time.Time, bool) {
	switch v.Type {
	case bson.TypeDateTime:
		return v.Time().UTC(), true
	case bson.TypeString:
		at, err := time.Parse(time.RFC3339Nano, v.StringValue())
		return at.UTC(), err == nil
	case bson.TypeArray:
		parts, _ := v.Array().Values()
		if len(parts) != 2 {
			return time.Time{}, false
		}

		// The ticks are in local time, and the minutes are its distance from UTC.
		ticks, ok := parts[0].AsInt64OK()
		minutes, ok2 := parts[1].AsInt64OK()
		if !ok || !ok2 {
			return time.Time{}, false
		}
		// A duration has no room for the first and the last time of .NET.
		const second = 10_000_000
		ticks -= ticksOf1970
		return time.Unix(ticks/second-minutes*60, ticks%second*100).UTC(), true
	case bson.TypeEmbeddedDocument:
		return parseTime(row{v.Document()}.field("DateTime"))
	default:
		return time.Time{}, false
	}
}

// id returns the id of an envelope for a field with a GUID, an ObjectId or a text. The text of the id stays as it is.
func (r row) id(name string) (any, error) {
	v := r.field(name)
	switch v.Type {
	case bson.TypeObjectID:
		return v.ObjectID(), nil
	case bson.TypeBinary:
		subtype, data := v.Binary()
		return convertGUID(subtype, data)
	case bson.TypeString:
		// Only the canonical spelling becomes a UUID: the text of any other spelling would change.
		if u, err := uuid.Parse(v.StringValue()); err == nil && u.String() == strings.ToLower(v.StringValue()) {
			return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: u[:]}, nil
		}
		return v.StringValue(), nil
	default:
		return nil, fmt.Errorf("%s: expected a GUID, an ObjectId or a text; found %s", name, v.Type)
	}
}

// convertGUID returns a GUID in the standard order of bytes. Subtype 3 has the order of the driver for .NET before version 3.
func convertGUID(subtype byte, data []byte) (bson.Binary, error) {
	if len(data) != 16 || subtype != bson.TypeBinaryUUID && subtype != bson.TypeBinaryUUIDOld {
		return bson.Binary{}, fmt.Errorf("expected a GUID; found binary subtype %d of %d bytes", subtype, len(data))
	}
	u := append([]byte(nil), data...)
	if subtype == bson.TypeBinaryUUIDOld {
		binary.BigEndian.PutUint32(u, binary.LittleEndian.Uint32(data))
		binary.BigEndian.PutUint16(u[4:], binary.LittleEndian.Uint16(data[4:]))
		binary.BigEndian.PutUint16(u[6:], binary.LittleEndian.Uint16(data[6:]))
	}
	return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: u}, nil
}

// idText returns the canonical text of an id.
func idText(id any) string {
	switch v := id.(type) {
	case bson.ObjectID:
		return v.Hex()
	case bson.Binary:
		u, _ := uuid.FromBytes(v.Data)
		return u.String()
	default:
		return fmt.Sprint(v)
	}
}

// header is a header of a record. A nil value is null.
type header struct {
	name  string
	value *string
}

// parseHeaders parses a JSON object of headers in its order. A value that is not a text becomes its JSON.
func parseHeaders(text string) ([]header, error) {
	if strings.TrimSpace(text) == "" || strings.TrimSpace(text) == "null" {
		return nil, nil
	}

	d := json.NewDecoder(strings.NewReader(text))
	// A decoder of tokens keeps the order of the names, which a map would lose.
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("the headers are not a JSON object")
	}
	var list []header
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, errors.New("the headers are not a JSON object")
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, errors.New("the headers are not a JSON object")
		}

		h := header{name: fmt.Sprint(name)}
		var s string
		switch {
		case string(value) == "null":
		case json.Unmarshal(value, &s) == nil:
			h.value = &s
		default:
			s = string(value)
			h.value = &s
		}
		list = append(list, h)
	}
	return list, nil
}

// lastSegment returns the last part of an address, such as orders of kafka://topic/orders, rabbitmq://host/orders?durable=true, topic:orders.
func lastSegment(address string) string {
	address, _, _ = strings.Cut(address, "?")
	address = strings.TrimRight(address, "/")
	return address[strings.LastIndexAny(address, "/:")+1:]
}
