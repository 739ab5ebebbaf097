package admin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/purge"
	"github.com/outrelay/outrelay/pkg/event"
)

// replayReply bounds one read of a replay: a collection without the index on ts is sorted before the first reply comes.
const replayReply = 2 * time.Minute

// replayQuery says which delivered envelopes are meant. Every list that is not empty narrows it.
type replayQuery struct {
	Collections    []string       `bson:"collections"` // namespaces, in the order in which they are replayed
	From           bson.Timestamp `bson:"from"`        // the first stamp
	Until          bson.Timestamp `bson:"until"`       // the last
	IDs            []string       `bson:"ids,omitempty"`
	Keys           []string       `bson:"keys,omitempty"`
	Types          []string       `bson:"types,omitempty"`
	AggregateTypes []string       `bson:"aggregateTypes,omitempty"`
	Topics         []string       `bson:"topics,omitempty"` // not asked of MongoDB: the rules tell the topics
}

// filter are the envelopes with a stamp in (after, until] that no exception and no schedule stands for.
func (q replayQuery) filter(after, until bson.Timestamp) bson.D {
	ts := bson.D{{Key: "$gt", Value: after}, {Key: "$lte", Value: until}}
	if q.From.After(after) {
		ts[0] = bson.E{Key: "$gte", Value: q.From}
	}
	d := bson.D{{Key: "ts", Value: ts}, {Key: "state", Value: nil}, {Key: "dueAt", Value: nil}}
	if len(q.IDs) > 0 {
		var ids bson.A
		for _, text := range q.IDs {
			ids = append(ids, event.ParseID(text))
			if other := event.NewID(text); other != event.ParseID(text) {
				ids = append(ids, other)
			}
		}
		d = append(d, bson.E{Key: "_id", Value: in(ids)})
	}
	if len(q.Types) > 0 {
		d = append(d, bson.E{Key: "type", Value: in(q.Types)})
	}
	if len(q.AggregateTypes) > 0 {
		d = append(d, bson.E{Key: "aggregatetype", Value: in(q.AggregateTypes)})
	}
	if len(q.Keys) > 0 {
		var keys bson.A
		for _, text := range q.Keys {
			keys = append(keys, purge.KeyForms(text)...)
		}
		d = append(d, bson.E{Key: "$or", Value: bson.A{
			bson.D{{Key: "key", Value: in(keys)}},
			bson.D{{Key: "key", Value: in(bson.A{nil, ""})}, {Key: "aggregateid", Value: in(keys)}},
		}})
	}
	return d
}

func in(list any) bson.D { return bson.D{{Key: "$in", Value: list}} }

// replayGroup counts the envelopes that go the same way.
type replayGroup struct {
	AggregateType string
	Type          string
	Topic         string // that the envelopes name themselves; "" where the rules decide
	N             int64
}

// countReplay counts what the query finds in coll now, by all that decides where an envelope goes.
func countReplay(ctx context.Context, coll *mongo.Collection, q replayQuery) ([]replayGroup, error) {
	text := func(field string) bson.D { return bson.D{{Key: "$ifNull", Value: bson.A{field, ""}}} }
	cur, err := mongodb.Majority(coll).Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: q.filter(bson.Timestamp{}, q.Until)}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "a", Value: text("$aggregatetype")}, {Key: "t", Value: text("$type")}, {Key: "o", Value: text("$topic")}}},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: 1}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "n", Value: -1}, {Key: "_id", Value: 1}}}},
	}, options.Aggregate().SetAllowDiskUse(true))
	if err != nil {
		return nil, mongodb.Refusal(err, "counting envelopes of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}
	var rows []struct {
		ID struct{ A, T, O bson.RawValue } `bson:"_id"`
		N  int64                           `bson:"n"`
	}
	if err := cur.All(ctx, &rows); err != nil {
		return nil, fmt.Errorf("counting envelopes of %s: %w", mongodb.Namespace(coll), err)
	}
	out := make([]replayGroup, len(rows))
	for i, r := range rows {
		out[i].N = r.N
		out[i].AggregateType, _ = r.ID.A.StringValueOK()
		out[i].Type, _ = r.ID.T.StringValueOK()
		out[i].Topic, _ = r.ID.O.StringValueOK()
	}
	return out, nil
}

// readEnvelopes reads, in the order of their stamps, up to limit envelopes behind after, as whole as routing needs them: with
// null for a payload and without headers. It never breaks a run of equal stamps apart, so there may be more. seen is a
// time of the cluster up to which everything that was read is committed. N21: a majority read on the primary.
func readEnvelopes(ctx context.Context, coll *mongo.Collection, q replayQuery, after bson.Timestamp, limit int) (docs []bson.Raw, seen bson.Timestamp, err error) {
	ctx, cancel := context.WithTimeout(ctx, replayReply)
	defer cancel()
	sess, err := coll.Database().Client().StartSession()
	if err != nil {
		return nil, seen, fmt.Errorf("starting a session: %w", err)
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	ctx = mongo.NewSessionContext(ctx, sess)
	docs, err = findEnvelopesToReplay(ctx, coll, q.filter(after, q.Until), limit+1)
	if err == nil && len(docs) > limit {
		last := parseStamp(docs[limit])
		n := limit
		for n > 0 && parseStamp(docs[n-1]) == last {
			n--
		}
		if docs = docs[:n]; n == 0 { // copied documents share a stamp: all of them at once
			docs, err = findEnvelopesToReplay(ctx, coll, q.filter(beforeStamp(last), last), 0)
		}
	}
	if err != nil {
		return nil, seen, err
	}
	at := sess.OperationTime()
	if at == nil {
		return nil, seen, errors.New("reading envelopes to replay: the server tells no time; a replica set is needed")
	}
	return docs, *at, nil
}

var replayFields = bson.D{
	{Key: "ts", Value: 1},
	{Key: "aggregatetype", Value: 1},
	{Key: "aggregateid", Value: 1},
	{Key: "type", Value: 1},
	{Key: "key", Value: 1},
	{Key: "topic", Value: 1},
	{Key: "partition", Value: 1},
	{Key: "expiresAt", Value: 1},
	{Key: "payload", Value: asLiteral(nil)},
}

func findEnvelopesToReplay(ctx context.Context, coll *mongo.Collection, filter bson.D, limit int) ([]bson.Raw, error) {
	cur, err := mongodb.Majority(coll).Find(ctx, filter, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}).SetLimit(int64(limit)).SetProjection(replayFields).SetAllowDiskUse(true))
	if err != nil {
		return nil, mongodb.Refusal(err, "reading envelopes of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}
	var docs []bson.Raw
	if err := cur.All(ctx, &docs); err != nil {
		return nil, fmt.Errorf("reading envelopes of %s: %w", mongodb.Namespace(coll), err)
	}
	return docs, nil
}

// beforeStamp is the greatest timestamp below t, which is not zero.
func beforeStamp(t bson.Timestamp) bson.Timestamp {
	if t.I > 0 {
		return bson.Timestamp{T: t.T, I: t.I - 1}
	}
	return bson.Timestamp{T: t.T - 1, I: 1<<32 - 1}
}
