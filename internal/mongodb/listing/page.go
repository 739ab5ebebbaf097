package listing

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// ErrCursor is returned for a cursor that no page of the list returned.
var ErrCursor = errors.New("invalid cursor: pass the cursor that the previous page of this list returned")

// EncodeCursor returns the text of a place in a list.
func EncodeCursor(place any) (string, error) {
	data, err := bson.Marshal(place)
	if err != nil {
		return "", fmt.Errorf("encoding a cursor: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(data), nil
}

// ParseCursor reads the text of [EncodeCursor] into place. The error is [ErrCursor].
func ParseCursor(text string, place any) error {
	data, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || bson.Raw(data).Validate() != nil || bson.Unmarshal(data, place) != nil {
		return ErrCursor
	}
	return nil
}

// place is the place of an entry in an order. Its text is the cursor of the page after the entry. It remains valid while entries
// are added and removed, because it contains no number of entries.
type place struct {
	Field string        `bson:"f"` // of the order, so that a list rejects the cursor of another one
	Value bson.RawValue `bson:"v"`
	ID    bson.RawValue `bson:"i"`
}

// Cursor returns the cursor of the page after the entry with these values.
func (o Order) Cursor(value, id any) (string, error) {
	return EncodeCursor(bson.D{{Key: "f", Value: o.Field}, {Key: "v", Value: value}, {Key: "i", Value: id}})
}

// Continue restricts filter to the entries of the page that a cursor names; "" is the first page. The error is [ErrCursor].
func (o Order) Continue(filter bson.D, after string) (bson.D, error) {
	if after == "" {
		return filter, nil
	}
	var last place
	if err := ParseCursor(after, &last); err != nil {
		return nil, err
	}
	if last.Field != o.Field || last.Value.Type == 0 || last.ID.Type == 0 {
		return nil, ErrCursor
	}
	return All(filter, o.After(last.Value, last.ID)), nil
}

// ReadPage reads up to limit entries that filter matches, in this order. after is next of the previous page, or "" for the
// first one; next is "" on the last page. opts must keep the field of the order.
func ReadPage[T any](
	ctx context.Context, coll *mongo.Collection, order Order, filter bson.D, after string, limit int, opts *options.FindOptionsBuilder,
) (page []T, next string, err error) {
	if filter, err = order.Continue(filter, after); err != nil {
		return nil, "", err
	}
	// Without a bound, the server would sort all entries that filter matches by their ids.
	var bound bson.RawValue
	if order.FieldIndex {
		if bound, err = order.findBound(ctx, coll, filter, limit); err != nil {
			return nil, "", err
		}
		if !bound.IsZero() {
			filter = All(filter, order.upTo(bound))
		}
	}

	// One entry more than the page has shows whether there is another page.
	cur, err := cursor.Find(ctx, coll, filter, opts.SetSort(order.Sort()).SetLimit(int64(limit)+1))
	docs, err := cursor.All[bson.Raw](ctx, "reading a page", cur, err)
	if err != nil {
		return nil, "", err
	}

	switch {
	case len(docs) > limit:
		docs = docs[:limit]
		last := docs[limit-1]
		next, err = order.Cursor(last.Lookup(order.Field), last.Lookup("_id"))
	// Entries up to the bound were removed since it was read. The next page begins after the bound.
	case !bound.IsZero():
		next, err = order.Cursor(bound, order.lastID())
	}
	if err != nil {
		return nil, "", err
	}

	page = make([]T, len(docs))
	for i, doc := range docs {
		if err := bson.Unmarshal(doc, &page[i]); err != nil {
			return nil, "", fmt.Errorf("reading entry %s: %w", doc.Lookup("_id"), err)
		}
	}
	return page, next, nil
}

// findBound returns the value of the field in the first entry after a page; zero if the page has all entries.
func (o Order) findBound(ctx context.Context, coll *mongo.Collection, filter bson.D, limit int) (bson.RawValue, error) {
	cur, err := cursor.Find(ctx, coll, filter, options.Find().
		SetSort(o.Sort()[:1]).
		SetSkip(int64(limit)).
		SetLimit(1).
		SetProjection(bson.D{{Key: o.Field, Value: 1}}))
	docs, err := cursor.All[bson.Raw](ctx, "reading the end of a page", cur, err)
	if err != nil || len(docs) == 0 {
		return bson.RawValue{}, err
	}
	return docs[0].Lookup(o.Field), nil
}
