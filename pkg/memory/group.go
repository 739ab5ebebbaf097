package memory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// group is a consumer group. All of it is guarded by the broker's lock.
type group struct {
	name    string
	id      int32 // of the present generation
	forming bool  // members are on their way into the next one
	offsets map[consumer.TopicPartition]int64
	members []*member
}

// member is one Join.
type member struct {
	topics  []string
	serving *generation // nil while it waits for one
	next    *generation // made for it and not taken yet
	expired bool        // it is out of the group until it ends what it serves
}

// errRebalance is why the context of a generation ends.
var errRebalance = errors.New("the group is rebalanced")

// Join is consumer.Transport's: one member of the group until ctx ends. Whenever a member comes or goes, or a topic of
// theirs gets more partitions, all members end what they serve, and the partitions are given out anew.
func (b *Broker) Join(ctx context.Context, name string, topics []string, s consumer.Session) error {
	if name == "" || len(topics) == 0 {
		return errors.New("joining a group: a name and topics are needed")
	}
	for _, t := range topics {
		if err := checkTopic(t); err != nil {
			return fmt.Errorf("joining group %s: %w", name, err)
		}
	}
	g, m := b.enter(name, topics)
	defer b.leave(g, m)
	for {
		serving, cancel := context.WithCancelCause(ctx)
		gen, err := b.await(ctx, m, cancel)
		if err != nil {
			cancel(err)
			return nil //nolint:nilerr // the context ended, which is how a member leaves
		}
		err = s.Serve(serving, gen)
		cancel(context.Canceled)
		if err != nil || ctx.Err() != nil {
			return err
		}
		b.served(g, m)
	}
}

func (b *Broker) enter(name string, topics []string) (*group, *member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.group(name)
	m := &member{topics: slices.Compact(slices.Sorted(slices.Values(topics)))}
	for _, t := range m.topics {
		b.topic(t)
	}
	g.members = append(g.members, m)
	b.rebalance(g)
	return g, m
}

func (b *Broker) group(name string) *group {
	g := b.groups[name]
	if g == nil {
		g = &group{name: name, offsets: map[consumer.TopicPartition]int64{}}
		b.groups[name] = g
	}
	return g
}

func (b *Broker) leave(g *group, m *member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	g.members = slices.DeleteFunc(g.members, func(x *member) bool { return x == m })
	b.rebalance(g)
}

// await is the next generation of the member, whose end calls cancel.
func (b *Broker) await(ctx context.Context, m *member, cancel context.CancelCauseFunc) (*generation, error) {
	for {
		b.mu.Lock()
		gen, changed := m.next, b.changed
		if gen != nil && ctx.Err() == nil {
			m.next, m.serving, gen.cancel = nil, gen, cancel
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

// served notes that the member is out of its generation.
func (b *Broker) served(g *group, m *member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m.serving = nil
	if m.expired || !g.forming { // it comes back, or ended by itself and takes part again
		m.expired = false
		b.rebalance(g)
		return
	}
	b.form(g)
}

// rebalance asks all members to end what they serve; the last one that has ended makes the next generation.
func (b *Broker) rebalance(g *group) {
	g.forming = true
	for _, m := range g.members {
		m.next = nil
		if m.serving != nil {
			m.serving.cancel(errRebalance)
		}
	}
	b.form(g)
}

func (b *Broker) rebalanceSubscribers(topic string) {
	for _, g := range b.groups {
		if slices.ContainsFunc(g.members, func(m *member) bool { return slices.Contains(m.topics, topic) }) {
			b.rebalance(g)
		}
	}
}

// Rebalance lets a group give out its partitions anew, as when a member came or went.
func (b *Broker) Rebalance(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rebalance(b.group(name))
}

// Expire ends the present generation of a group at once, as when its members were not heard of for the session's time:
// they cannot commit any more, and may not know yet.
func (b *Broker) Expire(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.group(name)
	g.id++
	for _, m := range g.members {
		m.expired = m.serving != nil
	}
	b.rebalance(g)
}

// Committed is the offset that a group goes on from in a partition, and whether it has committed one.
func (b *Broker) Committed(name, topic string, part int32) (int64, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	offset, ok := b.group(name).offsets[consumer.TopicPartition{Topic: topic, Partition: part}]
	return offset, ok
}

// Lag is how many offsets of the topic the group has not committed, over all partitions.
func (b *Broker) Lag(name, topic string) (lag int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lag(name, topic)
}

func (b *Broker) lag(name, topic string) (lag int64) {
	for i, p := range b.topic(topic).partitions {
		lag += p.end - max(b.group(name).offsets[consumer.TopicPartition{Topic: topic, Partition: int32(i)}], p.start)
	}
	return lag
}

// AwaitCommitted returns when the group has committed everything that is in the topic.
func (b *Broker) AwaitCommitted(ctx context.Context, name, topic string) error {
	for {
		b.mu.Lock()
		lag, changed := b.lag(name, topic), b.changed
		b.mu.Unlock()
		if lag <= 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("waiting for group %s, which is %d behind in %s: %w", name, lag, topic, ctx.Err())
		}
	}
}

// form makes the next generation when nobody serves the one before.
func (b *Broker) form(g *group) {
	if slices.ContainsFunc(g.members, func(m *member) bool { return m.serving != nil && !m.expired }) {
		return
	}
	g.forming = false
	g.id++
	subscribed := map[string][]*generation{}
	for _, m := range g.members {
		if m.expired {
			continue
		}
		m.next = &generation{broker: b, group: g, id: g.id}
		for _, t := range m.topics {
			subscribed[t] = append(subscribed[t], m.next)
		}
	}
	turn := 0
	for _, name := range slices.Sorted(maps.Keys(subscribed)) {
		for i := range b.topic(name).partitions {
			tp := consumer.TopicPartition{Topic: name, Partition: int32(i)}
			gen := subscribed[name][turn%len(subscribed[name])]
			turn++
			offset, ok := g.offsets[tp]
			if !ok {
				offset = b.topics[name].partitions[i].start
			}
			gen.partitions = append(gen.partitions, consumer.Assignment{TopicPartition: tp, Offset: offset})
		}
	}
	b.change()
}

// generation is consumer.Generation for one member.
type generation struct {
	broker     *Broker
	group      *group
	id         int32
	partitions []consumer.Assignment
	cancel     context.CancelCauseFunc // ends its Serve
}

func (g *generation) ID() int32 { return g.id }

func (g *generation) Partitions() []consumer.Assignment { return slices.Clone(g.partitions) }

func (g *generation) Log(ctx context.Context, tp consumer.TopicPartition) (inbox.Log, error) {
	g.broker.mu.Lock()
	defer g.broker.mu.Unlock()
	p, err := g.broker.partition(tp)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return inbox.Log{}, err
	}
	return inbox.Log{ID: g.broker.topics[tp.Topic].id, End: p.end}, nil
}

func (b *Broker) partition(tp consumer.TopicPartition) (*partition, error) {
	t := b.topics[tp.Topic]
	if t == nil || tp.Partition < 0 || int(tp.Partition) >= len(t.partitions) {
		return nil, fmt.Errorf("there is no partition %s", tp)
	}
	return t.partitions[tp.Partition], nil
}

// fetchWait is how long a fetch waits for a record.
const fetchWait = time.Second

func (g *generation) Fetch(ctx context.Context, tp consumer.TopicPartition, offset int64, maxBytes int) (consumer.Fetched, error) {
	var timeout <-chan time.Time
	for {
		if err := ctx.Err(); err != nil {
			return consumer.Fetched{}, err
		}
		g.broker.mu.Lock()
		f, err := g.broker.fetch(tp, offset, maxBytes)
		changed := g.broker.changed
		g.broker.mu.Unlock()
		if err != nil || f.Next > offset {
			return f, err
		}
		if timeout == nil {
			timer := time.NewTimer(fetchWait)
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-changed:
		case <-timeout:
			return f, nil
		case <-ctx.Done():
		}
	}
}

// fetch is what a partition has from an offset on.
func (b *Broker) fetch(tp consumer.TopicPartition, offset int64, maxBytes int) (consumer.Fetched, error) {
	p, err := b.partition(tp)
	if err != nil {
		return consumer.Fetched{}, err
	}
	if offset < p.start || offset > p.end {
		return consumer.Fetched{}, &consumer.RangeError{TopicPartition: tp, Offset: offset, Start: p.start, End: p.end}
	}
	f := consumer.Fetched{Next: p.end, End: p.end}
	at, _ := slices.BinarySearchFunc(p.records, offset, func(r stored, o int64) int { return int(r.Offset - o) })
	bytes := 0
	for _, r := range p.records[at:] {
		if bytes += len(r.Key) + len(r.Value); bytes > maxBytes && len(f.Records) > 0 {
			f.Next = r.Offset
			break
		}
		f.Records = append(f.Records, clone(r.Record))
	}
	return f, nil
}

func (g *generation) Commit(ctx context.Context, offsets map[consumer.TopicPartition]int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	g.broker.mu.Lock()
	defer g.broker.mu.Unlock()
	if g.group.id != g.id {
		return consumer.ErrGenerationOver
	}
	maps.Copy(g.group.offsets, offsets)
	g.broker.change()
	return nil
}
