// Package cursor reads the documents of a statement of MongoDB, for the packages of services and of the relay.
//
// Order: as the server returns the documents. Blocking: until the last one has arrived. Cost: all of them in memory, except that Each has
// one response of the server.
package cursor

import (
	"context"
	"fmt"
	"iter"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// All returns the documents of cur, or the error of the statement that failed to open it. doing names the purpose in errors.
func All[T any](ctx context.Context, doing string, cur *mongo.Cursor, err error) ([]T, error) {
	var docs []T
	if err == nil {
		err = cur.All(ctx, &docs)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	return docs, nil
}

// Each iterates over the documents of cur, and closes it. It yields the error of the statement that failed to open it, or of the first document that
// it cannot read, and then ends. doing names the purpose in errors.
func Each[T any](ctx context.Context, doing string, cur *mongo.Cursor, err error) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		if err != nil {
			yield(none, fmt.Errorf("%s: %w", doing, err))
			return
		}

		// An error may be ignored: the server closes an abandoned cursor after a while.
		defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
		for cur.Next(ctx) {
			var doc T
			if err := cur.Decode(&doc); err != nil {
				yield(none, fmt.Errorf("%s: %w", doing, err))
				return
			}
			if !yield(doc, nil) {
				return
			}
		}
		if err := cur.Err(); err != nil {
			yield(none, fmt.Errorf("%s: %w", doing, err))
		}
	}
}

// Distinct returns the values of res, or the error of the statement. DistinctResult.Decode hides that error.
func Distinct[T any](doing string, res *mongo.DistinctResult) ([]T, error) {
	err := res.Err()
	var values []T
	if err == nil {
		err = res.Decode(&values)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	return values, nil
}
