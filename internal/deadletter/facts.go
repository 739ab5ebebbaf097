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

// maxFact bounds a fact: what an index can hold whatever the envelope says.
const maxFact = 4096

// factsOf reads what it can; the envelope may be wrong in any way but still is BSON.
func factsOf(raw bson.Raw) Facts {
	f := Facts{Type: stringOf(raw, "type"), AggregateType: stringOf(raw, "aggregatetype"), Key: textOf(raw, "key")}
	if f.Key == "" {
		f.Key = textOf(raw, "aggregateid")
	}
	return f
}

func stringOf(raw bson.Raw, field string) string {
	v, err := raw.LookupErr(field)
	if err != nil {
		return ""
	}
	s, _ := v.StringValueOK()
	return clip(s, maxFact)
}

func textOf(raw bson.Raw, field string) string {
	v, err := raw.LookupErr(field)
	if err != nil {
		return ""
	}
	return clip(canonical(v), maxFact)
}

// canonical is the text of what may be an id or a key, "" for anything else.
func canonical(v bson.RawValue) string {
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
