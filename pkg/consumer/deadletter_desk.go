package consumer

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// ErrEmptyQuery reports that a query to requeue or discard has no condition and does not set All.
var ErrEmptyQuery = errors.New("the query matches every dead letter: give it a condition, or set All")

// LetterQuery selects letters. A letter must match all conditions that are set. The zero query matches every letter.
type LetterQuery struct {
	IDs      []LetterID
	Messages []string // ids of messages; matches all letters of these messages
	Group    string
	Handler  string
	Class    string
	Type     string
	Topic    string // the topic of the message's first record
	Key      []byte
	Reason   string    // a prefix of the reason
	From, To time.Time // moved at From or later, and before To
	// Replayed selects the letters that were requeued (true) or were not requeued (false). nil selects both.
	Replayed *bool

	// All allows Requeue and Discard without any condition: they then apply to every letter.
	All bool
}

// Empty reports whether the query has no condition except Replayed.
func (q LetterQuery) Empty() bool {
	return len(q.IDs) == 0 && len(q.Messages) == 0 && q.Group == "" && q.Handler == "" && q.Class == "" && q.Type == "" &&
		q.Topic == "" && len(q.Key) == 0 && q.Reason == "" && q.From.IsZero() && q.To.IsZero()
}

// buildFilter returns the filter of the query for MongoDB.
func (q LetterQuery) buildFilter() bson.D {
	// Chunks of large values have no class, so this condition leaves them out.
	class := bson.E{Key: "class", Value: bson.D{{Key: "$exists", Value: true}}}
	if q.Class != "" {
		class.Value = q.Class
	}
	filter := bson.D{class}
	require := func(field string, v any) { filter = append(filter, bson.E{Key: field, Value: v}) }

	if len(q.IDs) > 0 {
		require("_id", bson.D{{Key: "$in", Value: q.IDs}})
	}
	if len(q.Messages) > 0 {
		require("_id.id", bson.D{{Key: "$in", Value: q.Messages}})
	}
	for _, c := range []struct{ field, value string }{
		{"_id.group", q.Group}, {"_id.handler", q.Handler}, {"type", q.Type}, {"topic", q.Topic},
	} {
		if c.value != "" {
			require(c.field, c.value)
		}
	}
	if len(q.Key) > 0 {
		require("key", q.Key)
	}
	if q.Reason != "" {
		require("reason", bson.D{{Key: "$regex", Value: "^" + regexp.QuoteMeta(q.Reason)}})
	}

	moved := bson.D{}
	if !q.From.IsZero() {
		moved = append(moved, bson.E{Key: "$gte", Value: q.From})
	}
	if !q.To.IsZero() {
		moved = append(moved, bson.E{Key: "$lt", Value: q.To})
	}
	if len(moved) > 0 {
		require("movedAt", moved)
	}

	if q.Replayed != nil {
		require("replayed", bson.D{{Key: "$exists", Value: *q.Replayed}})
	}
	return filter
}

// DefaultLetterPage is the length of a page if List gets no limit.
const DefaultLetterPage = 100

// LetterPage is a page of a list of letters, latest first. It does not contain values that are stored in chunks. Get reads
// them.
type LetterPage struct {
	Letters []Letter
	Next    string // the cursor of the next page; "" at the end
}

// List returns a page of letters, latest first. after is the Next of the previous page, or "" for the first page. If limit
// is not positive, the page has at most DefaultLetterPage letters.
func (d *DeadLetters) List(ctx context.Context, q LetterQuery, after string, limit int) (LetterPage, error) {
	if limit <= 0 {
		limit = DefaultLetterPage
	}

	filter := q.buildFilter()
	if after != "" {
		id, at, err := decodeCursor(after)
		if err != nil {
			return LetterPage{}, err
		}
		beyond := bson.D{{Key: "$or", Value: bson.A{
			bson.D{{Key: "movedAt", Value: bson.D{{Key: "$lt", Value: at}}}},
			bson.D{{Key: "movedAt", Value: at}, {Key: "_id", Value: bson.D{{Key: "$gt", Value: id}}}},
		}}}
		filter = bson.D{{Key: "$and", Value: bson.A{filter, beyond}}}
	}

	latestFirst := bson.D{{Key: "movedAt", Value: -1}, {Key: "_id", Value: 1}}
	cur, err := d.coll.Find(ctx, filter, options.Find().SetSort(latestFirst).SetLimit(int64(limit)))
	if err != nil {
		return LetterPage{}, fmt.Errorf("listing dead letters of %s: %w", d.name, err)
	}
	var page LetterPage
	if err := cur.All(ctx, &page.Letters); err != nil {
		return LetterPage{}, fmt.Errorf("listing dead letters of %s: %w", d.name, err)
	}

	if len(page.Letters) == limit {
		page.Next, err = encodeCursor(&page.Letters[limit-1])
	}
	return page, err
}

// letterCursor is the place of a letter in a list.
type letterCursor struct {
	ID      LetterID  `bson:"i"`
	MovedAt time.Time `bson:"m"`
}

func encodeCursor(l *Letter) (string, error) {
	b, err := bson.MarshalExtJSON(letterCursor{l.ID, l.MovedAt}, false, false)
	return string(b), err
}

func decodeCursor(text string) (LetterID, time.Time, error) {
	var c letterCursor
	if err := bson.UnmarshalExtJSON([]byte(text), false, &c); err != nil {
		return c.ID, c.MovedAt, fmt.Errorf("%w: invalid cursor %q: pass the Next of the previous page", ErrMalformed, text)
	}
	return c.ID, c.MovedAt, nil
}

// Count returns how many letters match: the number that Requeue and Discard would process.
func (d *DeadLetters) Count(ctx context.Context, q LetterQuery) (int64, error) {
	n, err := d.coll.CountDocuments(ctx, q.buildFilter())
	if err != nil {
		return 0, fmt.Errorf("counting dead letters of %s: %w", d.name, err)
	}
	return n, nil
}

// LetterSummary counts the letters with the same group, handler, type and class.
type LetterSummary struct {
	Group    string    `bson:"group"`
	Handler  string    `bson:"handler"`
	Type     string    `bson:"type"`
	Class    string    `bson:"class"`
	Count    int64     `bson:"count"`
	Replayed int64     `bson:"replayed"` // the part of Count that was requeued
	First    time.Time `bson:"first"`    // when the first of them was moved
	Last     time.Time `bson:"last"`     // when the last of them was moved
}

// Summarize counts the matching letters by group, handler, type and class, and returns the largest counts first.
func (d *DeadLetters) Summarize(ctx context.Context, q LetterQuery) ([]LetterSummary, error) {
	groupKey := bson.D{
		{Key: "group", Value: "$_id.group"},
		{Key: "handler", Value: "$_id.handler"},
		{Key: "type", Value: "$type"},
		{Key: "class", Value: "$class"},
	}
	oneIfReplayed := bson.D{{Key: "$cond", Value: bson.A{
		bson.D{{Key: "$gt", Value: bson.A{"$replayed", nil}}}, 1, 0,
	}}}

	cur, err := d.coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: q.buildFilter()}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: groupKey},
			{Key: "count", Value: bson.D{{Key: "$sum", Value: 1}}},
			{Key: "replayed", Value: bson.D{{Key: "$sum", Value: oneIfReplayed}}},
			{Key: "first", Value: bson.D{{Key: "$min", Value: "$movedAt"}}},
			{Key: "last", Value: bson.D{{Key: "$max", Value: "$movedAt"}}},
		}}},
		{{Key: "$replaceWith", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{"$_id", "$$ROOT"}}}}},
		{{Key: "$sort", Value: bson.D{{Key: "count", Value: -1}, {Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, fmt.Errorf("summarizing dead letters of %s: %w", d.name, err)
	}

	var out []LetterSummary
	if err := cur.All(ctx, &out); err != nil {
		return nil, fmt.Errorf("summarizing dead letters of %s: %w", d.name, err)
	}
	return out, nil
}

// Discard deletes the matching letters permanently and returns how many. Call Count first to see the number. A query
// without a condition returns ErrEmptyQuery, unless it sets All.
func (d *DeadLetters) Discard(ctx context.Context, q LetterQuery) (int64, error) {
	if q.Empty() && !q.All {
		return 0, ErrEmptyQuery
	}

	var n int64
	for {
		// The letters are listed to find their chunks. Chunks are deleted first, because only their letter leads to them.
		page, err := d.List(ctx, q, "", DefaultLetterPage)
		if err != nil || len(page.Letters) == 0 {
			return n, err
		}

		ids := make([]any, 0, len(page.Letters))
		for i := range page.Letters {
			for c := range page.Letters[i].Chunks {
				ids = append(ids, chunkID{page.Letters[i].ID, c})
			}
		}
		if len(ids) > 0 {
			if _, err := d.deleteByID(ctx, ids); err != nil {
				return n, err
			}
		}

		ids = ids[:0]
		for i := range page.Letters {
			ids = append(ids, page.Letters[i].ID)
		}
		deleted, err := d.deleteByID(ctx, ids)
		if err != nil {
			return n, err
		}
		n += deleted
	}
}

// deleteByID deletes documents and returns how many there were.
func (d *DeadLetters) deleteByID(ctx context.Context, ids []any) (int64, error) {
	res, err := d.coll.DeleteMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}})
	if err != nil {
		return 0, fmt.Errorf("discarding dead letters of %s: %w", d.name, err)
	}
	return res.DeletedCount, nil
}
