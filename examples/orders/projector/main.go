// Projector maintains collections for reading. For each customer it counts the placed, paid and
// canceled orders and sums up the amounts. For each order it lists the events in their order. A
// count is wrong if one event is counted twice or not at all, which the inbox prevents.
//
// Events of one order arrive in order, because they have the same key. Events of different orders
// are handled concurrently, within the limit of the consumer. One transaction writes several
// messages that wait for the same lane.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/examples/orders/shop"
	"github.com/outrelay/outrelay/pkg/consumer"
)

func main() { shop.Main(buildParts) }

// buildParts creates the collections and the consumer.
func buildParts(ctx context.Context, s *shop.Shop) ([]func(context.Context) error, error) {
	v := &view{customers: s.DB.Collection("customers"), orders: s.DB.Collection("order_history")}

	// If transactions have to create a collection, they conflict.
	for _, coll := range []*mongo.Collection{v.customers, v.orders} {
		if err := s.DB.CreateCollection(ctx, coll.Name()); err != nil && !isCollectionExists(err) {
			return nil, err
		}
	}

	c, err := s.Consumer("view", "order")
	if err != nil {
		return nil, err
	}

	// The pattern matches all types of events of orders.
	if err := c.Handle("customers", consumer.Batch(0, v.projectBatch, "Order*")); err != nil {
		return nil, err
	}

	return []func(context.Context) error{c.Run}, nil
}

// isCollectionExists reports whether err means that the collection exists already.
func isCollectionExists(err error) bool {
	const namespaceExists = 48

	var server mongo.ServerError
	return errors.As(err, &server) && server.HasErrorCode(namespaceExists)
}

// view contains the collections for reading.
type view struct{ customers, orders *mongo.Collection }

// projectBatch writes the changes of several messages of one lane, in the transaction of those
// messages.
func (v *view) projectBatch(ctx context.Context, ms []*consumer.Message) error {
	var counts, history []mongo.WriteModel
	for _, m := range ms {
		var o shop.Order
		if err := json.Unmarshal(m.Value, &o); err != nil {
			return fmt.Errorf("reading %s %s: %w", m.Name, m.ID, err)
		}

		var inc bson.D
		switch m.Name {
		case shop.OrderPlaced.Name:
			inc = bson.D{{Key: "placed", Value: 1}}
		case shop.OrderPaid.Name:
			inc = bson.D{{Key: "paid", Value: 1}, {Key: "cents", Value: o.Cents}}
		case shop.OrderCancelled.Name:
			inc = bson.D{{Key: "cancelled", Value: 1}}
		default:
			continue // a type of a later version of the service
		}

		counts = append(counts, upsertByID(o.Customer, bson.D{{Key: "$inc", Value: inc}}))
		history = append(history, upsertByID(o.ID, bson.D{{Key: "$push", Value: bson.D{{Key: "events", Value: m.Name}}}}))
	}

	if len(counts) == 0 {
		return nil
	}
	if _, err := v.orders.BulkWrite(ctx, history); err != nil {
		return err
	}

	_, err := v.customers.BulkWrite(ctx, counts, options.BulkWrite().SetOrdered(false))
	return err
}

// upsertByID returns an update of the document with this id, which is created if it does not exist.
func upsertByID(id string, update bson.D) mongo.WriteModel {
	filter := bson.D{{Key: "_id", Value: id}}
	return mongo.NewUpdateOneModel().SetFilter(filter).SetUpdate(update).SetUpsert(true)
}
