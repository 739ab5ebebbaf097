package envelope_test

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
)

// wellFormed are changes of an envelope that every check accepts.
func wellFormed() []bson.E {
	u := uuid.New()
	standard := bson.Binary{Subtype: bson.TypeBinaryUUID, Data: u[:]}
	changes := []bson.E{
		{Key: "_id", Value: bson.NewObjectID()},
		{Key: "_id", Value: standard},
		{Key: "_id", Value: strings.Repeat("x", 1024)},
		{Key: "partition", Value: int32(3)},
		{Key: "partition", Value: int64(3)},
		{Key: "partition", Value: 3.0},
		{Key: "partition", Value: -1},
		{Key: "headers", Value: bson.A{}},
		{Key: "headers", Value: bson.A{pair("a", "1"), pair("a", []byte{0}), pair("b", nil)}},
		{Key: "headers", Value: bson.D{{Key: "a", Value: "1"}, {Key: "b", Value: nil}}},
		{Key: "ts", Value: bson.Timestamp{}},
		{Key: "ts", Value: bson.Timestamp{T: 5, I: 6}},
		{Key: "slot", Value: int32(1023)},
		{Key: "own", Value: "field of the service"},
	}

	for _, p := range []any{[]byte("x"), "x", "", bson.D{{Key: "a", Value: 1}}, bson.A{1, "x"}, nil} {
		changes = append(changes, bson.E{Key: "payload", Value: p})
	}

	for _, field := range []string{"aggregateid", "key", "schemaversion"} {
		for _, v := range []any{"x", int32(1), int64(1), bson.NewObjectID(), standard} {
			changes = append(changes, bson.E{Key: field, Value: v})
		}
	}

	for _, field := range []string{"topic", "contenttype", "source", "subject"} {
		changes = append(changes, bson.E{Key: field, Value: "x"}, bson.E{Key: field, Value: nil})
	}

	for _, field := range []string{"time", "dueAt", "expiresAt"} {
		changes = append(changes, bson.E{Key: field, Value: time.Now()}, bson.E{Key: field, Value: nil})
	}

	return changes
}

// unchecked reports whether no schema can express why the field is malformed.
func unchecked(c malformedField) bool {
	// A rule for doubles would apply to integers as well, which may be larger.
	if f, isDouble := c.value.(float64); isDouble && math.Abs(f) > 1<<53 {
		return true
	}
	b, isBinary := c.value.(bson.Binary)
	return isBinary && (b.Subtype == bson.TypeBinaryUUIDOld || len(b.Data) != 16)
}

// The validator accepts each envelope that the relay accepts, and rejects the others.
func TestValidatorAgreesWithTheRelay(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	rule := options.CreateCollection().SetValidator(bson.D{{Key: "$jsonSchema", Value: envelope.Validator()}})
	if err := db.CreateCollection(t.Context(), "outbox", rule); err != nil {
		t.Fatal(err)
	}

	insert := func(raw bson.Raw) error {
		_, err := db.Collection("outbox").InsertOne(t.Context(), raw)
		_, _ = db.Collection("outbox").DeleteMany(t.Context(), bson.D{})
		return err
	}
	for _, c := range wellFormed() {
		raw := doc(t, c)
		if err := envelope.Parse(raw, &envelope.View{}); err != nil {
			t.Errorf("the relay rejects %s %v: %v", c.Key, c.Value, err)
		}
		if err := insert(raw); err != nil {
			t.Errorf("the validator rejects %s %v: %v", c.Key, c.Value, err)
		}
	}
	for _, c := range append(malformedFields(), malformedField{"headers", bson.A{pair("id", "1")}, ""}, malformedField{"headers", bson.A{pair("outrelay-x", "1")}, ""}) {
		reservedInDocument := c.field == "headers" && strings.Contains(c.want, "without a name")
		missingID := c.field == "_id" && c.value == absent // the driver adds one
		if unchecked(c) || reservedInDocument || missingID || c.value == (bson.Undefined{}) {
			continue
		}
		if err := insert(doc(t, bson.E{Key: c.field, Value: c.value})); !mongo.IsDuplicateKeyError(err) && err == nil {
			t.Errorf("the validator accepts %s %v", c.field, c.value)
		}
	}
}

// The JSON Schema describes the same documents in Extended JSON.
func TestJSONSchemaAgreesWithTheRelay(t *testing.T) {
	t.Parallel()
	text, err := bson.MarshalExtJSON(envelope.JSONSchema(), false, false)
	if err != nil {
		t.Fatal(err)
	}
	source, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("envelope.json", source); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile("envelope.json")
	if err != nil {
		t.Fatal(err)
	}

	check := func(raw bson.Raw, canonical bool) error {
		t.Helper()
		text, err := bson.MarshalExtJSON(raw, canonical, false)
		if err != nil {
			t.Fatal(err)
		}
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		return schema.Validate(value)
	}
	for _, canonical := range []bool{false, true} {
		for _, c := range wellFormed() {
			// Relaxed Extended JSON does not distinguish long and double from int, and has no other form for them.
			if err := check(doc(t, c), canonical); err != nil {
				t.Errorf("canonical %v, %s %v: %v", canonical, c.Key, c.Value, err)
			}
		}
	}
	for _, c := range malformedFields() {
		if _, isUndefined := c.value.(bson.Undefined); unchecked(c) || isUndefined || c.field == "delivery" && c.value == absent {
			continue
		}
		inHeaders := c.field == "headers" && !strings.Contains(c.want, "headers is") && !strings.Contains(c.want, "of a header is not one string")
		if inHeaders {
			// A schema cannot describe the form of a value in a document for arrays as well.
			continue
		}
		if check(doc(t, bson.E{Key: c.field, Value: c.value}), true) == nil {
			t.Errorf("the schema accepts %s %v", c.field, c.value)
		}
	}
}

// docs/envelope.md describes each field, and no other.
func TestTheDocumentationListsEveryField(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/envelope.md")
	if err != nil {
		t.Fatal(err)
	}

	_, table, _ := strings.Cut(string(text), "## Fields")
	table, _, _ = strings.Cut(table, "\n## ")
	var listed []string
	for line := range strings.Lines(table) {
		if cells := strings.Split(line, "|"); len(cells) > 2 && strings.HasPrefix(strings.TrimSpace(cells[1]), "`") {
			listed = append(listed, strings.Trim(strings.TrimSpace(cells[1]), "`"))
		}
	}

	var fields []string
	for _, f := range envelope.Fields() {
		fields = append(fields, f.Name)
	}

	if !slices.Equal(listed, fields) {
		t.Errorf("docs/envelope.md lists %q, want %q", listed, fields)
	}
}

// Each field that pkg/event writes is part of the contract.
func TestFieldsOfTheLibraryArePartOfTheContract(t *testing.T) {
	t.Parallel()
	at := time.Now()
	raw, err := event.New(event.Aggregate{Type: "order", ID: "1"}, "Placed", event.Bytes("text/plain", []byte("x")),
		event.WithKey("k"), event.WithTopic("t"), event.WithHeader("h", []byte("v")), event.WithDueAt(at), event.WithExpiry(at.Add(time.Hour))).MarshalBSON()
	if err != nil {
		t.Fatal(err)
	}

	elements, err := bson.Raw(raw).Elements()
	if err != nil {
		t.Fatal(err)
	}

	for _, e := range elements {
		if !slices.ContainsFunc(envelope.Fields(), func(f envelope.Field) bool { return f.Name == e.Key() }) {
			t.Errorf("%s is not part of the contract", e.Key())
		}
	}

	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil {
		t.Error(err)
	}
	if _, err := json.Marshal(envelope.Fields()); err != nil {
		t.Error(err)
	}
}
