package consumer

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/retry"
)

// KafkaConfig describes how Kafka is reached. Only Brokers is required. A zero value of another field
// means its default.
type KafkaConfig struct {
	Brokers  []string // host:port
	ClientID string   // defaults to "outrelay"
	TLS      *tls.Config
	SASL     sasl.Mechanism

	// SessionTimeout is how long the group waits for a member that does not respond. Defaults to 30 s.
	// HeartbeatInterval must be at most half of it. It is also how soon a rebalance is noticed. Defaults
	// to 3 s.
	SessionTimeout, HeartbeatInterval time.Duration
	// RebalanceTimeout is how long the group waits for a member to give its partitions back. It must be
	// above the consumer's Drain. Defaults to 30 s.
	RebalanceTimeout time.Duration
	// JoinBackoff is the wait after a failed join. Defaults to 1 s.
	JoinBackoff time.Duration
	// MaxWait is how long a broker holds a fetch that finds nothing. Defaults to 500 ms.
	MaxWait time.Duration
	// FromEnd makes a group without offsets start with the records that are written from now on. Without
	// it the group starts with all records of the topics.
	FromEnd bool
	// Exclusive assigns all partitions of a topic to one member of the group, the one with the highest
	// Priority. The others stand by. All members of the group must set it.
	Exclusive bool
	Priority  int32
	// WatchPartitions is the interval at which topics are checked for new partitions. Defaults to 10 s.
	WatchPartitions time.Duration
}

const (
	dialTimeout    = 5 * time.Second
	requestTimeout = 10 * time.Second // a fetch gets MaxWait in addition
	// joinGrace is how long a stop waits for the response to a join, which may take the whole
	// RebalanceTimeout.
	joinGrace = time.Second
	// idleLinks is the number of connections to a broker that are kept for fetches, one for each
	// partition at a time.
	idleLinks = 64
)

// WithBrokers sets the addresses of Kafka.
func WithBrokers(addrs ...string) Option {
	return option(func(s *settings) { s.kafka.Brokers = append(s.kafka.Brokers, addrs...) })
}

// WithKafka sets all options of Kafka. The addresses of Brokers are added.
func WithKafka(cfg KafkaConfig) Option {
	return option(func(s *settings) {
		cfg.Brokers = append(append([]string(nil), s.kafka.Brokers...), cfg.Brokers...)
		s.kafka = cfg
	})
}

// Kafka is the Transport over Kafka's consumer groups. It reads committed records only. Each partition has
// at most one fetch in flight.
type Kafka struct {
	cfg    KafkaConfig
	client *kafkawire.Client
}

var _ Transport = (*Kafka)(nil)

// NewKafka returns a Transport over Kafka. It does no I/O. The error joins all invalid settings.
func NewKafka(cfg KafkaConfig) (*Kafka, error) {
	cfg.SessionTimeout = cmp.Or(cfg.SessionTimeout, 30*time.Second)
	cfg.HeartbeatInterval = cmp.Or(cfg.HeartbeatInterval, 3*time.Second)
	cfg.RebalanceTimeout = cmp.Or(cfg.RebalanceTimeout, 30*time.Second)
	cfg.JoinBackoff = cmp.Or(cfg.JoinBackoff, time.Second)
	cfg.MaxWait = cmp.Or(cfg.MaxWait, 500*time.Millisecond)
	cfg.WatchPartitions = cmp.Or(cfg.WatchPartitions, 10*time.Second)
	cfg.ClientID = cmp.Or(cfg.ClientID, kafkawire.DefaultClientID)
	if err := cfg.validate(); err != nil {
		return nil, err
	}

	client, err := kafkawire.NewClient(kafkawire.Config{
		Brokers:   cfg.Brokers,
		TLS:       cfg.TLS,
		SASL:      cfg.SASL,
		ClientID:  cfg.ClientID,
		IdleLinks: idleLinks,
	})
	if err != nil {
		return nil, err
	}
	return &Kafka{cfg: cfg, client: client}, nil
}

func (cfg *KafkaConfig) validate() error {
	var errs []error
	if len(cfg.Brokers) == 0 {
		errs = append(errs, errors.New("no brokers: set them with Brokers"))
	}
	for _, b := range cfg.Brokers {
		if _, _, err := net.SplitHostPort(b); err != nil {
			errs = append(errs, fmt.Errorf("broker %q: %w", b, err))
		}
	}

	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"session timeout", cfg.SessionTimeout},
		{"heartbeat interval", cfg.HeartbeatInterval},
		{"rebalance timeout", cfg.RebalanceTimeout},
		{"join backoff", cfg.JoinBackoff},
		{"longest wait of a fetch", cfg.MaxWait},
		{"interval of checks for partitions", cfg.WatchPartitions},
	} {
		if d.value <= 0 {
			errs = append(errs, fmt.Errorf("%s is %v: it must be positive", d.name, d.value))
		}
	}
	if cfg.HeartbeatInterval*2 > cfg.SessionTimeout {
		errs = append(errs, fmt.Errorf("heartbeat interval %v: it must be at most half of the session timeout %v",
			cfg.HeartbeatInterval, cfg.SessionTimeout))
	}
	return errors.Join(errs...)
}

// Close closes idle connections. The transport can be used again.
func (k *Kafka) Close() { k.client.CloseIdle() }

// MemberTimeout returns how long the group waits for a member that does not respond or does not rejoin.
func (k *Kafka) MemberTimeout() time.Duration {
	return min(k.cfg.SessionTimeout, k.cfg.RebalanceTimeout)
}

// Join is one member of the group until ctx ends. Topics that do not exist yet are reported, and checked
// every WatchPartitions, while the existing ones are read. Retry topics of the group that exist although
// no handler uses them are read as well, see RetryTopicName.
func (k *Kafka) Join(ctx context.Context, group string, topics []string, s Session) error {
	defer k.client.CloseIdle()
	topics = slices.Compact(slices.Sorted(slices.Values(k.withOldRetryTopics(ctx, group, topics, s))))
	look := &scout{client: k.client, cfg: &k.cfg, topics: topics, session: s}
	for {
		existing := look.awaitTopics(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err := k.joinWith(ctx, group, existing, look); err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// joinWith is a member that reads topics, until ctx ends or other topics exist.
func (k *Kafka) joinWith(ctx context.Context, group string, topics []string, look *scout) error {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() {
		look.watchTopics(ctx, topics)
		cancel()
	})

	calls := &connections{dialer: k.client}
	startOffset := kafka.FirstOffset
	if k.cfg.FromEnd {
		startOffset = kafka.LastOffset
	}
	cg, err := kafka.NewConsumerGroup(kafka.ConsumerGroupConfig{
		ID:      group,
		Brokers: k.cfg.Brokers,
		Topics:  topics,
		Dialer: &kafka.Dialer{
			ClientID:      k.cfg.ClientID,
			Timeout:       dialTimeout,
			SASLMechanism: k.cfg.SASL,
			DialFunc:      calls.dial,
		},
		GroupBalancers:         k.cfg.balancers(),
		SessionTimeout:         k.cfg.SessionTimeout,
		HeartbeatInterval:      k.cfg.HeartbeatInterval,
		RebalanceTimeout:       k.cfg.RebalanceTimeout,
		JoinGroupBackoff:       k.cfg.JoinBackoff,
		Timeout:                requestTimeout,
		StartOffset:            startOffset,
		WatchPartitionChanges:  true,
		PartitionWatchInterval: k.cfg.WatchPartitions,
	})
	if err != nil {
		return fmt.Errorf("joining: %w", err)
	}

	m := &member{cfg: &k.cfg, cg: cg, session: look.session, leaders: &leaders{client: k.client, topics: topics}}
	err = m.serveGenerations(ctx)
	m.leave(calls)
	return err
}

// member is one membership in the group.
type member struct {
	cfg     *KafkaConfig
	cg      *kafka.ConsumerGroup
	session Session
	leaders *leaders

	closing sync.Once
	closed  chan struct{}
}

// serveGenerations serves one generation after another.
func (m *member) serveGenerations(ctx context.Context) error {
	for {
		gen, err := m.cg.Next(ctx)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the end of ctx is the normal end
		case err != nil:
			if !errors.Is(err, kafka.RebalanceInProgress) {
				m.session.Fault(fmt.Errorf("joining the group: %w", err))
			}
			continue
		}

		done := make(chan error, 1)
		gen.Start(func(over context.Context) { done <- m.serve(ctx, over, gen) })
		if err := <-done; err != nil {
			return err
		}
	}
}

// serve serves one generation, until the group or the caller ends it. The group waits for it to return.
func (m *member) serve(ctx, over context.Context, gen *kafka.Generation) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	unhook := context.AfterFunc(over, func() { cancel(kafka.ErrGenerationEnded) })
	defer unhook()
	g := &generation{cfg: m.cfg, gen: gen, session: m.session, leaders: m.leaders, epochs: epochs{leaders: m.leaders}}
	defer g.over.Store(true)
	if !g.locateOffsets(ctx) {
		return nil
	}

	// The member must begin to leave before serve returns. Otherwise it would join once more.
	stop := context.AfterFunc(ctx, func() {
		if over.Err() == nil {
			m.beginLeaving()
		}
	})
	defer stop()
	err := m.session.Serve(ctx, g)
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

// dial connects, with TLS if that is configured. kafka-go does not start TLS, because the replies are
// checked before kafka-go decodes them.
func (l *connections) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := l.dialer.DialChecked(ctx, network, address)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = map[net.Conn]struct{}{}
	}
	l.open[c] = struct{}{}
	return &trackedConn{c, l}, nil
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
	cfg     *KafkaConfig
	gen     *kafka.Generation
	session Session
	leaders *leaders

	assigned []Assignment
	over     atomic.Bool // Serve has returned
	damage   damage
	epochs   epochs
}

// locateOffsets sets where the partitions start, also those without a committed offset. It returns false
// if the generation ends before.
func (g *generation) locateOffsets(ctx context.Context) bool {
	for topic, list := range g.gen.Assignments {
		for _, a := range list {
			tp := TopicPartition{topic, int32(a.ID)}
			offset := a.Offset
			for attempts := retry.Reopen.Start(); offset < 0; {
				at, err := g.leaders.readEdge(ctx, tp, kafkawire.LogEdge(a.Offset))
				if err == nil {
					offset = at.Offset
					break
				}
				if ctx.Err() != nil {
					return false
				}
				g.session.Fault(fmt.Errorf("reading where partition %s begins: %w", tp, err))
				_ = attempts.Wait(ctx)
			}
			g.assigned = append(g.assigned, Assignment{tp, offset})
		}
	}
	return true
}

// ID returns the number of the generation.
func (g *generation) ID() int32 { return g.gen.ID }

// Partitions returns the partitions of this member.
func (g *generation) Partitions() []Assignment { return g.assigned }

// Log returns the end of the partition, the epoch of its leader, and the id of its topic.
func (g *generation) Log(ctx context.Context, tp TopicPartition) (inbox.Log, error) {
	idCtx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	id, err := g.leaders.client.TopicID(idCtx, tp.Topic)
	if err != nil {
		return inbox.Log{}, err
	}
	end, err := g.leaders.readEdge(ctx, tp, kafkawire.LogEnd)
	return inbox.Log{ID: id, End: end.Offset, Epoch: end.LeaderEpoch}, err
}

// Commit stores offsets.
func (g *generation) Commit(_ context.Context, offsets map[TopicPartition]int64) error {
	if g.over.Load() {
		return ErrGenerationOver
	}
	byTopic := map[string]map[int]int64{}
	for tp, at := range offsets {
		if byTopic[tp.Topic] == nil {
			byTopic[tp.Topic] = map[int]int64{}
		}
		byTopic[tp.Topic][int(tp.Partition)] = at
	}

	err := g.gen.CommitOffsets(byTopic)
	for _, over := range []kafka.Error{
		kafka.IllegalGeneration, kafka.UnknownMemberId, kafka.RebalanceInProgress, kafka.FencedInstanceID,
	} {
		if errors.Is(err, over) {
			return fmt.Errorf("%w: %w", ErrGenerationOver, err)
		}
	}
	return err
}
