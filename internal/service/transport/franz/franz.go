// Package franz joins consumer groups with the library franz-go. A rebalance is cooperative: partitions that stay with their
// member go on. Records are read by package kafkalog, as with kafka-go: kgo fetches nothing.
//
// Blocking: Join blocks until its context ends. A rebalance waits until the handlers of the partitions that leave the
// member have ended and their offsets are committed.
package franz

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkalog"
)

const (
	// leaveGrace is how long a stop waits for the group, for example for the response to a join.
	leaveGrace = time.Second
	// heartbeat is the default interval, shorter than with kafka-go: the new owner of a partition learns of it at its next
	// heartbeat, and no member handles the partition until then.
	heartbeat = time.Second
)

// Transport joins Kafka's consumer groups. It reads committed records only. Each partition has at most one fetch in flight.
type Transport struct{ *kafkalog.Client }

var _ transport.Transport = (*Transport)(nil)

// New returns a transport. It does no I/O. The error joins all invalid settings.
func New(cfg transport.Config) (*Transport, error) {
	// A broker removes a member whose heartbeat is late, so a short session needs more heartbeats.
	if cfg.HeartbeatInterval == 0 && cfg.SessionTimeout >= 0 {
		cfg.HeartbeatInterval = cmp.Or(min(heartbeat, cfg.SessionTimeout/3), heartbeat)
	}
	client, err := kafkalog.New(cfg)
	if err != nil {
		return nil, err
	}
	return &Transport{client}, nil
}

// Join is one member of the group until ctx ends. Topics that do not exist yet are reported, and joined when they exist,
// without a stop of the others.
func (t *Transport) Join(ctx context.Context, group string, topics []string, session transport.Session) error {
	defer t.Close()
	topics = t.CompleteTopics(ctx, group, topics, session)

	ctx, cancel := context.WithCancel(ctx)
	var reporting sync.WaitGroup
	defer reporting.Wait()
	defer cancel()
	// kgo reads the metadata again only after MetadataMaxAge.
	var current atomic.Pointer[kgo.Client]
	refresh := func() {
		if client := current.Load(); client != nil {
			client.ForceMetadataRefresh()
		}
	}
	reporting.Go(func() { t.ReportMissing(ctx, topics, session, refresh) })

	for ctx.Err() == nil {
		if err := t.joinOnce(ctx, group, topics, session, &current); err != nil {
			return err
		}
	}
	return nil
}

// joinOnce is one membership in the group, whose client it stores in current. It returns when ctx ends or session.Serve returns.
func (t *Transport) joinOnce(
	ctx context.Context, group string, topics []string, session transport.Session, current *atomic.Pointer[kgo.Client],
) error {
	member := &member{
		session: session, reader: t.Reader(topics), offsets: t.GroupOffsets(group), instance: t.Config.InstanceID,
		joined: make(chan *generation, 1), served: make(chan struct{}),
		owned: map[transport.TopicPartition]bool{},
	}
	// The client outlives ctx: it still commits, and leaves the group.
	life, kill := context.WithCancel(context.WithoutCancel(ctx))
	defer kill()
	client, err := kgo.NewClient(append(t.options(group, topics), member.options(life)...)...)
	if err != nil {
		return fmt.Errorf("joining: %w", err)
	}
	current.Store(client)
	defer current.Store(nil)

	var polling sync.WaitGroup
	polling.Go(func() { member.reportErrors(life, client) })
	err = member.serveGenerations(ctx)
	close(member.served)

	// Closing waits for the group, which may hang. Then the end of life interrupts it.
	closed := make(chan struct{})
	go func() {
		client.Close()
		close(closed)
	}()
	late := time.NewTimer(leaveGrace)
	defer late.Stop()
	select {
	case <-closed:
	case <-late.C:
	}
	kill()
	<-closed
	polling.Wait()
	return err
}

// options returns the options of kgo that follow from the configuration.
func (t *Transport) options(group string, topics []string) []kgo.Opt {
	cfg := &t.Config
	opts := []kgo.Opt{
		kgo.SeedBrokers(cfg.Brokers...),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topics...),
		kgo.Balancers(balancer(cfg)),
		kgo.SessionTimeout(cfg.SessionTimeout),
		kgo.HeartbeatInterval(cfg.HeartbeatInterval),
		kgo.RebalanceTimeout(cfg.RebalanceTimeout),
		kgo.MetadataMaxAge(cfg.WatchPartitions),
		kgo.MetadataMinAge(min(cfg.WatchPartitions, cfg.JoinBackoff)),
		kgo.RetryBackoffFn(func(int) time.Duration { return cfg.JoinBackoff }),
		// The transport commits after the handlers, and reads the records over its own connections.
		kgo.DisableAutoCommit(),
		kgo.DisableClientMetrics(),
		kgo.FetchMaxBytes(record.MaxResponse),
		kgo.BrokerMaxReadBytes(record.MaxResponse),
		kgo.ClientID(t.Wire.ClientID()),
	}

	if cfg.TLS != nil {
		opts = append(opts, kgo.DialTLSConfig(cfg.TLS))
	}
	if cfg.Dial != nil {
		opts = append(opts, kgo.Dialer(cfg.Dial))
	}
	if login := kafkalog.Login(*cfg); login != nil {
		opts = append(opts, kgo.SASL(mechanism{login}))
	}
	if cfg.InstanceID != "" {
		opts = append(opts, kgo.InstanceID(cfg.InstanceID))
	}
	if cfg.Rack != "" {
		opts = append(opts, kgo.Rack(cfg.Rack))
	}

	return opts
}

// member is one membership in the group. kgo calls its methods one after another.
type member struct {
	session  transport.Session
	reader   *kafkalog.Reader
	offsets  *kafkalog.GroupOffsets
	instance string

	joined  chan *generation
	served  chan struct{} // closed when no generation will be served any more
	current *generation   // nil before the first assignment, and after the partitions were lost
	owned   map[transport.TopicPartition]bool
}

// options returns the options with which kgo calls the member. life ends when the group does not respond to a stop.
func (m *member) options(life context.Context) []kgo.Opt {
	return []kgo.Opt{
		kgo.WithContext(life),
		kgo.OnPartitionsAssigned(func(_ context.Context, client *kgo.Client, list map[string][]int32) {
			m.begin(client)
			m.add(list)
		}),
		// Without offsets, kgo fetches nothing.
		kgo.AdjustFetchOffsetsFn(func(context.Context, map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
			return nil, nil
		}),
		kgo.OnPartitionsRevoked(func(_ context.Context, _ *kgo.Client, list map[string][]int32) { m.revoke(list) }),
		kgo.OnPartitionsLost(func(context.Context, *kgo.Client, map[string][]int32) { m.lose() }),
	}
}

// serveGenerations serves one generation after another. There is another one only if the partitions are lost.
func (m *member) serveGenerations(ctx context.Context) error {
	for {
		var generation *generation
		select {
		case generation = <-m.joined:
		case <-ctx.Done():
			return nil
		}

		serveCtx, cancel := context.WithCancel(ctx)
		var watching sync.WaitGroup
		watching.Go(func() {
			select {
			case <-generation.lost:
				cancel()
			case <-serveCtx.Done():
			}
		})
		err := m.session.Serve(serveCtx, generation)
		generation.over.Store(true)
		cancel()
		watching.Wait()
		close(generation.ended)

		// Only lost partitions lead to another generation.
		select {
		case <-generation.lost:
		default:
			return err
		}
		if err != nil {
			return err
		}
	}
}

// begin begins a generation without partitions, unless there is one.
func (m *member) begin(client *kgo.Client) {
	if m.current != nil {
		return
	}
	generation := &generation{
		Reader: m.reader, member: m, client: client, changes: make(chan transport.Change),
		lost: make(chan struct{}), ended: make(chan struct{}),
	}
	m.current = generation
	select {
	case m.joined <- generation:
	case <-m.served:
	}
}

// add adds the partitions of a rebalance. It does not use the offsets that kgo reads for them, which have no ids of topics.
func (m *member) add(list map[string][]int32) {
	var added []transport.TopicPartition
	for topic, ids := range list {
		for _, id := range ids {
			// kgo may list partitions that this member has already.
			if tp := (transport.TopicPartition{Topic: topic, Partition: id}); !m.owned[tp] {
				added = append(added, tp)
			}
		}
	}

	// The session gets all partitions of a rebalance in one change.
	if len(added) > 0 && m.change(transport.Change{Added: added}) {
		for _, tp := range added {
			m.owned[tp] = true
		}
	}
}

// revoke gives partitions back, and blocks until their handlers have ended and their offsets are committed.
func (m *member) revoke(list map[string][]int32) {
	var revoked []transport.TopicPartition
	for topic, ids := range list {
		for _, id := range ids {
			if tp := (transport.TopicPartition{Topic: topic, Partition: id}); m.owned[tp] {
				revoked = append(revoked, tp)
				delete(m.owned, tp)
			}
		}
	}
	if len(revoked) > 0 {
		m.change(transport.Change{Revoked: revoked})
	}
}

// change passes a change to the session, and blocks until it has taken effect. It returns false if the session ends.
func (m *member) change(change transport.Change) bool {
	done := make(chan struct{})
	change.Done = func() { close(done) }
	select {
	case m.current.changes <- change:
	case <-m.current.ended:
		return false
	case <-m.served:
		return false
	}

	select {
	case <-done:
		return true
	case <-m.current.ended:
		return false
	}
}

// lose ends the generation, because the group has moved on without this member, and blocks until its session has ended.
func (m *member) lose() {
	if m.current == nil {
		return
	}
	m.current.over.Store(true)
	close(m.current.lost)
	select {
	case <-m.current.ended:
	case <-m.served:
	}
	m.current = nil
	clear(m.owned)
}

// reportErrors reports the errors of the group until the client is closed. There are no records.
func (m *member) reportErrors(life context.Context, client *kgo.Client) {
	for {
		fetches := client.PollFetches(life)
		if fetches.IsClientClosed() || life.Err() != nil {
			return
		}
		for _, e := range fetches.Errors() {
			m.session.Fault(fmt.Errorf("joining the group: %w", e.Err))
		}
	}
}

// generation is the time from an assignment until the member leaves the group or loses its partitions.
type generation struct {
	*kafkalog.Reader
	member  *member
	client  *kgo.Client
	changes chan transport.Change
	lost    chan struct{} // closed when the group has moved on without this member
	ended   chan struct{} // closed when Serve has returned
	over    atomic.Bool   // the partitions are lost, or Serve has returned
}

// ID returns the number of the current generation of the group.
func (g *generation) ID() int32 {
	_, id := g.client.GroupMetadata()
	return id
}

// Partitions returns nil: all partitions come as changes.
func (*generation) Partitions() []transport.TopicPartition { return nil }

// Changes has the changes of all rebalances.
func (g *generation) Changes() <-chan transport.Change { return g.changes }

// Resume returns where the group goes on.
func (g *generation) Resume(ctx context.Context, tp transport.TopicPartition) (transport.Start, error) {
	return g.Reader.Resume(ctx, tp, g.member.offsets)
}

// commitRetry is the wait before a commit is repeated that has met a rebalance.
const commitRetry = 100 * time.Millisecond

// Commit stores offsets. While the group is rebalanced, it waits. It does not use the commits of kgo, which rejects the offsets
// of a topic that was deleted and created again, for the life of the client.
func (g *generation) Commit(ctx context.Context, offsets map[transport.TopicPartition]transport.GroupOffset) error {
	for {
		if g.over.Load() {
			return transport.ErrGenerationOver
		}
		id, generation := g.client.GroupMetadata()
		member := kafkawire.GroupMember{Generation: generation, Member: id, Instance: g.member.instance}
		err := g.member.offsets.Commit(ctx, member, g.Reader, offsets)
		if err == nil {
			return nil
		}

		// The group has removed this member, unless kgo has joined again with another id.
		now, _ := g.client.GroupMetadata()
		isRemoved := errors.Is(err, kafkawire.UnknownMemberID) || errors.Is(err, kafkawire.FencedInstanceID)
		if isRemoved && now == id {
			return fmt.Errorf("%w: %w", transport.ErrGenerationOver, err)
		}

		// The group forms its next generation. kgo learns its number, or that this member is not part of it, within a heartbeat.
		isBetween := errors.Is(err, kafkawire.RebalanceInProgress) || errors.Is(err, kafkawire.IllegalGeneration)
		if !isRemoved && !isBetween || retry.Sleep(ctx, commitRetry) != nil {
			return err
		}
	}
}
