package app

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
)

// topicNames are the topics of the cluster. They do not count for topics.max, so that a service which makes up topics
// cannot use up the places of topics that exist.
type topicNames struct {
	names atomic.Pointer[map[string]bool]
}

func (n *topicNames) exists(topic string) bool {
	names := n.names.Load()
	return names != nil && (*names)[topic]
}

// topicNamesEvery is how often the topics are listed while envelopes name more topics than they may.
const topicNamesEvery = 10 * time.Second

// countTopics begins to count the topics that envelopes name. It lists those of the cluster now, and again while the count is
// at its maximum, for topics that were created since.
func (t *term) countTopics(ctx context.Context) {
	var exist topicNames
	list := func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, topicNamesEvery)
		defer cancel()
		names, err := t.kafka.TopicNames(ctx)
		if err != nil {
			t.log.Debug("the topics of the cluster could not be listed", "error", err)
			return
		}
		exist.names.Store(&names)
	}
	list(ctx)
	t.router.Begin(exist.exists)
	t.runInBackground(func(ctx context.Context) {
		for retry.Sleep(ctx, topicNamesEvery) == nil {
			if t.router.Full() {
				list(ctx)
			}
		}
	})
}
