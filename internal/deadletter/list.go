package deadletter

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
)

// maxConcurrentQueries bounds the collections that are asked at once.
const maxConcurrentQueries = 4

// Bounds of a page.
const (
	PageSize    = 100 // when none is asked for
	MaxPageSize = 1000
)

// Page is which part of a list.
type Page struct {
	Limit int    // letters; 0 is PageSize
	After string // Next of the page before; "" is the first
}

// Listing is one page. Envelopes are left out: Open reads one.
type Listing struct {
	Letters []Dead // the latest first
	Total   int64  // letters that match, on all pages
	Next    string // the next page's After; "" at the end
}

// ErrCursor says that a page was asked for by a text that no page gave.
var ErrCursor = errors.New("the cursor is none that a page of dead letters has given")

// List reads a page of the letters of several outboxes, given as namespaces. A cursor stays good whatever is moved, requeued or
// discarded meanwhile: it names the last letter's place, not a number of letters.
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
	parts := make([][]Dead, len(namespaces))
	err = forEachNamespace(ctx, namespaces, func(ctx context.Context, i int) error {
		coll, err := deadCollection(client, namespaces[i])
		if err != nil {
			return err
		}
		parts[i], err = listCollection(ctx, coll, after.narrowFilter(namespaces[i], q.mongoFilter()), limit+1)
		return err
	})
	if err != nil {
		return Listing{}, err
	}
	out := Listing{Letters: slices.Concat(parts...)}
	// Stable: within a collection the server has sorted.
	slices.SortStableFunc(out.Letters, func(a, b Dead) int {
		return cmp.Or(b.MovedAt.Compare(a.MovedAt), strings.Compare(b.ID.NS, a.ID.NS))
	})
	if len(out.Letters) > limit {
		out.Letters = out.Letters[:limit]
		if out.Next, err = newCursor(out.Letters[limit-1]).encode(); err != nil {
			return Listing{}, err
		}
	}
	out.Total, err = Count(ctx, client, namespaces, q)
	return out, err
}

func listCollection(ctx context.Context, coll *mongo.Collection, filter bson.D, limit int) ([]Dead, error) {
	cur, err := coll.Find(ctx, filter, options.Find().SetSort(bson.D{{Key: "movedAt", Value: -1}, {Key: "_id", Value: -1}}).
		SetLimit(int64(limit)).SetProjection(bson.D{{Key: "envelope", Value: 0}}))
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", store.Namespace(coll), err)
	}
	var out []Dead
	if err := cur.All(ctx, &out); err != nil {
		return nil, fmt.Errorf("listing %s: %w", store.Namespace(coll), err)
	}
	return out, nil
}

// Count is how many letters match.
func Count(ctx context.Context, client *mongo.Client, namespaces []string, q Query) (int64, error) {
	counts := make([]int64, len(namespaces))
	err := forEachNamespace(ctx, namespaces, func(ctx context.Context, i int) error {
		coll, err := deadCollection(client, namespaces[i])
		if err != nil {
			return err
		}
		if err := store.CatchUp(ctx, coll); err != nil {
			return err
		}
		if counts[i], err = coll.CountDocuments(ctx, q.mongoFilter()); err != nil {
			return fmt.Errorf("counting %s: %w", store.Namespace(coll), err)
		}
		return nil
	})
	var total int64
	for _, n := range counts {
		total += n
	}
	return total, err
}

// Group is the letters of one topic, type and class.
type Group struct {
	Topic       string
	Type        string
	Class       record.Class
	Count       int64
	Replayable  int64     // of Count, those that nobody requeued
	First, Last time.Time // moved to the dead letters
}

// Summarize counts the letters that match by topic, type and class, the most frequent first.
func Summarize(ctx context.Context, client *mongo.Client, namespaces []string, q Query) ([]Group, error) {
	parts := make([][]Group, len(namespaces))
	err := forEachNamespace(ctx, namespaces, func(ctx context.Context, i int) error {
		coll, err := deadCollection(client, namespaces[i])
		if err != nil {
			return err
		}
		parts[i], err = summarizeCollection(ctx, coll, q)
		return err
	})
	if err != nil {
		return nil, err
	}
	type key struct {
		topic, typ string
		class      record.Class
	}
	at := map[key]int{}
	out := []Group{}
	for _, g := range slices.Concat(parts...) {
		k := key{g.Topic, g.Type, g.Class}
		i, known := at[k]
		if !known {
			at[k] = len(out)
			out = append(out, g)
			continue
		}
		sum := &out[i]
		sum.Count += g.Count
		sum.Replayable += g.Replayable
		if g.First.Before(sum.First) {
			sum.First = g.First
		}
		if g.Last.After(sum.Last) {
			sum.Last = g.Last
		}
	}
	slices.SortFunc(out, func(a, b Group) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.Topic, b.Topic), strings.Compare(a.Type, b.Type), cmp.Compare(a.Class, b.Class))
	})
	return out, nil
}

func summarizeCollection(ctx context.Context, coll *mongo.Collection, q Query) ([]Group, error) {
	replayable := bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$eq", Value: bson.A{bson.D{{Key: "$type", Value: "$replayed"}}, "missing"}}}, 1, 0}}}
	cur, err := coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: q.mongoFilter()}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "topic", Value: "$topic"}, {Key: "type", Value: "$type"}, {Key: "class", Value: "$class"}}},
			{Key: "count", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
			{Key: "replayable", Value: bson.D{{Key: "$sum", Value: replayable}}},
			{Key: "first", Value: bson.D{{Key: "$min", Value: "$movedAt"}}},
			{Key: "last", Value: bson.D{{Key: "$max", Value: "$movedAt"}}},
		}}},
	})
	if err != nil {
		return nil, fmt.Errorf("summarizing %s: %w", store.Namespace(coll), err)
	}
	var rows []struct {
		ID struct {
			Topic, Type string
			Class       record.Class
		} `bson:"_id"`
		Count, Replayable int64
		First, Last       time.Time
	}
	if err := cur.All(ctx, &rows); err != nil {
		return nil, fmt.Errorf("summarizing %s: %w", store.Namespace(coll), err)
	}
	out := make([]Group, len(rows))
	for i, r := range rows {
		out[i] = Group{Topic: r.ID.Topic, Type: r.ID.Type, Class: r.ID.Class, Count: r.Count, Replayable: r.Replayable, First: r.First, Last: r.Last}
	}
	return out, nil
}

// deadCollection is the collection of the letters of an outbox.
func deadCollection(client *mongo.Client, ns string) (*mongo.Collection, error) {
	db, coll, ok := strings.Cut(ns, ".")
	if !ok || db == "" || coll == "" {
		return nil, fmt.Errorf("namespace %q is not <database>.<collection>", ns)
	}
	return store.Majority(client.Database(db).Collection(Collection(coll))), nil
}

func forEachNamespace(ctx context.Context, namespaces []string, f func(ctx context.Context, i int) error) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrentQueries)
	for i := range namespaces {
		g.Go(func() error { return f(gctx, i) })
	}
	return g.Wait()
}

// cursor is the place of a letter in the order of a list: by the time of the move, the namespace, and the rest of the id,
// all descending.
type cursor struct {
	MovedAt bson.DateTime `bson:"m"`
	NS      string        `bson:"n"`
	ID      ID            `bson:"i"`
}

func newCursor(d Dead) *cursor {
	return &cursor{MovedAt: bson.NewDateTimeFromTime(d.MovedAt), NS: d.ID.NS, ID: d.ID}
}

func (c *cursor) encode() (string, error) {
	b, err := bson.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("making a cursor: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(b), nil
}

func parseCursor(text string) (*cursor, error) {
	if text == "" {
		return nil, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return nil, ErrCursor
	}
	c := &cursor{}
	if err := bson.Unmarshal(b, c); err != nil || c.NS == "" || c.ID.ID.IsZero() {
		return nil, ErrCursor
	}
	return c, nil
}

// narrowFilter narrows the filter to the letters of ns that come after the cursor.
func (c *cursor) narrowFilter(ns string, filter bson.D) bson.D {
	if c == nil {
		return filter
	}
	movedAt := func(op string) bson.D {
		return bson.D{{Key: "movedAt", Value: bson.D{{Key: op, Value: c.MovedAt}}}}
	}
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
