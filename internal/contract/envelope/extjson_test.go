package envelope_test

import (
	"math"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/envelope"
)

// value draws a BSON value of any type that the driver writes.
func value(t *rapid.T, depth int) any {
	str := func() string {
		return rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{"", "\u2028\u2029", "\xff\xc3", "<&>\"\\\x00\x1f\x7f\b\f\n\r\t", "héé😀"})).Draw(t, "string")
	}
	kinds := 17
	if depth > 3 {
		kinds = 14
	}

	switch rapid.IntRange(0, kinds).Draw(t, "kind") {
	case 0:
		return str()
	case 1:
		return rapid.Int32().Draw(t, "int32")
	case 2:
		return rapid.Int64().Draw(t, "int64")
	case 3:
		return rapid.OneOf(rapid.Float64(), rapid.SampledFrom([]float64{0, math.Copysign(0, -1), 1, -5, 1e20, 1e21, 1e-7, 123456789, math.MaxFloat64, math.SmallestNonzeroFloat64, math.Inf(1), math.Inf(-1), math.NaN()})).Draw(t, "double")
	case 4:
		return rapid.Bool().Draw(t, "bool")
	case 5:
		return nil
	case 6:
		return bson.DateTime(rapid.OneOf(rapid.Int64Range(-1e13, 3e14), rapid.SampledFrom([]int64{0, -1, 1, 1000, 253402300799999, 253402300800000})).Draw(t, "date"))
	case 7:
		return bson.NewObjectID()
	case 8:
		return bson.Binary{Subtype: rapid.SampledFrom([]byte{0, 4, 6, 0x80}).Draw(t, "subtype"), Data: rapid.SliceOf(rapid.Byte()).Draw(t, "binary")}
	case 9:
		return bson.Timestamp{T: rapid.Uint32().Draw(t, "T"), I: rapid.Uint32().Draw(t, "I")}
	case 10:
		return bson.NewDecimal128(rapid.Uint64().Draw(t, "high"), rapid.Uint64().Draw(t, "low"))
	case 11:
		return bson.Regex{Pattern: strings.ReplaceAll(str(), "\x00", ""), Options: rapid.StringMatching("[ilmsux]{0,4}").Draw(t, "options")}
	case 12:
		return bson.JavaScript(str())
	case 13:
		return bson.Symbol(str())
	case 14:
		return rapid.SampledFrom([]any{bson.MinKey{}, bson.MaxKey{}, bson.Undefined{}, bson.DBPointer{DB: "a.b", Pointer: bson.ObjectID{1}}}).Draw(t, "bare")
	case 15:
		return bson.CodeWithScope{Code: bson.JavaScript(str()), Scope: document(t, depth+1)}
	case 16:
		return document(t, depth+1)
	default:
		a := bson.A{}
		for range rapid.IntRange(0, 4).Draw(t, "elements") {
			a = append(a, value(t, depth+1))
		}

		return a
	}
}

func document(t *rapid.T, depth int) bson.D {
	d := bson.D{}
	for range rapid.IntRange(0, 5).Draw(t, "fields") {
		d = append(d, bson.E{Key: strings.ReplaceAll(rapid.String().Draw(t, "name"), "\x00", ""), Value: value(t, depth)})
	}
	return d
}

// The bytes of a record are the driver's relaxed Extended JSON, for each type that BSON has.
func TestDocumentIsTheDriversExtendedJSON(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d := document(t, 0)
		raw, err := bson.Marshal(bson.D{{Key: "_id", Value: "1"}, {Key: "aggregatetype", Value: "a"}, {Key: "aggregateid", Value: "1"}, {Key: "type", Value: "t"}, {Key: "payload", Value: d}})
		if err != nil {
			t.Fatal(err)
		}

		var v envelope.View
		if err := envelope.Parse(raw, &v); err != nil {
			t.Fatal(err)
		}

		want, err := bson.MarshalExtJSON(bson.Raw(v.Payload), false, false)
		if err != nil {
			t.Fatal(err)
		}

		got, err := envelope.AppendPayload([]byte("x"), &v)
		if err != nil || string(got) != "x"+string(want) {
			t.Fatalf("%v\ngot  %s\nwant x%s", err, got, want)
		}
	})
}

// For a binary of the old subtype 2, the driver writes the inner length as data, but the
// specification does not.
func TestOldBinaryInADocument(t *testing.T) {
	t.Parallel()
	var v envelope.View
	if err := envelope.Parse(doc(t, bson.E{Key: "payload", Value: bson.D{{Key: "x", Value: bson.Binary{Subtype: 2, Data: []byte{0xff, 0xff}}}}}), &v); err != nil {
		t.Fatal(err)
	}
	if got, err := envelope.AppendPayload(nil, &v); err != nil || string(got) != `{"x":{"$binary":{"base64":"//8=","subType":"02"}}}` {
		t.Errorf("%s, %v", got, err)
	}
}

func TestNestingIsBounded(t *testing.T) {
	t.Parallel()
	nested := func(depth int) error {
		d := bson.D{}
		for range depth - 1 {
			d = bson.D{{Key: "d", Value: d}}
		}

		var v envelope.View
		if err := envelope.Parse(doc(t, bson.E{Key: "payload", Value: d}), &v); err != nil {
			t.Fatal(err)
		}

		_, err := envelope.AppendPayload(nil, &v)
		return err
	}
	if err := nested(256); err != nil {
		t.Error(err)
	}

	if err := nested(257); err == nil {
		t.Error("257 levels were accepted")
	}
}
