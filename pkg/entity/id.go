package entity

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"strconv"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// ID lists the types that an id can have. Each is stored as its own BSON type: a UUID as binary of
// subtype 4, or an ObjectID, a string, an int32 or an int64. The zero value is not a valid id.
type ID interface {
	~string | ~int32 | ~int64 | uuid.UUID | bson.ObjectID
}

// Kinds of ids, as they are written in headerID.
const (
	kindUUID     = "uuid"
	kindObjectID = "objectid"
	kindString   = "string"
	kindInt32    = "int32"
	kindInt64    = "int64"
)

// kindOf returns the kind of the type I.
func kindOf[I ID]() string {
	var id I
	switch any(id).(type) {
	case uuid.UUID:
		return kindUUID
	case bson.ObjectID:
		return kindObjectID
	}

	switch reflect.TypeFor[I]().Kind() {
	case reflect.String:
		return kindString
	case reflect.Int32:
		return kindInt32
	default:
		return kindInt64
	}
}

// idValue returns the id as a BSON value. The zero value is ErrNoID.
func idValue[I ID](id I) (bson.RawValue, error) {
	var zero I
	if id == zero {
		return bson.RawValue{}, ErrNoID
	}

	var value any
	switch typed := any(id).(type) {
	case uuid.UUID:
		value = bson.Binary{Subtype: bson.TypeBinaryUUID, Data: typed[:]}
	case bson.ObjectID:
		value = typed
	// A named type, such as type OrderID string, is stored as its basic type.
	default:
		value = plainValue(reflect.ValueOf(id))
	}

	bsonType, data, err := bson.MarshalValue(value)
	if err != nil {
		return bson.RawValue{}, fmt.Errorf("id %v: %w", id, err)
	}

	return bson.RawValue{Type: bsonType, Value: data}, nil
}

// plainValue converts a value of a named type to its underlying type, so that methods of the named
// type do not change the encoding.
func plainValue(value reflect.Value) any {
	switch value.Kind() {
	case reflect.String:
		return value.String()
	case reflect.Int32:
		return int32(value.Int())
	default:
		return value.Int()
	}
}

// formatID returns the text of an id, for messages and headers.
func formatID[I ID](id I) string {
	switch typed := any(id).(type) {
	case uuid.UUID:
		return typed.String()
	case bson.ObjectID:
		return typed.Hex()
	}

	if value := reflect.ValueOf(id); value.Kind() == reflect.String {
		return value.String()
	}

	return strconv.FormatInt(reflect.ValueOf(id).Int(), 10)
}

// parseID is the inverse of formatID.
func parseID[I ID](text string) (id I, err error) {
	value := reflect.ValueOf(&id).Elem()
	switch typed := any(&id).(type) {
	case *uuid.UUID:
		*typed, err = uuid.Parse(text)
	case *bson.ObjectID:
		*typed, err = bson.ObjectIDFromHex(text)
	default:
		if value.Kind() == reflect.String {
			value.SetString(text)
			break
		}

		var n int64
		if n, err = strconv.ParseInt(text, 10, value.Type().Bits()); err == nil {
			value.SetInt(n)
		}
	}

	// The zero value means that an entity has no id.
	var zero I
	if err == nil && id == zero {
		err = ErrNoID
	}

	return id, err
}

// idFromValue returns the id in value, which must have exactly the BSON type of I.
func idFromValue[I ID](value bson.RawValue) (id I, err error) {
	var ok bool
	switch typed := any(&id).(type) {
	case *uuid.UUID:
		var binary bson.Binary
		binary.Subtype, binary.Data, ok = value.BinaryOK()
		ok = ok && binary.Subtype == bson.TypeBinaryUUID && len(binary.Data) == len(typed)
		copy(typed[:], binary.Data)
	case *bson.ObjectID:
		*typed, ok = value.ObjectIDOK()
	default:
		ok = setPlain(reflect.ValueOf(&id).Elem(), value)
	}

	// The types must be equal: the queries of the collection would not match an id of another BSON type.
	if !ok {
		err = fmt.Errorf("invalid _id: BSON type %s is not a valid %s", value.Type, kindOf[I]())
	}
	return id, err
}

// setPlain sets dst, a text or a number, to the value in value. It reports whether value has exactly the BSON type of dst.
func setPlain(dst reflect.Value, value bson.RawValue) bool {
	switch dst.Kind() {
	case reflect.String:
		text, ok := value.StringValueOK()
		dst.SetString(text)
		return ok
	case reflect.Int32:
		n, ok := value.Int32OK()
		dst.SetInt(int64(n))
		return ok
	default:
		n, ok := value.Int64OK()
		dst.SetInt(n)
		return ok
	}
}

// mapKey returns an _id as the key of a map.
func mapKey(value bson.RawValue) string {
	return string([]byte{byte(value.Type)}) + string(value.Value)
}

// NewRegistry returns the registry of the driver with one addition: UUIDs in all fields are stored
// as binary of subtype 4. It is the default of this package. Add codecs to it and pass it to
// WithRegistry if T needs them.
func NewRegistry() *bson.Registry {
	registry := bson.NewRegistry()
	goType := reflect.TypeFor[uuid.UUID]()
	registry.RegisterTypeEncoder(goType, bson.ValueEncoderFunc(encodeUUID))
	registry.RegisterTypeDecoder(goType, bson.ValueDecoderFunc(decodeUUID))
	return registry
}

// encodeUUID writes a UUID as binary of subtype 4.
func encodeUUID(_ bson.EncodeContext, writer bson.ValueWriter, value reflect.Value) error {
	id, ok := value.Interface().(uuid.UUID)
	if !ok {
		return fmt.Errorf("%s is not a UUID", value.Type())
	}
	return writer.WriteBinaryWithSubtype(id[:], bson.TypeBinaryUUID)
}

// decodeUUID reads a UUID. Null is the zero UUID.
func decodeUUID(_ bson.DecodeContext, reader bson.ValueReader, value reflect.Value) error {
	switch reader.Type() {
	case bson.TypeNull:
		value.SetZero()
		return reader.ReadNull()
	case bson.TypeBinary:
	default:
		return fmt.Errorf("BSON type %s is not a UUID", reader.Type())
	}

	data, subtype, err := reader.ReadBinary()
	if err != nil {
		return err
	}

	// The byte order of the old subtype 3 is unknown.
	if subtype != bson.TypeBinaryUUID && subtype != bson.TypeBinaryGeneric {
		return fmt.Errorf("binary of subtype %d is not a UUID", subtype)
	}

	id, err := uuid.FromBytes(data)
	if err != nil {
		return err
	}

	value.Set(reflect.ValueOf(id))
	return nil
}

// appendElement appends one element of a document to dst.
func appendElement(dst []byte, name string, value bson.RawValue) []byte {
	dst = append(dst, byte(value.Type))
	dst = append(dst, name...)
	return append(append(dst, 0), value.Value...)
}

func int64Value(n int64) bson.RawValue {
	return bson.RawValue{Type: bson.TypeInt64, Value: binary.LittleEndian.AppendUint64(nil, uint64(n))}
}

// composeDocument returns the document of an entity: the _id, the fields of body except for _id and
// the version, and the version if versionField is set. If body has a field of that name that is not
// a version, it returns an error instead of dropping the field.
func composeDocument(id bson.RawValue, body bson.Raw, versionField string, version int64) (bson.Raw, error) {
	doc := appendElement(make([]byte, 4, len(body)+len(versionField)+48), "_id", id)
	elems, err := body.Elements()
	if err != nil {
		return nil, err
	}

	if versionField != "" {
		// A field with this name that is not a version would be lost.
		if _, err := readVersion(body, versionField); err != nil {
			return nil, err
		}
	}

	for _, e := range elems {
		if key := e.Key(); key != "_id" && (versionField == "" || key != versionField) {
			doc = append(doc, e...)
		}
	}

	if versionField != "" {
		doc = appendElement(doc, versionField, int64Value(version))
	}

	doc = append(doc, 0)
	binary.LittleEndian.PutUint32(doc, uint32(len(doc)))
	return doc, nil
}

// readVersion returns the version of a stored document. It is 0 for a document that was stored
// without versions.
func readVersion(doc bson.Raw, field string) (int64, error) {
	value, err := doc.LookupErr(field)
	if err != nil || value.Type == bson.TypeNull {
		return 0, nil
	}

	n, ok := value.AsInt64OK()
	if !ok || n < 0 {
		return 0, fmt.Errorf("field %s has type %s and is not a version; set another field with WithVersionField", field, value.Type)
	}

	return n, nil
}
