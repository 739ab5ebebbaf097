// Package inboxtest is the contract of an inbox as a test suite: what pkg/inbox promises, an inbox without servers has to
// keep as well, or a test that passes with the one says nothing about the other.
//
// The suite measures no time and depends on none: leases and retentions are ended by hooks of the Setup.
package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// Inbox is what the suite asks of an inbox.
type Inbox interface {
	Once(ctx context.Context, consumer, id string, fn func(ctx context.Context) error, opts ...inbox.OnceOption) error
	Admit(ctx context.Context, list []inbox.Entry) (fresh []bool, err error)
	Pass(ctx context.Context, list []inbox.Entry) error
	Claim(ctx context.Context, e inbox.Entry, lease time.Duration) (inbox.Claim, error)
	Attach(ctx context.Context, consumer, topic string, part int32, l inbox.Log) (inbox.Generation, error)
	Exists(ctx context.Context, k inbox.Key) (bool, error)
}

// Setup is one empty store with inboxes over it.
type Setup struct {
	Inbox   Inbox // with its defaults
	Other   Inbox // the same, of another process
	Halting Inbox // with inbox.WithRecreated(inbox.Halt)

	// Transaction runs fn as one unit of work, again where it conflicts with another, as outbox.Transaction does.
	Transaction func(ctx context.Context, fn func(ctx context.Context) error) error
	// Expire ends the retention of every marker and removes it.
	Expire func(ctx context.Context) error
	// Lapse ends the lease of every claim.
	Lapse func(ctx context.Context) error
}

// suite is a Setup with what the tests say often.
type suite struct {
	*testing.T
	Setup
}

// Run runs the suite. The factory is called for each test, which may run in parallel with others.
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
		{"NoneRunsAlways", noneRunsAlways},
		{"AdmitAnswersEachEntry", admitAnswersEachEntry},
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
		{"EagerOnce", eagerOnce},
		{"RaceOfClaims", raceOfClaims},
		{"N29_GenerationByEndOffset", generationByEnd},
		{"N29_GenerationByLeaderEpoch", generationByEpoch},
		{"N29_GenerationByTopicID", generationByTopicID},
		{"N29_TruncatedTopicGoesOnFromItsEnd", truncatedTopic},
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

func entry(id string) inbox.Entry { return inbox.Entry{Key: inbox.Key{Consumer: consumerA, ID: id}} }

func placed(id string, lane int32, offset int64) inbox.Entry {
	e := entry(id)
	e.Place = inbox.Place{Topic: topic, Partition: 3, Lane: lane, Offset: offset, LeaderEpoch: 5}
	return e
}

// bare is a record without an id.
func bare(lane int32, offset int64) inbox.Entry {
	return placed(inbox.PlaceID(topic, 3, offset), lane, offset)
}

func (s suite) ctx() context.Context { return s.T.Context() }

// want fails the test unless err is target; a nil target is success.
func (s suite) want(err, target error) {
	s.Helper()
	if !errors.Is(err, target) {
		s.Fatalf("the error is %v, want %v", err, target)
	}
}

func (s suite) ok(err error) {
	s.Helper()
	s.want(err, nil)
}

// admit admits in a transaction that commits.
func (s suite) admit(x Inbox, list ...inbox.Entry) (fresh []bool, err error) {
	s.Helper()
	err = s.Transaction(s.ctx(), func(ctx context.Context) (err error) {
		fresh, err = x.Admit(ctx, list)
		return err
	})
	return fresh, err
}

// fresh fails unless admitting gives exactly that.
func (s suite) fresh(want []bool, list ...inbox.Entry) {
	s.Helper()
	got, err := s.admit(s.Inbox, list...)
	s.ok(err)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.Fatalf("fresh is %v, want %v", got, want)
	}
}

func (s suite) exists(id string, want bool) {
	s.Helper()
	got, err := s.Inbox.Exists(s.ctx(), entry(id).Key)
	s.ok(err)
	if got != want {
		s.Fatalf("marker of %s: %t, want %t", id, got, want)
	}
}

// once runs Once with a handler that only counts.
func (s suite) once(x Inbox, id string, opts ...inbox.OnceOption) (runs int, err error) {
	err = x.Once(s.ctx(), consumerA, id, func(context.Context) error {
		runs++
		return nil
	}, opts...)
	return runs, err
}

func (s suite) claim(x Inbox, e inbox.Entry) inbox.Claim {
	s.Helper()
	c, err := x.Claim(s.ctx(), e, time.Minute)
	s.ok(err)
	return c
}

// handled finishes a claim in a transaction that commits.
func (s suite) handled(c inbox.Claim) error {
	return s.Transaction(s.ctx(), func(ctx context.Context) error { return c.Handled(ctx) })
}
