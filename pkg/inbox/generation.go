package inbox

import (
	"cmp"
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

// Log is a partition as its leader describes it.
type Log struct {
	// ID identifies the topic among all that ever were: it is of the cluster and of the topic. "" is unknown.
	ID    string
	End   int64 // the offset after the last record; -1 is unknown
	Epoch int32 // of the leader; -1 is unknown
}

// suspicion is what is known of a partition that its log seems to contradict.
type suspicion struct {
	generation, watermark int64
	epoch                 int32
	id                    string
}

// recreated says whether the log cannot be of the topic that was seen. Without the topics' ids an end below the watermark or
// a lower leader epoch is all that can tell. N29
func (s suspicion) recreated(l Log) bool {
	if s.id != "" && l.ID != "" {
		return s.id != l.ID
	}
	return l.End >= 0 && l.End < s.watermark || l.Epoch >= 0 && l.Epoch < s.epoch
}

// truncated says whether the same topic has lost records that were handled, as by an unclean leader election.
func (s suspicion) truncated(l Log) bool {
	return s.id != "" && s.id == l.ID && l.End >= 0 && l.End < s.watermark
}

// Attach tells the inbox that this process begins to handle a partition, with the partition's log as read from its leader
// just now. If the topic is another one by its id or, where that is unknown, by an end below the watermark or a lower epoch,
// then by the policy a new generation begins, in which the old watermarks do not count, or it is a *RecreatedError. If the
// same topic ends below the watermark, it has lost records: the watermarks go back to its end, or it is that error.
//
// As somebody else may have moved the watermark after the end was read, the first such answer is ErrUnconfirmed: read end
// the log again, and call again.
//
// If another process had the partition and did not Release it, the server is asked to end that one's transactions: what a
// killed process has written and not committed would be locked until their lifetime is over, 60 s by default.
//
// It is needed once for each assignment. Without it Admit works in whatever generation there is. It costs one read and one
// write, and takes no part in a transaction of ctx.
func (x *Inbox) Attach(ctx context.Context, consumer, topic string, part int32, l Log) (Generation, error) {
	p := partition{consumer, topic, part}
	g, err := x.turn(ctx, p, x.hold(p), l, func(seen suspicion) (begin bool, err error) {
		recreated, truncated := seen.recreated(l), seen.truncated(l)
		if !recreated && !truncated {
			x.suspect(p, nil)
			return false, nil
		}

		// This log was read after the watermark that was seen before; what contradicts that too is true.
		before, ok := x.suspected(p)
		if !ok || before.generation != seen.generation || before.recreated(l) != recreated || before.truncated(l) != truncated {
			x.suspect(p, &seen)
			return false, fmt.Errorf("%w: partition %d of %s (%s) ends at offset %d with leader epoch %d, while %s has handled up to %d at epoch %d (%s)",
				ErrUnconfirmed, part, topic, l.ID, l.End, l.Epoch, consumer, seen.watermark, seen.epoch, seen.id)
		}
		if x.recreated == Halt {
			return false, &RecreatedError{
				Consumer: consumer, Topic: topic, Partition: part,
				Watermark: seen.watermark, End: l.End, Epoch: l.Epoch, Seen: seen.epoch,
			}
		}
		return recreated, nil
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
	g, err := x.turn(ctx, partition{consumer, topic, part}, "", Log{End: -1, Epoch: -1}, begin)
	if err != nil {
		return Generation{}, fmt.Errorf("beginning a generation: %w", err)
	}
	return g, nil
}

// turn reads a partition's watermarks, lets judge say whether a generation begins, and writes the partition's own document
// if nobody else has done so since. by is the tenure that gets the partition, "" if none does. Watermarks of the same
// generation that are above the log's end go back to it.
func (x *Inbox) turn(ctx context.Context, p partition, by string, log Log, judge func(seen suspicion) (begin bool, err error)) (Generation, error) {
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
		now := Log{ID: cmp.Or(log.ID, seen.id), Epoch: max(seen.epoch, log.Epoch)}
		if begin {
			next, now = Generation{Number: seen.generation + 1, Recreated: true}, log
		}
		had := m[lane{p, partitionLane}].By
		if by == "" {
			by = had
		} else if had != "" && had != by {
			if err := x.evict(ctx, had); err != nil {
				return Generation{}, err
			}
		}
		ok, err := x.writeGeneration(ctx, p, m, next.Number, now, by)
		if err == nil && ok && !begin && seen.truncated(log) {
			err = x.lower(ctx, m, seen.generation, log.End)
			next.Watermark = log.End
		}
		if err != nil || ok {
			return next, err
		}
		if err := wait.Wait(ctx); err != nil {
			return Generation{}, err
		}
	}
}

// lower takes the watermarks that are above the end of a truncated log back to it, so that the records that come to those
// offsets now are handled. A watermark that moved since it was read is of records that are there.
func (x *Inbox) lower(ctx context.Context, m marks, generation, end int64) error {
	for l, w := range m {
		if l.lane == partitionLane || w.Generation != generation || w.Next <= end {
			continue
		}
		filter := bson.D{{Key: "_id", Value: l.id()}, {Key: "g", Value: generation}, {Key: "n", Value: w.Next}}
		if _, err := x.offsets.UpdateOne(ctx, filter, bson.D{{Key: "$set", Value: bson.D{{Key: "n", Value: end}}}}); err != nil {
			return fmt.Errorf("lowering a watermark of partition %d of %s to offset %d: %w", l.partition.partition, l.topic, end, err)
		}
	}
	return nil
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
		if l.lane == partitionLane {
			s.id = w.ID
			continue
		}
		s.watermark = max(s.watermark, w.Next)
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
func (x *Inbox) writeGeneration(ctx context.Context, p partition, m marks, number int64, log Log, by string) (ok bool, err error) {
	own := lane{p, partitionLane}
	id := bson.E{Key: "_id", Value: own.id()}
	filter := bson.D{id, {Key: "g", Value: m[own].Generation}, {Key: "by", Value: m[own].by()}}
	if _, there := m[own]; !there {
		filter = bson.D{id, {Key: "g", Value: bson.D{{Key: "$exists", Value: false}}}}
	}
	set := bson.A{bson.D{{Key: "$set", Value: bson.D{{Key: "g", Value: number}, {Key: "e", Value: log.Epoch}, {Key: "id", Value: log.ID}, {Key: "by", Value: mark{By: by}.by()}, {Key: "at", Value: "$$NOW"}}}}}
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
