// Package lettercount counts the dead letters of handlers by an index alone.
package lettercount

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// Series counts the letters of one handler with the same class.
type Series struct {
	Group   string
	Handler string
	Class   string
	Dead    int64 // letters that were not requeued
}

const seriesSeparator = "\n"

// SeriesOf returns the field series of the document of a letter.
func SeriesOf(group, handler, class string) string {
	return strings.Join([]string{group, handler, class}, seriesSeparator)
}

// FailureOf returns the failure of a letter with this reason.
func FailureOf(reason, group, handler, class, topic, name string) record.Failure {
	return record.FailureOf(reason, "handler", group, handler, class, topic, name)
}

// Open is the filter for the letters of a collection that were neither requeued nor discarded.
func Open() bson.D {
	return bson.D{
		{Key: "series", Value: bson.D{{Key: "$gt", Value: ""}}},
		{Key: "requeued", Value: bson.D{{Key: "$exists", Value: false}}},
		{Key: "archived", Value: bson.D{{Key: "$exists", Value: false}}},
	}
}

// CountSeries counts the letters of a collection. It reads only an index, and stops at limit entries.
func CountSeries(ctx context.Context, db *mongo.Database, collection string, limit int64) ([]Series, error) {
	isDecided := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "$gt", Value: bson.A{"$requeued.at", nil}}}, bson.D{{Key: "$gt", Value: bson.A{"$archived.at", nil}}},
	}}}
	oneIfDead := bson.D{{Key: "$cond", Value: bson.A{isDecided, 0, 1}}}
	cur, err := cursor.Aggregate(ctx, db.Collection(collection), mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "series", Value: bson.D{{Key: "$gt", Value: ""}}}}}},
		{{Key: "$limit", Value: limit}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$series"}, {Key: "dead", Value: bson.D{{Key: "$sum", Value: oneIfDead}}}}}},
		{{Key: "$sort", Value: bson.D{{Key: "dead", Value: -1}, {Key: "_id", Value: 1}}}},
	})
	type count struct {
		ID   string `bson:"_id"`
		Dead int64  `bson:"dead"`
	}
	docs, err := cursor.All[count](ctx, "counting dead letters of "+collection, cur, err)
	if err != nil {
		return nil, err
	}

	list := make([]Series, len(docs))
	for i, d := range docs {
		parts := append(strings.Split(d.ID, seriesSeparator), "", "")
		list[i] = Series{Group: parts[0], Handler: parts[1], Class: parts[2], Dead: d.Dead}
	}
	return list, nil
}

// OldestOpen returns when the oldest letter that was neither requeued nor discarded was given up, or nil if there is none. It reads an index up to that letter.
func OldestOpen(ctx context.Context, db *mongo.Database, collection string) (*time.Time, error) {
	var oldest struct {
		GivenUpAt time.Time `bson:"givenUpAt"`
	}
	err := db.Collection(collection).FindOne(ctx, Open(), options.FindOne().
		SetSort(bson.D{{Key: "givenUpAt", Value: 1}, {Key: "_id", Value: -1}}).
		SetProjection(bson.D{{Key: "givenUpAt", Value: 1}})).Decode(&oldest)

	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("finding the oldest dead letter of %s: %w", collection, err)
	}
	at := oldest.GivenUpAt.UTC()
	return &at, nil
}
