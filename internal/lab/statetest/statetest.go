// Package statetest gives a single test a state database of its own, as after the first start of a relay.
package statetest

import (
	"log/slog"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// New returns a state database with all its collections. It is dropped at the end of the test.
func New(tb testing.TB, client *mongo.Client) state.Database {
	tb.Helper()
	return Set(tb, state.Of(stacktest.Database(tb, client)))
}

// Set creates the collections of database, and returns database.
func Set(tb testing.TB, database state.Database) state.Database {
	tb.Helper()
	if err := database.Ensure(tb.Context(), slog.New(slog.DiscardHandler)); err != nil {
		tb.Fatal(err)
	}
	return database
}
