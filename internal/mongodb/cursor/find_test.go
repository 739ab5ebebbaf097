package cursor_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// A cluster may set a time limit for reads (defaultMaxTimeMS of MongoDB 8.0). It holds only for statements without a limit of their own.
func TestEachReadSendsATimeLimit(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var sent []bson.Raw
	client := stacktest.Client(t, options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		mu.Lock()
		defer mu.Unlock()
		if slices.Contains([]string{"find", "aggregate", "count", "distinct"}, e.CommandName) {
			sent = append(sent, slices.Clone(e.Command))
		}
	}}))
	coll := stacktest.Database(t, client).Collection("c")
	if _, err := coll.InsertMany(t.Context(), []any{bson.D{{Key: "a", Value: "x"}}, bson.D{{Key: "a", Value: "x"}}, bson.D{}}); err != nil {
		t.Fatal(err)
	}

	ignore := func(bson.Raw) error { return nil }
	reads := map[string]func(context.Context) error{
		"a list": func(ctx context.Context) error {
			_, err := mongodb.FindAll[bson.Raw](ctx, coll, "listing", bson.D{})
			return err
		},
		"each document": func(ctx context.Context) error {
			return mongodb.FindEach(ctx, coll, "reading", bson.D{}, ignore, options.Find().SetBatchSize(2))
		},
		"a pipeline": func(ctx context.Context) error {
			_, err := mongodb.AggregateAll[bson.Raw](ctx, coll, "reading", mongo.Pipeline{})
			return err
		},
		"values": func(ctx context.Context) error {
			_, err := mongodb.CountValues(ctx, coll, bson.D{}, "a", 10)
			return err
		},
		"a pipeline of a database": func(ctx context.Context) error {
			cur, err := cursor.Aggregate(ctx, client.Database("admin"), mongo.Pipeline{{{Key: "$currentOp", Value: bson.D{}}}})
			if err != nil {
				return err
			}
			return cur.Close(ctx)
		},
		"a change stream": func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			stream, err := coll.Watch(ctx, mongo.Pipeline{})
			if err != nil {
				return err
			}
			return stream.Close(ctx)
		},
	}
	for name, read := range reads {
		sent = nil
		if err := read(t.Context()); err != nil || len(sent) == 0 {
			t.Errorf("%s: %v, %d statements", name, err, len(sent))
		}
		for _, command := range sent {
			if limit, ok := command.Lookup("maxTimeMS").AsInt64OK(); !ok || limit <= 0 {
				t.Errorf("%s has no time limit: %s", name, command)
			}
		}
	}
}

// Find takes the options of a find, and reads by an aggregation.
func TestFindTakesTheOptionsOfAFind(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("c")
	for _, letter := range []string{"b", "A", "c", "B", "a"} {
		if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: letter}, {Key: "more", Value: 1}}); err != nil {
			t.Fatal(err)
		}
	}

	insensitive := &options.Collation{Locale: "en", Strength: 2}
	byID := bson.D{{Key: "_id", Value: 1}}
	for name, c := range map[string]struct {
		filter any
		opts   *options.FindOptionsBuilder
		want   []string
	}{
		"order":     {bson.D{}, options.Find().SetSort(byID).SetHint(byID), []string{"A", "B", "a", "b", "c"}},
		"range":     {bson.D{}, options.Find().SetSort(byID).SetSkip(1).SetLimit(2), []string{"B", "a"}},
		"no limits": {bson.D{}, options.Find().SetSort(byID).SetSkip(0).SetLimit(0).SetBatchSize(2).SetAllowDiskUse(true), []string{"A", "B", "a", "b", "c"}},
		"no order":  {bson.D{}, options.Find().SetSort(bson.D{}).SetProjection(bson.D{}).SetHint(byID), []string{"A", "B", "a", "b", "c"}},
		"backwards": {bson.D{}, options.Find().SetHint(bson.D{{Key: "$natural", Value: -1}}), []string{"a", "B", "c", "A", "b"}},
		"collation": {bson.D{{Key: "_id", Value: "b"}}, options.Find().SetCollation(insensitive), []string{"b", "B"}},
		"filter":    {bson.M{"_id": bson.M{"$gt": "a"}}, options.Find().SetSort(byID), []string{"b", "c"}},
	} {
		docs, err := mongodb.FindAll[bson.Raw](t.Context(), coll, "reading", c.filter, c.opts, options.Find().SetProjection(byID))
		var got []string
		for _, doc := range docs {
			got = append(got, doc.Lookup("_id").StringValue())
			if _, err := doc.LookupErr("more"); err == nil {
				t.Errorf("%s: the projection is not used: %s", name, doc)
			}
		}
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v (%v)", name, got, c.want, err)
		}
	}

	if _, err := mongodb.FindAll[bson.Raw](t.Context(), coll, "reading", bson.D{}, options.Find().SetMin(byID)); err == nil || !strings.Contains(err.Error(), "no such option") {
		t.Errorf("an option that an aggregation does not have: %v", err)
	}
}

// With a deadline, the driver would repeat a read for as long as the server closes its connections.
func TestAReadWithADeadlineIsRepeatedOnce(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	var attempts atomic.Int64
	client := stacktest.Client(t, options.Client().SetAppName(app).SetMonitor(&event.CommandMonitor{
		Started: func(context.Context, *event.CommandStartedEvent) { attempts.Add(1) },
	}))
	coll := stacktest.Database(t, client).Collection("c")
	read := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := cursor.Find(ctx, coll, bson.D{})
		return err
	}
	if err := read(); err != nil {
		t.Fatal(err)
	}

	for what, failure := range map[string]bson.E{
		"that is closed": {Key: "closeConnection", Value: true},
		"that is silent": {Key: "blockConnection", Value: true},
	} {
		attempts.Store(0)
		off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"aggregate"}}, failure, {Key: "blockTimeMS", Value: 3000}})
		err := read()
		off()
		if n := attempts.Load(); err == nil || n > 2 {
			t.Errorf("by a connection %s: %d attempts (%v), want two", what, n, err)
		}
		if isLate := failure.Key == "blockConnection"; mongo.IsTimeout(err) != isLate || errors.Is(err, context.DeadlineExceeded) != isLate {
			t.Errorf("by a connection %s: is a timeout: %v, want %v (%v)", what, mongo.IsTimeout(err), isLate, err)
		}
	}
}
