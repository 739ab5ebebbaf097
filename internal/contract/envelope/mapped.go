package envelope

import (
	"errors"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// setEventID sets the id of the record, for documents whose id is not their `_id`.
func (v *View) setEventID(cursor *cursor) error {
	if err := setText(&v.EventID, &v.eventIDText, cursor); err != nil {
		return err
	}
	if err := checkText(cursor.name, len(v.EventID), MaxIDBytes); err != nil {
		return err
	}
	if cursor.typ == bson.TypeBinary {
		v.EventUUID, _, _ = binaryData(cursor.val)
	}
	return nil
}

// setKey sets a part of the key. In the documents of Debezium's router, it may have any type but that of bytes, whose text in
// Java is not the same twice.
func (v *View) setKey(dst *[]byte, buf *[36]byte, cursor *cursor) error {
	if !v.java || cursor.typ == bson.TypeBinary || cursor.typ == bson.TypeNull || cursor.typ == bson.TypeString {
		return setText(dst, buf, cursor)
	}

	text, err := appendJavaText(buf[:0], cursor.typ, cursor.val, MaxFieldText)
	switch {
	case errors.Is(err, ErrTooLong):
		return newTooLarge("the text of %s has more bytes than a key may have; at most %d are allowed", clipName(cursor.name), MaxFieldText)
	case err != nil:
		return newMalformed("%s is broken or nested deeper than %d", cursor.name, maxDepth)
	}
	*dst = text
	return nil
}

// setTimestamp sets the timestamp of the record: a date, or a whole number of milliseconds. A broker that compresses the records
// again rejects the whole batch of a negative one, with an error of no class.
func (v *View) setTimestamp(cursor *cursor) error {
	if n, ok := integerValue(cursor); ok {
		v.RecordTime, v.HasRecordTime = n, true
	} else if err := setDate(&v.RecordTime, &v.HasRecordTime, cursor); err != nil {
		return newMalformed("%s is %s; a date or a number of milliseconds is wanted", cursor.name, typeName(cursor.typ))
	}

	if v.RecordTime < 0 {
		return newMalformed("%s is before 1970, which no timestamp of Kafka can be", cursor.name)
	}
	return nil
}

// requiredParts returns the parts that each document must contain.
func (m *Mapping) requiredParts() fieldSet {
	if m == nil {
		return fID | fAggregateType | fAggregateID | fType | fPayload
	}
	return fID | m.required
}

// derive sets the parts that are no field: the whole document as the payload, and the key of the document.
func (m *Mapping) derive(view *View) error {
	if m.whole {
		view.marked = view.foreign == nil && view.markField != nil && isMarked(view.Raw)
		if view.foreign == nil && !view.marked {
			view.foreign = view.markField
		}
		if view.foreign != nil {
			return newMalformed("the field %s belongs to the relay, so a document that has it cannot be the payload as a whole", view.foreign)
		}
		view.Payload, view.PayloadType, view.whole = view.Raw, byte(bson.TypeEmbeddedDocument), true
	}

	switch {
	case m.docKey:
		view.keyBuf = appendDocumentKey(view.keyBuf[:0], view)
		view.Key = view.keyBuf
	// A document without a key is ordered with no other document.
	case view.Key == nil && view.AggregateID == nil:
		view.Key = view.AppendID(view.keyText[:0])
	}
	return nil
}

// noteForeign remembers the first field of a whole document that has the name of a field of the relay. A stamp and a slot
// have the same meaning in such a document as in any other. The fields of a mark count together.
func (v *View) noteForeign(cursor *cursor) {
	if v.foreign != nil || cursor.typ == bson.TypeNull {
		return
	}

	switch string(cursor.name) {
	case "ts":
		if cursor.typ == bson.TypeTimestamp {
			return
		}
	case "slot":
		if _, ok := integerValue(cursor); ok {
			return
		}
	case "sent", "sentAt":
		v.markField = cursor.name
		return
	default:
		return
	}
	v.foreign = cursor.name
}

// leavesOut reports whether a field of a whole document is no part of the payload, because it belongs to the relay. A document
// without a mark may have a time scheduledFor.
func (v *View) leavesOut(name []byte) bool {
	return slices.Contains(relayWritten, string(name)) && (v.marked || !slices.Contains(relayMarks, string(name)))
}
