// Package inboxtest contains the contract of an inbox as tests. Inboxes with each inbox.Store must pass
// them, so that a test with one of them is valid for the other.
//
// The tests do not depend on time: hooks of the Setup end leases and retentions.
package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
)

// Setup is an empty store with several inboxes.
type Setup struct {
	Inbox   *inbox.Inbox // with default settings
	Other   *inbox.Inbox // the same, but of another process
	Halting *inbox.Inbox // with HaltOnRecreated

	// Transaction runs fn as one unit of work, and again after a conflict, in the same way as
	// outbox.Box.Transaction.
	Transaction func(ctx context.Context, fn func(ctx context.Context) error) error

	// Expire ends the retention of every marker and removes the markers.
	Expire func(ctx context.Context) error

	// Lapse ends the lease of every claim.
	Lapse func(ctx context.Context) error
}

// suite is one test with its Setup and helper methods.
type suite struct {
	*testing.T
	Setup
}

// Run runs the tests in parallel. factory returns a new Setup for each test.
func Run(t *testing.T, factory func(t *testing.T) Setup) {
	t.Helper()

	for _, test := range []struct {
		name string
		run  func(suite)
	}{
		{"OnceRunsOnce", onceRunsOnce},
		{"OnceFailureLeavesNothing", onceFailureLeavesNothing},
		{"OnceWithinOnce", onceWithinOnce},
		{"OnceInTheCallersTransaction", onceInTheCallersTransaction},
		{"FirstResponseIsReturned", firstResponseIsReturned},
		{"FailureStoresNoResponse", failureStoresNoResponse},
		{"ResponseIsMissing", responseIsMissing},
		{"ResponseRollsBack", responseRollsBack},
		{"RaceOfResponses", raceOfResponses},
		{"ResponseExpires", responseExpires},
		{"AdmitDecidesEachEntry", admitDecidesEachEntry},
		{"AdmitNewRejectsMarkedEntries", admitNewRejectsMarkedEntries},
		{"AdmitNeedsATransaction", admitNeedsATransaction},
		{"AdmitRollsBack", admitRollsBack},
		{"InvalidEntries", invalidEntries},
		{"ConsumersAndNamespacesAreApart", consumersAndNamespacesAreApart},
		{"WatermarkOutlivesMarkers", watermarkOutlivesMarkers},
		{"WatermarkMovesPastDuplicates", watermarkMovesPastDuplicates},
		{"LanesAreApart", lanesAreApart},
		{"PassMovesWithoutMarking", passMovesWithoutMarking},
		{"RaceOfOnce", raceOfOnce},
		{"RaceOfAdmit", raceOfAdmit},
		{"ClaimIsExclusive", claimIsExclusive},
		{"ClaimMovesTheWatermark", claimMovesTheWatermark},
		{"ClaimIsReleasedAndDeferred", claimIsReleasedAndDeferred},
		{"ClaimOutsideOfTransactions", claimOutsideOfTransactions},
		{"ClaimLapsesAndItsHolderCannotFinish", claimLapses},
		{"ClaimHandledRollsBack", claimHandledRollsBack},
		{"ClaimAndAdmit", claimAndAdmit},
		{"ClaimHoldEndsWhenLost", claimHoldEndsWhenLost},
		{"ClaimingOnce", claimingOnce},
		{"RaceOfClaims", raceOfClaims},
		{"N29_GenerationByEndOffset", generationByEnd},
		{"N29_GenerationByLeaderEpoch", generationByEpoch},
		{"N29_GenerationByTopicID", generationByTopicID},
		{"N29_RecordsInPlaceOfLostOnesAreFresh", lostRecords},
		{"N29_ALaggingProcessHidesNoRecords", lostRecordsOfAnother},
		{"N29_ALossHaltsUntilItIsAccepted", lossHalts},
		{"N29_GenerationHalts", generationHalts},
		{"N29_AnotherProcessBeganAGeneration", generationOfAnother},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(suite{t, factory(t)})
		})
	}
}

const (
	consumerA = "group/a"
	topic     = "orders"
)

// newEntry returns an entry without a place.
func newEntry(id string) inbox.Entry {
	return inbox.Entry{Key: inbox.Key{Consumer: consumerA, ID: id}}
}

// placedEntry returns an entry with a place in partition 3.
func placedEntry(id string, lane int32, offset int64) inbox.Entry {
	entry := newEntry(id)
	entry.Place = inbox.Place{Topic: topic, Partition: 3, Lane: lane, Offset: offset, LeaderEpoch: 5}
	return entry
}

// entryWithoutID returns the entry of a record without an id.
func entryWithoutID(lane int32, offset int64) inbox.Entry {
	return placedEntry(inbox.PlaceID(topic, 3, offset), lane, offset)
}

func (s suite) ctx() context.Context { return s.T.Context() }

// checkError fails the test unless err is target. A nil target means success.
func (s suite) checkError(err, target error) {
	s.Helper()
	if !errors.Is(err, target) {
		s.Fatalf("the error is %v, want %v", err, target)
	}
}

// checkSuccess fails the test if err is not nil.
func (s suite) checkSuccess(err error) {
	s.Helper()
	s.checkError(err, nil)
}

// admitInTransaction admits the entries in a transaction that commits.
func (s suite) admitInTransaction(inbox *inbox.Inbox, list ...inbox.Entry) (fresh []bool, err error) {
	s.Helper()
	err = s.Transaction(s.ctx(), func(ctx context.Context) (err error) {
		fresh, err = inbox.Admit(ctx, list)
		return err
	})
	return fresh, err
}

// admitNewInTransaction is admitInTransaction with AdmitNew.
func (s suite) admitNewInTransaction(inbox *inbox.Inbox, list ...inbox.Entry) (fresh []bool, err error) {
	s.Helper()
	err = s.Transaction(s.ctx(), func(ctx context.Context) (err error) {
		fresh, err = inbox.AdmitNew(ctx, list)
		return err
	})
	return fresh, err
}

// checkFresh admits the entries and fails the test unless the result is want.
func (s suite) checkFresh(want []bool, list ...inbox.Entry) {
	s.Helper()
	got, err := s.admitInTransaction(s.Inbox, list...)
	s.checkSuccess(err)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.Fatalf("fresh is %v, want %v", got, want)
	}
}

// checkExists fails the test unless a marker exists.
func (s suite) checkExists(id string) {
	s.Helper()
	if !s.hasMarker(id) {
		s.Fatalf("the marker of %s is missing", id)
	}
}

// checkMissing fails the test if a marker exists.
func (s suite) checkMissing(id string) {
	s.Helper()
	if s.hasMarker(id) {
		s.Fatalf("the marker of %s exists", id)
	}
}

func (s suite) hasMarker(id string) bool {
	s.Helper()
	got, err := s.Inbox.Handled(s.ctx(), newEntry(id).Key)
	s.checkSuccess(err)
	return got
}

// countOnce calls Once with a handler that counts its runs.
func (s suite) countOnce(inbox *inbox.Inbox, entry inbox.Entry, cfg inbox.OnceConfig) (runs int, err error) {
	err = inbox.Once(s.ctx(), entry, func(context.Context) error {
		runs++
		return nil
	}, cfg)
	return runs, err
}

// mustClaim claims the entry for a minute.
func (s suite) mustClaim(inbox *inbox.Inbox, entry inbox.Entry) *inbox.Claim {
	s.Helper()
	claim, err := inbox.Claim(s.ctx(), entry, time.Minute)
	s.checkSuccess(err)
	return claim
}

// finishClaim marks the message as handled in a transaction that commits.
func (s suite) finishClaim(claim *inbox.Claim) error {
	return s.Transaction(s.ctx(), func(ctx context.Context) error { return claim.Handled(ctx) })
}
