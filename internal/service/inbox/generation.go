package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
)

// Generation is one life of a partition: it begins when the topic is created, and ends when it is
// deleted.
type Generation struct {
	// Number increases by one with each generation.
	Number int64

	// Recreated reports whether this call has begun the generation.
	Recreated bool

	// Watermark is the highest offset of the watermarks of the generation, or 0 if there is none.
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

	// Accepted reports that the caller has gone on with the topic before, without HaltOnRecreated.
	Accepted bool
}

// suspicion is the stored state of a partition that contradicts its log.
type suspicion struct {
	generation, watermark int64
	epoch                 int32
	id                    string
}

// showsRecreation reports whether the log cannot belong to the topic that was seen before. If an id
// is unknown, only an end below the watermark or a lower leader epoch shows that. N29
func (s suspicion) showsRecreation(log Log) bool {
	if s.id != "" && log.ID != "" {
		return s.id != log.ID
	}
	return log.End >= 0 && log.End < s.watermark || log.Epoch >= 0 && log.Epoch < s.epoch
}

// showsLoss reports whether the same topic has lost handled records, and no process has attached to it since, for example after an
// unclean leader election. Each loss comes with a higher leader epoch.
func (s suspicion) showsLoss(log Log) bool {
	return s.id != "" && s.id == log.ID && log.End >= 0 && log.End < s.watermark && log.Epoch > s.epoch
}

// Attach prepares the inbox for a partition that this process begins to handle. Call it once for
// each assignment, with the log that was just read from the leader. Without Attach, Admit uses the
// current generation. Attach needs one read and one write, and does not join a transaction of ctx.
//
// Attach compares the log with the watermark:
//   - If the topic was recreated, a new generation begins, in which old watermarks have no effect. A
//     different id shows that, or if an id is unknown, an end below the watermark or a lower epoch.
//   - With HaltOnRecreated, the error is then ErrRecreated, unless the topic is accepted, and also if the same topic ends below the
//     watermark because it has lost records.
//
// Without HaltOnRecreated, lost records need nothing: the leader writes others with a higher epoch at
// their offsets, which the watermarks do not cover.
//
// Another process may have moved the watermark after the end was read. So the first contradiction
// is ErrUnconfirmed: read the log again, and call Attach again.
//
// If another process had the partition, did not call Release, and called no Heartbeat for MaxSilence,
// the server ends the transactions of that process. Otherwise uncommitted writes of a killed process
// would stay locked until the lifetime of the transaction is over (default 60 s). If the process is not
// silent yet, a later Heartbeat of this process does that.
func (x *Inbox) Attach(ctx context.Context, consumer, topic string, part int32, log Log) (Generation, error) {
	entry := Entry{Key{Consumer: consumer, ID: "-"}, Place{Topic: topic, Partition: part}}
	if err := errors.Join(entry.validateEntry(), requireTopic(topic)); err != nil {
		return Generation{}, fmt.Errorf("attaching: %w", err)
	}

	partition := Partition{consumer, topic, part}
	generation, err := x.switchGeneration(ctx, partition, log)
	if err != nil {
		return Generation{}, fmt.Errorf("attaching: %w", err)
	}

	x.mu.Lock()
	defer x.mu.Unlock()
	x.attached[partition] = generation.Number
	delete(x.suspicions, partition)
	return generation, nil
}

// The signs of life of a process that has partitions. They are far below the lifetime of a transaction, and
// long enough for a pause of a busy machine.
const (
	HeartbeatInterval = 3 * time.Second
	MaxSilence        = 10 * time.Second
)

// Heartbeat stores that this process lives, so that no other process ends its transactions. Call it every
// HeartbeatInterval while the process has partitions. It also ends transactions of previous owners that
// were alive at Attach and are silent now. It costs one write, if Admit was called since the first Attach.
func (x *Inbox) Heartbeat(ctx context.Context) error { return x.store.Heartbeat(ctx) }

// TopicIDs returns the stored ids of the topics of partitions, by partition. The consumer of a partition is the group. It does
// not join a transaction of ctx.
func (x *Inbox) TopicIDs(ctx context.Context, list []Partition) (map[Partition]string, error) {
	lanes := make([]LaneKey, len(list))
	for i, p := range list {
		lanes[i] = LaneKey{p, TopicLane}
	}
	marks, err := x.readMarks(x.store.Outside(ctx), lanes)
	if err != nil {
		return nil, fmt.Errorf("reading the ids of topics: %w", err)
	}

	ids := make(map[Partition]string, len(marks))
	for l, w := range marks {
		ids[l.Partition] = w.ID
	}
	return ids, nil
}

// StoreTopicIDs stores ids for TopicIDs. Call it when the group has committed an offset of the topic with this id: until then,
// a member that finds no such offset must see that the stored id is another one.
func (x *Inbox) StoreTopicIDs(ctx context.Context, ids map[Partition]string) error {
	if len(ids) == 0 {
		return nil
	}
	return x.store.WriteTopicIDs(x.store.Outside(ctx), ids)
}

// requireTopic returns an error if the topic is empty.
func requireTopic(topic string) error {
	if topic != "" {
		return nil
	}
	return fmt.Errorf("%w: the topic is empty", ErrInvalid)
}

// judgeLog reports whether a new generation begins, because the log contradicts the stored state.
func (x *Inbox) judgeLog(partition Partition, seen suspicion, log Log) (begin bool, err error) {
	recreated := seen.showsRecreation(log)
	lossy := x.settings.HaltOnRecreated && seen.showsLoss(log)

	x.mu.Lock()
	defer x.mu.Unlock()
	if !recreated && !lossy {
		delete(x.suspicions, partition)
		return false, nil
	}

	// This log was read after the watermark of the first contradiction. If it contradicts that
	// watermark too, the contradiction is real.
	before, ok := x.suspicions[partition]
	confirmed := ok && before.generation == seen.generation &&
		before.showsRecreation(log) == recreated && before.showsLoss(log) == lossy
	if !confirmed {
		x.suspicions[partition] = seen
		return false, fmt.Errorf("%w: partition %d of %s (%s) ends at offset %d with leader epoch %d, "+
			"but %s has handled up to offset %d at epoch %d (%s)",
			ErrUnconfirmed, partition.Number, partition.Topic, log.ID, log.End, log.Epoch, partition.Consumer, seen.watermark, seen.epoch, seen.id)
	}

	if x.settings.HaltOnRecreated && (lossy || !log.Accepted) {
		return false, fmt.Errorf("%w: partition %d of %s ends at offset %d with leader epoch %d, "+
			"but %s has handled up to offset %d at epoch %d; "+
			"if the topic was deleted and created again, run once without consumer.WithHaltOnLoss",
			ErrRecreated, partition.Number, partition.Topic, log.End, log.Epoch, partition.Consumer, seen.watermark, seen.epoch)
	}

	return recreated, nil
}

// switchGeneration reads the watermarks of a partition, decides whether a new generation begins, and
// writes the watermark of the partition. If another process has changed that watermark in between, it
// repeats this.
func (x *Inbox) switchGeneration(ctx context.Context, partition Partition, log Log) (Generation, error) {
	// Attach does not join a transaction of the caller.
	ctx = x.store.Outside(ctx)
	own := LaneKey{partition, PartitionLane}
	lanes := []LaneKey{own}
	for l := range int32(Lanes) {
		lanes = append(lanes, LaneKey{partition, l})
	}

	tenure := x.store.AddPartition(partition)
	for wait := retry.Reopen.Start(); ; {
		marks, err := x.readMarks(ctx, lanes)
		if err != nil {
			return Generation{}, err
		}

		seen := marks.summarize()
		begin, err := x.judgeLog(partition, seen, log)
		if err != nil {
			return Generation{}, err
		}

		// Unknown values of the log do not replace stored ones.
		next := Generation{Number: seen.generation, Watermark: seen.watermark}
		mark := Mark{Generation: next.Number, Epoch: max(seen.epoch, log.Epoch), By: tenure, ID: cmp.Or(log.ID, seen.id)}
		if begin {
			next = Generation{Number: seen.generation + 1, Recreated: true}
			mark = Mark{Generation: next.Number, Epoch: log.Epoch, By: tenure, ID: log.ID}
		}

		var stored *Mark
		if before, ok := marks[own]; ok {
			stored = &before
			if before.By != "" && before.By != tenure {
				if err := x.store.EndTransactions(ctx, before.By); err != nil {
					return Generation{}, err
				}
			}
		}

		// Another process may have written the watermark since it was read. Then everything is repeated.
		ok, err := x.store.WriteGeneration(ctx, partition, stored, mark)
		if err != nil || ok {
			return next, err
		}
		if err := wait.Wait(ctx); err != nil {
			return Generation{}, err
		}
	}
}

// summarize returns the state of the current generation of a partition, from all watermarks of
// that partition.
func (m Marks) summarize() suspicion {
	suspicion := suspicion{epoch: -1}
	for _, w := range m {
		suspicion.generation = max(suspicion.generation, w.Generation)
	}

	for l, w := range m {
		if w.Generation != suspicion.generation {
			continue
		}

		suspicion.epoch = max(suspicion.epoch, w.Epoch)
		if l.Lane == PartitionLane {
			suspicion.id = w.ID
			continue
		}

		suspicion.watermark = max(suspicion.watermark, w.Next)
	}

	return suspicion
}

// checkAttached returns ErrStale if another process has begun a generation of the partition
// since this process attached. The records that this process has fetched may belong to the deleted
// topic, and their offsets must not be used for the new one.
func (x *Inbox) checkAttached(partition Partition, current int64) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if generation, ok := x.attached[partition]; ok && generation != current {
		return fmt.Errorf("%w: %s is attached to generation %d of partition %d of %s, which is now at %d; "+
			"drop the fetched records and attach again",
			ErrStale, partition.Consumer, generation, partition.Number, partition.Topic, current)
	}
	return nil
}
