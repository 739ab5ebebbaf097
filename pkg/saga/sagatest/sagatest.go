// Package sagatest has the tests that every saga.Store must pass, and with it an outbox whose events belong to the same
// transactions.
package sagatest

import (
	"context"
	"errors"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/saga"
)

// Fixture is a store to be tested, empty and for one test alone.
type Fixture struct {
	Store saga.Store
	// Outbox needs a transaction for its events, and they are there only when it commits.
	Outbox saga.Outbox
	// Events are the types of all committed events that were not cancelled, scheduled ones included, in the order of
	// their appends.
	Events func(ctx context.Context) ([]string, error)
}

// Run tests the stores that factory makes. The subtests run in parallel, each with a fixture of its own.
func Run(t *testing.T, factory func(tb testing.TB) Fixture) {
	t.Helper()
	for name, test := range map[string]func(*suite){
		"Save":                   (*suite).save,
		"EveryKindOfID":          (*suite).everyKindOfID,
		"SecondStartIsRefused":   (*suite).secondStart,
		"StaleChangeIsRefused":   (*suite).staleChange,
		"CompletionDeletes":      (*suite).completionDeletes,
		"StaleCompletionRefused": (*suite).staleCompletion,
		"Tombstone":              (*suite).tombstone,
		"Recent":                 (*suite).recent,
		"Prepare":                (*suite).prepare,
		"RollbackLeavesNothing":  (*suite).rollback,
		"JoinedFailure":          (*suite).joinedFailure,
		"ReadsItsOwnWrites":      (*suite).ownWrites,
		"ConcurrentChanges":      (*suite).concurrentChanges,
		"ConcurrentStarts":       (*suite).concurrentStarts,
		"StepIsOneTransaction":   (*suite).step,
		"Timeouts":               (*suite).timeouts,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(&suite{T: t, Fixture: factory(t), ctx: t.Context()})
		})
	}
}

// name is the saga of all tests.
const name = "conformance_sagas"

type suite struct {
	*testing.T
	Fixture
	ctx context.Context
}

func body(n int) bson.Raw {
	b, err := bson.Marshal(bson.D{{Key: "n", Value: int32(n)}, {Key: "inner", Value: bson.D{{Key: "$a.b", Value: "$c"}}}})
	if err != nil {
		panic(err) // the document is a constant
	}
	return b
}

func (s *suite) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *suite) mustSave(ctx context.Context, r saga.Record) saga.Record {
	s.Helper()
	saved, err := s.Store.Save(ctx, name, r)
	s.must(err)
	return saved
}

// is fails unless the record of that id has that version and body; version 0 is no record.
func (s *suite) is(ctx context.Context, id any, version int64, body bson.Raw) saga.Record {
	s.Helper()
	r, found, err := s.Store.Load(ctx, name, id)
	s.must(err)
	if found != (version > 0) {
		s.Fatalf("saga %v is there: %v", id, found)
	}
	if found && (r.Version != version || !equal(r.Body, body) || r.ID != id) {
		s.Errorf("saga %v is %v at version %d with %s, want version %d with %s", id, r.ID, r.Version, r.Body, version, body)
	}
	return r
}

// equal compares documents and takes none for an empty one.
func equal(a, b bson.Raw) bool {
	return len(a) <= 5 && len(b) <= 5 || string(a) == string(b)
}

func (s *suite) conflict(err error, version int64) {
	s.Helper()
	var c *saga.ConflictError
	if !errors.Is(err, saga.ErrConflict) || !errors.As(err, &c) {
		s.Fatalf("got %v, want a *saga.ConflictError", err)
	}
	if c.Saga != name || c.Version != version {
		s.Errorf("the conflict is of %s at version %d, want %s at %d", c.Saga, c.Version, name, version)
	}
}
