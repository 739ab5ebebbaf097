package envelope

import (
	"errors"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// A required field that is missing is named, with a field whose name differs only in case and separators: the writer meant that one.
func TestAMissingFieldIsNamedWithItsNearMiss(t *testing.T) {
	t.Parallel()
	full := bson.D{{Key: "_id", Value: "1"}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "T"}, {Key: "payload", Value: "x"}}

	for _, c := range []struct {
		field        int
		name, reason string
	}{
		{1, "aggregateType", "field aggregatetype is missing or empty; found aggregateType"},
		{2, "aggregate_id", "field aggregateid is missing or empty; found aggregate_id"},
		{3, "Type", "field type is missing or empty; found Type"},
		{4, "PAYLOAD", "field payload is missing; null makes a tombstone; found PAYLOAD"},
		{3, "kind", "field type is missing or empty"},
	} {
		doc := append(bson.D{}, full...)
		doc[c.field].Key = c.name
		raw, err := bson.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		var view View
		var rejected *record.Rejection
		if err := Parse(raw, &view); !errors.As(err, &rejected) || rejected.Reason != c.reason || rejected.Missing != full[c.field].Key {
			t.Errorf("%s: %v, %+v, want %q", c.name, err, rejected, c.reason)
		}
	}
}
