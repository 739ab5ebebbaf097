package deadletter

import (
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// Facts are what a letter tells of its envelope beside it, as text: letters are found by them also where the envelope is
// malformed, or stored in chunks.
type Facts struct {
	Type          string `bson:"type,omitempty"`
	AggregateType string `bson:"aggregatetype,omitempty"`
	Key           string `bson:"key,omitempty"` // the ordering key
}

// maxFactBytes bounds a fact: what an index can hold whatever the envelope says.
const maxFactBytes = 4096

// readFacts reads what it can; the envelope may be wrong in any way but still is BSON.
func readFacts(raw bson.Raw) Facts {
	f := Facts{Type: stringField(raw, "type"), AggregateType: stringField(raw, "aggregatetype"), Key: textField(raw, "key")}
	if f.Key == "" {
		f.Key = textField(raw, "aggregateid")
	}
	return f
}

func stringField(raw bson.Raw, field string) string {
	v, err := raw.LookupErr(field)
	if err != nil {
		return ""
	}
	s, _ := v.StringValueOK()
	return truncateText(s, maxFactBytes)
}

func textField(raw bson.Raw, field string) string {
	v, err := raw.LookupErr(field)
	if err != nil {
		return ""
	}
	return truncateText(canonicalText(v), maxFactBytes)
}

// canonicalText is the text of what may be an id or a key, "" for anything else.
func canonicalText(v bson.RawValue) string {
	switch v.Type {
	case bson.TypeInt32, bson.TypeInt64:
		return strconv.FormatInt(v.AsInt64(), 10)
	case bson.TypeString, bson.TypeObjectID, bson.TypeBinary:
		var id event.ID
		if id.UnmarshalBSONValue(byte(v.Type), v.Value) == nil {
			return id.String()
		}
	}
	return ""
}
