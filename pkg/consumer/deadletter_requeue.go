package consumer

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/outrelay/outrelay/internal/transport"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Replay configures how letters are requeued.
type Replay struct {
	Publisher transport.Publisher
	Actor     string // the person or the process that requeues; stored with the letter
	Note      string // the reason; stored with the letter
	// Topic is the topic to publish to. Defaults to the topic of the message's first record.
	Topic string
	// Edit may change a message before it is published, for example to correct its body. The letter stays unchanged.
	Edit func(m *Message) error
}

// replayClaim is how long a letter is reserved for the call that requeues it.
const replayClaim = time.Minute

// Requeue publishes the matching letters that were not requeued yet, and marks them. Each message is published as the next
// delivery, and only for the handler that gave it up. Requeue returns the number of published letters, also with an error.
// The other letters are then unchanged. A query without a condition returns ErrEmptyQuery, unless it sets All.
//
// If the process crashes between publishing and marking, the next call publishes the letter again. The inbox then rejects
// the second message if the first was handled.
func (d *DeadLetters) Requeue(ctx context.Context, q LetterQuery, r Replay) (int64, error) {
	if q.Empty() && !q.All {
		return 0, ErrEmptyQuery
	}
	return d.requeueMatching(ctx, q, r, func(*Message) bool { return true })
}

// Unpark requeues the parked letters of a group for which takes returns true. Parked letters have the class no_handler. A
// consumer calls it with its registry when it has new handlers. The messages are published for all handlers of the group.
func (d *DeadLetters) Unpark(ctx context.Context, group string, r Replay, takes func(m *Message) bool) (int64, error) {
	return d.requeueMatching(ctx, LetterQuery{Group: group, Class: ClassNoHandler}, r, takes)
}

// requeueMatching requeues the letters that match the query, were not requeued yet, and are accepted by takes.
func (d *DeadLetters) requeueMatching(
	ctx context.Context, q LetterQuery, r Replay, takes func(*Message) bool,
) (int64, error) {
	if r.Publisher == nil {
		return 0, &unsupportedError{Operation: "requeueing dead letters", Needs: "a Publisher"}
	}

	notReplayed := false
	q.Replayed = &notReplayed

	var n int64
	after := ""
	for {
		page, err := d.List(ctx, q, after, DefaultLetterPage)
		if err != nil {
			return n, err
		}

		for i := range page.Letters {
			l := &page.Letters[i]
			if !takes(l.Message()) {
				continue
			}
			requeued, err := d.requeueLetter(ctx, l, r)
			if err != nil {
				return n, err
			}
			if requeued {
				n++
			}
		}

		after = page.Next
		if after == "" {
			return n, nil
		}
	}
}

// requeueLetter claims a letter, publishes it and marks it. It returns false if another call has claimed or requeued it.
func (d *DeadLetters) requeueLetter(ctx context.Context, l *Letter, r Replay) (bool, error) {
	id := bson.E{Key: "_id", Value: l.ID}
	claimExpired := bson.D{{Key: "$lte", Value: bson.A{
		bson.D{{Key: "$ifNull", Value: bson.A{"$claimedUntil", time.Time{}}}}, "$$NOW",
	}}}
	unclaimed := bson.D{id, {Key: "replayed", Value: nil}, {Key: "$expr", Value: claimExpired}}
	until := bson.D{{Key: "$add", Value: bson.A{"$$NOW", replayClaim.Milliseconds()}}}

	res, err := d.coll.UpdateOne(ctx, unclaimed, mongo.Pipeline{
		{{Key: "$set", Value: bson.D{{Key: "claimedUntil", Value: until}}}},
	})
	if err != nil {
		return false, fmt.Errorf("requeueing dead letter %s: %w", l.ID, err)
	}
	if res.MatchedCount == 0 {
		return false, nil
	}

	m, topic, err := d.prepareRequeue(ctx, l, r)
	if err == nil {
		err = r.Publisher.Publish(ctx, topic, []transport.Record{recordOf(m)})
	}
	if err != nil {
		// The record may not have been published. Without the claim the next call can try again at once.
		unset := bson.D{{Key: "$unset", Value: bson.D{{Key: "claimedUntil", Value: ""}}}}
		_, releaseErr := d.coll.UpdateOne(context.WithoutCancel(ctx), bson.D{id}, unset)
		return false, fmt.Errorf("requeueing dead letter %s: %w", l.ID, errors.Join(err, releaseErr))
	}

	mark := Replayed{Actor: r.Actor, Note: clip(r.Note, maxReason), Topic: topic, Delivery: m.Delivery}
	stamped := bson.D{{Key: "$mergeObjects", Value: bson.A{
		bson.D{{Key: "$literal", Value: mark}}, bson.D{{Key: "at", Value: "$$NOW"}},
	}}}
	_, err = d.coll.UpdateOne(ctx, bson.D{id}, mongo.Pipeline{
		{{Key: "$set", Value: bson.D{{Key: "replayed", Value: stamped}}}},
		{{Key: "$unset", Value: "claimedUntil"}},
	})
	if err != nil {
		return false, fmt.Errorf("marking dead letter %s, which was requeued: %w", l.ID, err)
	}
	return true, nil
}

// prepareRequeue returns the message to publish for a letter, and its topic.
func (d *DeadLetters) prepareRequeue(ctx context.Context, l *Letter, r Replay) (*Message, string, error) {
	if err := d.loadChunks(ctx, l); err != nil {
		return nil, "", err
	}

	m := l.Message()
	m.Delivery++
	m.SetHeader(HeaderOnly, []byte(l.ID.Group+"/"+l.ID.Handler))
	m.SetHeader(HeaderDelivery, strconv.AppendInt(nil, int64(m.Delivery), 10))
	m.SetHeader(HeaderRetryOrigin, []byte(l.Origin.String()))

	// With its deadline the message would expire again.
	if l.Class == ClassExpired {
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
