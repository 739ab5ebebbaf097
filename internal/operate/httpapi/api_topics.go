package httpapi

import (
	"context"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func (a *api) addGroups() {
	addQuery(a, "/groups", "list-groups", "List the consumer groups that read topics of the watcher, greatest lag first",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			All bool `query:"all" doc:"Every group that the Kafka login may see."`
		},
		) (admin.GroupList, error) {
			return op.Groups().List(ctx, input.All)
		})

	addQuery(a, "/groups/one", "show-group", "Show a consumer group with its members, partitions and lag, and its handlers that are suspended or paused",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Group string `query:"group" required:"true" minLength:"1" maxLength:"255"`
		},
		) (admin.Group, error) {
			return op.Groups().Show(ctx, input.Group)
		})
}

func (a *api) addTopics() {
	addQuery(a, "/topics", "list-topics", "List the topics with rate, latency, last record, waiting events and dead letters. Topics with trouble come first, then the busiest",
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
