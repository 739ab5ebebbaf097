package envelope

import (
	"encoding/json"
	"math"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// everyType returns the document whose JSON is in testdata. debezium.json is the value that MongoEventRouter of Debezium
// 3.6.1 with the Java driver 5.6.2 made of it as a payload. connector.json is the value that the formatter DefaultJson of the
// MongoDB Kafka connector 2.0.1 made of it.
func everyType(t *testing.T) []byte {
	t.Helper()
	oid, err := bson.ObjectIDFromHex("6560d0c3a1b2c3d4e5f60718")
	if err != nil {
		t.Fatal(err)
	}

	decimal, err := bson.ParseDecimal128("1.10E+3")
	if err != nil {
		t.Fatal(err)
	}

	raw, err := bson.Marshal(bson.D{
		{Key: "double", Value: 1.5},
		{Key: "whole", Value: 3.0},
		{Key: "big", Value: 1e21},
		{Key: "small", Value: 1e-5},
		{Key: "mid", Value: 12345678.9},
		{Key: "thousandth", Value: 0.001},
		{Key: "neg0", Value: math.Copysign(0, -1)},
		{Key: "nan", Value: math.NaN()},
		{Key: "inf", Value: math.Inf(1)},
		{Key: "ninf", Value: math.Inf(-1)},
		{Key: "string", Value: "a\"b\\c/\n\r\t\b\f\u0001\u00e9\u2028\u2029\U0001F600e\u0301\u200b\u00ad<>&'"},
		{Key: "document", Value: bson.D{{Key: "a", Value: int32(1)}, {Key: "b", Value: bson.D{}}}},
		{Key: "array", Value: bson.A{int32(1), "x", bson.A{}, bson.D{{Key: "y", Value: nil}}}},
		{Key: "binary", Value: bson.Binary{Data: []byte{0, 1, 255}}},
		{Key: "uuid", Value: bson.Binary{Subtype: 4, Data: []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}}},
		{Key: "user", Value: bson.Binary{Subtype: 0x80, Data: []byte{1}}},
		{Key: "oid", Value: oid},
		{Key: "true", Value: true},
		{Key: "date", Value: time.UnixMilli(1700000000123)},
		{Key: "old", Value: time.UnixMilli(-1)},
		{Key: "far", Value: time.UnixMilli(253402300800000)},
		{Key: "null", Value: nil},
		{Key: "regex", Value: bson.Regex{Pattern: `a/b"`, Options: "mi"}},
		{Key: "code", Value: bson.JavaScript("f()")},
		{Key: "scoped", Value: bson.CodeWithScope{Code: "g()", Scope: bson.D{{Key: "x", Value: int32(1)}}}},
		{Key: "symbol", Value: bson.Symbol("s")},
		{Key: "int", Value: int32(-7)},
		{Key: "timestamp", Value: bson.Timestamp{T: 1700000000, I: 3}},
		{Key: "long", Value: int64(1) << 53},
		{Key: "slong", Value: int64(5)},
		{Key: "decimal", Value: decimal},
		{Key: "min", Value: bson.MinKey{}},
		{Key: "max", Value: bson.MaxKey{}},
		{Key: "undef", Value: bson.Undefined{}},
		{Key: "dbp", Value: bson.DBPointer{DB: "db.c", Pointer: oid}},
	})
	if err != nil {
		t.Fatal(err)
	}

	return raw
}

func TestStylesOfOtherPrograms(t *testing.T) {
	t.Parallel()
	for file, style := range map[string]Style{"testdata/debezium.json": Debezium, "testdata/connector.json": Connector} {
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := AppendValue(nil, bson.TypeEmbeddedDocument, everyType(t), style, NoLimit)
		if diff := cmp.Diff(string(want), string(got)); err != nil || diff != "" {
			t.Errorf("%s, %v (-file +written):\n%s", file, err, diff)
		}
	}
}

func TestPlainStyle(t *testing.T) {
	t.Parallel()
	got, err := AppendValue(nil, bson.TypeEmbeddedDocument, everyType(t), Plain, NoLimit)
	if err != nil {
		t.Fatal(err)
	}
	var v map[string]any
	if err := json.Unmarshal(got, &v); err != nil {
		t.Fatalf("%s: %v", got, err)
	}

	want := map[string]any{
		"double": 1.5, "whole": 3.0, "big": 1e21, "small": 1e-5, "mid": 12345678.9, "thousandth": 0.001, "neg0": math.Copysign(0, -1),
		"nan": "NaN", "inf": "Infinity", "ninf": "-Infinity", "int": -7.0, "long": float64(1 << 53), "slong": 5.0, "decimal": "1.10E+3",
		"string":   "a\"b\\c/\n\r\t\b\f\u0001\u00e9\u2028\u2029\U0001F600e\u0301\u200b\u00ad<>&'",
		"document": map[string]any{"a": 1.0, "b": map[string]any{}}, "array": []any{1.0, "x", []any{}, map[string]any{"y": nil}},
		"binary": "AAH/", "user": "AQ==", "uuid": "01020304-0506-0708-090a-0b0c0d0e0f10", "oid": "6560d0c3a1b2c3d4e5f60718",
		"true": true, "null": nil, "undef": nil, "min": nil, "max": nil, "dbp": "6560d0c3a1b2c3d4e5f60718",
		"date": "2023-11-14T22:13:20.123Z", "old": "1969-12-31T23:59:59.999Z", "far": "10000-01-01T00:00:00Z", "timestamp": "2023-11-14T22:13:20Z",
		"regex": `/a/b"/im`, "code": "f()", "scoped": "g()", "symbol": "s",
	}
	if diff := cmp.Diff(want, v); diff != "" {
		t.Errorf("(-want +written):\n%s", diff)
	}
}

// Numbers that Java and Go write differently, by Java's Double.toString.
func TestJavaDoubles(t *testing.T) {
	t.Parallel()
	for f, want := range map[float64]string{
		0: "0.0", 1: "1.0", 0.1: "0.1", 1e7: "1.0E7", 9999999.5: "9999999.5", 1e-3: "0.001", 9.99e-4: "9.99E-4",
		123456789012345680.0: "1.2345678901234568E17", 1e22: "1.0E22", 1.7976931348623157e308: "1.7976931348623157E308", 100: "100.0",
	} {
		if got := string(appendJavaDouble(nil, f)); got != want {
			t.Errorf("%v is written as %s, want %s", f, got, want)
		}
	}
}

func TestStylesRejectBrokenDocuments(t *testing.T) {
	t.Parallel()
	whole := everyType(t)
	for n := range len(whole) - 1 {
		for _, style := range []Style{Plain, Debezium, Connector, Connect} {
			broken := append([]byte{}, whole[:n+1]...)
			if _, err := AppendValue(nil, bson.TypeEmbeddedDocument, broken, style, NoLimit); err == nil {
				t.Fatalf("style %d accepts a document that ends after %d bytes", style, n+1)
			}
		}
	}
}

func TestStylesDoNotAllocate(t *testing.T) {
	doc := marshal(t, bson.D{
		{Key: "_id", Value: bson.NewObjectID()},
		{Key: "n", Value: int64(1) << 40},
		{Key: "f", Value: 1e21},
		{Key: "at", Value: time.Now()},
		{Key: "b", Value: []byte("binary")},
		{Key: "u", Value: bson.Binary{Subtype: 4, Data: make([]byte, 16)}},
		{Key: "s", Value: "text"},
	})

	buf := make([]byte, 0, 4096)
	for _, style := range []Style{Relaxed, Plain, Debezium, Connector, Connect} {
		if n := testing.AllocsPerRun(100, func() { _, _ = AppendValue(buf, bson.TypeEmbeddedDocument, doc, style, NoLimit) }); n > 0 {
			t.Errorf("style %d: %v allocations", style, n)
		}
	}
}
