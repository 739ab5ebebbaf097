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

// ErrEmptyQuery refuses to requeue or discard by a query that names no condition.
var ErrEmptyQuery = errors.New("the query names no dead letters; give it a condition, or say that all of them are meant")

// LetterQuery says which letters. Conditions that are set hold all together; the zero query is every letter.
type LetterQuery struct {
	IDs      []LetterID
	Messages []string // ids of messages, every letter of them
	Group    string
	Handler  string
	Class    string
	Type     string
	Topic    string // the one that the message came in at first
	Key      []byte
	Reason   string    // the reason begins with it
	From, To time.Time // moved at From or later, and before To
	// Replayed asks for letters that were requeued, or were not; nil for both.
	Replayed *bool

	// All lets a query without any condition requeue or discard: every letter there is.
	All bool
}

// Empty reports whether the query has no condition but Replayed.
func (q LetterQuery) Empty() bool {
	return len(q.IDs) == 0 && len(q.Messages) == 0 && q.Group == "" && q.Handler == "" && q.Class == "" && q.Type == "" &&
		q.Topic == "" && len(q.Key) == 0 && q.Reason == "" && q.From.IsZero() && q.To.IsZero()
}

func (q LetterQuery) buildFilter() bson.D {
	f := bson.D{{Key: "class", Value: bson.D{{Key: "$exists", Value: true}}}} // letters, not parts of their values
	and := func(field string, v any) { f = append(f, bson.E{Key: field, Value: v}) }
	if len(q.IDs) > 0 {
		and("_id", bson.D{{Key: "$in", Value: q.IDs}})
	}
	if len(q.Messages) > 0 {
		and("_id.id", bson.D{{Key: "$in", Value: q.Messages}})
	}
	for _, c := range []struct{ field, value string }{
		{"_id.group", q.Group}, {"_id.handler", q.Handler}, {"type", q.Type}, {"topic", q.Topic},
	} {
		if c.value != "" {
			and(c.field, c.value)
		}
	}
	if q.Class != "" {
		f[0].Value = q.Class
	}
	if len(q.Key) > 0 {
		and("key", q.Key)
	}
	if q.Reason != "" {
		and("reason", bson.D{{Key: "$regex", Value: "^" + regexp.QuoteMeta(q.Reason)}})
	}
	moved := bson.D{}
	if !q.From.IsZero() {
		moved = append(moved, bson.E{Key: "$gte", Value: q.From})
	}
	if !q.To.IsZero() {
		moved = append(moved, bson.E{Key: "$lt", Value: q.To})
	}
	if len(moved) > 0 {
		and("movedAt", moved)
	}
	if q.Replayed != nil {
		and("replayed", bson.D{{Key: "$exists", Value: *q.Replayed}})
	}
	return f
}

// DefaultLetterPage is the length of a page unless List is told another.
const DefaultLetterPage = 100

// LetterPage is a part of a list, latest first. Values that are kept in parts are left out; Get reads them.
type LetterPage struct {
	Letters []Letter
	Next    string // "" at the end
}

// List reads a page of letters, latest first; after is the Next of the page before, "" for the first.
func (d *DeadLetters) List(ctx context.Context, q LetterQuery, after string, limit int) (LetterPage, error) {
	if limit <= 0 {
		limit = DefaultLetterPage
	}
	f := q.buildFilter()
	if after != "" {
		id, at, err := decodeCursor(after)
		if err != nil {
			return LetterPage{}, err
		}
		f = bson.D{{Key: "$and", Value: bson.A{f, bson.D{{Key: "$or", Value: bson.A{
			bson.D{{Key: "movedAt", Value: bson.D{{Key: "$lt", Value: at}}}},
			bson.D{{Key: "movedAt", Value: at}, {Key: "_id", Value: bson.D{{Key: "$gt", Value: id}}}},
		}}}}}}
	}
	cur, err := d.coll.Find(ctx, f, options.Find().SetSort(bson.D{{Key: "movedAt", Value: -1}, {Key: "_id", Value: 1}}).SetLimit(int64(limit)))
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

// letterCursor is a place in a list.
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
		return c.ID, c.MovedAt, fmt.Errorf("%w: %q is no place in a list of dead letters", ErrValidation, text)
	}
	return c.ID, c.MovedAt, nil
}

// Count is how many letters match: what Requeue and Discard would take.
func (d *DeadLetters) Count(ctx context.Context, q LetterQuery) (int64, error) {
	n, err := d.coll.CountDocuments(ctx, q.buildFilter())
	if err != nil {
		return 0, fmt.Errorf("counting dead letters of %s: %w", d.name, err)
	}
	return n, nil
}

// LetterSummary counts letters that have the same owner, type and class.
type LetterSummary struct {
	Group    string    `bson:"group"`
	Handler  string    `bson:"handler"`
	Type     string    `bson:"type"`
	Class    string    `bson:"class"`
	Count    int64     `bson:"count"`
	Replayed int64     `bson:"replayed"` // of Count
	First    time.Time `bson:"first"`    // moved
	Last     time.Time `bson:"last"`
}

// Summarize counts the matching letters by group, handler, type and class, the most first.
func (d *DeadLetters) Summarize(ctx context.Context, q LetterQuery) ([]LetterSummary, error) {
	cur, err := d.coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: q.buildFilter()}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "group", Value: "$_id.group"}, {Key: "handler", Value: "$_id.handler"}, {Key: "type", Value: "$type"}, {Key: "class", Value: "$class"}}},
			{Key: "count", Value: bson.D{{Key: "$sum", Value: 1}}},
			{Key: "replayed", Value: bson.D{{Key: "$sum", Value: bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$gt", Value: bson.A{"$replayed", nil}}}, 1, 0}}}}}},
			{Key: "first", Value: bson.D{{Key: "$min", Value: "$movedAt"}}},
			{Key: "last", Value: bson.D{{Key: "$max", Value: "$movedAt"}}},
		}}},
		{{Key: "$replaceWith", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{"$_id", "$$ROOT"}}}}},
		{{Key: "$sort", Value: bson.D{{Key: "count", Value: -1}, {Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, fmt.Errorf("summarising dead letters of %s: %w", d.name, err)
	}
	var out []LetterSummary
	if err := cur.All(ctx, &out); err != nil {
		return nil, fmt.Errorf("summarising dead letters of %s: %w", d.name, err)
	}
	return out, nil
}

// Discard deletes the matching letters for good and returns how many. Count tells beforehand. A query without a condition
// is ErrEmptyQuery.
func (d *DeadLetters) Discard(ctx context.Context, q LetterQuery) (int64, error) {
	if q.Empty() && !q.All {
		return 0, ErrEmptyQuery
	}
	var n int64
	for {
		// In parts, so that the values that are kept beside their letters go with them.
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
			if _, err := d.coll.DeleteMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}); err != nil {
				return n, fmt.Errorf("discarding dead letters of %s: %w", d.name, err)
			}
		}
		ids = ids[:0]
		for i := range page.Letters {
			ids = append(ids, page.Letters[i].ID)
		}
		res, err := d.coll.DeleteMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}})
		if err != nil {
			return n, fmt.Errorf("discarding dead letters of %s: %w", d.name, err)
		}
		n += res.DeletedCount
	}
}
