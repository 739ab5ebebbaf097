package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/purge"
	"github.com/outrelay/outrelay/pkg/event"
)

// replayResponse bounds one read of a replay. Without the index on ts, the server sorts the collection
// before its first response.
const replayResponse = 2 * time.Minute

// replayQuery selects delivered envelopes. Every list that is not empty is a condition.
type replayQuery struct {
	Collections    []string       `bson:"collections"` // namespaces, in the order in which they are replayed
	From           bson.Timestamp `bson:"from"`        // the first timestamp
	Until          bson.Timestamp `bson:"until"`       // the last
	IDs            []string       `bson:"ids,omitempty"`
	Keys           []string       `bson:"keys,omitempty"`
	Types          []string       `bson:"types,omitempty"`
	AggregateTypes []string       `bson:"aggregateTypes,omitempty"`
	Topics         []string       `bson:"topics,omitempty"` // evaluated by the routing rules, not by MongoDB

	mapping *envelope.Mapping // of the watcher, not stored
	whole   bool              // the routing may need every field
}

// buildRangeFilter selects the envelopes with a timestamp in (after, until] that are not scheduled.
func (q replayQuery) buildRangeFilter(after, until bson.Timestamp) bson.D {
	ts := bson.D{{Key: "$gt", Value: after}, {Key: "$lte", Value: until}}
	if q.From.After(after) {
		ts[0] = bson.E{Key: "$gte", Value: q.From}
	}

	return append(bson.D{envelope.Stamped(ts...)}, q.buildConditions()...)
}

// buildConditions selects the envelopes at any time that are not scheduled.
func (q replayQuery) buildConditions() bson.D {
	document := outboxes.WithoutDueAt()

	if len(q.IDs) > 0 {
		// A text may stand for several types of ids, so the filter has all of them.
		var ids []event.ID
		for _, text := range q.IDs {
			ids = append(ids, parseIDs(text)...)
		}
		document = append(document, bson.E{Key: "_id", Value: anyOf(ids)})
	}

	if len(q.Types) > 0 {
		document = append(document, bson.E{Key: cmp.Or(q.mapping.Name("type"), "type"), Value: anyOf(q.Types)})
	}
	if len(q.AggregateTypes) > 0 {
		document = append(document, bson.E{Key: cmp.Or(q.mapping.Name("aggregatetype"), "aggregatetype"), Value: anyOf(q.AggregateTypes)})
	}

	if len(q.Keys) > 0 {
		var keys bson.A
		for _, text := range q.Keys {
			keys = append(keys, purge.KeyForms(text)...)
		}
		document = append(document, q.mapping.KeyFilter(keys))
	}

	return document
}

func anyOf(list any) bson.D { return bson.D{{Key: "$in", Value: list}} }

// maxUnstampedCount bounds the envelopes that countUnstamped reads.
const maxUnstampedCount = 100_000

// countUnstamped counts the envelopes without a timestamp that match all other conditions, up to
// [maxUnstampedCount]. A replay cannot send them, because nothing shows when they were delivered.
func countUnstamped(ctx context.Context, coll *mongo.Collection, query replayQuery) (int64, error) {
	filter := bson.D{{Key: "$and", Value: bson.A{bson.D{outboxes.Unstamped()}, query.buildConditions()}}}
	n, err := coll.CountDocuments(ctx, filter, options.Count().SetLimit(maxUnstampedCount))
	return n, mongodb.DescribeError(err, "counting envelopes of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
}

// readEnvelopes reads up to limit envelopes after a timestamp, in the order of their timestamps. It
// reads the fields that routing needs, with null for a payload and without headers. It never splits
// envelopes with the same timestamp, so there may be more than limit. All envelopes that it read were
// committed before the cluster time seen. N21: a majority read on the primary.
func readEnvelopes(
	ctx context.Context, coll *mongo.Collection, query replayQuery, after bson.Timestamp, limit int,
) (docs []bson.Raw, seen bson.Timestamp, err error) {
	ctx, cancel := context.WithTimeout(ctx, replayResponse)
	defer cancel()
	sess, err := coll.Database().Client().StartSession()
	if err != nil {
		return nil, seen, fmt.Errorf("starting a session: %w", err)
	}

	defer sess.EndSession(context.WithoutCancel(ctx))
	// The session returns the time at which the server has read.
	ctx = mongo.NewSessionContext(ctx, sess)
	docs, err = query.find(ctx, coll, query.buildRangeFilter(after, query.Until), limit+1)
	if err == nil && len(docs) > limit {
		last := parseStamp(docs[limit])
		n := limit
		for n > 0 && parseStamp(docs[n-1]) == last {
			n--
		}

		docs = docs[:n]

		// Copied documents share a timestamp, and are read all at once.
		if n == 0 {
			docs, err = query.find(ctx, coll, query.buildRangeFilter(mongodb.Preceding(last), last), 0)
		}
	}
	if err != nil {
		return nil, seen, err
	}

	at := sess.OperationTime()
	if at == nil {
		return nil, seen, errors.New("reading envelopes to replay: the server returns no cluster time; a replica set is required")
	}
	return docs, *at, nil
}

// sizeField has the size of a document in the result of a read.
const sizeField = "outrelaySize"

// buildProjection returns the projection of a replay: the fields for the routing, null for a payload, and the size of the
// whole document.
func (q replayQuery) buildProjection() bson.D {
	if q.whole {
		return bson.D{}
	}
	fields := q.mapping.Select("ts", "slot", "aggregatetype", "aggregateid", "type", "key", "topic", "partition", "expiresAt")
	fields = append(fields, bson.E{Key: sizeField, Value: bson.D{{Key: "$bsonSize", Value: "$$ROOT"}}})
	if payload := q.mapping.Name("payload"); payload != "" {
		fields = append(fields, bson.E{Key: payload, Value: mongodb.Literal(nil)})
	}
	return fields
}

func (q replayQuery) find(ctx context.Context, coll *mongo.Collection, filter bson.D, limit int) ([]bson.Raw, error) {
	return mongodb.FindAll[bson.Raw](ctx, mongodb.Majority(coll), "reading envelopes of "+mongodb.Namespace(coll), filter,
		options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}).SetLimit(int64(limit)).SetProjection(q.buildProjection()).SetAllowDiskUse(true))
}
