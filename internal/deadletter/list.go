package deadletter

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// maxConcurrentQueries bounds the collections that are queried at the same time.
const maxConcurrentQueries = 4

// Bounds of a page.
const (
	PageSize    = 100 // the default
	MaxPageSize = 1000
)

// Page selects one page of a list.
type Page struct {
	Limit int    // letters; 0 means PageSize
	After string // Next of the previous page, or "" for the first page
}

// Listing is one page. Its letters have no envelopes: [Open] reads one with its envelope.
type Listing struct {
	Letters []Dead // newest first
	Total   int64  // number of matching letters on all pages
	Next    string // After of the next page, or "" on the last page
}

// List returns a page of the letters of several outboxes, given as namespaces. A cursor remains
// valid while letters are added, requeued or discarded: it contains the place of the last letter,
// not a number of letters.
func List(ctx context.Context, client *mongo.Client, namespaces []string, q Query, page Page) (Listing, error) {
	limit := page.Limit
	if limit <= 0 {
		limit = PageSize
	}
	limit = min(limit, MaxPageSize)

	after, err := parseCursor(page.After)
	if err != nil {
		return Listing{}, err
	}

	// One letter more than the limit shows whether there is another page.
	perCollection := make([][]Dead, len(namespaces))
	options := options.Find().
		SetSort(bson.D{{Key: "movedAt", Value: -1}, {Key: "_id", Value: -1}}).
		SetLimit(int64(limit) + 1).
		SetProjection(bson.D{{Key: "envelope", Value: 0}})
	err = forEachNamespace(ctx, namespaces, func(ctx context.Context, i int) error {
		coll := deadCollection(client, namespaces[i])
		filter := after.narrowFilter(namespaces[i], q.mongoFilter())
		found, err := mongodb.FindAll[Dead](ctx, coll, "listing "+mongodb.Namespace(coll), filter, options)
		perCollection[i] = found
		return err
	})
	if err != nil {
		return Listing{}, err
	}

	// The sort is stable, which keeps the order of the server within a collection.
	out := Listing{Letters: slices.Concat(perCollection...)}
	slices.SortStableFunc(out.Letters, func(a, b Dead) int {
		return cmp.Or(b.MovedAt.Compare(a.MovedAt), strings.Compare(b.ID.NS, a.ID.NS))
	})
	if len(out.Letters) > limit {
		out.Letters = out.Letters[:limit]
		last := out.Letters[limit-1]
		out.Next, err = mongodb.EncodeCursor(cursor{bson.NewDateTimeFromTime(last.MovedAt), last.ID.NS, last.ID})
		if err != nil {
			return Listing{}, err
		}
	}

	out.Total, err = Count(ctx, client, namespaces, q)
	return out, err
}

// Count returns the number of letters that match q in the given outboxes.
func Count(ctx context.Context, client *mongo.Client, namespaces []string, q Query) (int64, error) {
	counts := make([]int64, len(namespaces))
	err := forEachNamespace(ctx, namespaces, func(ctx context.Context, i int) error {
		coll := deadCollection(client, namespaces[i])
		if err := mongodb.CatchUp(ctx, coll); err != nil {
			return err
		}
		n, err := coll.CountDocuments(ctx, q.mongoFilter())
		if err != nil {
			return fmt.Errorf("counting %s: %w", mongodb.Namespace(coll), err)
		}
		counts[i] = n
		return nil
	})

	var total int64
	for _, n := range counts {
		total += n
	}
	return total, err
}

// Group summarizes the letters with the same topic, type and class.
type Group struct {
	Topic      string       `json:"topic,omitempty"`
	Type       string       `json:"type"`
	Class      record.Class `json:"class"`
	Count      int64        `json:"count"`
	Replayable int64        `json:"replayable"` // letters of Count that are not requeued
	First      time.Time    `json:"first"`      // when the oldest letter died
	Last       time.Time    `json:"last"`       // when the newest letter died
}

// groupKey identifies a [Group].
type groupKey struct {
	topic, eventType string
	class            record.Class
}

// Summarize counts the letters that match q by topic, type and class. The largest group comes
// first.
func Summarize(ctx context.Context, client *mongo.Client, namespaces []string, q Query) ([]Group, error) {
	perCollection := make([][]Group, len(namespaces))
	err := forEachNamespace(ctx, namespaces, func(ctx context.Context, i int) error {
		groups, err := summarizeCollection(ctx, deadCollection(client, namespaces[i]), q)
		perCollection[i] = groups
		return err
	})
	if err != nil {
		return nil, err
	}

	groups := mergeGroups(slices.Concat(perCollection...))
	slices.SortFunc(groups, func(a, b Group) int {
		return cmp.Or(
			cmp.Compare(b.Count, a.Count),
			strings.Compare(a.Topic, b.Topic),
			strings.Compare(a.Type, b.Type),
			cmp.Compare(a.Class, b.Class),
		)
	})
	return groups, nil
}

// mergeGroups adds up groups with the same key. The result is not nil.
func mergeGroups(groups []Group) []Group {
	merged := []Group{}
	indexes := map[groupKey]int{}
	for _, g := range groups {
		key := groupKey{g.Topic, g.Type, g.Class}
		i, exists := indexes[key]
		if !exists {
			indexes[key] = len(merged)
			merged = append(merged, g)
			continue
		}

		sum := &merged[i]
		sum.Count += g.Count
		sum.Replayable += g.Replayable
		if g.First.Before(sum.First) {
			sum.First = g.First
		}
		if g.Last.After(sum.Last) {
			sum.Last = g.Last
		}
	}
	return merged
}

func summarizeCollection(ctx context.Context, coll *mongo.Collection, q Query) ([]Group, error) {
	notRequeued := bson.D{{Key: "$eq", Value: bson.A{bson.D{{Key: "$type", Value: "$replayed"}}, "missing"}}}
	replayable := bson.D{{Key: "$cond", Value: bson.A{notRequeued, 1, 0}}}

	return mongodb.AggregateAll[Group](ctx, coll, "summarizing "+mongodb.Namespace(coll), mongo.Pipeline{
		{{Key: "$match", Value: q.mongoFilter()}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{
				{Key: "topic", Value: "$topic"},
				{Key: "type", Value: "$type"},
				{Key: "class", Value: "$class"},
			}},
			{Key: "count", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
			{Key: "replayable", Value: bson.D{{Key: "$sum", Value: replayable}}},
			{Key: "first", Value: bson.D{{Key: "$min", Value: "$movedAt"}}},
			{Key: "last", Value: bson.D{{Key: "$max", Value: "$movedAt"}}},
		}}},
		{{Key: "$replaceWith", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{"$_id", "$$ROOT"}}}}},
	})
}

// CountTopics counts the letters that are not requeued by their topics; the topic of an invalid envelope is "". It reads at
// most limit letters of each outbox, and reports whether there were more.
func CountTopics(
	ctx context.Context, client *mongo.Client, namespaces []string, limit int64,
) (counts map[string]int64, more bool, err error) {
	perCollection := make([]map[string]int64, len(namespaces))
	err = forEachNamespace(ctx, namespaces, func(ctx context.Context, i int) error {
		filter := Query{RequeueStatus: Replayable}.mongoFilter()
		topics, err := mongodb.CountValues(ctx, deadCollection(client, namespaces[i]), filter, "topic", limit)
		perCollection[i] = topics
		return err
	})

	counts = map[string]int64{}
	for _, topics := range perCollection {
		var read int64
		for topic, n := range topics {
			counts[topic] += n
			read += n
		}
		// A collection at the limit may have more letters.
		more = more || read == limit
	}
	return counts, more, err
}

// deadCollection returns the collection with the letters of the outbox ns.
func deadCollection(client *mongo.Client, ns string) *mongo.Collection {
	return mongodb.Majority(outboxes.CollectionOf(client, Collection(ns)))
}

// forEachNamespace calls f for each index of namespaces, several at the same time, and returns the
// first error.
func forEachNamespace(ctx context.Context, namespaces []string, f func(ctx context.Context, i int) error) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrentQueries)
	for i := range namespaces {
		g.Go(func() error { return f(gctx, i) })
	}
	return g.Wait()
}

// cursor is the place of a letter in the order of a list: by the time of the move, the namespace,
// and the rest of the id, all descending.
type cursor struct {
	MovedAt bson.DateTime `bson:"m"`
	NS      string        `bson:"n"`
	ID      ID            `bson:"i"`
}

// parseCursor parses the text of a cursor. It returns nil for "", and [mongodb.ErrCursor] for an invalid
// text.
func parseCursor(text string) (*cursor, error) {
	if text == "" {
		return nil, nil
	}

	c := &cursor{}
	if mongodb.ParseCursor(text, c) != nil || c.NS == "" || c.ID.ID.IsZero() {
		return nil, mongodb.ErrCursor
	}
	return c, nil
}

// narrowFilter returns filter restricted to the letters of ns that come after the cursor. A nil
// cursor does not restrict.
func (c *cursor) narrowFilter(ns string, filter bson.D) bson.D {
	if c == nil {
		return filter
	}

	movedAt := func(op string) bson.D {
		return bson.D{{Key: "movedAt", Value: bson.D{{Key: op, Value: c.MovedAt}}}}
	}
	// Letters of equal times are in descending order of their namespaces.
	switch strings.Compare(ns, c.NS) {
	case -1:
		return joinFilters(filter, movedAt("$lte"))
	case 1:
		return joinFilters(filter, movedAt("$lt"))
	}
	return joinFilters(filter, movedAt("$lte"), bson.D{{Key: "$or", Value: bson.A{
		movedAt("$lt"),
		bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: c.ID}}}},
	}}})
}
