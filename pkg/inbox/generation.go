package inbox

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/retry"
)

// Generation is one life of a partition as a consumer knows it.
type Generation struct {
	Number    int64
	Recreated bool  // this call has begun it
	Watermark int64 // one past the highest offset that was dealt with in it; 0 if none
}

// Attach tells the inbox that this process begins to handle a partition, with the partition's end offset and leader epoch
// as read from its leader just now (-1 where unknown). An end below the watermark or a lower epoch means that the topic is
// another one: then, by the policy, a new generation begins, in which the old watermarks do not count, or it is a
// *RecreatedError.
//
// It is needed once for each assignment. Without it Admit works in whatever generation there is. It costs one read and one
// write, and takes no part in a transaction of ctx.
func (x *Inbox) Attach(ctx context.Context, consumer, topic string, part int32, end int64, epoch int32) (Generation, error) {
	p := partition{consumer, topic, part}
	g, err := x.turn(ctx, p, func(seen Generation, known int32) (begin bool, err error) { // N29
		lower := epoch >= 0 && known >= 0 && epoch < known
		if (end < 0 || end >= seen.Watermark) && !lower {
			return false, nil
		}
		if x.recreated == Halt {
			return false, &RecreatedError{
				Consumer: consumer, Topic: topic, Partition: part,
				Watermark: seen.Watermark, End: end, Epoch: epoch, Seen: known,
			}
		}
		return true, nil
	}, epoch)
	if err != nil {
		return Generation{}, fmt.Errorf("attaching: %w", err)
	}
	x.mu.Lock()
	x.attached[p] = g.Number
	x.mu.Unlock()
	return g, nil
}

// Renew begins a new generation whatever the policy: an operator's answer to a *RecreatedError. Attach has to follow.
func (x *Inbox) Renew(ctx context.Context, consumer, topic string, part int32) (Generation, error) {
	begin := func(Generation, int32) (bool, error) { return true, nil }
	g, err := x.turn(ctx, partition{consumer, topic, part}, begin, -1)
	if err != nil {
		return Generation{}, fmt.Errorf("beginning a generation: %w", err)
	}
	return g, nil
}

// turn reads a partition's watermarks, lets judge say whether a generation begins, and writes the partition's own document
// if nobody else has done so since.
func (x *Inbox) turn(ctx context.Context, p partition, judge func(seen Generation, epoch int32) (bool, error), epoch int32) (Generation, error) {
	if err := (Entry{Key{Consumer: p.consumer, ID: "-"}, Place{Topic: p.topic, Partition: p.partition}}).validate(); err != nil || p.topic == "" {
		return Generation{}, errors.Join(err, noTopic(p))
	}
	ctx = mongo.NewSessionContext(ctx, nil)
	lanes := make(map[lane]struct{}, Lanes)
	for l := range int32(Lanes) {
		lanes[lane{p, l}] = struct{}{}
	}
	for wait := retry.Reopen.Start(); ; {
		m, err := x.readMarks(ctx, lanes)
		if err != nil {
			return Generation{}, err
		}
		seen, known := m.summary(p)
		begin, err := judge(seen, known)
		if err != nil {
			return seen, err
		}
		next := Generation{Number: seen.Number, Watermark: seen.Watermark}
		e := max(known, epoch)
		if begin {
			next, e = Generation{Number: seen.Number + 1, Recreated: true}, epoch
		}
		ok, err := x.writeGeneration(ctx, p, m, next.Number, e)
		if err != nil || ok {
			return next, err
		}
		if err := wait.Wait(ctx); err != nil {
			return Generation{}, err
		}
	}
}

func noTopic(p partition) error {
	if p.topic != "" {
		return nil
	}
	return fmt.Errorf("%w: the topic is empty", ErrInvalid)
}

// summary is the current generation of a partition with its highest leader epoch, -1 if unknown.
func (m marks) summary(p partition) (Generation, int32) {
	var g Generation
	for l := range m {
		g.Number = max(g.Number, m[l].Generation)
	}
	epoch := int32(-1)
	for l, w := range m {
		if w.Generation != g.Number {
			continue
		}
		epoch = max(epoch, w.Epoch)
		if l.lane != partitionLane {
			g.Watermark = max(g.Watermark, w.Next)
		}
	}
	return g, epoch
}

// writeGeneration stores the partition's own document if it is still as it was read; ok is false if it is not.
func (x *Inbox) writeGeneration(ctx context.Context, p partition, m marks, number int64, epoch int32) (ok bool, err error) {
	own := lane{p, partitionLane}
	id := bson.E{Key: "_id", Value: own.id()}
	filter := bson.D{id, {Key: "g", Value: m[own].Generation}}
	if _, there := m[own]; !there {
		filter = bson.D{id, {Key: "g", Value: bson.D{{Key: "$exists", Value: false}}}}
	}
	set := bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "g", Value: number}, {Key: "e", Value: epoch}, {Key: "at", Value: "$$NOW"}}}}}
	res, err := x.offsets.UpdateOne(ctx, filter, set, options.UpdateOne().SetUpsert(true))
	if mongo.IsDuplicateKeyError(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("writing the generation of partition %d of %s: %w", p.partition, p.topic, err)
	}
	return res.MatchedCount+res.UpsertedCount == 1, nil
}

// checkAttached refuses a partition of which another process has begun a generation since this one attached: what was
// fetched may be of the old topic, and its offsets would be taken for the new one's.
func (x *Inbox) checkAttached(p partition, current int64) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if g, ok := x.attached[p]; ok && g != current {
		return &StaleError{Consumer: p.consumer, Topic: p.topic, Partition: p.partition, Attached: g, Current: current}
	}
	return nil
}
