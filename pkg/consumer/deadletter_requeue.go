package consumer

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Replay is how letters go back to their topic.
type Replay struct {
	Publisher Publisher
	Actor     string // who asks for it; kept with the letter
	Note      string // why; kept with the letter
	// Topic to publish to. Defaults to the one that the message came in at first.
	Topic string
	// Edit may change a message on its way, for example a body that was broken. The letter stays as it was.
	Edit func(m *Message) error
}

// replayClaim is how long another call leaves a letter alone that one is about to requeue.
const replayClaim = time.Minute

// Requeue publishes the matching letters that nobody requeued yet, for the handler alone that gave them up, as the next
// delivery, and marks them. It returns how many; after an error the rest is as it was. A crash between the two publishes a
// letter again when it is asked for next, which the inbox then refuses if it was handled. A query without a condition is
// ErrEmptyQuery.
func (d *DeadLetters) Requeue(ctx context.Context, q LetterQuery, r Replay) (int64, error) {
	if q.Empty() && !q.All {
		return 0, ErrEmptyQuery
	}
	return d.requeueMatching(ctx, q, r, func(*Message) bool { return true })
}

// Unpark requeues the parked letters of a group, those of class no_handler, that takes is true for: a consumer calls it
// with its registry when it has new handlers. They are published for all handlers of the group.
func (d *DeadLetters) Unpark(ctx context.Context, group string, r Replay, takes func(m *Message) bool) (int64, error) {
	return d.requeueMatching(ctx, LetterQuery{Group: group, Class: ClassNoHandler}, r, takes)
}

func (d *DeadLetters) requeueMatching(ctx context.Context, q LetterQuery, r Replay, takes func(*Message) bool) (int64, error) {
	if r.Publisher == nil {
		return 0, &UnsupportedError{Operation: "requeueing dead letters", Needs: "a Publisher"}
	}
	fresh := false
	q.Replayed = &fresh
	var n int64
	for after := ""; ; {
		page, err := d.List(ctx, q, after, DefaultLetterPage)
		if err != nil {
			return n, err
		}
		for i := range page.Letters {
			l := &page.Letters[i]
			if !takes(l.Message()) {
				continue
			}
			done, err := d.requeueLetter(ctx, l, r)
			if err != nil {
				return n, err
			}
			if done {
				n++
			}
		}
		if after = page.Next; after == "" {
			return n, nil
		}
	}
}

// requeueLetter claims a letter, publishes it and marks it; false if somebody else has it.
func (d *DeadLetters) requeueLetter(ctx context.Context, l *Letter, r Replay) (bool, error) {
	free := bson.D{
		{Key: "_id", Value: l.ID},
		{Key: "replayed", Value: nil},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$claimedUntil", time.Time{}}}}, "$$NOW"}}}},
	}
	until := bson.D{{Key: "$add", Value: bson.A{"$$NOW", replayClaim.Milliseconds()}}}
	res, err := d.coll.UpdateOne(ctx, free, mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "claimedUntil", Value: until}}}}})
	if err != nil {
		return false, fmt.Errorf("requeueing dead letter %s: %w", l.ID, err)
	}
	if res.MatchedCount == 0 {
		return false, nil
	}
	m, topic, err := d.prepareRequeue(ctx, l, r)
	if err == nil {
		err = r.Publisher.Publish(ctx, topic, []*Message{m})
	}
	if err != nil {
		// Nothing is known to be published: whoever asks again need not wait for the claim to lapse.
		_, release := d.coll.UpdateOne(context.WithoutCancel(ctx), bson.D{{Key: "_id", Value: l.ID}}, bson.D{{Key: "$unset", Value: bson.D{{Key: "claimedUntil", Value: ""}}}})
		return false, fmt.Errorf("requeueing dead letter %s: %w", l.ID, errors.Join(err, release))
	}
	mark := Replayed{Actor: r.Actor, Note: clip(r.Note, maxReason), Topic: topic, Delivery: m.Delivery}
	_, err = d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: l.ID}}, mongo.Pipeline{
		{{Key: "$set", Value: bson.D{{Key: "replayed", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{bson.D{{Key: "$literal", Value: mark}}, bson.D{{Key: "at", Value: "$$NOW"}}}}}}}}},
		{{Key: "$unset", Value: "claimedUntil"}},
	})
	if err != nil {
		return false, fmt.Errorf("marking dead letter %s, which was requeued: %w", l.ID, err)
	}
	return true, nil
}

// prepareRequeue is the message of a letter on its way back.
func (d *DeadLetters) prepareRequeue(ctx context.Context, l *Letter, r Replay) (*Message, string, error) {
	if err := d.loadChunks(ctx, l); err != nil {
		return nil, "", err
	}
	m := l.Message()
	m.Delivery++
	m.SetHeader(HeaderOnly, []byte(l.ID.Group+"/"+l.ID.Handler))
	m.SetHeader(HeaderDelivery, strconv.AppendInt(nil, int64(m.Delivery), 10))
	m.SetHeader(HeaderRetryOrigin, []byte(l.Origin.String()))
	if l.Class == ClassExpired { // it would expire again
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
