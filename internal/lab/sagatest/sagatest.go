// Package sagatest contains the tests that every sagas.Store must pass. They also need an outbox
// whose events belong to the same transactions.
package sagatest

import (
	"context"
	"errors"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Fixture is an empty store for one test.
type Fixture struct {
	// Store is the store under test.
	Store sagas.Store

	// Box is an outbox in the same database.
	Box *outbox.Box

	// Events returns the types of all committed events that were not canceled, including scheduled
	// ones, in the order of their appends.
	Events func(ctx context.Context) ([]string, error)
}

// Run tests the stores that factory creates. The subtests run in parallel. Each of them gets a new
// fixture.
func Run(t *testing.T, factory func(tb testing.TB) Fixture) {
	t.Helper()
	for name, test := range map[string]func(*suite){
		"Save":                    (*suite).saveAndLoad,
		"EveryKindOfID":           (*suite).everyKindOfID,
		"SecondStartIsRejected":   (*suite).secondStart,
		"StaleChangeIsRejected":   (*suite).staleChange,
		"CompletionDeletes":       (*suite).completionDeletes,
		"StaleCompletionRejected": (*suite).staleCompletion,
		"Tombstone":               (*suite).tombstoneStays,
		"Recent":                  (*suite).recentOrder,
		"Prepare":                 (*suite).prepareTypes,
		"RollbackLeavesNothing":   (*suite).rollbackLeavesNothing,
		"JoinedFailure":           (*suite).joinedFailure,
		"ReadsItsOwnWrites":       (*suite).ownWrites,
		"ConcurrentChanges":       (*suite).concurrentChanges,
		"ConcurrentStarts":        (*suite).concurrentStarts,
		"StepIsOneTransaction":    (*suite).stepIsOneTransaction,
		"Timeouts":                (*suite).timeoutEvents,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(&suite{T: t, Fixture: factory(t), ctx: t.Context()})
		})
	}
}

// sagaName is the name of the saga in all tests.
const sagaName = "conformance_sagas"

// suite is one test with its fixture.
type suite struct {
	*testing.T
	Fixture
	ctx context.Context
}

// newBody returns a body that contains n, and names and values that a pipeline would interpret.
func newBody(n int) bson.Raw {
	data, err := bson.Marshal(bson.D{{Key: "n", Value: int32(n)}, {Key: "inner", Value: bson.D{{Key: "$a.b", Value: "$c"}}}})
	if err != nil {
		// The encoding cannot fail: the document is a constant.
		panic(err)
	}
	return data
}

func (s *suite) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *suite) mustSave(ctx context.Context, record sagas.Record) sagas.Record {
	s.Helper()
	saved, err := s.Store.Save(ctx, sagaName, record)
	s.must(err)
	return saved
}

// checkRecord returns the record with this id. The test fails unless it has this version and this
// body. Version 0 means that there must be no record.
func (s *suite) checkRecord(ctx context.Context, id any, version int64, body bson.Raw) sagas.Record {
	s.Helper()
	record, found, err := s.Store.Load(ctx, sagaName, id)
	s.must(err)
	if found != (version > 0) {
		s.Fatalf("saga %v exists: %v, want %v", id, found, version > 0)
	}

	if found && (record.Version != version || !sameDocument(record.Body, body) || record.ID != id) {
		s.Errorf("saga %v: got id %v at version %d with %s, want version %d with %s",
			id, record.ID, record.Version, record.Body, version, body)
	}

	return record
}

// sameDocument compares two documents. A missing document is equal to an empty one.
func sameDocument(a, b bson.Raw) bool {
	return len(a) <= 5 && len(b) <= 5 || string(a) == string(b)
}

// checkConflict fails the test unless err is sagas.ErrConflict.
func (s *suite) checkConflict(err error) {
	s.Helper()
	if !errors.Is(err, sagas.ErrConflict) {
		s.Fatalf("got %v, want %v", err, sagas.ErrConflict)
	}
}
