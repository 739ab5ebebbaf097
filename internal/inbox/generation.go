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

// Generation is one life of a partition: it begins when the topic is created, and ends when it is
// deleted.
type Generation struct {
	// Number increases by one with each generation.
	Number int64

	// Recreated reports whether this call has begun the generation.
	Recreated bool

	// Watermark is the offset after the last handled record of the generation, or 0 if there is
	// none.
	Watermark int64
}

// Log describes a partition, as its leader reports it.
type Log struct {
	// ID identifies the cluster and the topic, including its deletion and re-creation. It is empty
	// if unknown.
	ID string

	// End is the offset after the last record, or −1 if unknown.
	End int64

	// Epoch is the epoch of the leader, or −1 if unknown.
	Epoch int32
}

// suspicion is the stored state of a partition that contradicts its log.
type suspicion struct {
	generation, watermark int64
	epoch                 int32
	id                    string
}

// showsRecreation reports whether the log cannot belong to the topic that was seen before. If an id
// is unknown, only an end below the watermark or a lower leader epoch shows that. N29
func (s suspicion) showsRecreation(l Log) bool {
	if s.id != "" && l.ID != "" {
		return s.id != l.ID
	}
	return l.End >= 0 && l.End < s.watermark || l.Epoch >= 0 && l.Epoch < s.epoch
}

// showsTruncation reports whether the same topic has lost handled records, for example by an
// unclean leader election.
func (s suspicion) showsTruncation(l Log) bool {
	return s.id != "" && s.id == l.ID && l.End >= 0 && l.End < s.watermark
}

// Attach prepares the inbox for a partition that this process begins to handle. Call it once for
// each assignment, with the log that was just read from the leader. Without Attach, Admit uses the
// current generation. Attach needs one read and one write, and does not join a transaction of ctx.
//
// Attach compares the log with the watermark:
//   - If the topic was recreated, a new generation begins, in which old watermarks have no effect.
//     With Halt, the error is a *RecreatedError instead. A different id shows that, or if an id is
//     unknown, an end below the watermark or a lower epoch.
//   - If the same topic ends below the watermark, it has lost records. The watermarks go back to
//     its end. With Halt, the error is a *RecreatedError instead.
//
// Another process may have moved the watermark after the end was read. So the first contradiction
// is ErrUnconfirmed: read the log again, and call Attach again.
//
// If another process had the partition and did not call Release, the server ends the transactions
// of that process. Otherwise uncommitted writes of a killed process would stay locked until the
// lifetime of the transaction is over (default 60 s).
func (x *Inbox) Attach(ctx context.Context, consumer, topic string, part int32, l Log) (Generation, error) {
	p := partition{consumer, topic, part}
	judge := func(seen suspicion) (begin bool, err error) {
		recreated, truncated := seen.showsRecreation(l), seen.showsTruncation(l)
		if !recreated && !truncated {
			x.setSuspicion(p, nil)
			return false, nil
		}

		// This log was read after the watermark of the first contradiction. If it contradicts that
		// watermark too, the contradiction is real.
		before, ok := x.suspicionOf(p)
		confirmed := ok && before.generation == seen.generation &&
			before.showsRecreation(l) == recreated && before.showsTruncation(l) == truncated
		if !confirmed {
			x.setSuspicion(p, &seen)
			return false, fmt.Errorf("%w: partition %d of %s (%s) ends at offset %d with leader epoch %d, "+
				"but %s has handled up to offset %d at epoch %d (%s)",
				ErrUnconfirmed, part, topic, l.ID, l.End, l.Epoch, consumer, seen.watermark, seen.epoch, seen.id)
		}

		if x.recreated == Halt {
			return false, &RecreatedError{
				Consumer: consumer, Topic: topic, Partition: part,
				Watermark: seen.watermark, End: l.End, Epoch: l.Epoch, Seen: seen.epoch,
			}
		}

		return recreated, nil
	}

	g, err := x.switchGeneration(ctx, p, x.addToTenure(p), l, judge)
	if err != nil {
		return Generation{}, fmt.Errorf("attaching: %w", err)
	}

	x.mu.Lock()
	defer x.mu.Unlock()
	x.attached[p] = g.Number
	delete(x.suspicions, p)
	return g, nil
}

// suspicionOf returns the stored suspicion of a partition, and whether there is one.
func (x *Inbox) suspicionOf(p partition) (suspicion, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s, ok := x.suspicions[p]
	return s, ok
}

// setSuspicion stores the suspicion of a partition, or removes it if s is nil.
func (x *Inbox) setSuspicion(p partition, s *suspicion) {
	x.mu.Lock()
	defer x.mu.Unlock()

	if s == nil {
		delete(x.suspicions, p)
		return
	}

	x.suspicions[p] = *s
}

// Renew begins a new generation of the partition, regardless of the policy. Operators use it to
// resolve a *RecreatedError. Call Attach after it.
func (x *Inbox) Renew(ctx context.Context, consumer, topic string, part int32) (Generation, error) {
	begin := func(suspicion) (bool, error) { return true, nil }
	g, err := x.switchGeneration(ctx, partition{consumer, topic, part}, "", Log{End: -1, Epoch: -1}, begin)
	if err != nil {
		return Generation{}, fmt.Errorf("beginning a generation: %w", err)
	}

	return g, nil
}

// switchGeneration reads the watermarks of a partition, lets judge decide whether a new generation
// begins, and writes the document of the partition. If another process has changed that document in
// between, it repeats this. by is the tenure that gets the partition, or "". Watermarks of the same
// generation that exceed the end of a truncated log are lowered to it.
func (x *Inbox) switchGeneration(
	ctx context.Context, p partition, by string, log Log, judge func(seen suspicion) (begin bool, err error),
) (Generation, error) {
	e := Entry{Key{Consumer: p.consumer, ID: "-"}, Place{Topic: p.topic, Partition: p.partition}}
	if err := e.validateEntry(); err != nil || p.topic == "" {
		return Generation{}, errors.Join(err, requireTopic(p))
	}

	// Attach and Renew do not join a transaction of the caller.
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

		seen := m.summarizeMarks()
		begin, err := judge(seen)
		if err != nil {
			return Generation{}, err
		}

		next := Generation{Number: seen.generation, Watermark: seen.watermark}

		// Unknown values of the log do not replace stored ones.
		now := Log{ID: cmp.Or(log.ID, seen.id), Epoch: max(seen.epoch, log.Epoch)}
		if begin {
			next = Generation{Number: seen.generation + 1, Recreated: true}
			now = log
		}

		// Renew passes no tenure, so the partition keeps its present one.
		previous := m[lane{p, partitionLane}].By
		if by == "" {
			by = previous
		} else if previous != "" && previous != by {
			if err := x.endTransactionsOf(ctx, previous); err != nil {
				return Generation{}, err
			}
		}

		// Another process may have written the document since it was read. Then everything is repeated.
		ok, err := x.writeGeneration(ctx, p, m, next.Number, now, by)
		if err == nil && ok && !begin && seen.showsTruncation(log) {
			err = x.lowerWatermarks(ctx, m, seen.generation, log.End)
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

// lowerWatermarks lowers the watermarks that exceed the end of a truncated log, so that the new
// records at these offsets are handled. A watermark that was moved in the meantime belongs to
// existing records and stays.
func (x *Inbox) lowerWatermarks(ctx context.Context, m marks, generation, end int64) error {
	for l, w := range m {
		if l.lane == partitionLane || w.Generation != generation || w.Next <= end {
			continue
		}

		filter := bson.D{
			{Key: "_id", Value: l.documentID()},
			{Key: "g", Value: generation},
			{Key: "n", Value: w.Next},
		}
		set := bson.D{{Key: "$set", Value: bson.D{{Key: "n", Value: end}}}}
		if _, err := x.offsets.UpdateOne(ctx, filter, set); err != nil {
			return fmt.Errorf("lowering a watermark of partition %d of %s to offset %d: %w",
				l.partition.partition, l.topic, end, err)
		}
	}

	return nil
}

// requireTopic returns an error if the topic is empty.
func requireTopic(p partition) error {
	if p.topic != "" {
		return nil
	}
	return fmt.Errorf("%w: the topic is empty", ErrInvalid)
}

// summarizeMarks returns the state of the current generation of a partition, from all documents of
// that partition.
func (m marks) summarizeMarks() suspicion {
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

// byValue returns the value of the field by. Null stands for no tenure, and also matches a missing
// field.
func (w mark) byValue() any {
	if w.By == "" {
		return nil
	}
	return w.By
}

// writeGeneration stores the document of the partition if it has not changed since m was read. ok
// reports whether it did.
func (x *Inbox) writeGeneration(
	ctx context.Context, p partition, m marks, number int64, log Log, by string,
) (ok bool, err error) {
	own := lane{p, partitionLane}
	id := bson.E{Key: "_id", Value: own.documentID()}
	filter := bson.D{id, {Key: "g", Value: m[own].Generation}, {Key: "by", Value: m[own].byValue()}}
	if _, exists := m[own]; !exists {
		filter = bson.D{id, {Key: "g", Value: bson.D{{Key: "$exists", Value: false}}}}
	}

	set := bson.D{
		{Key: "g", Value: number},
		{Key: "e", Value: log.Epoch},
		{Key: "id", Value: log.ID},
		{Key: "by", Value: mark{By: by}.byValue()},
		{Key: "at", Value: "$$NOW"},
	}
	update := bson.A{bson.D{{Key: "$set", Value: set}}}
	res, err := x.offsets.UpdateOne(ctx, filter, update, options.UpdateOne().SetUpsert(true))
	if mongo.IsDuplicateKeyError(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("writing the generation of partition %d of %s: %w", p.partition, p.topic, err)
	}

	return res.MatchedCount+res.UpsertedCount == 1, nil
}

// checkAttached returns a *StaleError if another process has begun a generation of the partition
// since this process attached. The records that this process has fetched may belong to the deleted
// topic, and their offsets must not be used for the new one.
func (x *Inbox) checkAttached(p partition, current int64) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if g, ok := x.attached[p]; ok && g != current {
		return &StaleError{Consumer: p.consumer, Topic: p.topic, Partition: p.partition, Attached: g, Current: current}
	}
	return nil
}
