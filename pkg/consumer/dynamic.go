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

	"github.com/outrelay/outrelay/internal/retry"
)

// TopicsCollection is the collection that stores dynamic topics.
const TopicsCollection = "inbox_topics"

// DynamicTopics allows any process to add topics to the group with AddTopic, and to remove them with RemoveTopic, while the
// group runs. The topics are stored in the collection TopicsCollection of the consumer's database. Every member watches the
// collection with a change stream. Dynamic topics are read in addition to the topics of Topics, which may be empty. Each
// change causes a rebalance of the group.
func DynamicTopics() Option { return option(func(s *settings) { s.dynamic = true }) }

// errNotDynamic reports that the consumer was created without DynamicTopics.
var errNotDynamic = errors.New("consumer: topics cannot be changed: create the consumer with DynamicTopics")

// AddTopic permanently adds a topic to the topics of the group. If the topic is there already, AddTopic changes nothing and
// returns nil.
func (c *Consumer) AddTopic(ctx context.Context, topic string) error {
	if topic == "" {
		return errors.New("consumer: the topic's name is empty")
	}
	if c.topicBoard == nil {
		return errNotDynamic
	}

	keepTime := bson.D{{Key: "$ifNull", Value: bson.A{"$at", "$$NOW"}}}
	update := bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "at", Value: keepTime}}}}}
	_, err := c.topicBoard.coll.UpdateOne(ctx, c.topicBoard.documentKey(topic), update, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("consumer: adding topic %s to group %s: %w", topic, c.group, err)
	}
	return nil
}

// RemoveTopic removes a topic that was added with AddTopic, and reports whether it was there. The offsets and watermarks of
// the topic stay. If the topic is added again, the group continues from its offsets.
func (c *Consumer) RemoveTopic(ctx context.Context, topic string) (bool, error) {
	if c.topicBoard == nil {
		return false, errNotDynamic
	}
	res, err := c.topicBoard.coll.DeleteOne(ctx, c.topicBoard.documentKey(topic))
	if err != nil {
		return false, fmt.Errorf("consumer: removing topic %s from group %s: %w", topic, c.group, err)
	}
	return res.DeletedCount > 0, nil
}

// AddedTopics returns the topics that were added with AddTopic, sorted.
func (c *Consumer) AddedTopics(ctx context.Context) ([]string, error) {
	if c.topicBoard == nil {
		return nil, errNotDynamic
	}
	return c.topicBoard.listTopics(ctx)
}

// topicBoard accesses the stored topics of one group.
type topicBoard struct {
	coll  *mongo.Collection
	group string
}

func newTopicBoard(db *mongo.Database, group string) *topicBoard {
	return &topicBoard{coll: majorityCollection(db, TopicsCollection), group: group}
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

	topics := make([]string, len(docs))
	for i, d := range docs {
		topics[i] = d.ID.T
	}
	slices.Sort(topics)
	return topics, nil
}

// watchTopics calls onTopics with the current topics, and again after each change. It blocks until ctx ends, and opens the
// change stream again after errors, which it reports.
func (b *topicBoard) watchTopics(ctx context.Context, onTopics func(topics []string), report func(err error)) {
	backoff := retry.Reopen.Start()
	for ctx.Err() == nil {
		err := b.followChanges(ctx, func(topics []string) {
			backoff.Reset()
			onTopics(topics)
		})
		if err != nil && ctx.Err() == nil {
			report(fmt.Errorf("watching the topics of group %s: %w", b.group, err))
		}
		_ = backoff.Wait(ctx)
	}
}

// followChanges calls onTopics with the current topics, and again after each change, until the change stream ends.
func (b *topicBoard) followChanges(ctx context.Context, onTopics func(topics []string)) error {
	// The stream is opened before the first list is read, so no change between the two is missed.
	ofGroup := bson.D{{Key: "documentKey._id.g", Value: b.group}}
	cs, err := b.coll.Watch(ctx, mongo.Pipeline{{{Key: "$match", Value: ofGroup}}})
	if err != nil {
		return err
	}
	defer func() { _ = cs.Close(context.WithoutCancel(ctx)) }()

	for {
		topics, err := b.listTopics(ctx)
		if err != nil {
			return err
		}
		onTopics(topics)
		if !cs.Next(ctx) {
			return cs.Err()
		}
	}
}

// latestTopics is the latest list of dynamic topics. It is safe for concurrent use.
type latestTopics struct {
	mu      sync.Mutex
	topics  []string
	known   bool
	changed chan struct{} // closed and replaced at each change
}

func (l *latestTopics) set(topics []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.known && slices.Equal(topics, l.topics) {
		return
	}

	l.topics, l.known = topics, true
	close(l.changed)
	l.changed = make(chan struct{})
}

// current returns the topics, whether they are known yet, and a channel that is closed at the next change.
func (l *latestTopics) current() (topics []string, known bool, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.topics, l.known, l.changed
}

// joinGroup is a member of the group until ctx ends. It joins again whenever the dynamic topics change.
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

	latest := &latestTopics{changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { c.topicBoard.watchTopics(ctx, latest.set, r.report) })

	for ctx.Err() == nil {
		added, known, changed := latest.current()
		topics := slices.Compact(slices.Sorted(slices.Values(slices.Concat(c.s.topics, added))))

		// Before the first list arrives, the set of topics is incomplete.
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

// joinUntilChange is a member of the group until changed is closed or ctx ends.
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

// joinTopics is a member of the group until ctx ends, or until a handler is added whose policy needs further retry topics.
func (r *run) joinTopics(ctx context.Context, topics []string) error {
	retryTopics, err := r.c.retryTopics(topics)
	if err != nil {
		return err
	}

	ctx, cancel := context.WithCancel(ctx)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()

	waiting.Go(func() {
		defer cancel()
		r.c.awaitRetryTopics(ctx, topics, retryTopics)
	})
	return r.c.transport.Join(ctx, r.c.group, slices.Concat(topics, retryTopics), r)
}

// awaitRetryTopics blocks until a policy needs a retry topic that is not in known, or until ctx ends.
func (c *Consumer) awaitRetryTopics(ctx context.Context, topics, known []string) {
	for {
		// An invalid policy must not stop the other handlers. The messages of its handler get its error.
		changed := c.reg.changes()
		wanted, err := c.retryTopics(topics)
		isNew := func(t string) bool { return !slices.Contains(known, t) }
		if err == nil && slices.ContainsFunc(wanted, isNew) {
			return
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
