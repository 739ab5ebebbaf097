package demo

import (
	"context"
	"errors"
	"slices"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

const aggregate = "order" // aggregate type of the sample service's events

// names are the names of a run's databases, topics and groups on the servers.
type names struct {
	database string // of the sample service
	state    string // database of the relays
	topics   string // prefix of the topics, before the aggregate type
	groups   string // prefix of the consumer groups
}

// defaultNames returns the names on servers that only this run uses.
func defaultNames() names {
	return names{database: "shop", state: "outrelay", topics: "outbox.event.", groups: "demo-"}
}

// uniqueNames returns names that no other run uses, for shared servers.
func uniqueNames() names {
	id := uuid.NewString()[:8]
	return names{
		database: "shop_" + id,
		state:    "outrelay_dev_" + id,
		topics:   "outrelay_dev_" + id + ".",
		groups:   "outrelay_dev_" + id + "-",
	}
}

// topicName returns the topic of an aggregate type.
func (n names) topicName(aggregateType string) string { return n.topics + aggregateType }

// environment is the origin of a server that the environment names.
const environment = "environment"

// usesGivenServers reports whether the environment names one of the servers.
func usesGivenServers(stack *devstack.Stack) bool {
	return slices.ContainsFunc(stack.Servers(), func(server devstack.Server) bool { return server.Origin == environment })
}

// shopDatabase returns the database of the sample service.
func (d *demo) shopDatabase() *mongo.Database { return d.client.Database(d.names.database) }

// stateDatabase returns the database of the relays.
func (d *demo) stateDatabase() state.Database { return state.Of(d.client.Database(d.names.state)) }

// createTopic creates the topic of an aggregate type.
func (d *demo) createTopic(ctx context.Context, aggregateType string) error {
	name := d.names.topicName(aggregateType)
	if err := d.stack.CreateTopic(ctx, name, partitions, 1); err != nil {
		return err
	}
	d.createdTopics = append(d.createdTopics, name)
	return nil
}

// removeLeftovers removes the run's databases and topics from servers that continue to run, unless
// they are the evidence of a broken promise.
func (d *demo) removeLeftovers(ctx context.Context) {
	if !usesGivenServers(d.stack) {
		return
	}
	if d.broken {
		d.view.printLine("  evidence          databases %s and %s, topics %s… are kept",
			d.names.database, d.names.state, d.names.topics)
		return
	}

	// The run may have ended with its context: the removal has its own time.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	err := errors.Join(
		d.shopDatabase().Drop(ctx),
		d.stateDatabase().Mongo().Drop(ctx),
		d.stack.DeleteTopics(ctx, d.createdTopics...),
	)
	if err != nil {
		d.view.printLine("  cannot remove all of %s, %s and %s…: %v",
			d.names.database, d.names.state, d.names.topics, err)
	}
}
