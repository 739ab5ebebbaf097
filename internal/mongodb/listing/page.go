package listing

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// place is the place of an entry in an order. Its text is the cursor of the page after the entry. It remains valid while entries
// are added and removed, because it contains no number of entries.
type place struct {
	Field string        `bson:"f"` // of the order, so that a list rejects the cursor of another one
	Value bson.RawValue `bson:"v"`
	ID    bson.RawValue `bson:"i"`
}

// Cursor returns the cursor of the page after the entry with these values.
func (o Order) Cursor(value, id any) (string, error) {
	return mongodb.EncodeCursor(bson.D{{Key: "f", Value: o.Field}, {Key: "v", Value: value}, {Key: "i", Value: id}})
}

// Continue restricts filter to the entries of the page that a cursor names; "" is the first page. The error is
// [mongodb.ErrCursor].
func (o Order) Continue(filter bson.D, after string) (bson.D, error) {
	if after == "" {
		return filter, nil
	}
	var last place
	if err := mongodb.ParseCursor(after, &last); err != nil {
		return nil, err
	}
	if last.Field != o.Field || last.Value.Type == 0 || last.ID.Type == 0 {
		return nil, mongodb.ErrCursor
	}
	return All(filter, o.After(last.Value, last.ID)), nil
}

// ReadPage reads up to limit entries that filter matches, in this order. after is next of the previous page, or "" for the
// first one; next is "" on the last page. doing names the purpose in errors. opts must keep the field of the order.
func ReadPage[T any](
	ctx context.Context, coll *mongo.Collection, doing string, order Order, filter bson.D, after string, limit int,
	opts *options.FindOptionsBuilder,
) (page []T, next string, err error) {
	if filter, err = order.Continue(filter, after); err != nil {
		return nil, "", err
	}
	// One entry more than the page has shows whether there is another page.
	docs, err := mongodb.FindAll[bson.Raw](ctx, coll, doing, filter, opts.SetSort(order.Sort()).SetLimit(int64(limit)+1))
	if err != nil {
		return nil, "", err
	}

	if len(docs) > limit {
		docs = docs[:limit]
		last := docs[limit-1]
		if next, err = order.Cursor(last.Lookup(order.Field), last.Lookup("_id")); err != nil {
			return nil, "", err
		}
	}
	page = make([]T, len(docs))
	for i, doc := range docs {
		if err := bson.Unmarshal(doc, &page[i]); err != nil {
			return nil, "", fmt.Errorf("%s: %w", doing, err)
		}
	}
	return page, next, nil
}
