package routing

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/x/bsonx/bsoncore"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

const mebibyte = 1 << 20

// manyElements returns a document or an array with n elements of the type t, which have no names and these bytes as values.
func manyElements(n int, t bson.Type, value []byte) []byte {
	b := make([]byte, 4, 5+n*(2+len(value)))
	for range n {
		b = append(append(b, byte(t), 0), value...)
	}
	return closeDocument(b)
}

func closeDocument(b []byte) []byte {
	b = append(b, 0)
	return bsoncore.UpdateLength(b, 0, int32(len(b)))
}

// nestedIn returns doc as the only field of documents, depth levels deep.
func nestedIn(doc []byte, depth int) []byte {
	for range depth {
		doc = closeDocument(append([]byte{0, 0, 0, 0, byte(bson.TypeEmbeddedDocument), 'a', 0}, doc...))
	}
	return doc
}

func stringValue(s string) []byte { return bsoncore.AppendString(nil, s) }

// rawField is a field of an envelope, as BSON.
type rawField struct {
	name  string
	typ   bson.Type
	value []byte
}

// boundedEnvelope returns an envelope with the required fields, some of which are replaced or added.
func boundedEnvelope(fields ...rawField) []byte {
	b := make([]byte, 4)
	add := func(f rawField) { b = append(append(append(append(b, byte(f.typ)), f.name...), 0), f.value...) }
	given := map[string]bool{}
	for _, f := range fields {
		given[f.name] = true
	}
	for _, name := range []string{"_id", "aggregatetype", "aggregateid", "type", "payload"} {
		if !given[name] {
			add(rawField{name, bson.TypeString, stringValue("x")})
		}
	}
	for _, f := range fields {
		add(f)
	}
	return closeDocument(b)
}

// recordSize returns the bytes of all parts of a record.
func recordSize(rec *record.Record) int {
	n := len(rec.Topic) + len(rec.Key) + len(rec.Value)
	for _, h := range rec.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// Whatever a service inserts, in any shape of records: a record is within the limits, or it is rejected before it has taken
// memory.
func TestRecordsAreBoundedWhileTheyAreBuilt(t *testing.T) {
	text := func(name string, n int) rawField {
		return rawField{name, bson.TypeString, stringValue(strings.Repeat("x", n))}
	}
	array := func(name string, b []byte) rawField { return rawField{name, bson.TypeArray, b} }
	doc := func(name string, b []byte) rawField { return rawField{name, bson.TypeEmbeddedDocument, b} }
	undefined := manyElements(4_900_000, bson.TypeUndefined, nil)
	binary := bsoncore.AppendBinary(nil, 0, make([]byte, 13*mebibyte))

	type input struct {
		name   string
		fields []rawField
		may    bool // it may be sent in some shapes
	}
	inputs := []input{
		{"undefined elements", []rawField{array("payload", undefined)}, false},
		{"undefined fields", []rawField{doc("payload", undefined)}, false},
		{"deep undefined elements", []rawField{doc("payload", nestedIn(manyElements(400_000, bson.TypeUndefined, nil), 150))}, true},
		{"long deep names", []rawField{doc("payload", nestedIn(manyElements(100_000, bson.TypeEmbeddedDocument, []byte{5, 0, 0, 0, 0}), 170))}, true},
		{"text of control characters", []rawField{doc("payload", closeDocument(append([]byte{0, 0, 0, 0, byte(bson.TypeString), 'a', 0}, stringValue(strings.Repeat("\x01", 7*mebibyte))...)))}, false},
		{"name of control characters", []rawField{doc("payload", closeDocument(append(append([]byte{0, 0, 0, 0, byte(bson.TypeNull)}, strings.Repeat("\x01", 7*mebibyte)...), 0)))}, false},
		{"invalid text", []rawField{doc("payload", closeDocument(append([]byte{0, 0, 0, 0, byte(bson.TypeString), 'a', 0}, stringValue(strings.Repeat("\xff", 7*mebibyte))...)))}, false},
		{"options of a pattern", []rawField{doc("payload", closeDocument(append(append([]byte{0, 0, 0, 0, byte(bson.TypeRegex), 'a', 0, 'p', 0}, strings.Repeat("x", 9*mebibyte)...), 0)))}, false},
		{"nested binary", []rawField{doc("payload", closeDocument(append([]byte{0, 0, 0, 0, byte(bson.TypeBinary), 'a', 0}, binary...)))}, false},
		{"code with scope", []rawField{array("payload", closeDocument(bsoncore.AppendCodeWithScope([]byte{0, 0, 0, 0, byte(bson.TypeCodeWithScope), '0', 0}, strings.Repeat("\x02", 7*mebibyte), []byte{5, 0, 0, 0, 0})))}, true},
		{"binary payload", []rawField{{"payload", bson.TypeBinary, binary}}, false},
		{"text payload", []rawField{text("payload", 13*mebibyte)}, false},
		{"escaped text payload", []rawField{{"payload", bson.TypeString, stringValue(strings.Repeat("\x01", 7*mebibyte))}}, true},
		{"headers document", []rawField{doc("headers", manyNamed(450_000, bson.TypeNull, nil))}, false},
		{"few headers too many", []rawField{doc("headers", manyNamed(4_097, bson.TypeNull, nil))}, false},
		{"headers and those of the relay", []rawField{doc("headers", manyNamed(4_096, bson.TypeNull, nil))}, false},
		{"large headers", []rawField{doc("headers", manyNamed(9, bson.TypeString, stringValue(strings.Repeat("x", mebibyte))))}, false},
		{"name of a header", []rawField{doc("headers", closeDocument(append(append([]byte{0, 0, 0, 0, byte(bson.TypeNull)}, strings.Repeat("x", 40<<10)...), 0)))}, false},
		{"id", []rawField{text("_id", 1025)}, false},
		{"large id", []rawField{text("_id", 8*mebibyte)}, false},
	}
	for _, name := range []string{"aggregatetype", "aggregateid", "type"} {
		inputs = append(inputs, input{name, []rawField{text(name, 9*mebibyte)}, false}, input{"long " + name, []rawField{text(name, 32<<10+1)}, false})
	}
	for _, name := range []string{"key", "topic", "contenttype", "schemaversion", "source", "subject"} {
		inputs = append(inputs, input{name, []rawField{text(name, 9*mebibyte)}, true}, input{"long " + name, []rawField{text(name, 32<<10+1)}, true})
	}

	shapes := map[string]PresetConfig{
		"structured":          {Name: CloudEvents, Structured: true},
		"debezium with field": {Name: Debezium, Placement: []string{"aggregateid:value"}},
		"typed with field":    {Name: Typed, Placement: []string{"payload:value:again"}},
		"plain with header":   {Name: Plain, Headers: map[string]string{"h": "{field:key}{aggregateid}"}},
	}
	for _, name := range PresetNames() {
		shapes[name] = PresetConfig{Name: name}
	}
	for style := range jsonStyles {
		shapes["plain as "+style] = PresetConfig{Name: Plain, JSON: style}
		shapes["whole document as "+style] = PresetConfig{Name: Connector, JSON: style}
	}

	for shape, c := range shapes {
		mapping, err := envelope.NewMapping(FieldNames(c.Name, envelope.Names{}))
		if err != nil {
			t.Fatal(err)
		}
		c.Mapping = mapping
		f := newFiller(t, c)
		for _, in := range inputs {
			raw := boundedEnvelope(in.fields...)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			var v envelope.View
			var rec record.Record
			err := mapping.Parse(raw, &v)
			if err == nil {
				err = f.Fill(&v, &meta, target, &rec)
			}
			runtime.ReadMemStats(&after)

			if spent := (after.TotalAlloc - before.TotalAlloc) / mebibyte; spent > 80 {
				t.Errorf("%s, %s: %d MiB were allocated", shape, in.name, spent)
			}
			rejection, rejected := errors.AsType[*record.Rejection](err)
			switch {
			case err == nil && !in.may && c.Name != Connector && !(c.Name == Debezium && strings.Contains(fmt.Sprint(in.fields[0].name), "headers")):
				t.Errorf("%s, %s: a record of %d bytes and %d headers is sent", shape, in.name, recordSize(&rec), len(rec.Headers))
			case err == nil && (recordSize(&rec) > 8*mebibyte || len(rec.Headers) > 4096 || len(rec.Key) > 32<<10):
				t.Errorf("%s, %s: a record of %d bytes and %d headers is sent", shape, in.name, recordSize(&rec), len(rec.Headers))
			// The preset for whole documents reserves the field key.
			case rejected && c.Name == Connector && in.fields[0].name == "key":
			case err != nil && (!rejected || rejection.Class != record.MessageTooLarge || !strings.Contains(rejection.Reason, "at most")):
				t.Errorf("%s, %s: %.300v", shape, in.name, err)
			}
		}
		if cap(f.buf) > 0 {
			f.Release()
		}
		if cap(f.buf) > mebibyte || cap(f.headers) > 4096 {
			t.Errorf("%s: the filler keeps %d bytes and %d headers", shape, cap(f.buf), cap(f.headers))
		}
	}
}

// manyNamed is manyElements with the name "a" for each element, which is a valid name of a header.
func manyNamed(n int, t bson.Type, value []byte) []byte {
	b := make([]byte, 4, 5+n*(3+len(value)))
	for range n {
		b = append(append(b, byte(t), 'a', 0), value...)
	}
	return closeDocument(b)
}

func TestLimitOfRecordsIsASetting(t *testing.T) {
	t.Parallel()
	for size, want := range map[int]bool{64 << 10: true, 200 << 10: false} {
		f := newFiller(t, PresetConfig{MaxRecord: 100 << 10})
		var v envelope.View
		if err := envelope.Parse(boundedEnvelope(rawField{"payload", bson.TypeString, stringValue(strings.Repeat("x", size))}), &v); err != nil {
			t.Fatal(err)
		}
		err := f.Fill(&v, &meta, target, &record.Record{})
		if (err == nil) != want {
			t.Errorf("a payload of %d bytes: %v", size, err)
		}
		if err != nil && (classOf(err) != record.MessageTooLarge || !strings.Contains(err.Error(), "limits.record")) {
			t.Error(err)
		}
	}
}
