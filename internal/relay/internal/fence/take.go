package fence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// maxEpoch is the epoch at which a transactional id is left for the next generation. At 32,767 the
// coordinator would return another producer id, which cannot fence the old one.
const maxEpoch = 30_000

// In is the state from which a takeover begins: the content of the watcher document when the lease was
// acquired.
type In struct {
	// TransactionalID is the id without its generation: `outrelay.<instance>.<watcher>.<slot>` (N5).
	TransactionalID string
	// Offsets are the stored offsets by topic. Their topics are the targets of the takeover, with all
	// partitions that exist now. A partition without an entry is read from 0 (N9).
	Offsets map[string][]int64
	// Senders are the saved senders. The last one is the previous owner, and counts as open everywhere.
	Senders []record.Sender
	// Unneeded returns the topics that nothing refers to any more. Of these, the takeover forgets those that were deleted. nil: none.
	Unneeded func(ctx context.Context, topics []string) ([]string, error)
	// Gate reports whether the lease is valid. While it is not, nothing is done. nil means always valid.
	Gate func() bool
	// Bounds limit the read-back (N8). A zero bound has its default.
	Bounds Bounds
	// Alive is the latest time at which the earlier owner may have kept its transactional id alive. It
	// distinguishes a changed producer id from an expired one (N5). Zero means unknown.
	Alive time.Time
	// Event is called for events that matter to an operator, from any goroutine, also concurrently. It must not
	// block.
	Event func(Event)
	// Waiting is called while a step is retried for longer than 5 s: see Patience. It must not block.
	Waiting func(err error, began time.Time)
	// Stuck is how long the takeover waits for a hanging transaction before it uses the next
	// generation. Defaults to 10 s (N4).
	Stuck time.Duration
	// Idle is how long the takeover waits for a partition without progress. Defaults to 2 s. Retry
	// continues its read-back.
	Idle time.Duration
	// Own is how long a transaction of this owner may take before ErrSelfMove. Defaults to 5 s (N4).
	Own time.Duration

	epochs int16 // maxEpoch; tests set a lower value
}

// Out is the result of a takeover. Nothing may be sent before Senders and the offsets (From of each
// released Tail) are saved in one fenced write.
type Out struct {
	Producer    Producer // to send with
	Senders     []record.Sender
	Released    map[record.TopicPartition]*Tail
	Quarantined map[record.TopicPartition]kafkawire.Obstacle // why, for operators
	Forgotten   []string                                     // deleted topics, whose stored offsets have to be removed in the same write
	Session     *Session
}

// Take takes the transactional id over (N4): Init, a barrier over the healthy partitions, a read of each
// partition from its stored offset until the markers are found, and a conditional Init. Where a sender of
// an earlier generation is open, it also takes the id of that generation. Partitions that cannot be fenced
// now are quarantined, which is not an error. Errors: ErrFenced if another process takes the id at the same
// time, the code of a rejection (authorization), or the end of ctx.
func (c *Client) Take(ctx context.Context, input In) (*Out, error) {
	takeOver := &takeOver{session: newSession(c, input), released: map[record.TopicPartition]*Tail{}}
	session := takeOver.session
	for _, x := range input.Senders {
		session.generation = max(session.generation, x.Generation)
	}

	health, err := c.awaitHealth(ctx, takeOver.listTopics(), session.patience())
	if err != nil {
		return nil, err
	}
	session.discardForeignSenders(health.layout.Cluster)
	forgotten, err := takeOver.forgetDeletedTopics(ctx, health)
	if err != nil {
		return nil, err
	}
	takeOver.quarantineTargets(health)
	if err := takeOver.acquire(ctx); err != nil {
		return nil, err
	}
	if err := takeOver.releaseEarlierGenerations(ctx); err != nil {
		return nil, err
	}

	return &Out{
		Producer:    session.current,
		Senders:     session.Senders(),
		Released:    takeOver.released,
		Quarantined: session.Quarantined(),
		Forgotten:   forgotten,
		Session:     session,
	}, nil
}

// forgetDeletedTopics removes topics that do not exist and that nothing refers to from the targets, and from the earlier senders. It
// returns their names.
//
// N4: an earlier sender is no longer fenced in a topic that is forgotten. If the topic is created again, it can only write what it
// wrote to the deleted log, and only before the first record of this owner, whose higher epoch makes Kafka reject it.
func (t *takeOver) forgetDeletedTopics(ctx context.Context, health *Health) ([]string, error) {
	session := t.session
	var missing []string
	all := t.listTopics()
	for _, name := range all {
		if errors.Is(health.layout.Topics[name].Err, kafkawire.UnknownTopicOrPartition) {
			missing = append(missing, name)
		}
	}
	// If no topic exists, this is probably another cluster.
	if session.in.Unneeded == nil || len(missing) == 0 || len(missing) == len(all) {
		return nil, nil
	}

	names, err := session.in.Unneeded(ctx, missing)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	isForgotten := map[string]bool{}
	for _, name := range names {
		isForgotten[name] = true
	}
	session.in.Offsets = maps.Clone(session.in.Offsets)
	maps.DeleteFunc(session.in.Offsets, func(name string, _ []int64) bool { return isForgotten[name] })
	session.in.Senders = slices.Clone(session.in.Senders)
	for i := range session.in.Senders {
		sender := &session.in.Senders[i]
		sender.Open = slices.DeleteFunc(slices.Clone(sender.Open), func(tp record.TopicPartition) bool { return isForgotten[tp.Topic] })
		sender.EndOffsets = maps.Clone(sender.EndOffsets)
		maps.DeleteFunc(sender.EndOffsets, func(name string, _ []int64) bool { return isForgotten[name] })
	}
	return names, nil
}

// discardForeignSenders discards the senders of other Kafka clusters. They cannot write here, and an equal producer id
// is another producer here.
func (s *Session) discardForeignSenders(cluster string) {
	s.cluster = cluster
	foreign := func(sender record.Sender) bool {
		return sender.Cluster != "" && cluster != "" && sender.Cluster != cluster
	}
	if last := len(s.in.Senders) - 1; last >= 0 && foreign(s.in.Senders[last]) {
		s.moved = true
		s.report(Event{Kind: ClusterChanged, Text: fmt.Sprintf(
			"the previous owner sent to Kafka cluster %s, and this is cluster %s: records of the other cluster are not searched, "+
				"so events that were sent there after the stored position are sent again; "+
				"if you did not move the watcher, stop this relay and correct kafka.brokers",
			s.in.Senders[last].Cluster, cluster)})
	}
	s.in.Senders = slices.DeleteFunc(slices.Clone(s.in.Senders), foreign)
}

// takeOver is the state of one Take.
type takeOver struct {
	session  *Session
	released map[record.TopicPartition]*Tail
}

// listTopics returns the topics of the targets and of the open partitions of earlier senders.
func (t *takeOver) listTopics() []string {
	in := &t.session.in
	names := map[string]bool{}
	for topic := range in.Offsets {
		names[topic] = true
	}
	for _, s := range in.Senders {
		for _, tp := range s.Open {
			names[tp.Topic] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// quarantineTargets quarantines all partitions that the takeover has to release.
func (t *takeOver) quarantineTargets(health *Health) {
	session := t.session
	var all []record.TopicPartition
	for topic, stored := range session.in.Offsets {
		layout := health.layout.Topics[topic]
		n := max(len(stored), len(layout.Partitions))
		// A topic that is missing now is read when it exists again.
		if layout.Err != nil {
			n = max(n, 1)
		}
		for p := range n {
			all = append(all, record.TopicPartition{Topic: topic, Partition: int32(p)})
		}
	}

	// Earlier senders may be open in topics that are no longer stored.
	session.retired = earlierSenders(session.in.Senders, all, session.in.Offsets)
	for _, x := range session.retired {
		all = append(all, x.open.listPartitions()...)
	}
	for _, tp := range all {
		if session.held[tp] == nil {
			session.held[tp] = &heldPartition{
				tail:   newTail(storedOffset(session.in.Offsets, tp)),
				reason: cmp.Or(health.Reason(tp), kafkawire.Obstacle{Cause: "not read yet"}),
			}
		}
	}
}

// acquire runs the steps of N4 in their order.
func (t *takeOver) acquire(ctx context.Context) error {
	session := t.session
	id := session.formatID(session.generation)
	// N4: a marker above the last owner needs an epoch above that owner.
	got, err := session.client.Init(ctx, id, anyEpoch, session.patience())
	crash.At("after-init")

	// While the id hangs, no process can write a marker of it.
	if errors.Is(err, errStuck) {
		if err := session.takeNextGeneration(ctx); err != nil {
			return err
		}
		return t.readDespiteHang(ctx, id)
	}
	if err != nil {
		return err
	}

	session.current = got
	session.noteForgotten(ctx, session.generation, got)
	if len(session.held) == 0 {
		// The first start: no other process has this epoch, and there is nothing to read.
		return nil
	}
	return t.fenceTargets(ctx)
}

// releaseEarlierGenerations releases partitions in which a sender of an earlier generation is open: the
// marker that is missing there needs the id of that generation, and not another takeover.
func (t *takeOver) releaseEarlierGenerations(ctx context.Context) error {
	session := t.session
	if !slices.ContainsFunc(session.retired, func(sender earlierSender) bool {
		return sender.generation < session.generation && sender.open.count > 0
	}) {
		return nil
	}

	tails, err := session.Retry(ctx)
	maps.Copy(t.released, tails)
	// The owner finds out again when it keeps its id alive, and then moves to the next generation.
	if errors.Is(err, ErrSelfMove) {
		return nil
	}
	return err
}

// fenceTargets writes the barrier, reads, and takes an epoch to send with.
func (t *takeOver) fenceTargets(ctx context.Context) error {
	session := t.session
	health, err := session.client.awaitHealth(ctx, t.listTopics(), session.patience())
	if err != nil {
		return err
	}

	id := session.formatID(session.generation)
	// N4: with a sick partition, the transaction would not end, and the id could fence no other
	// partition.
	covered := health.Healthy(session.quarantinedPartitions())
	ends := session.readEnds(ctx, health, session.quarantinedPartitions(), session.in.Idle)
	rejected, _, err := session.client.Barrier(ctx, id, session.current, covered, session.patience())
	crash.At("after-barrier")
	stuck := errors.Is(err, errStuck)
	if err != nil && !stuck {
		return err
	}
	for tp, why := range rejected {
		session.held[tp].reason = kafkawire.Obstacle{Cause: why.Error()}
	}

	// The coordinator responds to the conditional Init when all markers are written. The read begins at
	// once, at the same time.
	var wg sync.WaitGroup
	barrier, next := session.current, session.current
	var initErr error
	if !stuck && barrier.Epoch < session.in.epochs {
		wg.Go(func() { next, initErr = session.client.Init(ctx, id, barrier, session.patience()) })
	}
	err = t.readTargets(ctx, health, ends, withoutRejected(covered, rejected))
	wg.Wait()

	switch {
	case err != nil:
		return err
	case stuck || errors.Is(initErr, errStuck) || barrier.Epoch >= session.in.epochs:
		// Nothing was ever sent with the epoch of the barrier.
		return session.takeNextGeneration(ctx)
	case initErr != nil:
		return initErr
	}

	session.current = next
	if session.isRejected() {
		return session.takeNextGeneration(ctx)
	}
	return nil
}

// readTargets reads every partition that has a leader, and releases the fenced ones. It waits for the
// markers of the current id in covered. ends are the ends of the logs before these markers.
func (t *takeOver) readTargets(
	ctx context.Context, health *Health, ends map[record.TopicPartition]int64, covered []record.TopicPartition,
) error {
	session := t.session
	awaited := map[record.TopicPartition]bool{}
	for _, tp := range covered {
		awaited[tp] = true
	}

	var list []*reading
	for tp, q := range session.held {
		if health.layout.LeaderAddr(tp) == "" {
			q.reason = health.Reason(tp)
			continue
		}

		reading := &reading{TopicPartition: tp, tail: q.tail, end: ends[tp]}
		for _, x := range session.openSenders(tp) {
			if awaited[tp] && x.ID == session.current.ID {
				reading.await = append(reading.await, x.Producer)
			}
		}
		list = append(list, reading)
	}
	return session.readAndRelease(ctx, session.newReader(), list, t.released)
}

// readDespiteHang reads the markers that are in the logs already, because the hanging transaction may
// have fenced some partitions. It reports what blocks the id.
func (t *takeOver) readDespiteHang(ctx context.Context, id string) error {
	session := t.session
	health, err := session.client.awaitHealth(ctx, t.listTopics(), session.patience())
	if err != nil {
		return err
	}
	ends := session.readEnds(ctx, health, session.quarantinedPartitions(), session.in.Idle)
	if err := t.readTargets(ctx, health, ends, nil); err != nil {
		return err
	}

	// An operator can only act on the partitions that block the transaction.
	var sick []string
	for _, tp := range session.quarantinedPartitions() {
		if why := health.Reason(tp); why != healthy {
			sick = append(sick, formatPartition(tp)+" ("+why.Cause+")")
		}
	}
	where := "all partitions look healthy; look at the logs of the brokers"
	if len(sick) > 0 {
		where = "unhealthy: " + strings.Join(sick[:min(len(sick), 20)], ", ")
	}
	session.report(Event{
		Kind: Hung,
		Text: fmt.Sprintf("transactional id %s has a transaction that does not end; "+
			"%d of %d partitions cannot be fenced and wait until it does; %s",
			id, len(session.held), len(session.held)+len(t.released), where),
	})
	return nil
}
