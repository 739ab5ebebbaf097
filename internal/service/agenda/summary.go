package agenda

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// Summary counts the scheduled events of one name.
type Summary struct {
	Name             string
	Count            int64
	Earliest, Latest time.Time
}

// Count returns the number of the events that query selects.
func Count(ctx context.Context, coll *mongo.Collection, query Query) (int64, error) {
	filter, err := query.buildFilter()
	if err != nil {
		return 0, err
	}
	return coll.CountDocuments(ctx, filter)
}

// Summarize counts the events that query selects by name, sorted by name.
func Summarize(ctx context.Context, coll *mongo.Collection, query Query) ([]Summary, error) {
	filter, err := query.buildFilter()
	if err != nil {
		return nil, err
	}

	cur, err := cursor.Aggregate(ctx, coll, mongo.Pipeline{
		{{Key: "$match", Value: filter}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: clipField(query.Mapping.Ref("type"))},
			{Key: "count", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
			{Key: "earliest", Value: bson.D{{Key: "$min", Value: "$dueAt"}}},
			{Key: "latest", Value: bson.D{{Key: "$max", Value: "$dueAt"}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, err
	}

	var docs []struct {
		Name     bson.RawValue `bson:"_id"`
		Count    int64         `bson:"count"`
		Earliest time.Time     `bson:"earliest"`
		Latest   time.Time     `bson:"latest"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		return nil, err
	}

	out := make([]Summary, len(docs))
	for i, d := range docs {
		out[i] = Summary{Count: d.Count, Earliest: d.Earliest, Latest: d.Latest}
		out[i].Name, _ = d.Name.StringValueOK()
	}

	return out, nil
}

// maxListedText limits the characters of a text field that a list returns. The writer of an event
// controls its length.
const maxListedText = 1024

// clipField returns an expression for a field of a list: the beginning of a text, or a short value
// of another type, or null.
func clipField(field string) bson.D {
	is := func(names ...string) bson.D {
		return bson.D{{Key: "$in", Value: bson.A{bson.D{{Key: "$type", Value: field}}, names}}}
	}

	return bson.D{{Key: "$switch", Value: bson.D{
		{Key: "branches", Value: bson.A{
			bson.D{{Key: "case", Value: is("string")}, {Key: "then", Value: bson.D{
				{Key: "$substrCP", Value: bson.A{field, 0, maxListedText}},
			}}},
			bson.D{{Key: "case", Value: is("int", "long", "objectId")}, {Key: "then", Value: field}},
			bson.D{{Key: "case", Value: is("binData")}, {Key: "then", Value: bson.D{{Key: "$cond", Value: bson.A{
				bson.D{{Key: "$lte", Value: bson.A{bson.D{{Key: "$binarySize", Value: field}}, 16}}}, field, nil,
			}}}}},
		}},
		{Key: "default", Value: nil},
	}}}
}
