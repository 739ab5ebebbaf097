package admin

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// ErrOlderNodes is returned for a migration that must wait until the nodes of older versions have
// stopped.
var ErrOlderNodes = nodes.ErrOlderNodes

// MigrationReport is the result of a migration.
type MigrationReport = migrate.Report

// MigrationStatus is the content of the ledger.
type MigrationStatus = migrate.Status

// MigrationStep is one step of the ledger.
type MigrationStep = migrate.StepStatus

// IndexDrift is one difference of a [Verification].
type IndexDrift = migrate.Drift

// Verification is the difference between collections and their declarations.
type Verification = migrate.Verification

// Indexes are the indexes of the watched collections, and the ledger of migrations.
type Indexes struct{ op Operator }

// newMigrator returns [ErrUnavailable] if the process does not list the watched outboxes.
func (x Indexes) newMigrator() (*migrate.Migrator, error) {
	if x.op.Outboxes == nil {
		return nil, fmt.Errorf("indexes: %w", ErrUnavailable)
	}

	// The configuration names the outboxes of its own watcher only.
	list := x.op.Outboxes
	if !x.op.isConfigured() {
		list = func(ctx context.Context) ([]outboxes.Outbox, error) { return x.op.registeredOutboxes(ctx, nil) }
	}
	return &migrate.Migrator{
		State:     x.op.State,
		Outboxes:  list,
		Node:      x.op.Node,
		Version:   x.op.Version,
		CheckStep: nodes.NewStepCheck(x.op.State),
	}, nil
}

// Migrations returns the content of the ledger.
func (x Indexes) Migrations(ctx context.Context) (MigrationStatus, error) {
	m, err := x.newMigrator()
	if err != nil {
		return MigrationStatus{}, err
	}
	return m.Status(ctx)
}

// Migrate applies the pending steps and creates missing indexes; see [migrate.Migrator.Up].
func (x Indexes) Migrate(ctx context.Context) (MigrationReport, error) {
	m, err := x.newMigrator()
	if err != nil {
		return MigrationReport{}, err
	}
	r, err := m.Up(ctx)
	if err != nil || len(r.Applied) == 0 {
		return r, err
	}
	return r, x.op.logAction(ctx, "migrated", bson.D{
		{Key: "steps", Value: r.Applied},
		{Key: "version", Value: x.op.Version},
	})
}

// Rebuild creates missing indexes, replaces different ones, and drops the indexes of older
// versions. While an index is built, purges and queries of its collection are slow.
func (x Indexes) Rebuild(ctx context.Context) (Verification, error) {
	if _, err := x.Migrate(ctx); err != nil {
		return Verification{}, err
	}
	return x.Verify(ctx, true)
}

// Verify compares all watched collections with their declarations. With repair it also fixes the
// differences; see [migrate.Migrator.Verify].
func (x Indexes) Verify(ctx context.Context, repair bool) (Verification, error) {
	m, err := x.newMigrator()
	if err != nil {
		return Verification{}, err
	}
	v, err := m.Verify(ctx, repair)
	if err != nil {
		return v, err
	}

	var repaired []string
	for _, d := range v.Drift {
		if d.Repaired {
			repaired = append(repaired, d.Collection+": "+d.Index+" was "+string(d.Kind))
		}
	}
	// Only a repair belongs to the events log.
	if len(repaired) == 0 {
		return v, nil
	}
	return v, x.op.logAction(ctx, "indexes_repaired", bson.D{
		{Key: "indexes", Value: repaired[:min(len(repaired), 100)]},
		{Key: "count", Value: len(repaired)},
	})
}
