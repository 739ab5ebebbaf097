package httpapi

import (
	"context"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func (a *api) addTopics() {
	addQuery(a, "/topics", "list-topics", "List the topics with rate, latency, last record, waiting events and dead letters: those with trouble first, then the busiest",
		func(ctx context.Context, op admin.Operator, _ *Empty) (admin.TopicList, error) {
			return op.Activity().Topics(ctx)
		})

	addQuery(a, "/topics/recent", "list-recent-events", "List a sample of the last delivered events with their places in Kafka, newest first",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Topic string `query:"topic" maxLength:"255" doc:"Only this topic."`
		},
		) (admin.RecentEvents, error) {
			return op.Activity().Recent(ctx, input.Topic)
		})
}
