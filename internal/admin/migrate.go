package admin

import (
	"context"

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

// Verification is the difference between collections and their declarations.
type Verification = migrate.Verification

// Migration manages the indexes of a deployment. All fields are required.
type Migration struct {
	Operator
	Node, Version string                                               // for the ledger
	Outboxes      func(ctx context.Context) ([]outboxes.Outbox, error) // returns the watched outboxes
}

func (m Migration) newMigrator() *migrate.Migrator {
	return &migrate.Migrator{
		State:     m.State,
		Outboxes:  m.Outboxes,
		Node:      m.Node,
		Version:   m.Version,
		CheckStep: nodes.NewStepCheck(m.State),
	}
}

// Status reads the ledger.
func (m Migration) Status(ctx context.Context) (MigrationStatus, error) {
	return m.newMigrator().Status(ctx)
}

// Up applies the pending steps and creates missing indexes; see [migrate.Migrator.Up].
func (m Migration) Up(ctx context.Context) (MigrationReport, error) {
	r, err := m.newMigrator().Up(ctx)
	if err != nil || len(r.Applied) == 0 {
		return r, err
	}
	return r, m.logAction(ctx, "migrated", bson.D{
		{Key: "steps", Value: r.Applied},
		{Key: "version", Value: m.Version},
	})
}

// Verify compares the collections with their declarations. With repair it also fixes the
// differences; see [migrate.Migrator.Verify].
func (m Migration) Verify(ctx context.Context, repair bool) (Verification, error) {
	v, err := m.newMigrator().Verify(ctx, repair)
	if err != nil {
		return v, err
	}

	var repaired []string
	for _, d := range v.Drift {
		if d.Repaired {
			repaired = append(repaired, d.Collection+": "+d.Index+" was "+string(d.Kind))
		}
	}
	if len(repaired) == 0 {
		return v, nil
	}
	return v, m.logAction(ctx, "indexes_repaired", bson.D{
		{Key: "indexes", Value: repaired[:min(len(repaired), 100)]},
		{Key: "count", Value: len(repaired)},
	})
}
