package waiting

import (
	"context"
	"maps"
	"regexp"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Query selects waiting envelopes of a watcher, for operators. An envelope matches if it fulfills all conditions that are set.
type Query struct {
	Watcher string          // required
	NS      string          // only of this outbox
	Reason  Reason          // only with this reason
	Topic   string          // only those that wait for this topic
	Key     string          // canonical text of the ordering key
	IDs     []bson.RawValue // ids of envelopes, with their types
	// Documents are ids of stored documents; together with IDs: documents of either.
	Documents [][IDSize]byte
	Failed    bool // only those that were rejected, and wait for their next attempt
}

// buildConditions returns the conditions of the query except the watcher.
func (q Query) buildConditions() bson.D {
	filter := listing.Filter{}
	filter.Equal("ns", q.NS)
	filter.Equal("key", q.Key)
	listing.InEither(&filter, "_id", q.Documents, "id", q.IDs)
	filter.Equal("reason", string(q.Reason))

	if q.Failed {
		failed := bson.D{{Key: "reason", Value: Retry}, {Key: "attempts", Value: bson.D{{Key: "$gt", Value: 0}}}}
		filter.Require("$and", bson.A{failed})
	}

	if q.Topic != "" {
		// One that lists no topics waits for all that it routes to.
		listed := bson.Regex{Pattern: "(^|,)" + regexp.QuoteMeta(q.Topic) + "(,|$)"}
		listing.In(&filter, "topics", bson.A{"", listed})
	}
	return bson.D(filter)
}

func (q Query) filter() bson.D {
	return append(bson.D{{Key: "watcher", Value: q.Watcher}}, q.buildConditions()...)
}

// List returns up to limit matching envelopes in the order in which they are sent, without the fields of the envelopes that are
// named in without. after is next of the previous page; next is "" on the last page. The cost of a page grows with the number of
// envelopes that do not match.
func List(ctx context.Context, coll *mongo.Collection, query Query, without []string, limit int, after string) (page []Document, next string, err error) {
	fields := bson.D{}
	for _, name := range without {
		fields = append(fields, bson.E{Key: "envelope." + name, Value: 0})
	}
	scan := &Scan{Store: NewStore(coll, query.Watcher, slot.Range{}), Where: query.buildConditions(), Fields: fields}
	if err := scan.resume(after); err != nil {
		return nil, "", err
	}

	more, err := scan.Page(ctx, limit, func(raw bson.Raw) error {
		// The bytes belong to the cursor.
		page = append(page, ReadDocument(slices.Clone(raw)))
		return nil
	})
	if err != nil || !more {
		return page, "", err
	}
	next, err = scan.encodePlace()
	return page, next, err
}

// EachStampOf calls take for each waiting envelope of the outbox ns whose id is in list, with the stamp of its insert.
func EachStampOf(
	ctx context.Context, coll *mongo.Collection, watcher, ns string, list []bson.RawValue, take func(id bson.RawValue, stamp bson.Timestamp),
) error {
	filter := Query{Watcher: watcher, NS: ns, IDs: list}.filter()
	return mongodb.FindEach(ctx, mongodb.Majority(coll), "looking for waiting envelopes", filter, func(raw bson.Raw) error {
		document := ReadDocument(raw)
		take(mongodb.CloneValue(document.ID), outboxes.Stamp(document.Envelope))
		return nil
	}, options.Find().SetProjection(mongodb.Fields("id", "envelope.ts")))
}

// deliveryStep is the distance between the numbers of two replays. A requeue has the number after that of its letter, so the numbers in
// between are for envelopes of the earlier replay that die and are requeued, again and again.
const deliveryStep = 1000

// NextDelivery returns the number of the deliveries of a new replay: no requeue and no replay had it before (N18). coll is `counters` of the
// state database.
func NextDelivery(ctx context.Context, coll *mongo.Collection) (int32, error) {
	var counter struct {
		N int32 `bson:"n"`
	}
	err := mongodb.Majority(coll).FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: "delivery"}},
		bson.D{{Key: "$inc", Value: bson.D{{Key: "n", Value: int32(1)}}}},
		options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&counter)
	return counter.N * deliveryStep, mongodb.DescribeError(err, "counting deliveries", "find, insert and update", mongodb.Namespace(coll))
}

// CountReplayed counts the envelopes of a replay that still wait, up to limit.
func CountReplayed(ctx context.Context, coll *mongo.Collection, replay string, limit int64) (int64, error) {
	n, err := mongodb.Majority(coll).CountDocuments(ctx, bson.D{{Key: "replayOf", Value: replay}}, options.Count().SetLimit(max(limit, 1)))
	return n, mongodb.DescribeError(err, "counting the waiting envelopes of replay "+replay, "find", mongodb.Namespace(coll))
}

// CountMatching counts the matching envelopes.
func CountMatching(ctx context.Context, coll *mongo.Collection, query Query) (int64, error) {
	n, err := mongodb.Majority(coll).CountDocuments(ctx, query.filter())
	return n, mongodb.DescribeError(err, "counting waiting envelopes", "find", mongodb.Namespace(coll))
}

// RetryFailed makes the failed envelopes that query selects due now, and returns their number. With reset, it also clears their failed
// attempts and the latest error. Other envelopes do not change, for example one that was sent in the meantime. It is one plain
// statement, so the owner of the watcher never waits for it.
func RetryFailed(ctx context.Context, coll *mongo.Collection, query Query, reset bool) (int64, error) {
	query.Failed = true
	update := bson.D{{Key: "$currentDate", Value: bson.D{{Key: "nextAt", Value: true}}}}
	if reset {
		update = append(update,
			bson.E{Key: "$set", Value: bson.D{{Key: "attempts", Value: int32(0)}}},
			bson.E{Key: "$unset", Value: bson.D{{Key: "uncounted", Value: ""}, {Key: "error", Value: ""}}})
	}
	res, err := mongodb.Majority(coll).UpdateMany(ctx, query.filter(), update)
	if err != nil {
		return 0, mongodb.DescribeError(err, "retrying failed envelopes", "find and update", mongodb.Namespace(coll))
	}
	return res.MatchedCount, nil
}

// Topic counts the envelopes of a watcher that wait for one topic. An envelope that waits for several counts for each.
type Topic struct {
	Topic    string // "" if the envelopes do not list their topics
	Retry    int64
	Blocked  int64
	Parked   int64
	Queued   int64
	Keys     int64     // ordering keys with any of these; 0 if more than 50,000 envelopes wait in all
	Oldest   time.Time // commit time of the oldest one; zero if unknown
	Outboxes []string  // namespaces, sorted, at most maxTopicOutboxes
}

// maxTopicOutboxes bounds Topic.Outboxes.
const maxTopicOutboxes = 20

// maxKeyed is the number of waiting envelopes above which their keys are not counted: the server would have to group them by key, which
// takes seconds for a million.
const maxKeyed = 50_000

// CountTopics counts the waiting envelopes of a watcher by topic. The server reads only the index.
func CountTopics(ctx context.Context, coll *mongo.Collection, watcher string) ([]Topic, error) {
	groups, err := CountGroups(ctx, coll, Query{Watcher: watcher})
	if err != nil {
		return nil, err
	}

	byTopic := map[string]*Topic{}
	total := int64(0)
	for _, group := range groups {
		topic := byTopic[group.Topic]
		if topic == nil {
			topic = &Topic{Topic: group.Topic}
			byTopic[group.Topic] = topic
		}
		topic.addGroup(group)
		total += group.N
	}
	if total > 0 && total <= maxKeyed {
		if err := countKeys(ctx, coll, watcher, byTopic); err != nil {
			return nil, err
		}
	}

	topics := []Topic{}
	for _, name := range slices.Sorted(maps.Keys(byTopic)) {
		topics = append(topics, *byTopic[name])
	}
	return topics, nil
}

// addGroup adds the envelopes of one outbox that wait for one reason. Groups come in the order of their outboxes.
func (t *Topic) addGroup(group Count) {
	switch group.Reason {
	case Retry:
		t.Retry += group.N
	case Blocked:
		t.Blocked += group.N
	case Parked:
		t.Parked += group.N
	case Queued:
		t.Queued += group.N
	}

	if t.Oldest.IsZero() || !group.Oldest.IsZero() && group.Oldest.Before(t.Oldest) {
		t.Oldest = group.Oldest
	}
	if len(t.Outboxes) < maxTopicOutboxes && !slices.Contains(t.Outboxes, group.NS) {
		t.Outboxes = append(t.Outboxes, group.NS)
	}
}

// countKeys sets the number of keys of each topic.
func countKeys(ctx context.Context, coll *mongo.Collection, watcher string, byTopic map[string]*Topic) error {
	rows, err := mongodb.AggregateAll[struct {
		Topic string `bson:"_id"`
		Keys  int64  `bson:"keys"`
	}](ctx, mongodb.Majority(coll), "counting the keys of waiting envelopes", mongo.Pipeline{
		{{Key: "$match", Value: Query{Watcher: watcher}.filter()}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: bson.D{
			{Key: "ns", Value: "$ns"}, {Key: "key", Value: "$key"}, {Key: "topics", Value: "$topics"},
		}}}}},
		{{Key: "$project", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "ns", Value: "$_id.ns"}, {Key: "key", Value: "$_id.key"}}},
			{Key: "topic", Value: bson.D{{Key: "$split", Value: bson.A{"$_id.topics", ","}}}},
		}}},
		{{Key: "$unwind", Value: "$topic"}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: bson.D{{Key: "topic", Value: "$topic"}, {Key: "key", Value: "$_id"}}}}}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$_id.topic"}, {Key: "keys", Value: bson.D{{Key: "$sum", Value: int64(1)}}}}}},
	})

	for _, row := range rows {
		// Envelopes for a new topic may have been stored since the other count.
		if topic := byTopic[row.Topic]; topic != nil {
			topic.Keys = row.Keys
		}
	}
	return err
}
