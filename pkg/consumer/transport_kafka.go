package consumer

import (
	"bufio"
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

	"github.com/outrelay/outrelay/internal/kafkawire/reply"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/inbox"
)

// KafkaConfig is how Kafka is reached. Every zero value but that of Brokers has a default.
type KafkaConfig struct {
	Brokers  []string // host:port
	ClientID string   // default "outrelay"
	TLS      *tls.Config
	SASL     sasl.Mechanism

	// SessionTimeout is how long the group waits for a member that is gone; default 30 s. HeartbeatInterval has to be well
	// below it; default 3 s; a rebalance is noticed by it.
	SessionTimeout, HeartbeatInterval time.Duration
	// RebalanceTimeout is how long the group waits for a member to give its partitions back; default 30 s. It has to be
	// above the consumer's Drain.
	RebalanceTimeout time.Duration
	// JoinBackoff is the wait after a failed join; default 1 s.
	JoinBackoff time.Duration
	// MaxWait is how long a broker holds a fetch that finds nothing; default 500 ms.
	MaxWait time.Duration
	// FromEnd lets a group that has no offset yet begin with what is written from then on, not with all that is there.
	FromEnd bool
	// Exclusive gives all partitions of a topic to one member of the group, that with the highest Priority, whatever their
	// number; the others stand by. All members of the group must say so.
	Exclusive bool
	Priority  int32
	// WatchPartitions is how often the topics are looked at for new partitions; default 10 s.
	WatchPartitions time.Duration
}

// The time limits of single exchanges. A fetch gets MaxWait on top.
const (
	dialTimeout    = 5 * time.Second
	requestTimeout = 10 * time.Second
	metadataTTL    = 5 * time.Second
	// joinGrace is how long a stop waits for the answer to a join, which may take the whole RebalanceTimeout.
	joinGrace = time.Second
)

// Brokers names where Kafka is.
func Brokers(addrs ...string) Option {
	return option(func(s *settings) { s.kafka.Brokers = append(s.kafka.Brokers, addrs...) })
}

// WithKafka sets everything about Kafka; brokers of Brokers are added.
func WithKafka(cfg KafkaConfig) Option {
	return option(func(s *settings) {
		cfg.Brokers = append(append([]string(nil), s.kafka.Brokers...), cfg.Brokers...)
		s.kafka = cfg
	})
}

// Kafka is the Transport over Kafka's consumer groups. It reads committed records only. One fetch for each partition is
// under way at a time, each by a connection of its own while it lasts.
type Kafka struct {
	cfg     KafkaConfig
	addr    net.Addr
	produce *kafka.Transport // for Publish
}

var _ Transport = (*Kafka)(nil)

// NewKafka makes a Transport over Kafka without connecting. All problems are reported at once.
func NewKafka(cfg KafkaConfig) (*Kafka, error) {
	or := func(d *time.Duration, def time.Duration) {
		if *d == 0 {
			*d = def
		}
	}
	or(&cfg.SessionTimeout, 30*time.Second)
	or(&cfg.HeartbeatInterval, 3*time.Second)
	or(&cfg.RebalanceTimeout, 30*time.Second)
	or(&cfg.JoinBackoff, time.Second)
	or(&cfg.MaxWait, 500*time.Millisecond)
	or(&cfg.WatchPartitions, 10*time.Second)
	if cfg.ClientID == "" {
		cfg.ClientID = "outrelay"
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	k := &Kafka{cfg: cfg, addr: kafka.TCP(cfg.Brokers...)}
	k.produce = k.newTransport(nil)
	return k, nil
}

func (cfg *KafkaConfig) check() error {
	var bad []error
	if len(cfg.Brokers) == 0 {
		bad = append(bad, errors.New("no brokers: name them with Brokers"))
	}
	for _, b := range cfg.Brokers {
		if _, _, err := net.SplitHostPort(b); err != nil {
			bad = append(bad, fmt.Errorf("broker %q: %w", b, err))
		}
	}
	for _, d := range []struct {
		name string
		is   time.Duration
	}{
		{"session time-out", cfg.SessionTimeout},
		{"heartbeat interval", cfg.HeartbeatInterval},
		{"rebalance time-out", cfg.RebalanceTimeout},
		{"join backoff", cfg.JoinBackoff},
		{"longest wait of a fetch", cfg.MaxWait},
		{"interval of looking for partitions", cfg.WatchPartitions},
	} {
		if d.is <= 0 {
			bad = append(bad, fmt.Errorf("%s is %v: it must be positive", d.name, d.is))
		}
	}
	if cfg.HeartbeatInterval*2 > cfg.SessionTimeout {
		bad = append(bad, fmt.Errorf("heartbeat interval %v: it must be at most half of the session time-out %v", cfg.HeartbeatInterval, cfg.SessionTimeout))
	}
	return errors.Join(bad...)
}

func (k *Kafka) newTransport(topics []string) *kafka.Transport {
	return &kafka.Transport{
		ClientID: k.cfg.ClientID, Dial: k.dial, SASL: k.cfg.SASL, DialTimeout: dialTimeout, MetadataTTL: metadataTTL, MetadataTopics: topics,
	}
}

// dial connects, with TLS if that is configured. Replies are checked before kafka-go decodes them, so TLS is not left to
// kafka-go.
func (k *Kafka) dial(ctx context.Context, network, addr string) (nc net.Conn, err error) {
	if k.cfg.TLS == nil {
		nc, err = (&net.Dialer{}).DialContext(ctx, network, addr)
	} else {
		nc, err = (&tls.Dialer{Config: k.cfg.TLS}).DialContext(ctx, network, addr)
	}
	if err != nil {
		return nil, err
	}
	return reply.Check(nc, bufio.NewReader(nc), addr), nil
}

// Close closes the connections of Publish that are idle. It may be used again.
func (k *Kafka) Close() { k.produce.CloseIdleConnections() }

// MemberTimeout is how long the group waits for a member that gives no sign or does not rejoin.
func (k *Kafka) MemberTimeout() time.Duration {
	return min(k.cfg.SessionTimeout, k.cfg.RebalanceTimeout)
}

// Join is one member of the group until ctx ends. Topics that do not exist yet are reported and looked for every
// WatchPartitions; the others are read meanwhile. Retry topics of the group that exist though no policy has them are read
// as well, see RetryTopicName.
func (k *Kafka) Join(ctx context.Context, group string, topics []string, s Session) error {
	defer k.produce.CloseIdleConnections()
	topics = slices.Compact(slices.Sorted(slices.Values(k.withOldRetryTopics(ctx, group, topics, s))))
	look := &scout{Kafka: k, topics: topics, fetches: k.newTransport(topics), session: s}
	defer look.fetches.CloseIdleConnections()
	for {
		there := look.existing(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err := k.join(ctx, group, there, look); err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// join is a member for those topics until ctx ends or others exist.
func (k *Kafka) join(ctx context.Context, group string, topics []string, look *scout) error {
	ctx, cancel := context.WithCancel(ctx)
	var looking sync.WaitGroup
	defer looking.Wait()
	defer cancel()
	looking.Go(func() { look.watch(ctx, topics); cancel() })
	calls := &lines{to: k.dial}
	cg, err := kafka.NewConsumerGroup(kafka.ConsumerGroupConfig{
		ID: group, Brokers: k.cfg.Brokers, Topics: topics,
		Dialer:         &kafka.Dialer{ClientID: k.cfg.ClientID, Timeout: dialTimeout, SASLMechanism: k.cfg.SASL, DialFunc: calls.dial},
		GroupBalancers: k.cfg.balancers(),
		SessionTimeout: k.cfg.SessionTimeout, HeartbeatInterval: k.cfg.HeartbeatInterval, RebalanceTimeout: k.cfg.RebalanceTimeout,
		JoinGroupBackoff: k.cfg.JoinBackoff, Timeout: requestTimeout, StartOffset: k.start(),
		WatchPartitionChanges: true, PartitionWatchInterval: k.cfg.WatchPartitions,
	})
	if err != nil {
		return fmt.Errorf("joining: %w", err)
	}
	m := &member{Kafka: k, cg: cg, session: look.session, fetches: look.fetches}
	err = m.run(ctx)
	m.leave(calls)
	return err
}

func (k *Kafka) start() int64 {
	if k.cfg.FromEnd {
		return kafka.LastOffset
	}
	return kafka.FirstOffset
}

// member is one Join.
type member struct {
	*Kafka
	cg      *kafka.ConsumerGroup
	session Session
	fetches *kafka.Transport

	closing sync.Once
	closed  chan struct{}
}

// run serves one generation after another.
func (m *member) run(ctx context.Context) error {
	for {
		gen, err := m.cg.Next(ctx)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // it was told to stop
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
	g := &generation{member: m, gen: gen}
	defer g.over.Store(true)
	if !g.locate(ctx) {
		return nil
	}
	stop := context.AfterFunc(ctx, func() {
		if over.Err() == nil {
			m.close() // before serve returns, or the member would join once more
		}
	})
	defer stop()
	err := m.session.Serve(ctx, g)
	if err != nil {
		m.close()
	}
	return err
}

// close begins to leave the group, which goes on when serve has returned.
func (m *member) close() {
	m.closing.Do(func() {
		m.closed = make(chan struct{})
		go func() { _ = m.cg.Close(); close(m.closed) }()
	})
}

// leave leaves the group and waits for it. A join that is under way would be waited for as long as the group takes; its
// connection is cut.
func (m *member) leave(calls *lines) {
	m.close()
	late := time.NewTimer(joinGrace)
	defer late.Stop()
	select {
	case <-m.closed:
	case <-late.C:
		calls.cut()
		<-m.closed
	}
}

// lines are the connections of the group.
type lines struct {
	to   func(ctx context.Context, network, address string) (net.Conn, error)
	mu   sync.Mutex
	open map[net.Conn]struct{}
}

type line struct {
	net.Conn
	of *lines
}

func (l *lines) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := l.to(ctx, network, address)
	if err != nil {
		return nil, err
	}
	conn := &line{c, l}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = map[net.Conn]struct{}{}
	}
	l.open[conn] = struct{}{}
	return conn, nil
}

// Close closes the connection and forgets it.
func (c *line) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

func (l *lines) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		_ = c.(*line).Conn.Close()
	}
}

// generation is one generation of the group.
type generation struct {
	*member
	gen    *kafka.Generation
	assign []Assignment
	over   atomic.Bool // Serve has returned
	damage damage
	epochs sync.Map // TopicPartition to the leader epoch of the last batch that was read, an int32
}

// locate finds where the partitions without a committed offset start; false if the generation ends before.
func (g *generation) locate(ctx context.Context) bool {
	for topic, list := range g.gen.Assignments {
		for _, a := range list {
			tp := TopicPartition{topic, int32(a.ID)}
			offset := a.Offset
			for b := retry.Reopen.Start(); offset < 0; {
				at, _, err := g.edge(ctx, tp, a.Offset)
				if err == nil {
					offset = at
					break
				}
				if ctx.Err() != nil {
					return false
				}
				g.session.Fault(fmt.Errorf("asking where partition %s begins: %w", tp, err))
				_ = b.Wait(ctx)
			}
			g.assign = append(g.assign, Assignment{tp, offset})
		}
	}
	return true
}

// ID is the generation's number.
func (g *generation) ID() int32 { return g.gen.ID }

// Partitions are those of this member.
func (g *generation) Partitions() []Assignment { return g.assign }

// Log is the partition's end, its leader's epoch, and the id of the topic.
func (g *generation) Log(ctx context.Context, tp TopicPartition) (inbox.Log, error) {
	id, err := g.topicID(ctx, tp.Topic)
	if err != nil {
		return inbox.Log{}, err
	}
	end, epoch, err := g.edge(ctx, tp, kafka.LastOffset)
	return inbox.Log{ID: id, End: end, Epoch: epoch}, err
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
	for _, over := range []kafka.Error{kafka.IllegalGeneration, kafka.UnknownMemberId, kafka.RebalanceInProgress, kafka.FencedInstanceID} {
		if errors.Is(err, over) {
			return fmt.Errorf("%w: %w", ErrGenerationOver, err)
		}
	}
	return err
}
