package memory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// group is a consumer group. The lock of the broker protects it.
type group struct {
	name    string
	id      int32 // of the current generation
	forming bool  // members are changing to the next generation
	offsets map[transport.TopicPartition]transport.GroupOffset
	members []*member
}

// member is a running call of Join.
type member struct {
	topics  []string
	serving *generation // nil while the member waits for one
	next    *generation // created for the member, but not taken yet
	expired bool        // outside of the group until it stops serving
}

// errRebalance is the cause with which the context of a generation ends.
var errRebalance = errors.New("the group is rebalanced")

// Join makes the caller a member of the group until ctx ends: see consumer.Transport. If a member
// joins or leaves, or a topic of the group gets more partitions, all members stop serving, and the
// partitions are assigned again.
func (b *Broker) Join(ctx context.Context, name string, topics []string, session transport.Session) error {
	if name == "" || len(topics) == 0 {
		return errors.New("joining a group: a name and at least one topic are required")
	}

	for _, t := range topics {
		if err := checkTopic(t); err != nil {
			return fmt.Errorf("joining group %s: %w", name, err)
		}
	}

	group, member := b.enterGroup(name, topics)
	defer b.leaveGroup(group, member)

	for {
		serving, cancel := context.WithCancelCause(ctx)
		gen, err := b.awaitGeneration(ctx, member, cancel)
		if err != nil {
			// The context has ended, which is how a member leaves.
			cancel(err)
			return nil //nolint:nilerr // see above
		}

		err = session.Serve(serving, gen)
		cancel(context.Canceled)
		if err != nil || ctx.Err() != nil {
			return err
		}

		b.endServing(group, member)
	}
}

// enterGroup adds a member to the group.
func (b *Broker) enterGroup(name string, topics []string) (*group, *member) {
	b.mu.Lock()
	defer b.mu.Unlock()

	group := b.findOrAddGroupLocked(name)
	member := &member{topics: slices.Compact(slices.Sorted(slices.Values(topics)))}
	for _, t := range member.topics {
		b.findOrAddTopicLocked(t)
	}

	group.members = append(group.members, member)
	b.rebalanceLocked(group)
	return group, member
}

// findOrAddGroupLocked returns the group called name.
func (b *Broker) findOrAddGroupLocked(name string) *group {
	existing := b.groups[name]
	if existing == nil {
		existing = &group{name: name, offsets: map[transport.TopicPartition]transport.GroupOffset{}}
		b.groups[name] = existing
	}
	return existing
}

// leaveGroup removes the member from the group.
func (b *Broker) leaveGroup(group *group, leaving *member) {
	b.mu.Lock()
	defer b.mu.Unlock()

	group.members = slices.DeleteFunc(group.members, func(member *member) bool { return member == leaving })
	b.rebalanceLocked(group)
}

// awaitGeneration blocks until the member has a new generation, or until ctx ends. cancel will be
// called when the generation ends.
func (b *Broker) awaitGeneration(ctx context.Context, member *member, cancel context.CancelCauseFunc) (*generation, error) {
	for {
		b.mu.Lock()
		gen := member.next
		changed := b.changed
		if gen != nil && ctx.Err() == nil {
			member.next = nil
			member.serving = gen
			gen.cancel = cancel
			b.mu.Unlock()
			return gen, nil
		}
		b.mu.Unlock()

		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// endServing records that the member has stopped serving its generation.
func (b *Broker) endServing(group *group, member *member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	member.serving = nil

	// The member comes back after Expire, or it has stopped without a rebalance.
	if member.expired || !group.forming {
		member.expired = false
		b.rebalanceLocked(group)
		return
	}
	b.formGenerationLocked(group)
}

// rebalanceLocked makes all members stop serving. When the last one has stopped, the next
// generation is formed.
func (b *Broker) rebalanceLocked(group *group) {
	group.forming = true
	for _, m := range group.members {
		m.next = nil
		if m.serving != nil {
			m.serving.cancel(errRebalance)
		}
	}
	b.formGenerationLocked(group)
}

// rebalanceSubscribersLocked rebalances the groups that subscribe to the topic.
func (b *Broker) rebalanceSubscribersLocked(topic string) {
	for _, g := range b.groups {
		if slices.ContainsFunc(g.members, func(member *member) bool { return slices.Contains(member.topics, topic) }) {
			b.rebalanceLocked(g)
		}
	}
}

// Rebalance makes a group assign its partitions again, as if a member had joined or left.
func (b *Broker) Rebalance(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rebalanceLocked(b.findOrAddGroupLocked(name))
}

// Expire ends the current generation of a group at once, as if the sessions of its members had
// timed out. The members cannot commit any more, even if they have not noticed it yet.
func (b *Broker) Expire(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()

	b.expireLocked(b.findOrAddGroupLocked(name))
}

func (b *Broker) expireLocked(group *group) {
	group.id++
	for _, m := range group.members {
		m.expired = m.serving != nil
	}
	b.rebalanceLocked(group)
}

// DescribeGroup returns the members of a group and their partitions.
func (b *Broker) DescribeGroup(ctx context.Context, name string) (transport.GroupState, error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	group := b.findOrAddGroupLocked(name)
	state := transport.GroupState{Members: len(group.members), Stable: !group.forming && len(group.members) > 0, Assigned: map[transport.TopicPartition]bool{}}
	for _, m := range group.members {
		gen := m.serving
		if m.next != nil {
			gen = m.next
		}
		if gen == nil {
			state.Stable = false
			continue
		}
		for _, a := range gen.partitions {
			state.Assigned[a] = true
		}
	}
	return state, ctx.Err()
}

// Members returns the number of members of a group.
func (b *Broker) Members(name string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.findOrAddGroupLocked(name).members)
}

// Unread describes the records that groups with members have not committed. It is empty if there are none.
func (b *Broker) Unread() []string {
	b.mu.Lock()
	defer b.mu.Unlock()

	var list []string
	for name, g := range b.groups {
		for _, m := range g.members {
			for _, topic := range m.topics {
				if lag := b.lagLocked(name, topic); lag > 0 {
					list = append(list, fmt.Sprintf("group %s has not handled %d records of topic %s", name, lag, topic))
				}
			}
		}
	}
	return list
}

// Redeliver makes all groups read the records of a topic from the beginning.
func (b *Broker) Redeliver(topic string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range b.groups {
		maps.DeleteFunc(g.offsets, func(tp transport.TopicPartition, _ transport.GroupOffset) bool { return tp.Topic == topic })
		if slices.ContainsFunc(g.members, func(member *member) bool { return slices.Contains(member.topics, topic) }) {
			// From now on the current members cannot commit.
			b.expireLocked(g)
		}
	}
}

// Committed returns the committed offset of a group in a partition, and whether there is one.
func (b *Broker) Committed(name, topic string, part int32) (int64, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()

	offset, ok := b.findOrAddGroupLocked(name).offsets[transport.TopicPartition{Topic: topic, Partition: part}]
	return offset.Offset, ok
}

// Lag returns the number of records in the topic that the group has not committed, in all
// partitions.
func (b *Broker) Lag(name, topic string) (lag int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lagLocked(name, topic)
}

// lagLocked is Lag for callers that hold the lock.
func (b *Broker) lagLocked(name, topic string) (lag int64) {
	for i, p := range b.findOrAddTopicLocked(topic).partitions {
		tp := transport.TopicPartition{Topic: topic, Partition: int32(i)}
		lag += p.end - max(b.findOrAddGroupLocked(name).offsets[tp].Offset, p.start)
	}
	return lag
}

// AwaitCommitted blocks until the group has committed all records of the topic, or until ctx ends.
func (b *Broker) AwaitCommitted(ctx context.Context, name, topic string) error {
	var lag int64
	err := b.await(ctx, func() bool {
		lag = b.lagLocked(name, topic)
		return lag <= 0
	})
	if err != nil {
		return fmt.Errorf("waiting for group %s, whose lag in %s is %d: %w", name, topic, lag, err)
	}
	return nil
}

// formGenerationLocked forms the next generation when no member serves the previous one.
func (b *Broker) formGenerationLocked(group *group) {
	if slices.ContainsFunc(group.members, func(member *member) bool { return member.serving != nil && !member.expired }) {
		return
	}

	group.forming = false
	group.id++

	subscribed := map[string][]*generation{}
	for _, m := range group.members {
		// An expired member joins again when it has stopped serving.
		if m.expired {
			continue
		}

		m.next = &generation{broker: b, group: group, id: group.id}
		for _, t := range m.topics {
			subscribed[t] = append(subscribed[t], m.next)
		}
	}

	// The partitions of all topics are assigned round robin.
	next := 0
	for _, name := range slices.Sorted(maps.Keys(subscribed)) {
		for i := range b.findOrAddTopicLocked(name).partitions {
			tp := transport.TopicPartition{Topic: name, Partition: int32(i)}
			gen := subscribed[name][next%len(subscribed[name])]
			next++

			gen.partitions = append(gen.partitions, tp)
		}
	}

	b.notifyLocked()
}

// generation is a consumer.Generation of one member.
type generation struct {
	broker     *Broker
	group      *group
	id         int32
	partitions []transport.TopicPartition
	cancel     context.CancelCauseFunc // ends the context of Serve
}

// ID returns the number of the generation.
func (g *generation) ID() int32 { return g.id }

// Partitions returns the assigned partitions.
func (g *generation) Partitions() []transport.TopicPartition { return slices.Clone(g.partitions) }

// Changes returns nil: a rebalance ends the generation.
func (*generation) Changes() <-chan transport.Change { return nil }

// Resume returns where the group goes on. A group that has committed nothing begins with the first record.
func (g *generation) Resume(ctx context.Context, tp transport.TopicPartition) (transport.Start, error) {
	g.broker.mu.Lock()
	defer g.broker.mu.Unlock()

	at, ok := g.group.offsets[tp]
	if ok || ctx.Err() != nil {
		return transport.Start{GroupOffset: at}, ctx.Err()
	}
	partition, err := g.broker.findPartitionLocked(tp)
	if err != nil {
		return transport.Start{}, err
	}
	return transport.Start{GroupOffset: transport.GroupOffset{Offset: partition.start}}, nil
}

// Log describes a partition.
func (g *generation) Log(ctx context.Context, tp transport.TopicPartition) (inbox.Log, error) {
	g.broker.mu.Lock()
	defer g.broker.mu.Unlock()

	partition, err := g.broker.findPartitionLocked(tp)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return inbox.Log{}, err
	}

	return inbox.Log{ID: g.broker.topics[tp.Topic].id, End: partition.end}, nil
}

// findPartitionLocked returns the partition, or an error if it does not exist.
func (b *Broker) findPartitionLocked(tp transport.TopicPartition) (*partition, error) {
	topic := b.topics[tp.Topic]
	if topic == nil || tp.Partition < 0 || int(tp.Partition) >= len(topic.partitions) {
		return nil, fmt.Errorf("partition %s does not exist", tp)
	}
	return topic.partitions[tp.Partition], nil
}

// fetchWait is the time for which a fetch waits for a record.
const fetchWait = time.Second

// Fetch returns the records of about maxBytes. If there are none, it waits for at
// most fetchWait.
func (g *generation) Fetch(
	ctx context.Context, tp transport.TopicPartition, from transport.FetchFrom, maxBytes int,
) (transport.Fetched, error) {
	var timeout <-chan time.Time
	for {
		if err := ctx.Err(); err != nil {
			return transport.Fetched{}, err
		}

		g.broker.mu.Lock()
		fetched, err := g.broker.fetchLocked(tp, from, maxBytes)
		changed := g.broker.changed
		g.broker.mu.Unlock()

		if err != nil || fetched.Next > from.Offset {
			return fetched, err
		}

		// Most fetches find a record and need no timer.
		if timeout == nil {
			timer := time.NewTimer(fetchWait)
			defer timer.Stop()
			timeout = timer.C
		}

		select {
		case <-changed:
		case <-timeout:
			return fetched, nil
		case <-ctx.Done():
		}
	}
}

// fetchLocked returns the records of a partition. It returns at least one record if there is one.
func (b *Broker) fetchLocked(tp transport.TopicPartition, from transport.FetchFrom, maxBytes int) (transport.Fetched, error) {
	offset := from.Offset
	partition, err := b.findPartitionLocked(tp)
	if err != nil {
		return transport.Fetched{}, err
	}
	if id := b.topics[tp.Topic].id; from.TopicID != "" && from.TopicID != id {
		return transport.Fetched{}, fmt.Errorf("topic %s has the id %s, not %s", tp.Topic, id, from.TopicID)
	}
	if offset < partition.start || offset > partition.end {
		return transport.Fetched{}, &transport.RangeError{TopicPartition: tp, Offset: offset, Start: partition.start, End: partition.end}
	}

	fetched := transport.Fetched{Next: partition.end, End: partition.end}
	compareOffset := func(record storedRecord, wanted int64) int { return int(record.Offset - wanted) }
	first, _ := slices.BinarySearchFunc(partition.records, offset, compareOffset)

	bytes := 0
	for _, r := range partition.records[first:] {
		bytes += len(r.Key) + len(r.Value)
		// The first record is returned at any size. Otherwise a large one would block the partition.
		if bytes > maxBytes && len(fetched.Records) > 0 {
			fetched.Next = r.Offset
			break
		}

		fetched.Records = append(fetched.Records, cloneRecord(r.Record))
	}

	return fetched, nil
}

// Commit stores the offsets of the group. After the generation is over, it returns
// consumer.ErrGenerationOver.
func (g *generation) Commit(ctx context.Context, offsets map[transport.TopicPartition]transport.GroupOffset) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	g.broker.mu.Lock()
	defer g.broker.mu.Unlock()

	// Another member may be reading the partitions by now.
	if g.group.id != g.id {
		return transport.ErrGenerationOver
	}

	maps.Copy(g.group.offsets, offsets)
	g.broker.notifyLocked()
	return nil
}
