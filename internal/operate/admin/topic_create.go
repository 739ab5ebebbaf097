package admin

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// The kinds of the entries in the audit log.
const (
	topicCreated  nodes.Kind = "topic_created"
	topicExtended nodes.Kind = "topic_extended"
)

// TopicOrder is a topic that an operator creates.
type TopicOrder = connect.TopicOrder

// TopicCreated is the result of the creation of a topic, or with a dry run the expected one.
type TopicCreated struct {
	DryRun      bool   `json:"dry_run"`
	Topic       string `json:"topic"`
	Partitions  int    `json:"partitions"`  // 0: the default of the brokers
	Replication int    `json:"replication"` // 0: the default of the brokers
	Extended    bool   `json:"extended"`    // the topic existed, and gets partitions until it has this number
	Command     string `json:"command"`     // of kafka-topics.sh, which does the same
}

// CreateTopic creates a topic with the settings of topics.create, unless the order has others. The events that wait for it are sent
// within about a second. A dry run lets a broker check the rights and the settings. A topic that was deleted gets at least the partitions to
// which the relay wrote. A topic that exists gets partitions if an owner reports that it has too few; otherwise CreateTopic returns an error.
func (a Activity) CreateTopic(ctx context.Context, order TopicOrder) (TopicCreated, error) {
	out := TopicCreated{DryRun: order.DryRun, Topic: order.Topic}
	if a.op.NewTopic == nil {
		return out, wrapError("creating a topic", ErrUnavailable)
	}
	if order.Partitions < 0 || order.Replication < 0 {
		return out, invalidRequest("partitions and replication are numbers above 0; leave them out to use topics.create")
	}

	status, err := ReadStatus(ctx, a.op.State)
	if err != nil {
		return out, err
	}
	order.Needed = neededPartitions(status, order.Topic)
	if order.Partitions > 0 && order.Partitions < order.Needed {
		return out, invalidRequest("topic %s needs at least %d partitions: events wait for the partitions to which earlier events of their keys were written", order.Topic, order.Needed)
	}

	// An owner reports the needed number only while events wait.
	if order.Earlier, err = lease.CountPartitions(ctx, a.op.watcherDocuments(), order.Topic); err != nil {
		return out, err
	}

	created, err := a.op.NewTopic(ctx, order)
	out.Partitions, out.Replication, out.Extended, out.Command = created.Partitions, created.Replication, created.Extended, created.Command
	if err != nil || order.DryRun {
		return out, err
	}
	kind := topicCreated
	if out.Extended {
		kind = topicExtended
	}
	// A number that the brokers have chosen is unknown, and not 0.
	return out, a.op.logAction(ctx, kind, setFields(bson.D{
		{Key: "topic", Value: out.Topic},
		{Key: "partitions", Value: out.Partitions},
		{Key: "replication", Value: out.Replication},
	}))
}

// neededPartitions returns the number of partitions that the owners of any watcher need of a missing or too small topic, or 0.
func neededPartitions(status Status, topic string) (needed int) {
	for i := range status.Slots {
		for _, unwritable := range status.Slots[i].Unwritable {
			if unwritable.Topic == topic {
				needed = max(needed, unwritable.Partitions)
			}
		}
	}
	return needed
}
