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
		if value, err := r.raw.LookupErr(n); err == nil {
			return value
		}
	}
	return bson.RawValue{}
}

func (r row) text(name string) string {
	text, _ := r.field(name).StringValueOK()
	return text
}

func (r row) int(name string) int32 {
	n, _ := r.field(name).AsInt64OK()
	return int32(min(max(n, 0), 1<<31-1))
}

func (r row) isTrue(name string) bool {
	value, ok := r.field(name).BooleanOK()
	return ok && value
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
	value := r.field(name)
	at, ok := parseTime(value)
	if !ok && value.Type != 0 && value.Type != bson.TypeNull {
		return at, fmt.Errorf("%s: expected a time; found %s", name, value)
	}
	return at, nil
}

// parseTime returns the time in a value, and false if there is none. The driver for .NET stores a DateTimeOffset as a date, as an array of
// ticks and minutes, as a document with both, or as text.
func parseTime(value bson.RawValue) (time.Time, bool) {
	switch value.Type {
	case bson.TypeDateTime:
		return value.Time().UTC(), true
	case bson.TypeString:
		at, err := time.Parse(time.RFC3339Nano, value.StringValue())
		return at.UTC(), err == nil
	case bson.TypeArray:
		parts, _ := value.Array().Values()
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
		return parseTime(row{value.Document()}.field("DateTime"))
	default:
		return time.Time{}, false
	}
}

// id returns the id of an envelope for a field with a GUID, an ObjectId or a text. The text of the id stays as it is.
func (r row) id(name string) (any, error) {
	value := r.field(name)
	switch value.Type {
	case bson.TypeObjectID:
		return value.ObjectID(), nil
	case bson.TypeBinary:
		subtype, data := value.Binary()
		return convertGUID(subtype, data)
	case bson.TypeString:
		// Only the canonical spelling becomes a UUID: the text of any other spelling would change.
		if id, err := uuid.Parse(value.StringValue()); err == nil && id.String() == strings.ToLower(value.StringValue()) {
			return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: id[:]}, nil
		}
		return value.StringValue(), nil
	default:
		return nil, fmt.Errorf("%s: expected a GUID, an ObjectId or a text; found %s", name, value.Type)
	}
}

// convertGUID returns a GUID in the standard order of bytes. Subtype 3 has the order of the driver for .NET before version 3.
func convertGUID(subtype byte, data []byte) (bson.Binary, error) {
	if len(data) != 16 || subtype != bson.TypeBinaryUUID && subtype != bson.TypeBinaryUUIDOld {
		return bson.Binary{}, fmt.Errorf("expected a GUID; found binary subtype %d of %d bytes", subtype, len(data))
	}
	guid := append([]byte(nil), data...)
	if subtype == bson.TypeBinaryUUIDOld {
		binary.BigEndian.PutUint32(guid, binary.LittleEndian.Uint32(data))
		binary.BigEndian.PutUint16(guid[4:], binary.LittleEndian.Uint16(data[4:]))
		binary.BigEndian.PutUint16(guid[6:], binary.LittleEndian.Uint16(data[6:]))
	}
	return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: guid}, nil
}

// idText returns the canonical text of an id.
func idText(id any) string {
	switch typed := id.(type) {
	case bson.ObjectID:
		return typed.Hex()
	case bson.Binary:
		uid, _ := uuid.FromBytes(typed.Data)
		return uid.String()
	default:
		return fmt.Sprint(typed)
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

	decoder := json.NewDecoder(strings.NewReader(text))
	// A decoder of tokens keeps the order of the names, which a map would lose.
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return nil, errors.New("the headers are not a JSON object")
	}
	var list []header
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return nil, errors.New("the headers are not a JSON object")
		}
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return nil, errors.New("the headers are not a JSON object")
		}

		header := header{name: fmt.Sprint(name)}
		var headerText string
		switch {
		case string(value) == "null":
		case json.Unmarshal(value, &headerText) == nil:
			header.value = &headerText
		default:
			headerText = string(value)
			header.value = &headerText
		}
		list = append(list, header)
	}
	return list, nil
}

// lastSegment returns the last part of an address, such as orders of kafka://topic/orders, rabbitmq://host/orders?durable=true, topic:orders.
func lastSegment(address string) string {
	address, _, _ = strings.Cut(address, "?")
	address = strings.TrimRight(address, "/")
	return address[strings.LastIndexAny(address, "/:")+1:]
}
