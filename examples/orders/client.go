package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"time"
)

// order is the body of a request to the order service.
type order struct {
	ID       string `json:"id"`
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// client places orders with several instances of the service, round robin.
type client struct {
	urls []string
	next int
}

// patience is the time limit for placing an order, and for settling all orders.
const patience = 4 * time.Minute

// placeOrder tries one instance after the other until one has answered. A client without an answer
// does not know whether the order was placed, so it repeats the request with the same id.
func (c *client) placeOrder(ctx context.Context, o order) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()

	body, err := json.Marshal(o)
	if err != nil {
		return err
	}

	for {
		c.next++
		err = postJSON(ctx, c.urls[c.next%len(c.urls)]+"/orders", body)
		if err == nil {
			return nil
		}

		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("placing order %s: %w", o.ID, err)
		}
	}
}

// postJSON sends a request and fails unless the status is 200.
func postJSON(ctx context.Context, url string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}

	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()

	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, res.Status)
	}

	return nil
}

// freeAddress returns a local address with a free port.
func freeAddress(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("looking for a free port: %w", err)
	}

	defer func() { _ = l.Close() }()

	return l.Addr().String(), nil
}
