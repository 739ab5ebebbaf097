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

// Account is what has come of the orders.
type Account struct {
	Orders     int     `json:"orders"`       // in the order service's collection
	Paid       int     `json:"paid"`         // of them
	Cancelled  int     `json:"cancelled"`    // of them
	Charges    int     `json:"charges"`      // what the bank was asked for; each order once
	Placed     int     `json:"view_placed"`  // what the projector has counted
	ViewPaid   int     `json:"view_paid"`    //
	ViewCancel int     `json:"view_cancel"`  //
	OutOfOrder int     `json:"out_of_order"` // orders whose history is not placed and then paid or cancelled
	Seconds    float64 `json:"seconds"`
}

func (a *Account) String() string {
	return fmt.Sprintf("orders %d: paid %d, cancelled %d · charged %d · counted: placed %d, paid %d, cancelled %d · out of order %d · %.1f s",
		a.Orders, a.Paid, a.Cancelled, a.Charges, a.Placed, a.ViewPaid, a.ViewCancel, a.OutOfOrder, a.Seconds)
}

// settled reports whether nothing is on its way any more; wrong, whether something has happened that must not.
func (a *Account) settled(n int) bool {
	return a.Orders == n && a.Paid+a.Cancelled == n && a.Placed == n && a.ViewPaid+a.ViewCancel == n
}

func (a *Account) wrong(n int) error {
	if a.Orders > n || a.Charges > n || a.Placed > n || a.ViewPaid+a.ViewCancel > n || a.OutOfOrder > 0 {
		return fmt.Errorf("something happened twice or out of order: %s", a)
	}
	return nil
}

// check looks into the collections of the three programs.
type check struct {
	client *mongo.Client
	db     *mongo.Database
}

// newCheck begins with an empty database: it counts all that is there.
func newCheck(ctx context.Context, uri, database string) (*check, error) {
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		return nil, err
	}
	c := &check{client, client.Database(database)}
	if n, err := c.db.Collection("orders").CountDocuments(ctx, bson.D{}); err != nil || n > 0 {
		c.close(ctx)
		return nil, errors.Join(fmt.Errorf("database %s has %d orders already; name another by SHOP_DATABASE", database, n), err)
	}
	return c, nil
}

func (c *check) close(ctx context.Context) { _ = c.client.Disconnect(context.WithoutCancel(ctx)) }

// wait returns the account when everything has come to rest.
func (c *check) wait(ctx context.Context, n int) (*Account, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var last *Account
	for {
		a, err := c.account(ctx)
		switch {
		case err == nil && a.wrong(n) != nil:
			return nil, a.wrong(n)
		case err == nil && a.settled(n):
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

func (c *check) account(ctx context.Context) (*Account, error) {
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
	errs = append(errs, c.customers(ctx, a), c.history(ctx, a))
	return a, errors.Join(errs...)
}

func (c *check) customers(ctx context.Context, a *Account) error {
	var docs []struct {
		Placed    int `bson:"placed"`
		Paid      int `bson:"paid"`
		Cancelled int `bson:"cancelled"`
	}
	if err := c.all(ctx, "customers", &docs); err != nil {
		return err
	}
	for _, d := range docs {
		a.Placed, a.ViewPaid, a.ViewCancel = a.Placed+d.Placed, a.ViewPaid+d.Paid, a.ViewCancel+d.Cancelled
	}
	return nil
}

func (c *check) history(ctx context.Context, a *Account) error {
	var docs []struct {
		Events []string `bson:"events"`
	}
	if err := c.all(ctx, "order_history", &docs); err != nil {
		return err
	}
	for _, d := range docs {
		if d.Events[0] != "OrderPlaced" || len(d.Events) > 2 || len(d.Events) == 2 && !slices.Contains([]string{"OrderPaid", "OrderCancelled"}, d.Events[1]) {
			a.OutOfOrder++
		}
	}
	return nil
}

func (c *check) all(ctx context.Context, collection string, into any) error {
	cur, err := c.db.Collection(collection).Find(ctx, bson.D{})
	if err != nil {
		return err
	}
	return cur.All(ctx, into)
}
