package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/retry"
)

// TopicsCollection is where dynamic topics are kept.
const TopicsCollection = "inbox_topics"

// DynamicTopics lets topics be added to the group and taken from it while it runs, by AddTopic and RemoveTopic of any
// process. They are kept in the collection TopicsCollection of the consumer's database, which every member watches by a
// change stream, and come on top of those of Topics, of which there may then be none. A change makes the group rebalance.
func DynamicTopics() Option { return option(func(s *settings) { s.dynamic = true }) }

// errNotDynamic says that the consumer was made without DynamicTopics.
var errNotDynamic = errors.New("consumer: topics cannot be changed: it was made without DynamicTopics")

// AddTopic adds a topic to those that the group reads, for good. It is no error if it is there.
func (c *Consumer) AddTopic(ctx context.Context, topic string) error {
	if topic == "" {
		return errors.New("consumer: the topic's name is empty")
	}
	if c.topicBoard == nil {
		return errNotDynamic
	}
	set := bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "at", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$at", "$$NOW"}}}}}}}}
	if _, err := c.topicBoard.coll.UpdateOne(ctx, c.topicBoard.documentKey(topic), set, options.UpdateOne().SetUpsert(true)); err != nil {
		return fmt.Errorf("consumer: adding topic %s to group %s: %w", topic, c.group, err)
	}
	return nil
}

// RemoveTopic takes a topic that was added from those that the group reads, and says whether it was there. Its offsets and
// watermarks stay: added again, it is read from where the group was.
func (c *Consumer) RemoveTopic(ctx context.Context, topic string) (bool, error) {
	if c.topicBoard == nil {
		return false, errNotDynamic
	}
	res, err := c.topicBoard.coll.DeleteOne(ctx, c.topicBoard.documentKey(topic))
	if err != nil {
		return false, fmt.Errorf("consumer: taking topic %s from group %s: %w", topic, c.group, err)
	}
	return res.DeletedCount > 0, nil
}

// AddedTopics lists the topics that were added to the group, sorted.
func (c *Consumer) AddedTopics(ctx context.Context) ([]string, error) {
	if c.topicBoard == nil {
		return nil, errNotDynamic
	}
	return c.topicBoard.listTopics(ctx)
}

// topicBoard is the topics of one group as the database has them.
type topicBoard struct {
	coll  *mongo.Collection
	group string
}

func newTopicBoard(db *mongo.Database, group string) *topicBoard {
	opts := options.Collection().SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary()).SetWriteConcern(writeconcern.Majority())
	return &topicBoard{coll: db.Collection(TopicsCollection, opts), group: group}
}

func (b *topicBoard) documentKey(topic string) bson.D {
	return bson.D{{Key: "_id", Value: bson.D{{Key: "g", Value: b.group}, {Key: "t", Value: topic}}}}
}

func (b *topicBoard) listTopics(ctx context.Context) ([]string, error) {
	cur, err := b.coll.Find(ctx, bson.D{{Key: "_id.g", Value: b.group}})
	if err != nil {
		return nil, fmt.Errorf("reading the topics of group %s: %w", b.group, err)
	}
	var docs []struct {
		ID struct {
			T string `bson:"t"`
		} `bson:"_id"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		return nil, fmt.Errorf("reading the topics of group %s: %w", b.group, err)
	}
	out := make([]string, len(docs))
	for i, d := range docs {
		out[i] = d.ID.T
	}
	slices.Sort(out)
	return out, nil
}

// watchTopics tells the list, and again after each change, until ctx ends.
func (b *topicBoard) watchTopics(ctx context.Context, tell func(topics []string), report func(err error)) {
	pause := retry.Reopen.Start()
	for ctx.Err() == nil {
		err := b.followChanges(ctx, func(topics []string) { pause.Reset(); tell(topics) })
		if err != nil && ctx.Err() == nil {
			report(fmt.Errorf("watching the topics of group %s: %w", b.group, err))
		}
		_ = pause.Wait(ctx)
	}
}

// followChanges opens the stream first, and reads the list behind its beginning: no change falls between.
func (b *topicBoard) followChanges(ctx context.Context, tell func(topics []string)) error {
	match := mongo.Pipeline{{{Key: "$match", Value: bson.D{{Key: "documentKey._id.g", Value: b.group}}}}}
	cs, err := b.coll.Watch(ctx, match)
	if err != nil {
		return err
	}
	defer func() { _ = cs.Close(context.WithoutCancel(ctx)) }()
	for {
		topics, err := b.listTopics(ctx)
		if err != nil {
			return err
		}
		tell(topics)
		if !cs.Next(ctx) {
			return cs.Err()
		}
	}
}

// latestTopics is the latest list of topics.
type latestTopics struct {
	mu      sync.Mutex
	topics  []string
	known   bool
	changed chan struct{}
}

func (n *latestTopics) set(topics []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.known && slices.Equal(topics, n.topics) {
		return
	}
	n.topics, n.known = topics, true
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *latestTopics) current() (topics []string, known bool, changed <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.topics, n.known, n.changed
}

// joinGroup is in the group with its topics as they are, until ctx ends.
func (r *run) joinGroup(ctx context.Context) error {
	c := r.c
	if c.topicBoard == nil {
		for ctx.Err() == nil {
			if err := r.joinTopics(ctx, c.s.topics); err != nil {
				return err
			}
		}
		return nil
	}
	n := &latestTopics{changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { c.topicBoard.watchTopics(ctx, n.set, r.report) })
	for ctx.Err() == nil {
		added, known, changed := n.current()
		topics := slices.Compact(slices.Sorted(slices.Values(slices.Concat(c.s.topics, added))))
		if !known || len(topics) == 0 {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		if err := r.joinUntilChange(ctx, topics, changed); err != nil {
			return err
		}
	}
	return nil
}

// joinUntilChange is in the group until the topics change or ctx ends.
func (r *run) joinUntilChange(ctx context.Context, topics []string, changed <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	waiting.Go(func() {
		select {
		case <-changed:
			cancel()
		case <-ctx.Done():
		}
	})
	return r.joinTopics(ctx, topics)
}

// joinTopics is in the group until ctx ends, or until a handler comes whose policy has retry topics that are not read yet.
func (r *run) joinTopics(ctx context.Context, topics []string) error {
	retries, err := r.c.retryTopics(topics)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	waiting.Go(func() {
		defer cancel()
		r.c.awaitRetryTopics(ctx, topics, retries)
	})
	return r.c.transport.Join(ctx, r.c.group, slices.Concat(topics, retries), r)
}

// awaitRetryTopics returns when a policy has retry topics beside those, or ctx ends.
func (c *Consumer) awaitRetryTopics(ctx context.Context, topics, known []string) {
	for {
		changed := c.reg.changes()
		now, err := c.retryTopics(topics) // with an error the handler's messages meet it; the others are read on
		if err == nil && slices.ContainsFunc(now, func(t string) bool { return !slices.Contains(known, t) }) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
