package app

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/routing"
)

// Outboxes returns a function that lists the existing collections that the configuration watches,
// sorted by name. It queries each database that may contain one.
func Outboxes(cfg config.Config, client *mongo.Client) func(ctx context.Context) ([]outboxes.Outbox, error) {
	return func(ctx context.Context) ([]outboxes.Outbox, error) {
		scope, err := changestream.ParseScope(cfg.Watch, stateCollections(cfg)...)
		if err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
		if db, _ := scope.Target(); db != "" {
			return outboxes.ListOutboxes(ctx, client, scope.Matches, db)
		}
		return outboxes.ListOutboxes(ctx, client, scope.Matches)
	}
}

// Router returns the configured router.
func Router(cfg config.Config) (*routing.Router, error) {
	r, err := routing.New(cfg.Routing())
	if err != nil {
		return nil, fmt.Errorf("topics: %w", err)
	}
	return r, nil
}
