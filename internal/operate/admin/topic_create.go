package admin

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// topicCreated is the kind of the entries in the audit log.
const topicCreated nodes.Kind = "topic_created"

// TopicOrder is a topic that an operator creates.
type TopicOrder = connect.TopicOrder

// TopicCreated is the result of the creation of a topic, or with a dry run the expected one.
type TopicCreated struct {
	DryRun      bool   `json:"dry_run"`
	Topic       string `json:"topic"`
	Partitions  int    `json:"partitions"`  // 0: the default of the brokers
	Replication int    `json:"replication"` // 0: the default of the brokers
	Command     string `json:"command"`     // of kafka-topics.sh, which does the same
}

// CreateTopic creates a topic with the settings of topics.create, unless the order has others. The events that wait for it are sent
// within about a second. A dry run lets a broker check the rights and the settings. It returns an error if the topic exists.
func (a Activity) CreateTopic(ctx context.Context, order TopicOrder) (TopicCreated, error) {
	out := TopicCreated{DryRun: order.DryRun, Topic: order.Topic}
	if a.op.NewTopic == nil {
		return out, wrapError("creating a topic", ErrUnavailable)
	}
	if order.Partitions < 0 || order.Replication < 0 {
		return out, invalidRequest("partitions and replication are numbers above 0; leave them out to use topics.create")
	}

	created, err := a.op.NewTopic(ctx, order)
	out.Partitions, out.Replication, out.Command = created.Partitions, created.Replication, created.Command
	if err != nil || order.DryRun {
		return out, err
	}
	return out, a.op.logAction(ctx, topicCreated, bson.D{
		{Key: "topic", Value: out.Topic},
		{Key: "partitions", Value: out.Partitions},
		{Key: "replication", Value: out.Replication},
	})
}
