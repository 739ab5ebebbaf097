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

	addAction(a, "/topics/create", "create-topic", "Create a topic in Kafka, with the settings of topics.create unless others are given",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				Topic       string `json:"topic" minLength:"1" maxLength:"249"`
				Partitions  int    `json:"partitions,omitempty" minimum:"0" maximum:"100000" doc:"0: as in topics.create, or the default of the brokers."`
				Replication int    `json:"replication,omitempty" minimum:"0" maximum:"1000" doc:"0: as in topics.create, or the default of the brokers."`
				DryRun      bool   `json:"dry_run,omitempty" doc:"Let a broker check the creation, and create nothing."`
			}
		},
		) (admin.TopicCreated, error) {
			body := &input.Body
			return op.Activity().CreateTopic(ctx, admin.TopicOrder{Topic: body.Topic, Partitions: body.Partitions, Replication: body.Replication, DryRun: body.DryRun})
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
