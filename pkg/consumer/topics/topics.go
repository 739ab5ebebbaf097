// Package topics is a list of topics that a consumer group reads in addition to the topics of consumer.WithTopics, and
// that any process may change while the group runs. The list is stored in MongoDB.
//
//	list, err := topics.New(db, "billing")
//	c, err := consumer.New("billing", db, consumer.WithTopicList(list), …) // every member
//	err = list.Add(ctx, "orders.new-tenant")                               // any process
package topics

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// List is the stored list of one group. It is safe for concurrent use and need not be closed.
type List struct {
	coll  *mongo.Collection
	group string
}

// New returns the list of the group in the collection inbox_topics of db. It does no I/O. The error lists every problem.
func New(db *mongo.Database, group string) (*List, error) {
	var problems []error
	if db == nil {
		problems = append(problems, errors.New("topics: the database is nil"))
	}
	if group == "" {
		problems = append(problems, errors.New("topics: the name of the group is empty"))
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}

	majority := options.Collection().
		SetWriteConcern(concern.Majority()).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary())
	return &List{coll: db.Collection(record.TopicsCollection, majority), group: group}, nil
}

// Add adds a topic permanently. It changes nothing if the list has the topic already. Members of the group read the topic
// from the place of consumer.WithStart, by default its beginning, or from their offsets if they have read it before. Each
// change causes a rebalance of the group.
func (l *List) Add(ctx context.Context, topic string) error {
	if topic == "" {
		return errors.New("topics: the topic's name is empty")
	}

	keepTime := bson.D{{Key: "$ifNull", Value: bson.A{"$at", "$$NOW"}}}
	update := bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "at", Value: keepTime}}}}}
	_, err := l.coll.UpdateOne(ctx, l.documentKey(topic), update, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("adding topic %s to group %s: %w", topic, l.group, err)
	}
	return nil
}

// Remove removes a topic, and reports whether the list had it. The offsets and watermarks of the topic stay: if it is added
// again, the group continues from there.
func (l *List) Remove(ctx context.Context, topic string) (bool, error) {
	res, err := l.coll.DeleteOne(ctx, l.documentKey(topic))
	if err != nil {
		return false, fmt.Errorf("removing topic %s from group %s: %w", topic, l.group, err)
	}
	return res.DeletedCount > 0, nil
}

func (l *List) documentKey(topic string) bson.D {
	return bson.D{{Key: "_id", Value: bson.D{{Key: "g", Value: l.group}, {Key: "t", Value: topic}}}}
}

// All returns the topics of the list, sorted.
func (l *List) All(ctx context.Context) ([]string, error) {
	cur, err := cursor.Find(ctx, l.coll, bson.D{{Key: "_id.g", Value: l.group}})
	type listed struct {
		ID struct {
			T string `bson:"t"`
		} `bson:"_id"`
	}
	docs, err := cursor.All[listed](ctx, "reading the topics of group "+l.group, cur, err)
	if err != nil {
		return nil, err
	}

	all := make([]string, len(docs))
	for i, d := range docs {
		all[i] = d.ID.T
	}
	slices.Sort(all)
	return all, nil
}

// Watch iterates over the contents of the list: as it is now, and again after each change. It blocks between changes, and
// ends after the first error, or when ctx ends.
func (l *List) Watch(ctx context.Context) iter.Seq2[[]string, error] {
	return func(yield func([]string, error) bool) {
		// The stream is opened before the first list is read, so no change between the two is missed.
		ofGroup := bson.D{{Key: "documentKey._id.g", Value: l.group}}
		changes, err := l.coll.Watch(ctx, mongo.Pipeline{{{Key: "$match", Value: ofGroup}}})
		if err != nil {
			yield(nil, fmt.Errorf("watching the topics of group %s: %w", l.group, err))
			return
		}
		defer func() { _ = changes.Close(context.WithoutCancel(ctx)) }()

		for {
			all, err := l.All(ctx)
			if !yield(all, err) || err != nil {
				return
			}
			if !changes.Next(ctx) {
				break
			}
		}
		if err := changes.Err(); err != nil {
			yield(nil, fmt.Errorf("watching the topics of group %s: %w", l.group, err))
		}
	}
}
