package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Account contains the results of a run.
type Account struct {
	Orders    int `json:"orders"`    // in the collection of the order service
	Paid      int `json:"paid"`      // paid orders
	Cancelled int `json:"cancelled"` // canceled orders
	Charges   int `json:"charges"`   // requests to the bank, one for each order

	// Counts of the projector.
	Placed     int `json:"view_placed"`
	ViewPaid   int `json:"view_paid"`
	ViewCancel int `json:"view_cancel"`

	OutOfOrder int     `json:"out_of_order"` // orders with a history other than placed, then paid or canceled
	Seconds    float64 `json:"seconds"`
}

func (a *Account) String() string {
	return fmt.Sprintf("orders %d: paid %d, cancelled %d · charged %d · counted: placed %d, paid %d, cancelled %d · "+
		"out of order %d · %.1f s",
		a.Orders, a.Paid, a.Cancelled, a.Charges, a.Placed, a.ViewPaid, a.ViewCancel, a.OutOfOrder, a.Seconds)
}

// isSettled reports whether all n orders are settled and counted.
func (a *Account) isSettled(n int) bool {
	return a.Orders == n && a.Paid+a.Cancelled == n && a.Placed == n && a.ViewPaid+a.ViewCancel == n
}

// checkCounts returns an error if an event had its effect twice or out of order.
func (a *Account) checkCounts(n int) error {
	if a.Orders > n || a.Charges > n || a.Placed > n || a.ViewPaid+a.ViewCancel > n || a.OutOfOrder > 0 {
		return fmt.Errorf("something happened twice or out of order: %s", a)
	}
	return nil
}

// check reads the collections of the three programs.
type check struct {
	client *mongo.Client
	db     *mongo.Database
}

// newCheck connects to the database, which must not contain orders, because all orders are counted.
func newCheck(ctx context.Context, uri, database string) (*check, error) {
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		return nil, err
	}

	c := &check{client, client.Database(database)}
	if n, err := c.db.Collection("orders").CountDocuments(ctx, bson.D{}); err != nil || n > 0 {
		c.disconnect(ctx)
		return nil, errors.Join(fmt.Errorf("database %s has %d orders already; set another one with SHOP_DATABASE", database, n), err)
	}

	return c, nil
}

// disconnect closes the connection.
func (c *check) disconnect(ctx context.Context) { _ = c.client.Disconnect(context.WithoutCancel(ctx)) }

// waitUntilSettled blocks until all n orders are settled, and returns the results. It fails after
// the time of patience, or if an effect happens twice or out of order.
func (c *check) waitUntilSettled(ctx context.Context, n int) (*Account, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()

	var last *Account
	for {
		a, err := c.readAccount(ctx)
		switch {
		case err == nil && a.checkCounts(n) != nil:
			return nil, a.checkCounts(n)
		case err == nil && a.isSettled(n):
			return a, nil
		case err == nil:
			last = a
		}

		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("not settled within %s: %v: %w", patience, last, errors.Join(ctx.Err(), err))
		}
	}
}

// readAccount reads the current results.
func (c *check) readAccount(ctx context.Context) (*Account, error) {
	a := &Account{}
	var errs []error
	count := func(collection string, filter bson.D) int {
		n, err := c.db.Collection(collection).CountDocuments(ctx, filter)
		errs = append(errs, err)
		return int(n)
	}

	a.Orders = count("orders", bson.D{})
	a.Paid = count("orders", bson.D{{Key: "status", Value: "paid"}})
	a.Cancelled = count("orders", bson.D{{Key: "status", Value: "cancelled"}})
	a.Charges = count("charges", bson.D{})
	errs = append(errs, c.addCustomers(ctx, a), c.addHistory(ctx, a))
	return a, errors.Join(errs...)
}

// addCustomers adds the counts of the projector to a.
func (c *check) addCustomers(ctx context.Context, a *Account) error {
	var docs []struct {
		Placed    int `bson:"placed"`
		Paid      int `bson:"paid"`
		Cancelled int `bson:"cancelled"`
	}
	if err := c.readAll(ctx, "customers", &docs); err != nil {
		return err
	}

	for _, d := range docs {
		a.Placed += d.Placed
		a.ViewPaid += d.Paid
		a.ViewCancel += d.Cancelled
	}

	return nil
}

// addHistory counts the orders whose events are out of order.
func (c *check) addHistory(ctx context.Context, a *Account) error {
	var docs []struct {
		Events []string `bson:"events"`
	}
	if err := c.readAll(ctx, "order_history", &docs); err != nil {
		return err
	}

	results := []string{"OrderPaid", "OrderCancelled"}
	for _, d := range docs {
		invalidResult := len(d.Events) == 2 && !slices.Contains(results, d.Events[1])
		if d.Events[0] != "OrderPlaced" || len(d.Events) > 2 || invalidResult {
			a.OutOfOrder++
		}
	}

	return nil
}

// readAll decodes all documents of a collection.
func (c *check) readAll(ctx context.Context, collection string, into any) error {
	cur, err := c.db.Collection(collection).Find(ctx, bson.D{})
	if err != nil {
		return err
	}
	return cur.All(ctx, into)
}
