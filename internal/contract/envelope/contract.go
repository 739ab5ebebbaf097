package envelope

import (
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// Field describes one field that a service writes. [Parse] implements the description, docs/envelope.md
// explains it, and [Validator] and [JSONSchema] express it for programs.
type Field struct {
	Name     string
	Types    []string // names of BSON types, as $jsonSchema has them; the field may be null unless it is required
	Required bool
	Meaning  string
}

// Fields returns the fields that a service writes, in the order of docs/envelope.md.
func Fields() []Field {
	text := []string{"string", "int", "long", "double", "objectId", "binData"}
	str, date := []string{"string"}, []string{"date"}

	return []Field{
		// The event, and its value.
		{
			"_id",
			[]string{"string", "objectId", "binData"},
			true,
			"identifies the event: a UUID (binary subtype 4), an ObjectId, or a string of at most 1,024 bytes",
		},
		{"aggregatetype", str, true, "kind of the object that the event is about, such as order; the rules for topics use it"},
		{"aggregateid", text, true, "identifies the object; it is the key of the record unless key is set; a UUID has subtype 4"},
		{"type", str, true, "name of the event, such as OrderPlaced"},
		{
			"payload",
			[]string{"binData", "string", "object", "array", "null"},
			true,
			"value of the record: bytes and strings unchanged, documents and arrays as JSON, null as a tombstone",
		},

		// The record, where the rules would make it otherwise.
		{"key", text, false, "key of the record, instead of aggregateid; events with the same key keep their order"},
		{"topic", str, false, "topic, instead of the topic that the rules select, if the rules allow that"},
		{"partition", []string{"int", "long", "double"}, false, "partition, a whole number; -1 or missing: by the key"},
		{
			"headers",
			[]string{"array", "object"},
			false,
			"headers of the record: an array of {k, v}, which preserves order and repetition, or a document of strings",
		},

		// Attributes that become headers.
		{"contenttype", str, false, "media type of the payload"},
		{"schemaversion", text, false, "version of the schema of the payload"},
		{"source", str, false, "CloudEvents attribute source"},
		{"subject", str, false, "CloudEvents attribute subject"},
		{"time", date, false, "when the event happened; CloudEvents attribute time"},

		// Times and fields for the relay.
		{"dueAt", date, false, "the event is sent at this time, and not before"},
		{"expiresAt", date, false, "the event is not sent any more after this time"},
		{"ts", nil, false, "Timestamp(0,0), which the server replaces by its time; anything else has no effect"},
		{"slot", nil, false, "murmur2(key) & 1023, for a watcher with several slots; anything else has no effect"},
	}
}

// Validator returns the $jsonSchema for the validator of an outbox collection. MongoDB then rejects the inserts of
// envelopes that [Parse] would reject, as far as $jsonSchema can express that. It permits all writes of the relay.
func Validator() bson.D {
	properties := bson.D{}
	var required bson.A
	for _, f := range Fields() {
		if f.Required {
			required = append(required, f.Name)
		}
		// ts and slot have no effect with another type, so such a value must not make an insert fail.
		if f.Types == nil {
			continue
		}

		types := f.Types
		if !f.Required {
			types = append(slices.Clone(types), "null")
		}
		rule := bson.D{{Key: "bsonType", Value: types}, {Key: "description", Value: f.Meaning}}
		properties = append(properties, bson.E{Key: f.Name, Value: append(rule, buildConstraints(f)...)})
	}
	return bson.D{{Key: "bsonType", Value: "object"}, {Key: "required", Value: required}, {Key: "properties", Value: properties}}
}

// buildConstraints returns the rules of a validator for a field, without its type.
func buildConstraints(field Field) bson.D {
	switch {
	case field.Name == "_id":
		return bson.D{{Key: "minLength", Value: 1}, {Key: "maxLength", Value: MaxIDBytes}}
	case field.Name == "partition":
		return bson.D{{Key: "minimum", Value: -1}, {Key: "multipleOf", Value: 1}}
	case field.Name == "headers":
		// The document form cannot be checked as well: the server has no rule for all values of a document except
		// additionalProperties, which does not apply to arrays.
		values := bson.D{{Key: "bsonType", Value: bson.A{"string", "binData", "null"}}}
		return bson.D{{Key: "items", Value: headerPair("bsonType", values)}, {Key: "additionalProperties", Value: values}}
	case field.Name == "payload" || !slices.Contains(field.Types, "string"):
		return nil
	}

	// The server counts characters, and Parse bytes. An empty required text counts as missing.
	rule := bson.D{{Key: "maxLength", Value: MaxFieldText}}
	if field.Required {
		rule = append(rule, bson.E{Key: "minLength", Value: 1})
	}
	// These rules apply to numbers only. A number of JavaScript is a double.
	if slices.Contains(field.Types, "double") {
		rule = append(rule, bson.E{Key: "multipleOf", Value: 1})
	}
	return rule
}

// reservedHeaders matches the names that [HeaderProblem] rejects, except the empty one.
const reservedHeaders = "^(" + record.HeaderID + "$|" + record.ReservedPrefix + ")"

// wholeDouble matches a whole double in canonical Extended JSON.
const wholeDouble = `^-?[0-9]+(\.0)?$`

// JSONSchema returns a JSON Schema (draft 2020-12) of the envelope as a document in Extended JSON, canonical or relaxed.
func JSONSchema() bson.D {
	properties := bson.D{}
	var required bson.A
	for _, f := range Fields() {
		if f.Required {
			required = append(required, f.Name)
		}

		types := f.Types
		// The validator leaves these fields out. A description for writers names the types that have an effect.
		switch {
		case f.Name == "ts":
			types = []string{"timestamp"}
		case f.Name == "slot":
			types = []string{"int", "long"}
		}
		var forms bson.A
		for _, t := range types {
			forms = append(forms, jsonForm(t, f))
		}
		if !f.Required {
			forms = append(forms, bson.D{{Key: "type", Value: "null"}})
		}
		properties = append(properties, bson.E{Key: f.Name, Value: bson.D{
			{Key: "description", Value: f.Meaning}, {Key: "anyOf", Value: forms},
		}})
	}
	return bson.D{
		{Key: "$schema", Value: "https://json-schema.org/draft/2020-12/schema"},
		{Key: "title", Value: "outrelay envelope"},
		{Key: "type", Value: "object"},
		{Key: "required", Value: required},
		{Key: "properties", Value: properties},
	}
}

// jsonForm returns the schema of a value of a BSON type in Extended JSON.
func jsonForm(bsonType string, field Field) bson.D {
	// Extended JSON writes such a value as a document whose key names the type: {"$oid": "…"}.
	wrapped := func(key string, value bson.D) bson.D {
		return bson.D{
			{Key: "type", Value: "object"},
			{Key: "required", Value: bson.A{key}},
			{Key: "additionalProperties", Value: false},
			{Key: "properties", Value: bson.D{{Key: key, Value: value}}},
		}
	}
	digits := bson.D{{Key: "type", Value: "string"}, {Key: "pattern", Value: "^-?[0-9]+$"}}
	number := func(form bson.D) bson.D {
		if field.Name == "partition" {
			form = append(form, bson.E{Key: "minimum", Value: -1})
		}
		return form
	}

	switch bsonType {
	case "string":
		document := bson.D{{Key: "type", Value: "string"}}
		if field.Required && field.Name != "payload" {
			document = append(document, bson.E{Key: "minLength", Value: 1})
		}
		if field.Name == "_id" {
			document = append(document, bson.E{Key: "maxLength", Value: MaxIDBytes})
		}
		return document
	case "int":
		return anyForm(number(bson.D{{Key: "type", Value: "integer"}}), wrapped("$numberInt", digits))
	case "long":
		return wrapped("$numberLong", digits)
	case "double":
		return wrapped("$numberDouble", bson.D{{Key: "type", Value: "string"}, {Key: "pattern", Value: wholeDouble}})
	case "objectId":
		return wrapped("$oid", bson.D{{Key: "type", Value: "string"}, {Key: "pattern", Value: "^[0-9a-fA-F]{24}$"}})
	case "binData":
		binary := wrapped("$binary", bson.D{
			{Key: "type", Value: "object"},
			{Key: "required", Value: bson.A{"base64", "subType"}},
			{Key: "properties", Value: bson.D{
				{Key: "base64", Value: bson.D{{Key: "type", Value: "string"}}},
				{Key: "subType", Value: subtypeOf(field)},
			}},
		})
		// Drivers write a UUID in either form.
		return anyForm(binary, wrapped("$uuid", bson.D{{Key: "type", Value: "string"}}))
	case "date":
		return wrapped("$date", anyForm(bson.D{{Key: "type", Value: "string"}}, wrapped("$numberLong", digits)))
	case "timestamp":
		return wrapped("$timestamp", bson.D{{Key: "type", Value: "object"}, {Key: "required", Value: bson.A{"t", "i"}}})
	case "array":
		if field.Name == "headers" {
			value := bson.D{{Key: "type", Value: bson.A{"string", "object", "null"}}}
			return bson.D{{Key: "type", Value: "array"}, {Key: "items", Value: headerPair("type", value)}}
		}
		return bson.D{{Key: "type", Value: "array"}}
	case "object":
		// The other types are objects with one key of this form, so a document must not consist of one.
		return bson.D{{Key: "type", Value: "object"}, {Key: "not", Value: bson.D{
			{Key: "minProperties", Value: 1},
			{Key: "maxProperties", Value: 1},
			{Key: "propertyNames", Value: bson.D{{Key: "pattern", Value: "^\\$(number|oid|date|timestamp|undefined|minKey|maxKey|symbol|code|regularExpression|dbPointer)"}}},
		}}}
	}
	return bson.D{{Key: "type", Value: "null"}}
}

// subtypeOf returns the schema of the subtype of a binary: any for a payload, and otherwise that of a UUID.
func subtypeOf(field Field) bson.D {
	if field.Name == "payload" {
		return bson.D{{Key: "type", Value: "string"}}
	}
	return bson.D{{Key: "enum", Value: bson.A{"04", "4"}}}
}

// headerPair returns the schema of one header in the array form, with the schema of its value. typeKey is the keyword for a type.
func headerPair(typeKey string, value bson.D) bson.D {
	return bson.D{
		{Key: typeKey, Value: "object"},
		{Key: "required", Value: bson.A{"k"}},
		{Key: "additionalProperties", Value: false},
		{Key: "properties", Value: bson.D{
			{Key: "k", Value: bson.D{
				{Key: typeKey, Value: "string"},
				{Key: "minLength", Value: 1},
				{Key: "not", Value: bson.D{{Key: "pattern", Value: reservedHeaders}}},
			}},
			{Key: "v", Value: value},
		}},
	}
}

func anyForm(forms ...bson.D) bson.D {
	return bson.D{{Key: "anyOf", Value: forms}}
}
