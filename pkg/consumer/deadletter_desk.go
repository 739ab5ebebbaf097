package consumer

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
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

func (q LetterQuery) filter() bson.D {
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
	f := q.filter()
	if after != "" {
		id, at, err := parseCursor(after)
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
		page.Next, err = cursorOf(&page.Letters[limit-1])
	}
	return page, err
}

// letterCursor is a place in a list.
type letterCursor struct {
	ID      LetterID  `bson:"i"`
	MovedAt time.Time `bson:"m"`
}

func cursorOf(l *Letter) (string, error) {
	b, err := bson.MarshalExtJSON(letterCursor{l.ID, l.MovedAt}, false, false)
	return string(b), err
}

func parseCursor(text string) (LetterID, time.Time, error) {
	var c letterCursor
	if err := bson.UnmarshalExtJSON([]byte(text), false, &c); err != nil {
		return c.ID, c.MovedAt, fmt.Errorf("%w: %q is no place in a list of dead letters", ErrValidation, text)
	}
	return c.ID, c.MovedAt, nil
}

// Count is how many letters match: what Requeue and Discard would take.
func (d *DeadLetters) Count(ctx context.Context, q LetterQuery) (int64, error) {
	n, err := d.coll.CountDocuments(ctx, q.filter())
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
		{{Key: "$match", Value: q.filter()}},
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

// Replay is how letters go back to their topic.
type Replay struct {
	Publisher Publisher
	Actor     string // who asks for it; kept with the letter
	Note      string // why; kept with the letter
	// Topic to publish to. Defaults to the one that the message came in at first.
	Topic string
	// Edit may change a message on its way, for example a body that was broken. The letter stays as it was.
	Edit func(m *Message) error
}

// replayClaim is how long another call leaves a letter alone that one is about to requeue.
const replayClaim = time.Minute

// Requeue publishes the matching letters that nobody requeued yet, for the handler alone that gave them up, as the next
// delivery, and marks them. It returns how many; after an error the rest is as it was. A crash between the two publishes a
// letter again when it is asked for next, which the inbox then refuses if it was handled. A query without a condition is
// ErrEmptyQuery.
func (d *DeadLetters) Requeue(ctx context.Context, q LetterQuery, r Replay) (int64, error) {
	if q.Empty() && !q.All {
		return 0, ErrEmptyQuery
	}
	return d.requeue(ctx, q, r, func(*Message) bool { return true })
}

// Unpark requeues the parked letters of a group, those of class no_handler, that takes is true for: a consumer calls it
// with its registry when it has new handlers. They are published for all handlers of the group.
func (d *DeadLetters) Unpark(ctx context.Context, group string, r Replay, takes func(m *Message) bool) (int64, error) {
	return d.requeue(ctx, LetterQuery{Group: group, Class: ClassNoHandler}, r, takes)
}

func (d *DeadLetters) requeue(ctx context.Context, q LetterQuery, r Replay, takes func(*Message) bool) (int64, error) {
	if r.Publisher == nil {
		return 0, &UnsupportedError{Operation: "requeueing dead letters", Needs: "a Publisher"}
	}
	fresh := false
	q.Replayed = &fresh
	var n int64
	for after := ""; ; {
		page, err := d.List(ctx, q, after, DefaultLetterPage)
		if err != nil {
			return n, err
		}
		for i := range page.Letters {
			l := &page.Letters[i]
			if !takes(l.Message()) {
				continue
			}
			done, err := d.requeueOne(ctx, l, r)
			if err != nil {
				return n, err
			}
			if done {
				n++
			}
		}
		if after = page.Next; after == "" {
			return n, nil
		}
	}
}

// requeueOne claims a letter, publishes it and marks it; false if somebody else has it.
func (d *DeadLetters) requeueOne(ctx context.Context, l *Letter, r Replay) (bool, error) {
	free := bson.D{
		{Key: "_id", Value: l.ID},
		{Key: "replayed", Value: nil},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$claimedUntil", time.Time{}}}}, "$$NOW"}}}},
	}
	until := bson.D{{Key: "$add", Value: bson.A{"$$NOW", replayClaim.Milliseconds()}}}
	res, err := d.coll.UpdateOne(ctx, free, mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "claimedUntil", Value: until}}}}})
	if err != nil {
		return false, fmt.Errorf("requeueing dead letter %s: %w", l.ID, err)
	}
	if res.MatchedCount == 0 {
		return false, nil
	}
	m, topic, err := d.back(ctx, l, r)
	if err == nil {
		err = r.Publisher.Publish(ctx, topic, []*Message{m})
	}
	if err != nil {
		// Nothing is known to be published: whoever asks again need not wait for the claim to lapse.
		_, release := d.coll.UpdateOne(context.WithoutCancel(ctx), bson.D{{Key: "_id", Value: l.ID}}, bson.D{{Key: "$unset", Value: bson.D{{Key: "claimedUntil", Value: ""}}}})
		return false, fmt.Errorf("requeueing dead letter %s: %w", l.ID, errors.Join(err, release))
	}
	mark := Replayed{Actor: r.Actor, Note: clip(r.Note, maxReason), Topic: topic, Delivery: m.Delivery}
	_, err = d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: l.ID}}, mongo.Pipeline{
		{{Key: "$set", Value: bson.D{{Key: "replayed", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{bson.D{{Key: "$literal", Value: mark}}, bson.D{{Key: "at", Value: "$$NOW"}}}}}}}}},
		{{Key: "$unset", Value: "claimedUntil"}},
	})
	if err != nil {
		return false, fmt.Errorf("marking dead letter %s, which was requeued: %w", l.ID, err)
	}
	return true, nil
}

// back is the message of a letter on its way back.
func (d *DeadLetters) back(ctx context.Context, l *Letter, r Replay) (*Message, string, error) {
	if err := d.whole(ctx, l); err != nil {
		return nil, "", err
	}
	m := l.Message()
	m.Delivery++
	m.SetHeader(HeaderOnly, []byte(l.ID.Group+"/"+l.ID.Handler))
	m.SetHeader(HeaderDelivery, strconv.AppendInt(nil, int64(m.Delivery), 10))
	m.SetHeader(HeaderRetryOrigin, []byte(l.Origin.String()))
	if l.Class == ClassExpired { // it would expire again
		m.DeleteHeader(HeaderDeliverBy)
		m.DeleteHeader(headerCEExpiryTime)
	}
	if r.Edit != nil {
		if err := r.Edit(m); err != nil {
			return nil, "", err
		}
	}
	topic := r.Topic
	if topic == "" {
		topic = l.Topic
	}
	return m, topic, nil
}
