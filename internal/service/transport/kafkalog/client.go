// Package kafkalog reads, publishes and finds the records of Kafka. It does not join groups: the packages kafkago and franz do that,
// each with another library, and read with this package.
//
// Order: records have the order of their offsets, and Publish keeps the order of the records of one partition.
// Blocking: each request has a deadline. Publish retries for about 15 s, and Follow blocks until its context ends.
// Cost: one request reads at most the bytes that the caller permits. A record that cannot be read becomes one record
// with an error.
package kafkalog

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
)

const (
	// RequestTimeout bounds a request. A fetch gets MaxWait in addition.
	RequestTimeout = 10 * time.Second
	// idleLinks is the number of connections to a broker that are kept for fetches, one for each
	// partition at a time.
	idleLinks = 64
)

// Client reads, publishes and finds the records of one cluster. It is safe for concurrent use.
type Client struct {
	Config transport.Config // with defaults
	Wire   *kafkawire.Client
}

// New returns a client. It does no I/O. The error joins all invalid settings.
func New(cfg transport.Config) (*Client, error) {
	cfg, err := cfg.WithDefaults()
	if err != nil {
		return nil, err
	}

	client, err := kafkawire.NewClient(kafkawire.Config{
		Brokers: cfg.Brokers, TLS: cfg.TLS, SASL: Login(cfg), ClientID: cfg.ClientID, IdleLinks: idleLinks, Dial: cfg.Dial,
	})
	if err != nil {
		return nil, err
	}
	return &Client{Config: cfg, Wire: client}, nil
}

// Login returns the login of the configuration, or nil.
func Login(cfg transport.Config) *sasl.Login {
	login := cfg.SASL
	if login == nil {
		return nil
	}
	return &sasl.Login{
		Mechanism:  login.Mechanism,
		User:       login.Username,
		Password:   func() (string, error) { return login.Password, nil },
		Token:      login.Token,
		Extensions: login.Extensions,
	}
}

// Close closes idle connections. The client can be used again.
func (c *Client) Close() { c.Wire.CloseIdle() }

// MemberTimeout returns how long the group waits for a member that does not respond or does not rejoin.
func (c *Client) MemberTimeout() time.Duration {
	return min(c.Config.SessionTimeout, c.Config.RebalanceTimeout)
}

// DescribeGroup returns the members of a group and their partitions.
func (c *Client) DescribeGroup(ctx context.Context, group string) (transport.GroupState, error) {
	at, err := c.Wire.FindGroupCoordinator(ctx, group)
	if err != nil {
		return transport.GroupState{}, err
	}
	groupState, err := c.Wire.DescribeGroup(ctx, at, group)
	if err != nil {
		return transport.GroupState{}, fmt.Errorf("describing group %s: %w", group, err)
	}

	state := transport.GroupState{Members: len(groupState.Members), Stable: groupState.State == "Stable", Assigned: map[transport.TopicPartition]bool{}}
	for i := range groupState.Members {
		for _, tp := range groupState.Members[i].Assigned {
			state.Assigned[transport.TopicPartition(tp)] = true
		}
	}
	return state, nil
}

// Follow calls join with those of the topics that exist, and once more whenever others exist. The context of join ends then.
// Follow returns the first error of join, or nil when ctx ends. Topics that do not exist yet are reported, and looked for every
// second.
func (c *Client) Follow(
	ctx context.Context, group string, topics []string, session transport.Session,
	join func(ctx context.Context, topics []string) error,
) error {
	defer c.Wire.CloseIdle()
	topics = c.CompleteTopics(ctx, group, topics, session)
	look := &scout{client: c.Wire, cfg: &c.Config, topics: topics, session: session}

	for {
		existing := look.awaitTopics(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err := look.joinUntilChange(ctx, existing, join); err != nil || ctx.Err() != nil {
			return err
		}
	}
}

// CompleteTopics returns the topics in order, with the retry topics of the group that exist although no handler uses them: see
// transport.RetryTopicName. It blocks until a broker responds or ctx ends.
func (c *Client) CompleteTopics(ctx context.Context, group string, topics []string, session transport.Session) []string {
	return slices.Compact(slices.Sorted(slices.Values(c.withOldRetryTopics(ctx, group, topics, session))))
}

// ReportMissing reports topics that do not exist, until ctx ends. It calls onNew when some of them exist.
func (c *Client) ReportMissing(ctx context.Context, topics []string, session transport.Session, onNew func()) {
	look := &scout{client: c.Wire, cfg: &c.Config, topics: topics, session: session}
	last := 0

	for ctx.Err() == nil {
		existing, missing, err := look.splitTopics(ctx)
		switch {
		case err == nil:
			if len(missing) < last {
				onNew()
			}
			last = len(missing)
			look.reportMissing(missing, len(existing) == 0)
		case ctx.Err() == nil:
			session.Fault(fmt.Errorf("reading the topics: %w", err))
		}
		_ = retry.Sleep(ctx, look.interval(last > 0))
	}
}

// joinUntilChange calls join with a context that ends when other topics exist than those given.
func (s *scout) joinUntilChange(
	ctx context.Context, topics []string, join func(ctx context.Context, topics []string) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() {
		s.watchTopics(ctx, topics)
		cancel()
	})
	return join(ctx, topics)
}
