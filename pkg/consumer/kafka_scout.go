package consumer

import (
	"context"
	"fmt"
	"slices"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/retry"
)

// scout finds out which of the topics exist. A group that asks for one that does not gets no partition of the others, as
// kafka-go assigns them, and might create it.
type scout struct {
	*Kafka
	topics  []string
	fetches *kafka.Transport
	session Session
	told    []string // missing topics that were reported
}

// existing waits until any of the topics exists, and returns those that do; nothing after ctx ended.
func (s *scout) existing(ctx context.Context) []string {
	b := retry.Policy{Base: retry.Reopen.Base, Cap: min(retry.Reopen.Cap, s.cfg.WatchPartitions)}.Start()
	for ctx.Err() == nil {
		there, missing, err := s.look(ctx)
		if err == nil {
			s.tell(missing)
			if len(there) > 0 {
				return there
			}
		} else if ctx.Err() == nil {
			s.session.Fault(fmt.Errorf("asking for the topics: %w", err))
		}
		_ = b.Wait(ctx)
	}
	return nil
}

// watch returns when other topics exist than those, or ctx ends. A topic that is gone has to be gone in two looks: a broker
// that has just come up may not know all topics yet, and to leave the group for that would stop all the others.
func (s *scout) watch(ctx context.Context, topics []string) {
	var before []string
	for retry.Sleep(ctx, s.cfg.WatchPartitions) == nil {
		there, _, err := s.look(ctx)
		if err != nil {
			continue
		}
		more := slices.ContainsFunc(there, func(t string) bool { return !slices.Contains(topics, t) })
		if !slices.Equal(there, topics) && (more || slices.Equal(there, before)) {
			return
		}
		before = there
	}
}

// tell reports missing topics once.
func (s *scout) tell(missing []string) {
	if !slices.Equal(missing, s.told) && len(missing) > 0 {
		s.session.Fault(fmt.Errorf("topics %q do not exist yet or may not be read: they are looked for every %v", missing, s.cfg.WatchPartitions))
	}
	s.told = missing
}

func (s *scout) look(ctx context.Context) (there, missing []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	refreshLayout(ctx, s.fetches, s.addr)
	cl := &kafka.Client{Addr: s.addr, Transport: s.fetches}
	md, err := cl.Metadata(ctx, &kafka.MetadataRequest{Topics: s.topics})
	if err != nil {
		return nil, nil, err
	}
	for _, t := range md.Topics {
		if t.Error == nil && len(t.Partitions) > 0 {
			there = append(there, t.Name)
		} else {
			missing = append(missing, t.Name)
		}
	}
	slices.Sort(there)
	slices.Sort(missing)
	return there, missing, nil
}

// withOldRetryTopics adds the retry topics of earlier policies: messages that wait in them would otherwise wait without end.
// It waits for the brokers.
func (k *Kafka) withOldRetryTopics(ctx context.Context, group string, topics []string, session Session) []string {
	t := k.newTransport(nil)
	defer t.CloseIdleConnections()
	b := retry.Reopen.Start()
	for ctx.Err() == nil {
		all, err := listTopics(ctx, &kafka.Client{Addr: k.addr, Transport: t})
		if err != nil {
			session.Fault(fmt.Errorf("listing the topics, for retry topics of earlier policies: %w", err))
			_ = b.Wait(ctx)
			continue
		}

		var old []string
		for _, topic := range all {
			if origin, n := parseRetryTopic(topic.Name, group); n > 0 && slices.Contains(topics, origin) && !slices.Contains(topics, topic.Name) {
				old = append(old, topic.Name)
			}
		}
		if len(old) > 0 {
			session.Fault(fmt.Errorf("retry topics %q are in no policy any more, and are read because messages may wait there: delete them once they are empty", old))
		}
		return slices.Concat(topics, old)
	}
	return topics
}

func listTopics(ctx context.Context, cl *kafka.Client) ([]kafka.Topic, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	md, err := cl.Metadata(ctx, &kafka.MetadataRequest{})
	if err != nil {
		return nil, err
	}
	return md.Topics, nil
}
