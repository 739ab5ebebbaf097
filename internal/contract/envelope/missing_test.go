package envelope

import (
	"errors"
	"slices"
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
		{1, "aggregateType", "field aggregatetype is missing or empty (found aggregateType)"},
		{2, "aggregate_id", "field aggregateid is missing or empty (found aggregate_id)"},
		{3, "Type", "field type is missing or empty (found Type)"},
		{4, "PAYLOAD", "field payload is missing, and null makes a tombstone (found PAYLOAD)"},
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
		if err := Parse(raw, &view); !errors.As(err, &rejected) || rejected.Reason != c.reason || !slices.Equal(rejected.Fields, []string{full[c.field].Key}) {
			t.Errorf("%s: %v, %+v, want %q", c.name, err, rejected, c.reason)
		}
	}
}

// All faults are named at once, and the class is that of the first one.
func TestARejectionNamesAllFaultsOfADocument(t *testing.T) {
	t.Parallel()
	mapping, problems := NewMapping(Names{AggregateType: "kind", Type: "event"}, false)
	if problems != nil {
		t.Fatal(problems)
	}

	for _, c := range []struct {
		mapping *Mapping
		doc     bson.D
		class   record.Class
		reason  string
		fields  []string
	}{
		{
			nil,
			bson.D{{Key: "_id", Value: "1"}, {Key: "aggregateType", Value: "order"}, {Key: "type", Value: 5}, {Key: "dueAt", Value: "soon"}},
			record.Malformed,
			"type is of type 32-bit integer; a string is wanted; dueAt is of type string; a date is wanted; field aggregatetype is missing or empty (found aggregateType); " +
				"field aggregateid is missing or empty; field payload is missing, and null makes a tombstone",
			[]string{"type", "dueAt", "aggregatetype", "aggregateid", "payload"},
		},
		{
			nil,
			bson.D{{Key: "_id", Value: "1"}, {Key: "partition", Value: -5}, {Key: "aggregatetype", Value: "order"}, {Key: "type", Value: "T"}, {Key: "payload", Value: nil}},
			record.PartitionOutOfRange, "partition -5; field aggregateid is missing or empty",
			[]string{"partition", "aggregateid"},
		},
		{
			mapping,
			bson.D{{Key: "_id", Value: "1"}, {Key: "Kind", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "payload", Value: "x"}},
			record.Malformed, "field kind is missing or empty (found Kind); field event is missing or empty",
			[]string{"aggregatetype", "type"},
		},
	} {
		raw, err := bson.Marshal(c.doc)
		if err != nil {
			t.Fatal(err)
		}
		var view View
		rejected := record.RejectionOf(c.mapping.Parse(raw, &view))
		if rejected.Class != c.class || rejected.Reason != c.reason || !slices.Equal(rejected.Fields, c.fields) {
			t.Errorf("%v: %+v, want %s: %s %v", c.doc, rejected, c.class, c.reason, c.fields)
		}
	}
}

// The relay ignores an unknown field, so a writer does not notice the wrong name of an optional one.
func TestNearMissesOfOptionalFields(t *testing.T) {
	t.Parallel()
	raw, err := bson.Marshal(bson.D{
		{Key: "_id", Value: "1"},
		{Key: "dueat", Value: 1},
		{Key: "expires_at", Value: 1},
		{Key: "contentType", Value: "x"},
		{Key: "traceId", Value: "x"},
		{Key: "Type", Value: "x"},
		{Key: "time", Value: 1},
		{Key: "Time", Value: 1},
	})
	if err != nil {
		t.Fatal(err)
	}

	if got, want := NearMisses(raw), []string{"dueat for dueAt", "expires_at for expiresAt", "contentType for contenttype"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
