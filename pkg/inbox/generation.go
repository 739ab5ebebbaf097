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

// suspicion is what a partition's end was found to be below of.
type suspicion struct {
	generation, watermark int64
	epoch                 int32
}

// contradicts says whether an end offset and a leader epoch (-1 where unknown) cannot be of the topic that was seen. N29
func (s suspicion) contradicts(end int64, epoch int32) bool {
	return end >= 0 && end < s.watermark || epoch >= 0 && epoch < s.epoch
}

// Attach tells the inbox that this process begins to handle a partition, with the partition's end offset and leader epoch
// as read from its leader just now (-1 where unknown). An end below the watermark or a lower epoch means that the topic is
// another one: then, by the policy, a new generation begins, in which the old watermarks do not count, or it is a
// *RecreatedError.
//
// As somebody else may have moved the watermark after the end was read, the first such answer is ErrUnconfirmed: read end
// and epoch again, and call again.
//
// If another process had the partition and did not Release it, the server is asked to end that one's transactions: what a
// killed process has written and not committed would be locked until their lifetime is over, 60 s by default.
//
// It is needed once for each assignment. Without it Admit works in whatever generation there is. It costs one read and one
// write, and takes no part in a transaction of ctx.
func (x *Inbox) Attach(ctx context.Context, consumer, topic string, part int32, end int64, epoch int32) (Generation, error) {
	p := partition{consumer, topic, part}
	g, err := x.turn(ctx, p, x.hold(p), epoch, func(seen suspicion) (begin bool, err error) {
		if !seen.contradicts(end, epoch) {
			x.suspect(p, nil)
			return false, nil
		}
		// This end was read after the watermark that was seen before; what is below that too is of another topic.
		if before, ok := x.suspected(p); !ok || before.generation != seen.generation || !before.contradicts(end, epoch) {
			x.suspect(p, &seen)
			return false, fmt.Errorf("%w: partition %d of %s ends at offset %d with leader epoch %d, while %s has handled up to %d at epoch %d",
				ErrUnconfirmed, part, topic, end, epoch, consumer, seen.watermark, seen.epoch)
		}
		if x.recreated == Halt {
			return false, &RecreatedError{
				Consumer: consumer, Topic: topic, Partition: part,
				Watermark: seen.watermark, End: end, Epoch: epoch, Seen: seen.epoch,
			}
		}
		return true, nil
	})
	if err != nil {
		return Generation{}, fmt.Errorf("attaching: %w", err)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.attached[p] = g.Number
	delete(x.suspects, p)
	return g, nil
}

func (x *Inbox) suspected(p partition) (suspicion, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s, ok := x.suspects[p]
	return s, ok
}

func (x *Inbox) suspect(p partition, s *suspicion) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if s == nil {
		delete(x.suspects, p)
		return
	}
	x.suspects[p] = *s
}

// Renew begins a new generation whatever the policy: an operator's answer to a *RecreatedError. Attach has to follow.
func (x *Inbox) Renew(ctx context.Context, consumer, topic string, part int32) (Generation, error) {
	begin := func(suspicion) (bool, error) { return true, nil }
	g, err := x.turn(ctx, partition{consumer, topic, part}, "", -1, begin)
	if err != nil {
		return Generation{}, fmt.Errorf("beginning a generation: %w", err)
	}
	return g, nil
}

// turn reads a partition's watermarks, lets judge say whether a generation begins, and writes the partition's own document
// if nobody else has done so since. by is the tenure that gets the partition, "" if none does.
func (x *Inbox) turn(ctx context.Context, p partition, by string, epoch int32, judge func(seen suspicion) (begin bool, err error)) (Generation, error) {
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
		seen := m.summary()
		begin, err := judge(seen)
		if err != nil {
			return Generation{}, err
		}
		next := Generation{Number: seen.generation, Watermark: seen.watermark}
		e := max(seen.epoch, epoch)
		if begin {
			next, e = Generation{Number: seen.generation + 1, Recreated: true}, epoch
		}
		had := m[lane{p, partitionLane}].By
		if by == "" {
			by = had
		} else if had != "" && had != by {
			if err := x.evict(ctx, had); err != nil {
				return Generation{}, err
			}
		}
		ok, err := x.writeGeneration(ctx, p, m, next.Number, e, by)
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

// summary is what the documents of one partition say of its current generation; an epoch of -1 is unknown.
func (m marks) summary() suspicion {
	s := suspicion{epoch: -1}
	for _, w := range m {
		s.generation = max(s.generation, w.Generation)
	}
	for l, w := range m {
		if w.Generation != s.generation {
			continue
		}
		s.epoch = max(s.epoch, w.Epoch)
		if l.lane != partitionLane {
			s.watermark = max(s.watermark, w.Next)
		}
	}
	return s
}

// by is the field's value: null, which also a field that is not there equals, for nobody.
func (w mark) by() any {
	if w.By == "" {
		return nil
	}
	return w.By
}

// writeGeneration stores the partition's own document if it is still as it was read; ok is false if it is not.
func (x *Inbox) writeGeneration(ctx context.Context, p partition, m marks, number int64, epoch int32, by string) (ok bool, err error) {
	own := lane{p, partitionLane}
	id := bson.E{Key: "_id", Value: own.id()}
	filter := bson.D{id, {Key: "g", Value: m[own].Generation}, {Key: "by", Value: m[own].by()}}
	if _, there := m[own]; !there {
		filter = bson.D{id, {Key: "g", Value: bson.D{{Key: "$exists", Value: false}}}}
	}
	set := bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "g", Value: number}, {Key: "e", Value: epoch}, {Key: "by", Value: mark{By: by}.by()}, {Key: "at", Value: "$$NOW"}}}}}
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
