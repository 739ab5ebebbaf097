package admin

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/store"
)

// ErrOlderNodes is a migration that waits for nodes of older versions to go.
var ErrOlderNodes = nodes.ErrOlder

// MigrationReport is what migrations did and found.
type MigrationReport = migrate.Report

// MigrationStatus is what the ledger says.
type MigrationStatus = migrate.Status

// Verification is how collections differ from what is declared.
type Verification = migrate.Verification

// Migration is an operator's hand on the indexes of a deployment. All fields are needed.
type Migration struct {
	Operator
	Node, Version string                                            // for the ledger
	Outboxes      func(ctx context.Context) ([]store.Outbox, error) // that are watched
}

func (m Migration) migrator() *migrate.Migrator {
	return &migrate.Migrator{State: m.State, Outboxes: m.Outboxes, Node: m.Node, Version: m.Version, Ready: nodes.Ready(m.State)}
}

// Status reads the ledger.
func (m Migration) Status(ctx context.Context) (MigrationStatus, error) {
	return m.migrator().Status(ctx)
}

// Up takes the pending steps and makes the indexes that are missing; see [migrate.Migrator.Up].
func (m Migration) Up(ctx context.Context) (MigrationReport, error) {
	r, err := m.migrator().Up(ctx)
	if err != nil || len(r.Applied) == 0 {
		return r, err
	}
	return r, m.note(ctx, "migrated", bson.D{{Key: "steps", Value: r.Applied}, {Key: "version", Value: m.Version}})
}

// Verify compares the collections with what is declared, and with repair mends what differs; see
// [migrate.Migrator.Verify].
func (m Migration) Verify(ctx context.Context, repair bool) (Verification, error) {
	v, err := m.migrator().Verify(ctx, repair)
	if err != nil {
		return v, err
	}
	var mended []string
	for _, d := range v.Drift {
		if d.Repaired {
			mended = append(mended, d.Collection+": "+d.Index+" was "+string(d.Kind))
		}
	}
	if len(mended) == 0 {
		return v, nil
	}
	return v, m.note(ctx, "indexes_repaired", bson.D{{Key: "indexes", Value: mended[:min(len(mended), 100)]}, {Key: "count", Value: len(mended)}})
}
