// The projector keeps views for reading: of each customer, how many orders were placed, paid and cancelled, and what was
// spent; of each order, what happened to it, in its order. It counts, which is wrong as soon as one event is counted twice
// or left out; the inbox sees to it that none is.
//
// Events of one order come in order, because they have one key; of different orders they are handled at the same time, up
// to the consumer's concurrency, and what waits for the same lane is written by one transaction.
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

func main() { shop.Main(build) }

func build(ctx context.Context, s *shop.Shop) ([]func(context.Context) error, error) {
	v := &view{customers: s.DB.Collection("customers"), orders: s.DB.Collection("order_history")}
	// A collection that a transaction has to create makes the first ones conflict.
	for _, coll := range []*mongo.Collection{v.customers, v.orders} {
		if err := s.DB.CreateCollection(ctx, coll.Name()); err != nil && !isThere(err) {
			return nil, err
		}
	}
	c, err := s.Consumer("view", "order")
	if err != nil {
		return nil, err
	}
	// One handler for all events of orders: a pattern takes the place of their names.
	if err := c.HandleBatch("Order*", v.project, consumer.Named("customers")); err != nil {
		return nil, err
	}
	return []func(context.Context) error{c.Run}, nil
}

func isThere(err error) bool {
	const namespaceExists = 48
	var server mongo.ServerError
	return errors.As(err, &server) && server.HasErrorCode(namespaceExists)
}

type view struct{ customers, orders *mongo.Collection }

// project writes what a few messages of one lane change, in their transaction.
func (v *view) project(ctx context.Context, ms []*consumer.Message) error {
	var counts, history []mongo.WriteModel
	for _, m := range ms {
		var o shop.Order
		if err := json.Unmarshal(m.Value, &o); err != nil {
			return fmt.Errorf("reading %s %s: %w", m.Type, m.ID, err)
		}
		var inc bson.D
		switch m.Type {
		case shop.OrderPlaced:
			inc = bson.D{{Key: "placed", Value: 1}}
		case shop.OrderPaid:
			inc = bson.D{{Key: "paid", Value: 1}, {Key: "cents", Value: o.Cents}}
		case shop.OrderCancelled:
			inc = bson.D{{Key: "cancelled", Value: 1}}
		default:
			continue // of a later version of the service
		}
		counts = append(counts, upsert(o.Customer, bson.D{{Key: "$inc", Value: inc}}))
		history = append(history, upsert(o.ID, bson.D{{Key: "$push", Value: bson.D{{Key: "events", Value: m.Type}}}}))
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

func upsert(id string, update bson.D) mongo.WriteModel {
	return mongo.NewUpdateOneModel().SetFilter(bson.D{{Key: "_id", Value: id}}).SetUpdate(update).SetUpsert(true)
}
