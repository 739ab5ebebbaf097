package entity

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"strconv"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// ID is what can identify an entity. Each is stored as its own BSON type: a UUID as binary of subtype 4, an ObjectID, a
// string, an int32, an int64. The zero value is no id.
type ID interface {
	~string | ~int32 | ~int64 | uuid.UUID | bson.ObjectID
}

// The kinds of ids, as the header of a change names them.
const (
	kindUUID     = "uuid"
	kindObjectID = "objectid"
	kindString   = "string"
	kindInt32    = "int32"
	kindInt64    = "int64"
)

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

// raw is the id as BSON, or an error for one that is none.
func raw[I ID](id I) (bson.RawValue, error) {
	var zero I
	if id == zero {
		return bson.RawValue{}, ErrNoID
	}
	var v any
	switch x := any(id).(type) {
	case uuid.UUID:
		v = bson.Binary{Subtype: bson.TypeBinaryUUID, Data: x[:]}
	case bson.ObjectID:
		v = x
	default:
		v = plain(reflect.ValueOf(id))
	}
	t, b, err := bson.MarshalValue(v)
	if err != nil {
		return bson.RawValue{}, fmt.Errorf("id %v: %w", id, err)
	}
	return bson.RawValue{Type: t, Value: b}, nil
}

// plain takes a named type's name away, and with it whatever methods say how to encode it.
func plain(v reflect.Value) any {
	switch v.Kind() {
	case reflect.String:
		return v.String()
	case reflect.Int32:
		return int32(v.Int())
	default:
		return v.Int()
	}
}

// text is how people and headers write the id.
func text[I ID](id I) string {
	switch x := any(id).(type) {
	case uuid.UUID:
		return x.String()
	case bson.ObjectID:
		return x.Hex()
	}
	if v := reflect.ValueOf(id); v.Kind() == reflect.String {
		return v.String()
	}
	return strconv.FormatInt(reflect.ValueOf(id).Int(), 10)
}

// parse reads what text wrote.
func parse[I ID](s string) (id I, err error) {
	v := reflect.ValueOf(&id).Elem()
	switch p := any(&id).(type) {
	case *uuid.UUID:
		*p, err = uuid.Parse(s)
	case *bson.ObjectID:
		*p, err = bson.ObjectIDFromHex(s)
	default:
		if v.Kind() == reflect.String {
			v.SetString(s)
			break
		}
		var n int64
		if n, err = strconv.ParseInt(s, 10, v.Type().Bits()); err == nil {
			v.SetInt(n)
		}
	}
	var zero I
	if err == nil && id == zero {
		err = ErrNoID
	}
	return id, err
}

// fromRaw reads an _id of exactly that type.
func fromRaw[I ID](v bson.RawValue) (id I, err error) {
	wrong := fmt.Errorf("an _id of BSON type %s is no %s", v.Type, kindOf[I]())
	switch p := any(&id).(type) {
	case *uuid.UUID:
		sub, data, ok := v.BinaryOK()
		if !ok || sub != bson.TypeBinaryUUID || len(data) != len(p) {
			return id, wrong
		}
		copy(p[:], data)
		return id, nil
	case *bson.ObjectID:
		oid, ok := v.ObjectIDOK()
		if !ok {
			return id, wrong
		}
		*p = oid
		return id, nil
	}
	dst := reflect.ValueOf(&id).Elem()
	switch dst.Kind() {
	case reflect.String:
		s, ok := v.StringValueOK()
		if !ok {
			return id, wrong
		}
		dst.SetString(s)
	case reflect.Int32:
		n, ok := v.Int32OK()
		if !ok {
			return id, wrong
		}
		dst.SetInt(int64(n))
	default:
		n, ok := v.Int64OK()
		if !ok {
			return id, wrong
		}
		dst.SetInt(n)
	}
	return id, nil
}

// keyOf makes an _id comparable.
func keyOf(v bson.RawValue) string { return string([]byte{byte(v.Type)}) + string(v.Value) }

// NewRegistry is the driver's registry, with UUIDs in any field stored as binary of subtype 4. It is the default of the
// types here; one with more codecs of its own can be made from it and be given by WithRegistry.
func NewRegistry() *bson.Registry {
	r := bson.NewRegistry()
	t := reflect.TypeFor[uuid.UUID]()
	r.RegisterTypeEncoder(t, bson.ValueEncoderFunc(encodeUUID))
	r.RegisterTypeDecoder(t, bson.ValueDecoderFunc(decodeUUID))
	return r
}

func encodeUUID(_ bson.EncodeContext, w bson.ValueWriter, v reflect.Value) error {
	id, ok := v.Interface().(uuid.UUID)
	if !ok {
		return fmt.Errorf("%s is no UUID", v.Type())
	}
	return w.WriteBinaryWithSubtype(id[:], bson.TypeBinaryUUID)
}

func decodeUUID(_ bson.DecodeContext, r bson.ValueReader, v reflect.Value) error {
	switch r.Type() {
	case bson.TypeNull:
		v.SetZero()
		return r.ReadNull()
	case bson.TypeBinary:
	default:
		return fmt.Errorf("BSON type %s is no UUID", r.Type())
	}
	data, subtype, err := r.ReadBinary()
	if err != nil {
		return err
	}
	if subtype != bson.TypeBinaryUUID && subtype != bson.TypeBinaryGeneric { // the order of the old subtype's bytes is not known
		return fmt.Errorf("binary of subtype %d is no UUID", subtype)
	}
	id, err := uuid.FromBytes(data)
	if err != nil {
		return err
	}
	v.Set(reflect.ValueOf(id))
	return nil
}

// appendElement appends one element to the body of a document.
func appendElement(dst []byte, name string, v bson.RawValue) []byte {
	dst = append(dst, byte(v.Type))
	dst = append(dst, name...)
	return append(append(dst, 0), v.Value...)
}

func int64Value(n int64) bson.RawValue {
	return bson.RawValue{Type: bson.TypeInt64, Value: binary.LittleEndian.AppendUint64(nil, uint64(n))}
}

// compose is the document of an entity: _id first, then body without _id and the version, then the version if there is one.
// A field of the entity that only has the version's name is not dropped in silence.
func compose(id bson.RawValue, body bson.Raw, versionField string, version int64) (bson.Raw, error) {
	doc := appendElement(make([]byte, 4, len(body)+len(versionField)+48), "_id", id)
	elems, err := body.Elements()
	if err != nil {
		return nil, err
	}
	if versionField != "" {
		if _, err := versionOf(body, versionField); err != nil {
			return nil, err
		}
	}
	for _, e := range elems {
		if k := e.Key(); k != "_id" && (versionField == "" || k != versionField) {
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

// versionOf is the version of a stored document; 0 for one from before there were versions.
func versionOf(doc bson.Raw, field string) (int64, error) {
	v, err := doc.LookupErr(field)
	if err != nil || v.Type == bson.TypeNull {
		return 0, nil
	}
	n, ok := v.AsInt64OK()
	if !ok || n < 0 {
		return 0, fmt.Errorf("field %s holds a %s, not a version; name another field by WithVersionField", field, v.Type)
	}
	return n, nil
}

// ErrNoID says that an entity has the zero value for an id.
var ErrNoID = errors.New("entity without an id")
