package inboxtest

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
)

func claimIsExclusive(suite suite) {
	claim := suite.mustClaim(suite.Inbox, newEntry("1"))
	if claim.Attempt() != 1 || claim.Entry() != newEntry("1") {
		suite.Fatalf("got attempt %d of %v, want 1 of %v", claim.Attempt(), claim.Entry(), newEntry("1"))
	}

	for _, x := range []*inbox.Inbox{suite.Inbox, suite.Other} {
		_, err := x.Claim(suite.ctx(), newEntry("1"), 0)
		suite.checkError(err, inbox.ErrInProgress)
		var claimed *inbox.InProgressError
		if !errors.As(err, &claimed) || claimed.Until.IsZero() {
			suite.Fatalf("the error is %#v, want a *ClaimedError with the end of the lease", err)
		}
	}

	suite.checkMissing("1")
	suite.checkSuccess(suite.finishClaim(claim))
	// A second mark changes nothing.
	suite.checkSuccess(claim.Handled(suite.ctx()))
	suite.checkExists("1")
	suite.checkSuccess(claim.Release(suite.ctx()))
	suite.checkSuccess(claim.Release(suite.ctx()))

	_, err := suite.Other.Claim(suite.ctx(), newEntry("1"), 0)
	suite.checkError(err, inbox.ErrDuplicate)
	suite.checkFresh([]bool{false}, newEntry("1"))

	other := newEntry("1")
	other.Key.Consumer = "group/b"
	suite.checkSuccess(suite.finishClaim(suite.mustClaim(suite.Other, other)))
}

func claimMovesTheWatermark(suite suite) {
	claim := suite.mustClaim(suite.Inbox, placedEntry("1", 0, 10))
	suite.checkSuccess(suite.finishClaim(claim))
	suite.checkSuccess(suite.Expire(suite.ctx()))
	suite.checkSuccess(suite.Lapse(suite.ctx()))
	_, err := suite.Inbox.Claim(suite.ctx(), placedEntry("1", 0, 10), 0)
	suite.checkError(err, inbox.ErrDuplicate)
	suite.checkFresh([]bool{false, true}, placedEntry("0", 0, 9), placedEntry("2", 0, 11))
}

func claimIsReleasedAndDeferred(suite suite) {
	claim := suite.mustClaim(suite.Inbox, newEntry("1"))
	suite.checkSuccess(claim.Release(suite.ctx()))
	claim = suite.mustClaim(suite.Other, newEntry("1"))
	if claim.Attempt() != 2 {
		suite.Fatalf("attempt %d, want 2", claim.Attempt())
	}

	suite.checkSuccess(claim.Defer(suite.ctx(), time.Hour))
	_, err := suite.Inbox.Claim(suite.ctx(), newEntry("1"), 0)
	suite.checkError(err, inbox.ErrInProgress)
	suite.checkSuccess(suite.Lapse(suite.ctx()))
	if claim := suite.mustClaim(suite.Inbox, newEntry("1")); claim.Attempt() != 3 {
		suite.Fatalf("attempt %d, want 3", claim.Attempt())
	}
}

func claimOutsideOfTransactions(suite suite) {
	err := suite.Transaction(suite.ctx(), func(ctx context.Context) error {
		_, err := suite.Inbox.Claim(ctx, newEntry("1"), 0)
		return err
	})
	suite.checkError(err, inbox.ErrInTransaction)
	claim := suite.mustClaim(suite.Inbox, newEntry("1"))
	// Without a transaction, the mark takes effect at once.
	suite.checkSuccess(claim.Handled(suite.ctx()))
	suite.checkExists("1")
}

func claimLapses(suite suite) {
	old := suite.mustClaim(suite.Inbox, newEntry("1"))
	suite.checkSuccess(suite.Lapse(suite.ctx()))
	now := suite.mustClaim(suite.Other, newEntry("1"))
	if now.Attempt() != 2 {
		suite.Fatalf("attempt %d, want 2", now.Attempt())
	}

	err := suite.Transaction(suite.ctx(), func(ctx context.Context) error {
		if _, err := suite.Inbox.Admit(ctx, []inbox.Entry{newEntry("effect")}); err != nil {
			return err
		}
		return old.Handled(ctx)
	})
	suite.checkError(err, inbox.ErrClaimLost)
	if !strings.Contains(err.Error(), newEntry("1").Key.String()) {
		suite.Fatalf("the error is %v, want it to name the message", err)
	}

	suite.checkMissing("effect")
	suite.checkMissing("1")

	// The claim belongs to another holder now, so Release must not end it.
	suite.checkSuccess(old.Release(suite.ctx()))
	_, err = suite.Inbox.Claim(suite.ctx(), newEntry("1"), 0)
	suite.checkError(err, inbox.ErrInProgress)

	suite.checkSuccess(suite.finishClaim(now))
	suite.checkExists("1")
	suite.checkError(suite.finishClaim(old), inbox.ErrClaimLost)
}

func claimHandledRollsBack(suite suite) {
	claim := suite.mustClaim(suite.Inbox, placedEntry("1", 0, 10))
	err := suite.Transaction(suite.ctx(), func(ctx context.Context) error {
		if err := claim.Handled(ctx); err != nil {
			return err
		}
		return errHandler
	})
	suite.checkError(err, errHandler)
	suite.checkMissing("1")

	_, err = suite.Other.Claim(suite.ctx(), placedEntry("1", 0, 10), 0)
	suite.checkError(err, inbox.ErrInProgress)
	suite.checkSuccess(suite.finishClaim(claim))
	suite.checkExists("1")
}

// claimAndAdmit mixes the modes, as a deployment does while it changes from one to the other.
func claimAndAdmit(suite suite) {
	claim := suite.mustClaim(suite.Inbox, newEntry("1"))
	_, err := suite.admitInTransaction(suite.Other, newEntry("2"), newEntry("1"))
	suite.checkError(err, inbox.ErrInProgress)
	suite.checkMissing("2")
	suite.checkSuccess(suite.Lapse(suite.ctx()))
	suite.checkFresh([]bool{true, true}, newEntry("2"), newEntry("1"))
	suite.checkError(suite.finishClaim(claim), inbox.ErrClaimLost)
	_, err = suite.Other.Claim(suite.ctx(), newEntry("1"), 0)
	suite.checkError(err, inbox.ErrDuplicate)
}

func claimHoldEndsWhenLost(suite suite) {
	claim, err := suite.Inbox.Claim(suite.ctx(), newEntry("1"), inbox.MinLease)
	suite.checkSuccess(err)
	err = claim.Hold(suite.ctx(), func(ctx context.Context) error {
		// Another holder claims the message when its lease has expired. A renewal may be too late
		// to prevent that.
		for ctx.Err() == nil {
			ctx := context.WithoutCancel(ctx)
			suite.checkSuccess(suite.Lapse(ctx))
			if _, err := suite.Other.Claim(ctx, newEntry("1"), time.Minute); !errors.Is(err, inbox.ErrInProgress) {
				suite.checkSuccess(err)
				break
			}
		}

		<-ctx.Done()
		suite.checkError(context.Cause(ctx), inbox.ErrClaimLost)
		return ctx.Err()
	})
	suite.checkError(err, inbox.ErrClaimLost)
	claim = suite.mustClaim(suite.Inbox, newEntry("2"))
	suite.checkError(claim.Hold(suite.ctx(), func(context.Context) error { return errHandler }), errHandler)
	suite.checkSuccess(claim.Hold(suite.ctx(), func(context.Context) error { return nil }))
}

func claimingOnce(suite suite) {
	begun := make(chan struct{})
	asked := make(chan struct{})
	done := make(chan error, 1)
	begin := sync.OnceFunc(func() { close(begun) })
	go func() {
		done <- suite.Inbox.Once(suite.ctx(), newEntry("1"), func(ctx context.Context) error {
			begin()
			<-asked
			return suite.Inbox.Once(ctx, newEntry("1"), func(context.Context) error { return nil }, inbox.OnceConfig{})
		}, inbox.OnceConfig{Claim: true})
	}()

	var err error
	select {
	case err = <-done:
		suite.Fatalf("the handler did not begin: %v", err)
	case <-begun:
		_, err = suite.Other.Claim(suite.ctx(), newEntry("1"), 0)
		close(asked)
	}

	suite.checkError(err, inbox.ErrInProgress)
	suite.checkSuccess(<-done)
	suite.checkExists("1")

	_, err = suite.countOnce(suite.Other, newEntry("1"), inbox.OnceConfig{Claim: true})
	suite.checkError(err, inbox.ErrDuplicate)

	held := suite.mustClaim(suite.Inbox, newEntry("2"))
	_, err = suite.countOnce(suite.Other, newEntry("2"), inbox.OnceConfig{Claim: true})
	suite.checkError(err, inbox.ErrInProgress)
	suite.checkSuccess(suite.finishClaim(held))
	_, err = suite.countOnce(suite.Other, newEntry("2"), inbox.OnceConfig{Claim: true})
	suite.checkError(err, inbox.ErrDuplicate)
}

func raceOfClaims(suite suite) {
	const callers = 16
	var won atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			_, err := []*inbox.Inbox{suite.Inbox, suite.Other}[i%2].Claim(suite.ctx(), newEntry("1"), time.Minute)
			switch {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, inbox.ErrInProgress):
				suite.Errorf("caller %d: %v", i, err)
			}
		})
	}

	wg.Wait()
	if won.Load() != 1 {
		suite.Fatalf("%d callers hold the claim, want 1", won.Load())
	}
}
