package envelope

import (
	"errors"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// setEventID sets the id of the record, for documents whose id is not their `_id`.
func (v *View) setEventID(c *cursor) error {
	if err := setText(&v.EventID, &v.eventIDText, c); err != nil {
		return err
	}
	if err := checkText(c.name, len(v.EventID), MaxIDBytes); err != nil {
		return err
	}
	if c.typ == bson.TypeBinary {
		v.EventUUID, _, _ = binaryData(c.val)
	}
	return nil
}

// setKey sets a part of the key. In the documents of Debezium's router, it may have any type but that of bytes, whose text in
// Java is not the same twice.
func (v *View) setKey(dst *[]byte, buf *[36]byte, c *cursor) error {
	if !v.java || c.typ == bson.TypeBinary || c.typ == bson.TypeNull || c.typ == bson.TypeString {
		return setText(dst, buf, c)
	}

	text, err := appendJavaText(buf[:0], c.typ, c.val, MaxFieldText)
	switch {
	case errors.Is(err, ErrTooLong):
		return newTooLarge("the text of %s has more bytes than a key may have; at most %d are allowed", clipName(c.name), MaxFieldText)
	case err != nil:
		return newMalformed("%s is broken or nested deeper than %d", c.name, maxDepth)
	}
	*dst = text
	return nil
}

// setTimestamp sets the timestamp of the record: a date, or a whole number of milliseconds.
func (v *View) setTimestamp(c *cursor) error {
	if n, ok := integerValue(c); ok && n >= 0 {
		v.RecordTime, v.HasRecordTime = n, true
		return nil
	}
	if c.typ != bson.TypeDateTime && c.typ != bson.TypeNull {
		return newMalformed("%s is %s; a date or a number of milliseconds is wanted", c.name, typeName(c.typ))
	}
	return setDate(&v.RecordTime, &v.HasRecordTime, c)
}

// checkComplete checks that the document in v has all required parts, and adds the parts that the
// mapping derives.
func (m *Mapping) checkComplete(v *View) error {
	if m == nil {
		return v.checkComplete()
	}

	if v.IDType == 0 || len(v.ID) == 0 {
		return newMalformed("field _id is missing or empty")
	}
	for _, r := range []struct {
		part  fieldSet
		found bool
	}{
		{fEventID, len(v.EventID) > 0},
		{fAggregateType, len(v.AggregateType) > 0},
		{fAggregateID, len(v.AggregateID) > 0},
		{fType, len(v.Type) > 0},
		{fPayload, v.PayloadType != 0},
	} {
		if m.required&r.part != 0 && !r.found {
			hint := "is missing or empty"
			if r.part == fPayload {
				hint = "is missing; null makes a tombstone"
			}
			return newMalformed("field %s %s", m.nameOf(r.part), hint)
		}
	}
	return m.derive(v)
}

// derive sets the parts that are no field: the whole document as the payload, and the key of the document.
func (m *Mapping) derive(v *View) error {
	if m.whole {
		if v.foreign != nil {
			return newMalformed("the field %s belongs to the relay, so a document that has it cannot be the payload as a whole", v.foreign)
		}
		v.Payload, v.PayloadType, v.whole = v.Raw, byte(bson.TypeEmbeddedDocument), true
	}

	switch {
	case m.docKey:
		v.keyBuf = appendDocumentKey(v.keyBuf[:0], v)
		v.Key = v.keyBuf
	// A document without a key is ordered with no other document.
	case v.Key == nil && v.AggregateID == nil:
		v.Key = v.AppendID(v.keyText[:0])
	}
	return nil
}

// noteForeign remembers the first field of a whole document that has the name of a field of the relay. A stamp and a slot
// have the same meaning in such a document as in any other.
func (v *View) noteForeign(c *cursor) {
	if v.foreign != nil || c.typ == bson.TypeNull {
		return
	}

	switch string(c.name) {
	case "ts":
		if c.typ == bson.TypeTimestamp {
			return
		}
	case "slot":
		if _, ok := integerValue(c); ok {
			return
		}
	default:
		return
	}
	v.foreign = c.name
}

// leftOut reports whether a field of a whole document is no part of the payload, because it belongs to the relay.
func leftOut(name []byte) bool {
	return slices.Contains(relayWritten, string(name))
}
