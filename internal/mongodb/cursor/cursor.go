// Package cursor reads the documents of a statement of MongoDB, for the packages of services and of the relay.
//
// Order: as the server returns the documents. Blocking: until the last one has arrived. Cost: all of them in memory.
package cursor

import (
	"context"
	"fmt"

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
