package cursor

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// maxReadTime is sent with each read that returns a cursor, as its time on the server in all. It takes the place of the limit that a cluster sets
// for reads without one (defaultMaxTimeMS of MongoDB 8.0): a takeover or a sweep may need longer. The end of the
// context ends a read earlier.
const maxReadTime = 24 * time.Hour

// aggregator is a collection or a database.
type aggregator interface {
	Aggregate(ctx context.Context, pipeline any, opts ...options.Lister[options.AggregateOptions]) (*mongo.Cursor, error)
}

// Aggregate opens a cursor on the documents that pipeline produces from a collection or database, with an explicit time limit. It
// repeats a failed statement at most once.
func Aggregate(
	ctx context.Context, target aggregator, pipeline any, opts ...options.Lister[options.AggregateOptions],
) (*mongo.Cursor, error) {
	//nolint:staticcheck // The driver sends no maxTimeMS with a read that returns a cursor (DRIVERS-2722), and has no other way to add it.
	limit := options.Aggregate().SetCustom(bson.M{"maxTimeMS": maxReadTime.Milliseconds()})
	opts = append(slices.Clone(opts), limit)

	// With a deadline, the driver repeats a failed statement until then without a pause. So it gets a context that ends at the same
	// time without one. The server ends a read whose connection is closed.
	call, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	cur, err := target.Aggregate(call, pipeline, opts...)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return cur, err
}

// Find opens a cursor on the documents of coll that filter matches. It sends an aggregation, because only that takes an explicit time limit.
// It takes the options for order, range, fields and plan.
func Find(ctx context.Context, coll *mongo.Collection, filter any, opts ...options.Lister[options.FindOptions]) (*mongo.Cursor, error) {
	var find options.FindOptions
	for _, lister := range opts {
		for _, set := range lister.List() {
			if err := set(&find); err != nil {
				return nil, err
			}
		}
	}

	pipeline := mongo.Pipeline{{{Key: "$match", Value: filter}}}
	for _, stage := range []struct {
		name  string
		set   bool
		value any
	}{
		{"$sort", !isEmpty(find.Sort), find.Sort},
		{"$skip", find.Skip != nil && *find.Skip > 0, find.Skip},
		{"$limit", find.Limit != nil && *find.Limit > 0, find.Limit},
		{"$project", !isEmpty(find.Projection), find.Projection},
	} {
		if stage.set {
			pipeline = append(pipeline, bson.D{{Key: stage.name, Value: stage.value}})
		}
	}

	aggregate := options.Aggregate().SetHint(find.Hint)
	if find.Collation != nil {
		aggregate.SetCollation(find.Collation)
	}
	if find.BatchSize != nil {
		aggregate.SetBatchSize(*find.BatchSize)
	}
	if find.AllowDiskUse != nil {
		aggregate.SetAllowDiskUse(*find.AllowDiskUse)
	}

	// Any other option would be without effect.
	find.Sort, find.Skip, find.Limit, find.Projection = nil, nil, nil, nil
	find.Hint, find.Collation, find.BatchSize, find.AllowDiskUse = nil, nil, nil, nil
	if !reflect.ValueOf(find).IsZero() {
		return nil, fmt.Errorf("reading %s.%s: an aggregation has no such option: %+v", coll.Database().Name(), coll.Name(), find)
	}
	return Aggregate(ctx, coll, pipeline, aggregate)
}

// isEmpty reports whether an option is not set, or is a document without fields, which an aggregation rejects.
func isEmpty(option any) bool {
	fields, isDocument := option.(bson.D)
	return option == nil || isDocument && len(fields) == 0
}
