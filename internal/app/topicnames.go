package app

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
)

// topicNames contains the topics of the cluster. They do not count for topics.max, so that a
// service with invented topic names cannot use up the places of existing topics. It is safe for
// concurrent use.
type topicNames struct {
	names atomic.Pointer[map[string]bool]
}

func (n *topicNames) exists(topic string) bool {
	names := n.names.Load()
	return names != nil && (*names)[topic]
}

// topicNamesEvery is the interval at which the topics are listed while envelopes name more topics
// than topics.max.
const topicNamesEvery = 10 * time.Second

// countTopics starts to count the topics that envelopes name. It lists the topics of the cluster
// now, and again while the count is at its maximum, because topics may have been created since.
func (t *term) countTopics(ctx context.Context) {
	var existing topicNames
	list := func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, topicNamesEvery)
		defer cancel()
		names, err := t.slot.relay.kafka.TopicNames(ctx)
		if err != nil {
			t.log.Debug("cannot list the topics of the cluster", "error", err)
			return
		}
		existing.names.Store(&names)
	}

	list(ctx)
	t.slot.relay.router.ResetTopics(existing.exists)
	t.runInBackground(func(ctx context.Context) {
		for retry.Sleep(ctx, topicNamesEvery) == nil {
			if t.slot.relay.router.TopicsFull() {
				list(ctx)
			}
		}
	})
}
