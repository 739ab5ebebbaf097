package consumer

import (
	"context"
	"slices"
	"sync"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/topics"
)

// WithTopicList makes the group read the topics of the list too. Every member needs the option and watches the list. With it,
// WithTopics may be missing.
func WithTopicList(list *topics.List) Option {
	return option(func(settings *settings) { settings.topicList = list })
}

// watchTopicList calls onTopics with the topics of the list, and again after each change. It blocks until ctx ends, and tries
// again after errors, which it reports.
func (r *run) watchTopicList(ctx context.Context, onTopics func(topics []string)) {
	backoff := retry.Reopen.Start()
	for ctx.Err() == nil {
		for topics, err := range r.c.s.topicList.Watch(ctx) {
			switch {
			case err == nil:
				backoff.Reset()
				onTopics(topics)
			case ctx.Err() == nil:
				r.reportTrouble("cannot read the list of topics; it is read again", err)
			}
		}

		_ = backoff.Wait(ctx)
	}
}

// latestTopics is the latest content of the topic list. It is safe for concurrent use.
type latestTopics struct {
	mu      sync.Mutex
	topics  []string
	known   bool
	changed chan struct{} // closed and replaced at each change
}

func (l *latestTopics) set(topics []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.known && slices.Equal(topics, l.topics) {
		return
	}

	l.topics, l.known = topics, true
	close(l.changed)
	l.changed = make(chan struct{})
}

// current returns the topics, whether they are known yet, and a channel that is closed at the next change.
func (l *latestTopics) current() (topics []string, known bool, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.topics, l.known, l.changed
}

// joinGroup is a member of the group until ctx ends. It joins again whenever the topic list changes.
func (r *run) joinGroup(ctx context.Context) error {
	consumer := r.c
	if consumer.s.topicList == nil {
		for ctx.Err() == nil {
			if err := r.joinTopics(ctx, consumer.s.topics); err != nil {
				return err
			}
		}
		return nil
	}

	// The list is watched while the group is joined, because a change makes the member join again.
	latest := &latestTopics{changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { r.watchTopicList(ctx, latest.set) })

	for ctx.Err() == nil {
		added, known, changed := latest.current()
		topics := slices.Compact(slices.Sorted(slices.Values(slices.Concat(consumer.s.topics, added))))

		// Before the first list arrives, the set of topics is incomplete.
		if !known || len(topics) == 0 {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}

		if err := r.joinUntilChange(ctx, topics, changed); err != nil {
			return err
		}
	}
	return nil
}

// joinUntilChange is a member of the group until changed is closed or ctx ends.
func (r *run) joinUntilChange(ctx context.Context, topics []string, changed <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()

	waiting.Go(func() {
		select {
		case <-changed:
			cancel()
		case <-ctx.Done():
		}
	})
	return r.joinTopics(ctx, topics)
}

// joinTopics is a member of the group until ctx ends, until a handler is added that needs further retry topics, or until the
// database has been out of reach for too long. It blocks while the database is out of reach.
func (r *run) joinTopics(ctx context.Context, topics []string) error {
	if err := r.reach.gate.waitOpen(ctx); err != nil {
		return nil //nolint:nilerr // ctx has ended
	}

	retryTopics := r.c.retryTopics(topics)
	ctx, cancel := context.WithCancel(ctx)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()

	waiting.Go(func() {
		defer cancel()
		r.c.awaitRetryTopics(ctx, topics, retryTopics)
	})
	waiting.Go(func() {
		defer cancel()
		r.reach.awaitLost(ctx)
	})
	waiting.Go(func() { r.explainWaits(ctx) })
	return r.c.transport.Join(ctx, r.c.group, slices.Concat(topics, retryTopics), r)
}

// awaitRetryTopics blocks until a handler needs a retry topic that is not in known, or until ctx ends.
func (c *Consumer) awaitRetryTopics(ctx context.Context, topics, known []string) {
	for {
		changed := c.reg.nextChange()
		isNew := func(topic string) bool { return !slices.Contains(known, topic) }
		if slices.ContainsFunc(c.retryTopics(topics), isNew) {
			return
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// retryTopics returns the names of the retry topics of the given topics, for the handler with the most of them.
func (c *Consumer) retryTopics(topics []string) []string {
	most := 0
	for _, r := range c.reg.snapshot().all {
		most = max(most, len(r.decider.topics))
	}

	var names []string
	for _, topic := range topics {
		for n := range most {
			names = append(names, transport.RetryTopicName(topic, c.group, n+1))
		}
	}
	return names
}
