package letters

import (
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Facts are the fields of an envelope that are stored on its letter as text. Queries use them, so
// that letters are found even if the envelope is malformed or stored in chunks.
type Facts struct {
	Type          string `bson:"type,omitempty"`
	AggregateType string `bson:"aggregatetype,omitempty"`
	Key           string `bson:"key,omitempty"` // the ordering key
}

// maxFactBytes bounds each fact, so that an index can hold it.
const maxFactBytes = 4096

// readFacts returns the facts that raw contains. raw must be BSON, but may be malformed in any
// other way.
func readFacts(raw bson.Raw) Facts {
	facts := Facts{
		Type:          stringField(raw, "type"),
		AggregateType: stringField(raw, "aggregatetype"),
		Key:           textField(raw, "key"),
	}
	if facts.Key == "" {
		facts.Key = textField(raw, "aggregateid")
	}
	return facts
}

// stringField returns the field if it is a string, and otherwise "".
func stringField(raw bson.Raw, field string) string {
	value, err := raw.LookupErr(field)
	if err != nil {
		return ""
	}
	text, _ := value.StringValueOK()
	return record.Clip(text, maxFactBytes)
}

// textField returns the canonical text of the field, or "" if it has none.
func textField(raw bson.Raw, field string) string {
	value, err := raw.LookupErr(field)
	if err != nil {
		return ""
	}
	return record.Clip(envelope.CanonicalText(value), maxFactBytes)
}

// IDText returns the text by which operators name an _id. [ParseIDText] reads it. An id of a type that no event may have,
// such as a double, a document or a UUID of subtype 3, is shown as relaxed Extended JSON.
func IDText(value bson.RawValue) string {
	if text := envelope.CanonicalText(value); text != "" || value.Type == 0 {
		return text
	}

	const name = `{"v":`
	out, err := bson.MarshalExtJSON(bson.D{{Key: "v", Value: value}}, false, false)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(strings.TrimPrefix(string(out), name), "}")
}

// ParseIDText returns the ids that text may stand for in addition to ids of events: Extended JSON, such as a number or a
// document.
func ParseIDText(text string) []bson.RawValue {
	// A string in quotes is no id of another type.
	if text == "" || text[0] == '"' {
		return nil
	}

	// A document can hold a value of any type.
	var doc bson.Raw
	if err := bson.UnmarshalExtJSON([]byte(`{"v":`+text+`}`), false, &doc); err != nil {
		return nil
	}
	elems, err := doc.Elements()
	if err != nil || len(elems) != 1 {
		return nil
	}
	return []bson.RawValue{elems[0].Value()}
}
