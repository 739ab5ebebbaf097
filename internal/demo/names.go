package demo

import (
	"context"
	"errors"
	"slices"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack"
)

const aggregate = "order" // type of what the sample service tells of

// names are what a run calls its things on the servers.
type names struct {
	database string // of the sample service
	state    string // database of the relays
	topics   string // how topics begin; the aggregate type follows
	groups   string // how consumer groups begin
}

// ownNames are those on servers that are the run's own.
func ownNames() names {
	return names{database: "shop", state: "outrelay", topics: "outbox.event.", groups: "demo-"}
}

// namesAmongOthers are those on servers that others use too: no two runs share one.
func namesAmongOthers() names {
	id := uuid.NewString()[:8]
	return names{database: "shop_" + id, state: "outrelay_dev_" + id, topics: "outrelay_dev_" + id + ".", groups: "outrelay_dev_" + id + "-"}
}

// topic is that of an aggregate type.
func (n names) topic(aggregateType string) string { return n.topics + aggregateType }

// environment is how a server is had that the environment names.
const environment = "environment"

// given reports whether one of the servers is not the stack's own.
func given(stack *devstack.Stack) bool {
	return slices.ContainsFunc(stack.Servers(), func(s devstack.Server) bool { return s.Origin == environment })
}

// db is the database of the sample service.
func (d *demo) db() *mongo.Database { return d.client.Database(d.names.database) }

// state is the database of the relays.
func (d *demo) state() *mongo.Database { return d.client.Database(d.names.state) }

// createTopic makes the topic of an aggregate type.
func (d *demo) createTopic(ctx context.Context, aggregateType string) error {
	name := d.names.topic(aggregateType)
	if err := d.stack.CreateTopic(ctx, name, partitions, 1); err != nil {
		return err
	}
	d.made = append(d.made, name)
	return nil
}

// tidy removes what the run has made on servers that stay, but for the evidence of a broken promise.
func (d *demo) tidy(ctx context.Context) {
	if !given(d.stack) {
		return
	}
	if d.broken {
		d.v.line("  to look at        databases %s and %s, topics %s… stay where they are", d.names.database, d.names.state, d.names.topics)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	if err := errors.Join(d.db().Drop(ctx), d.state().Drop(ctx), d.stack.DeleteTopics(ctx, d.made...)); err != nil {
		d.v.line("  some of %s, %s and %s… is left behind: %v", d.names.database, d.names.state, d.names.topics, err)
	}
}
