// Package kafkago joins consumer groups with the library kafka-go.
//
// Blocking: Join blocks until its context ends. A rebalance ends the generation of each member, which then commits
// and joins again. Cost: one connection for the membership, and those of package kafkalog.
package kafkago

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkalog"
)

const (
	dialTimeout = 5 * time.Second
	// joinGrace is how long a stop waits for the response to a join, which may take the whole
	// RebalanceTimeout.
	joinGrace = time.Second
	// coordinatorGrace is how long the group may have no coordinator before that is reported.
	coordinatorGrace = 10 * time.Second
)

// Transport joins Kafka's consumer groups. It reads committed records only. Each partition has at most one fetch in flight.
type Transport struct{ *kafkalog.Client }

var _ transport.Transport = (*Transport)(nil)

// New returns a transport. It does no I/O. The error joins all invalid settings.
func New(cfg transport.Config) (*Transport, error) {
	client, err := kafkalog.New(cfg)
	if err != nil {
		return nil, err
	}
	return &Transport{client}, nil
}

// Join is one member of the group until ctx ends: see kafkalog.Client.Follow about topics that do not exist.
func (t *Transport) Join(ctx context.Context, group string, topics []string, session transport.Session) error {
	return t.Follow(ctx, group, topics, session, func(ctx context.Context, topics []string) error {
		return t.joinWith(ctx, group, topics, session)
	})
}

// joinWith is a member that reads topics, until ctx ends.
func (t *Transport) joinWith(ctx context.Context, group string, topics []string, session transport.Session) error {
	cfg := &t.Config
	calls := &connections{dialer: t.Wire}
	// A nil *sasl.Login in the interface would count as a login.
	var login sasl.Mechanism
	if l := kafkalog.Login(*cfg); l != nil {
		login = l
	}
	assigned := &assigned{}
	cg, err := kafka.NewConsumerGroup(kafka.ConsumerGroupConfig{
		ID:      group,
		Brokers: cfg.Brokers,
		Topics:  topics,
		Dialer: &kafka.Dialer{
			ClientID:      cfg.ClientID,
			Timeout:       dialTimeout,
			SASLMechanism: login,
			DialFunc:      calls.dial,
		},
		GroupBalancers:    balancers(cfg, assigned),
		SessionTimeout:    cfg.SessionTimeout,
		HeartbeatInterval: cfg.HeartbeatInterval,
		RebalanceTimeout:  cfg.RebalanceTimeout,
		JoinGroupBackoff:  cfg.JoinBackoff,
		Timeout:           kafkalog.RequestTimeout,
		StartOffset:       kafka.FirstOffset,
	})
	if err != nil {
		return fmt.Errorf("joining: %w", err)
	}

	member := &member{
		cg:        cg,
		session:   session,
		newReader: func() *kafkalog.Reader { return t.Reader(topics) },
		offsets:   t.GroupOffsets(group),
		assigned:  assigned,
		watcher:   &watcher{read: t.Wire.Metadata, topics: topics, every: cfg.WatchPartitions},
	}
	err = member.serveGenerations(ctx)
	member.leave(calls)
	return err
}

// member is one membership in the group.
type member struct {
	cg        *kafka.ConsumerGroup
	session   transport.Session
	newReader func() *kafkalog.Reader
	offsets   *kafkalog.GroupOffsets
	assigned  *assigned
	watcher   *watcher

	leaving     sync.WaitGroup     // as a former member
	stopLeaving context.CancelFunc // nil before the first one

	closing sync.Once
	closed  chan struct{}
}

// serveGenerations serves one generation after another.
func (m *member) serveGenerations(ctx context.Context) error {
	defer m.endLeavingAs()
	former := "" // id of this member in the latest generation
	for began := time.Now(); ; {
		gen, err := m.cg.Next(ctx)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the end of ctx is the normal end
		case err != nil:
			// A new cluster creates the topic of the offsets for its first group, which has no coordinator until then.
			starting := errors.Is(err, kafka.GroupCoordinatorNotAvailable) && time.Since(began) < coordinatorGrace
			if !starting && !errors.Is(err, kafka.RebalanceInProgress) {
				m.session.Fault(fmt.Errorf("joining the group: %w", err))
			}
			// After this error, kafka-go joins with a new id. A coordinator that starts lists the former id again.
			if former != "" && !errors.Is(err, kafka.RebalanceInProgress) {
				m.beginLeavingAs(ctx, former)
			}
			continue
		}

		// The group has formed without the former id.
		m.endLeavingAs()
		// The generation ends as soon as one of its functions returns.
		if counts, leads := m.assigned.take(); leads {
			gen.Start(func(over context.Context) { m.watcher.await(over, counts) })
		}
		done := make(chan error, 1)
		// The group waits for a function that it has started before it forms the next generation.
		gen.Start(func(over context.Context) { done <- m.serve(ctx, over, gen) })
		if err := <-done; err != nil {
			return err
		}
		began, former = time.Now(), gen.MemberID
	}
}

// beginLeavingAs begins to remove the former id of this member from the group, which otherwise waits for it until its session ends. kafka-go
// tries once, which fails in an outage.
func (m *member) beginLeavingAs(ctx context.Context, former string) {
	m.endLeavingAs()
	ctx, m.stopLeaving = context.WithCancel(ctx)
	m.leaving.Go(func() {
		for backoff := retry.Reopen.Start(); ctx.Err() == nil; _ = backoff.Wait(ctx) {
			err := m.offsets.Leave(ctx, former)
			if err == nil || errors.Is(err, kafkawire.UnknownMemberID) {
				return
			}
		}
	})
}

// endLeavingAs ends what beginLeavingAs has begun.
func (m *member) endLeavingAs() {
	if m.stopLeaving != nil {
		m.stopLeaving()
	}
	m.leaving.Wait()
}

// serve serves one generation, until the group or the caller ends it. The group waits for it to return.
func (m *member) serve(ctx, over context.Context, gen *kafka.Generation) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// A new generation begins when the group ends the current generation.
	unhook := context.AfterFunc(over, func() { cancel(kafka.ErrGenerationEnded) })
	defer unhook()
	generation := &generation{Reader: m.newReader(), gen: gen, offsets: m.offsets}
	defer generation.over.Store(true)

	// The member must begin to leave before serve returns. Otherwise it would join once more.
	stop := context.AfterFunc(ctx, func() {
		if over.Err() == nil {
			m.beginLeaving()
		}
	})
	defer stop()
	err := m.session.Serve(ctx, generation)
	if err != nil {
		m.beginLeaving()
	}
	return err
}

// beginLeaving begins to leave the group, which continues when serve has returned.
func (m *member) beginLeaving() {
	m.closing.Do(func() {
		m.closed = make(chan struct{})
		go func() {
			_ = m.cg.Close()
			close(m.closed)
		}()
	})
}

// leave leaves the group and waits until it has left. A join in progress would delay that for as long as
// the group takes, so its connection is closed after joinGrace.
func (m *member) leave(calls *connections) {
	m.beginLeaving()
	late := time.NewTimer(joinGrace)
	defer late.Stop()
	select {
	case <-m.closed:
	case <-late.C:
		calls.closeAll()
		<-m.closed
	}
}

// connections are the connections of the group.
type connections struct {
	dialer *kafkawire.Client
	mu     sync.Mutex
	open   map[net.Conn]struct{}
}

// trackedConn is a connection that is removed from its list when it is closed.
type trackedConn struct {
	net.Conn
	list *connections
}

// dial connects, with TLS if that is configured. kafka-go does not start TLS, because the responses are
// checked before kafka-go decodes them.
func (l *connections) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := l.dialer.DialChecked(ctx, network, address)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = map[net.Conn]struct{}{}
	}
	l.open[conn] = struct{}{}
	return &trackedConn{conn, l}, nil
}

// Close closes the connection.
func (c *trackedConn) Close() error {
	c.list.mu.Lock()
	delete(c.list.open, c.Conn)
	c.list.mu.Unlock()
	return c.Conn.Close()
}

func (l *connections) closeAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		_ = c.Close()
	}
}

// generation is one generation of the group.
type generation struct {
	*kafkalog.Reader
	gen     *kafka.Generation
	offsets *kafkalog.GroupOffsets
	over    atomic.Bool // Serve has returned
}

// ID returns the number of the generation.
func (g *generation) ID() int32 { return g.gen.ID }

// Partitions returns the partitions of this member.
func (g *generation) Partitions() []transport.TopicPartition {
	var all []transport.TopicPartition
	for topic, list := range g.gen.Assignments {
		for _, a := range list {
			all = append(all, transport.TopicPartition{Topic: topic, Partition: int32(a.ID)})
		}
	}
	return all
}

// Changes returns nil: a rebalance ends the generation.
func (*generation) Changes() <-chan transport.Change { return nil }

// Resume returns where the group goes on. The offsets of kafka-go have no epochs and no ids.
func (g *generation) Resume(ctx context.Context, tp transport.TopicPartition) (transport.Start, error) {
	return g.Reader.Resume(ctx, tp, g.offsets)
}

// Commit stores offsets.
func (g *generation) Commit(ctx context.Context, offsets map[transport.TopicPartition]transport.GroupOffset) error {
	if g.over.Load() {
		return transport.ErrGenerationOver
	}

	// The end of a generation does not interrupt the commit, because offsets are committed then.
	member := kafkawire.GroupMember{Generation: g.gen.ID, Member: g.gen.MemberID}
	err := g.offsets.Commit(context.WithoutCancel(ctx), member, g.Reader, offsets)
	for _, over := range []kafkawire.Code{
		kafkawire.IllegalGeneration, kafkawire.UnknownMemberID, kafkawire.RebalanceInProgress, kafkawire.FencedInstanceID,
	} {
		if errors.Is(err, over) {
			return fmt.Errorf("%w: %w", transport.ErrGenerationOver, err)
		}
	}
	return err
}
