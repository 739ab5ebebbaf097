// Package listing builds the queries of lists that operators filter and page through: their conditions, their order, their pages
// and their summaries.
package listing

import (
	"regexp"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Filter is a filter for the entries of a list. An entry matches if it fulfills all conditions. Each method adds a condition
// unless its value is zero.
type Filter bson.D

// Equal requires the value of a field.
func (f *Filter) Equal(field, text string) {
	if text != "" {
		f.Require(field, text)
	}
}

// Require requires a value, or what operators say, of a field.
func (f *Filter) Require(field string, value any) { *f = append(*f, bson.E{Key: field, Value: value}) }

// In requires one of several values of a field. Nil is no condition; an empty list that is not nil matches nothing: a program that finds
// nothing to act on must not act on everything.
func In[T any](filter *Filter, field string, values []T) {
	if values != nil {
		filter.Require(field, bson.D{{Key: "$in", Value: values}})
	}
}

// InEither requires one of several values of a field, or one of several values of another field. Nil is no alternative, and two nil
// lists are no condition.
func InEither[A, B any](filter *Filter, field string, values []A, otherField string, otherValues []B) {
	if values == nil || otherValues == nil {
		In(filter, field, values)
		In(filter, otherField, otherValues)
		return
	}

	var first, second Filter
	In(&first, field, values)
	In(&second, otherField, otherValues)
	filter.Require("$or", bson.A{first, second})
}

// Prefix requires that the text of a field begins with prefix. Reasons often end with an id, so a prefix selects all of a
// kind.
func (f *Filter) Prefix(field, prefix string) {
	if prefix != "" {
		f.Require(field, bson.Regex{Pattern: "^" + regexp.QuoteMeta(prefix)})
	}
}

// During requires that the time in a field is start or later, and before end.
func (f *Filter) During(field string, start, end time.Time) {
	var window bson.D
	if !start.IsZero() {
		window = append(window, bson.E{Key: "$gte", Value: bson.NewDateTimeFromTime(start)})
	}
	if !end.IsZero() {
		window = append(window, bson.E{Key: "$lt", Value: bson.NewDateTimeFromTime(end)})
	}
	if window != nil {
		f.Require(field, window)
	}
}

// Exists requires that a field exists, or that it does not exist.
func (f *Filter) Exists(field string, exists bool) {
	f.Require(field, bson.D{{Key: "$exists", Value: exists}})
}

// All returns a filter that matches if all filters match.
func All(filters ...bson.D) bson.D { return bson.D{{Key: "$and", Value: filters}} }

// Order is the order of a list: by a field, and then by the id.
type Order struct {
	Field           string
	Down, IDsUpward bool // Down: the greatest first. The ids have the same direction, or with IDsUpward the other one.
	FieldIndex      bool // The index has only the field, so the server sorts each page by the ids.
}

// directions returns the directions of the field and of the ids.
func (o Order) directions() (field, ids int) {
	field = 1
	if o.Down {
		field = -1
	}
	if o.IDsUpward {
		return field, -field
	}
	return field, field
}

// Sort returns the order as MongoDB takes it.
func (o Order) Sort() bson.D {
	field, ids := o.directions()
	return bson.D{{Key: o.Field, Value: field}, {Key: "_id", Value: ids}}
}

// beyond are the operators that compare in a direction.
var beyond = map[int]string{1: "$gt", -1: "$lt"}

// After returns the filter for the entries after the place with these values. Entries of the same value are ordered by
// their ids, so a page continues exactly after the last entry of the previous one. The first condition bounds the
// entries of the index that the server reads. Only $expr compares ids of different types.
func (o Order) After(value, id any) bson.D {
	field, ids := o.directions()
	compare := func(operator string) bson.D {
		return bson.D{{Key: o.Field, Value: bson.D{{Key: operator, Value: value}}}}
	}
	later := bson.D{{Key: beyond[ids], Value: bson.A{"$_id", bson.D{{Key: "$literal", Value: id}}}}}
	return All(compare(beyond[field]+"e"), bson.D{{Key: "$or", Value: bson.A{
		compare(beyond[field]),
		bson.D{{Key: "$expr", Value: later}},
	}}})
}

// upTo returns the filter for the entries with this value, and before it.
func (o Order) upTo(value any) bson.D {
	field, _ := o.directions()
	return bson.D{{Key: o.Field, Value: bson.D{{Key: beyond[-field] + "e", Value: value}}}}
}

// lastID returns the id after all ids of an equal value.
func (o Order) lastID() any {
	if _, ids := o.directions(); ids < 0 {
		return bson.MinKey{}
	}
	return bson.MaxKey{}
}

// Summary returns the pipeline that groups the entries which filter matches by the fields of key. Each group has these
// fields, and `count`, `requeued` (how many of them have the field requeued), `first` and `last` (the earliest and the
// latest time in timeField). The largest group comes first.
func Summary(filter, key bson.D, timeField, requeued string) mongo.Pipeline {
	one := bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$gt", Value: bson.A{"$" + requeued, nil}}}, int64(1), int64(0)}}}
	return mongo.Pipeline{
		{{Key: "$match", Value: filter}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: key},
			{Key: "count", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
			{Key: "requeued", Value: bson.D{{Key: "$sum", Value: one}}},
			{Key: "first", Value: bson.D{{Key: "$min", Value: "$" + timeField}}},
			{Key: "last", Value: bson.D{{Key: "$max", Value: "$" + timeField}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "count", Value: -1}, {Key: "_id", Value: 1}}}},
		{{Key: "$replaceWith", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{"$_id", "$$ROOT"}}}}},
	}
}

// Mark returns the update that stores requeuedBy, with the time of the server, in the field requeued. now adds fields to it whose
// values are expressions.
func Mark(requeued string, requeuedBy any, now ...bson.E) mongo.Pipeline {
	fields := append(bson.D{{Key: "at", Value: "$$NOW"}}, now...)
	// A literal, because a text that begins with $ would be an expression in a pipeline.
	stamped := bson.D{{Key: "$mergeObjects", Value: bson.A{bson.D{{Key: "$literal", Value: requeuedBy}}, fields}}}
	return mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: requeued, Value: stamped}}}}}
}
