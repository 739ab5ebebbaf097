// Package setup creates everything that a relay with a configuration needs in MongoDB, for users whose relay may
// create nothing: the collections of the state database, and the indexes on the watched collections. The relay
// creates the same at its start if it may.
//
// Run blocks until the indexes are built, and may be repeated. It changes no document of a service.
package setup

import (
	"context"
	"fmt"
	"log/slog"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// Report is the result of Run.
type Report struct {
	// Created are the mongosh statements that were run, or of a dry run those that would be.
	Created []string `json:"created"`
	// Rejected are the indexes that could not be created, with the reason.
	Rejected []string `json:"rejected"`
	DryRun   bool     `json:"dry_run"`
}

// OK reports whether nothing is left to create.
func (r Report) OK() bool { return len(r.Rejected) == 0 && (!r.DryRun || len(r.Created) == 0) }

// Run creates what is missing for cfg, or lists it. Index builds may take long. An error means that the state database
// cannot be used or the server did not respond.
func Run(ctx context.Context, cfg config.Config, client *mongo.Client, dryRun bool) (Report, error) {
	report := Report{Created: []string{}, Rejected: []string{}, DryRun: dryRun}
	db := state.Open(client, cfg.State)
	if err := db.Check(ctx); err != nil {
		return report, err
	}
	missing, err := db.Missing(ctx)
	if err != nil {
		return report, err
	}
	if !dryRun {
		if err := db.Ensure(ctx, slog.New(slog.DiscardHandler)); err != nil {
			return report, err
		}
		left, err := db.Missing(ctx)
		if err != nil {
			return report, err
		}
		report.Rejected = append(report.Rejected, left...)
	}
	report.Created = append(report.Created, missing...)

	list, err := connect.Outboxes(cfg, client)(ctx)
	if err != nil {
		return report, fmt.Errorf("listing the watched collections: %w", err)
	}
	for _, o := range list {
		if err := report.addOutbox(ctx, cfg, client, o); err != nil {
			return report, err
		}
	}
	return report, nil
}

// addOutbox creates or lists the indexes of one outbox.
func (r *Report) addOutbox(ctx context.Context, cfg config.Config, client *mongo.Client, outbox outboxes.Outbox) error {
	// A relay creates the index of scheduled envelopes when it sees the first one. It may not be allowed to.
	want := connect.WantedIndexes(cfg)
	want.Scheduled = true
	if r.DryRun {
		missing, err := want.Missing(ctx, mongodb.Database(client, outbox.DB).Collection(outbox.Coll))
		for _, i := range missing {
			r.Created = append(r.Created, i.Statement(outbox.DB, outbox.Coll))
		}
		return err
	}

	created, err := want.Ensure(ctx, client, outbox)
	r.Created = append(r.Created, created...)
	if err == nil {
		_, err = outboxes.EnsureSentTTL(ctx, client, outbox, want.SentTTL)
	}
	if err != nil {
		r.Rejected = append(r.Rejected, err.Error())
	}
	return ctx.Err()
}
