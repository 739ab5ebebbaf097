package kafkalog

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// scout finds out which topics exist. If a group asks for a topic that does not exist, kafka-go assigns
// no partition of the other topics either, and might create the topic.
type scout struct {
	client  *kafkawire.Client
	cfg     *transport.Config
	topics  []string
	session transport.Session

	reported []string // missing topics
}

// awaitTopics blocks until at least one of the topics exists, and returns those that do. It returns nil
// if ctx ends.
func (s *scout) awaitTopics(ctx context.Context) []string {
	attempts := retry.Policy{Base: retry.Reopen.Base, Cap: s.interval(true)}.Start()
	for ctx.Err() == nil {
		existing, missing, err := s.splitTopics(ctx)
		if err == nil {
			s.reportMissing(missing, len(existing) == 0)
			if len(existing) > 0 {
				return existing
			}
		} else if ctx.Err() == nil {
			s.session.Fault(fmt.Errorf("reading the topics: %w", err))
		}

		_ = attempts.Wait(ctx)
	}

	return nil
}

// watchTopics blocks until other topics exist than those given, or ctx ends. A topic must be missing
// twice to count as deleted: a broker that has just started may not have all topics yet, and leaving the
// group for that would stop all other topics.
func (s *scout) watchTopics(ctx context.Context, topics []string) {
	var before []string
	isComplete := len(topics) == len(s.topics)

	for retry.Sleep(ctx, s.interval(!isComplete || before != nil)) == nil {
		existing, _, err := s.splitTopics(ctx)
		if err != nil {
			continue
		}
		isNew := func(topic string) bool { return !slices.Contains(topics, topic) }
		if !slices.Equal(existing, topics) && (slices.ContainsFunc(existing, isNew) || slices.Equal(existing, before)) {
			return
		}
		before = nil
		if !slices.Equal(existing, topics) {
			before = existing
		}
	}
}

// MissingInterval is how often topics that do not exist are looked for. A request names only the topics of the group.
const MissingInterval = time.Second

// interval returns how often the topics are looked for. A new topic has to be read soon; one that is deleted may be noticed later.
func (s *scout) interval(isMissing bool) time.Duration {
	if isMissing {
		return min(MissingInterval, s.cfg.WatchPartitions)
	}
	return s.cfg.WatchPartitions
}

// reportMissing reports missing topics once. all means that the member reads no other topic.
func (s *scout) reportMissing(missing []string, all bool) {
	if !slices.Equal(missing, s.reported) && len(missing) > 0 {
		s.session.Fault(&transport.MissingTopicsError{Topics: missing, All: all, Every: s.interval(true)})
	}
	s.reported = missing
}

func (s *scout) splitTopics(ctx context.Context) (existing, missing []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	layout, err := s.client.Metadata(ctx, s.topics)
	if err != nil {
		return nil, nil, err
	}

	for _, name := range slices.Sorted(maps.Keys(layout.Topics)) {
		if topicLayout := layout.Topics[name]; topicLayout.Err == nil && len(topicLayout.Partitions) > 0 {
			existing = append(existing, name)
		} else {
			missing = append(missing, name)
		}
	}
	return existing, missing, nil
}

// withOldRetryTopics adds the retry topics of earlier policies to topics. Messages that wait in them would
// otherwise wait forever. It blocks until a broker responds or ctx ends.
func (c *Client) withOldRetryTopics(ctx context.Context, group string, topics []string, session transport.Session) []string {
	attempts := retry.Reopen.Start()
	for ctx.Err() == nil {
		callCtx, cancel := context.WithTimeout(ctx, RequestTimeout)
		all, err := c.Wire.TopicNames(callCtx)
		cancel()
		if err != nil {
			session.Fault(fmt.Errorf("listing the topics, for retry topics of earlier policies: %w", err))
			_ = attempts.Wait(ctx)
			continue
		}

		var old []string
		for _, name := range slices.Sorted(maps.Keys(all)) {
			origin, n := transport.ParseRetryTopic(name, group)
			if n > 0 && slices.Contains(topics, origin) && !slices.Contains(topics, name) {
				old = append(old, name)
			}
		}
		// Only an operator can decide that they are empty for good.
		if len(old) > 0 {
			session.Fault(&transport.UnusedTopicsError{Topics: old})
		}
		return slices.Concat(topics, old)
	}
	return topics
}
