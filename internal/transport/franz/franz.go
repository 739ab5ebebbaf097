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

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/transport"
	"github.com/outrelay/outrelay/internal/transport/kafkalog"
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
	c, err := kafkalog.New(cfg)
	if err != nil {
		return nil, err
	}
	return &Transport{c}, nil
}

// Join is one member of the group until ctx ends. Topics that do not exist yet are reported, and joined when they exist,
// without a stop of the others.
func (t *Transport) Join(ctx context.Context, group string, topics []string, s transport.Session) error {
	defer t.Close()
	topics = t.CompleteTopics(ctx, group, topics, s)

	ctx, cancel := context.WithCancel(ctx)
	var reporting sync.WaitGroup
	defer reporting.Wait()
	defer cancel()
	reporting.Go(func() { t.ReportMissing(ctx, topics, s) })

	for ctx.Err() == nil {
		if err := t.joinOnce(ctx, group, topics, s); err != nil {
			return err
		}
	}
	return nil
}

// joinOnce is one membership in the group. It returns when ctx ends or s.Serve returns.
func (t *Transport) joinOnce(ctx context.Context, group string, topics []string, s transport.Session) error {
	m := &member{
		group: group, session: s, reader: t.Reader(topics),
		joined: make(chan *generation, 1), served: make(chan struct{}),
		owned: map[transport.TopicPartition]bool{},
	}
	// The client outlives ctx: it still commits, and leaves the group.
	life, kill := context.WithCancel(context.WithoutCancel(ctx))
	defer kill()
	client, err := kgo.NewClient(append(t.options(group, topics), m.options(life)...)...)
	if err != nil {
		return fmt.Errorf("joining: %w", err)
	}

	var polling sync.WaitGroup
	polling.Go(func() { m.reportErrors(life, client) })
	err = m.serveGenerations(ctx)
	close(m.served)

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
		kgo.FetchMaxBytes(record.MaxReply),
		kgo.BrokerMaxReadBytes(record.MaxReply),
		kgo.ClientID(t.Wire.ClientID()),
	}

	if cfg.TLS != nil {
		opts = append(opts, kgo.DialTLSConfig(cfg.TLS))
	}
	if login := mechanism(cfg.SASL); login != nil {
		opts = append(opts, kgo.SASL(login))
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
	group   string
	session transport.Session
	reader  *kafkalog.Reader

	joined  chan *generation
	served  chan struct{} // closed when no generation will be served any more
	current *generation   // nil before the first assignment, and after the partitions were lost
	owned   map[transport.TopicPartition]bool
}

// options returns the options with which kgo calls the member. life ends when the group does not respond to a stop.
func (m *member) options(life context.Context) []kgo.Opt {
	return []kgo.Opt{
		kgo.WithContext(life),
		kgo.OnPartitionsAssigned(func(_ context.Context, client *kgo.Client, _ map[string][]int32) { m.begin(client) }),
		kgo.AdjustFetchOffsetsFn(m.add),
		kgo.OnPartitionsRevoked(func(_ context.Context, _ *kgo.Client, list map[string][]int32) { m.revoke(list) }),
		kgo.OnPartitionsLost(func(context.Context, *kgo.Client, map[string][]int32) { m.lose() }),
	}
}

// serveGenerations serves one generation after another. There is another one only if the partitions are lost.
func (m *member) serveGenerations(ctx context.Context) error {
	for {
		var g *generation
		select {
		case g = <-m.joined:
		case <-ctx.Done():
			return nil
		}

		serveCtx, cancel := context.WithCancel(ctx)
		var watching sync.WaitGroup
		watching.Go(func() {
			select {
			case <-g.lost:
				cancel()
			case <-serveCtx.Done():
			}
		})
		err := m.session.Serve(serveCtx, g)
		g.over.Store(true)
		cancel()
		watching.Wait()
		close(g.ended)

		// Only lost partitions lead to another generation.
		select {
		case <-g.lost:
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
	g := &generation{
		Reader: m.reader, client: client, changes: make(chan transport.Change),
		lost: make(chan struct{}), ended: make(chan struct{}),
	}
	m.current = g
	select {
	case m.joined <- g:
	case <-m.served:
	}
}

// add adds the partitions of a rebalance. It returns no partitions, so that kgo fetches nothing.
func (m *member) add(
	ctx context.Context, offsets map[string]map[int32]kgo.Offset,
) (map[string]map[int32]kgo.Offset, error) {
	var added []transport.Assignment
	for topic, partitions := range offsets {
		for id, committed := range partitions {
			tp := transport.TopicPartition{Topic: topic, Partition: id}
			// kgo may list partitions that this member has already.
			if m.owned[tp] {
				continue
			}

			// The leader epoch lets the first fetch detect a log that was truncated in the meantime.
			at := transport.Assignment{TopicPartition: tp, Offset: committed.EpochOffset().Offset}
			m.reader.ResumeEpoch(tp, committed.EpochOffset().Epoch)
			// The group has committed nothing for this partition.
			if at.Offset < 0 {
				var ok bool
				if at, ok = m.reader.LocateStart(ctx, tp, m.group, m.session); !ok {
					return nil, context.Cause(ctx)
				}
			}
			added = append(added, at)
		}
	}

	// The session gets all partitions of a rebalance in one change.
	if len(added) > 0 && m.change(transport.Change{Added: added}) {
		for _, a := range added {
			m.owned[a.TopicPartition] = true
		}
	}
	return nil, nil
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
func (m *member) change(c transport.Change) bool {
	done := make(chan struct{})
	c.Done = func() { close(done) }
	select {
	case m.current.changes <- c:
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
func (*generation) Partitions() []transport.Assignment { return nil }

// Changes has the changes of all rebalances.
func (g *generation) Changes() <-chan transport.Change { return g.changes }

// Commit stores offsets. While the group is rebalanced, it waits.
func (g *generation) Commit(ctx context.Context, offsets map[transport.TopicPartition]int64) error {
	if g.over.Load() {
		return transport.ErrGenerationOver
	}
	byTopic := map[string]map[int32]kgo.EpochOffset{}
	for tp, at := range offsets {
		if byTopic[tp.Topic] == nil {
			byTopic[tp.Topic] = map[int32]kgo.EpochOffset{}
		}
		byTopic[tp.Topic][tp.Partition] = kgo.EpochOffset{Epoch: g.LeaderEpoch(tp), Offset: at}
	}

	var failed error
	g.client.CommitOffsetsSync(ctx, byTopic,
		func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, res *kmsg.OffsetCommitResponse, err error) {
			if failed = err; err != nil {
				return
			}
			for _, topic := range res.Topics {
				for _, p := range topic.Partitions {
					failed = cmp.Or(failed, kerr.ErrorForCode(p.ErrorCode))
				}
			}
		})

	// kgo commits with the current generation. So the group has removed this member.
	for _, over := range []error{kerr.IllegalGeneration, kerr.UnknownMemberID, kerr.FencedInstanceID} {
		if errors.Is(failed, over) {
			return fmt.Errorf("%w: %w", transport.ErrGenerationOver, failed)
		}
	}
	return failed
}
