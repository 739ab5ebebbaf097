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

func claimIsExclusive(s suite) {
	c := s.mustClaim(s.Inbox, newEntry("1"))
	if c.Attempt() != 1 || c.Entry() != newEntry("1") {
		s.Fatalf("got attempt %d of %v, want 1 of %v", c.Attempt(), c.Entry(), newEntry("1"))
	}

	for _, x := range []*inbox.Inbox{s.Inbox, s.Other} {
		_, err := x.Claim(s.ctx(), newEntry("1"), 0)
		s.checkError(err, inbox.ErrInProgress)
		var claimed *inbox.InProgressError
		if !errors.As(err, &claimed) || claimed.Until.IsZero() {
			s.Fatalf("the error is %#v, want a *ClaimedError with the end of the lease", err)
		}
	}

	s.checkExists("1", false)
	s.checkSuccess(s.finishClaim(c))
	// A second mark changes nothing.
	s.checkSuccess(c.Handled(s.ctx()))
	s.checkExists("1", true)
	s.checkSuccess(c.Release(s.ctx()))
	s.checkSuccess(c.Release(s.ctx()))

	_, err := s.Other.Claim(s.ctx(), newEntry("1"), 0)
	s.checkError(err, inbox.ErrDuplicate)
	s.checkFresh([]bool{false}, newEntry("1"))

	other := newEntry("1")
	other.Key.Consumer = "group/b"
	s.checkSuccess(s.finishClaim(s.mustClaim(s.Other, other)))
}

func claimMovesTheWatermark(s suite) {
	c := s.mustClaim(s.Inbox, placedEntry("1", 0, 10))
	s.checkSuccess(s.finishClaim(c))
	s.checkSuccess(s.Expire(s.ctx()))
	s.checkSuccess(s.Lapse(s.ctx()))
	_, err := s.Inbox.Claim(s.ctx(), placedEntry("1", 0, 10), 0)
	s.checkError(err, inbox.ErrDuplicate)
	s.checkFresh([]bool{false, true}, placedEntry("0", 0, 9), placedEntry("2", 0, 11))
}

func claimIsReleasedAndDeferred(s suite) {
	c := s.mustClaim(s.Inbox, newEntry("1"))
	s.checkSuccess(c.Release(s.ctx()))
	c = s.mustClaim(s.Other, newEntry("1"))
	if c.Attempt() != 2 {
		s.Fatalf("attempt %d, want 2", c.Attempt())
	}

	s.checkSuccess(c.Defer(s.ctx(), time.Hour))
	_, err := s.Inbox.Claim(s.ctx(), newEntry("1"), 0)
	s.checkError(err, inbox.ErrInProgress)
	s.checkSuccess(s.Lapse(s.ctx()))
	if c := s.mustClaim(s.Inbox, newEntry("1")); c.Attempt() != 3 {
		s.Fatalf("attempt %d, want 3", c.Attempt())
	}
}

func claimOutsideOfTransactions(s suite) {
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		_, err := s.Inbox.Claim(ctx, newEntry("1"), 0)
		return err
	})
	s.checkError(err, inbox.ErrInTransaction)
	c := s.mustClaim(s.Inbox, newEntry("1"))
	// Without a transaction, the mark takes effect at once.
	s.checkSuccess(c.Handled(s.ctx()))
	s.checkExists("1", true)
}

func claimLapses(s suite) {
	old := s.mustClaim(s.Inbox, newEntry("1"))
	s.checkSuccess(s.Lapse(s.ctx()))
	now := s.mustClaim(s.Other, newEntry("1"))
	if now.Attempt() != 2 {
		s.Fatalf("attempt %d, want 2", now.Attempt())
	}

	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if _, err := s.Inbox.Admit(ctx, []inbox.Entry{newEntry("effect")}); err != nil {
			return err
		}
		return old.Handled(ctx)
	})
	s.checkError(err, inbox.ErrClaimLost)
	if !strings.Contains(err.Error(), newEntry("1").Key.String()) {
		s.Fatalf("the error is %v, want it to name the message", err)
	}

	s.checkExists("effect", false)
	s.checkExists("1", false)

	// The claim belongs to another holder now, so Release must not end it.
	s.checkSuccess(old.Release(s.ctx()))
	_, err = s.Inbox.Claim(s.ctx(), newEntry("1"), 0)
	s.checkError(err, inbox.ErrInProgress)

	s.checkSuccess(s.finishClaim(now))
	s.checkExists("1", true)
	s.checkError(s.finishClaim(old), inbox.ErrClaimLost)
}

func claimHandledRollsBack(s suite) {
	c := s.mustClaim(s.Inbox, placedEntry("1", 0, 10))
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if err := c.Handled(ctx); err != nil {
			return err
		}
		return errHandler
	})
	s.checkError(err, errHandler)
	s.checkExists("1", false)

	_, err = s.Other.Claim(s.ctx(), placedEntry("1", 0, 10), 0)
	s.checkError(err, inbox.ErrInProgress)
	s.checkSuccess(s.finishClaim(c))
	s.checkExists("1", true)
}

// claimAndAdmit mixes the modes, as a deployment does while it changes from one to the other.
func claimAndAdmit(s suite) {
	c := s.mustClaim(s.Inbox, newEntry("1"))
	_, err := s.admitInTransaction(s.Other, newEntry("2"), newEntry("1"))
	s.checkError(err, inbox.ErrInProgress)
	s.checkExists("2", false)
	s.checkSuccess(s.Lapse(s.ctx()))
	s.checkFresh([]bool{true, true}, newEntry("2"), newEntry("1"))
	s.checkError(s.finishClaim(c), inbox.ErrClaimLost)
	_, err = s.Other.Claim(s.ctx(), newEntry("1"), 0)
	s.checkError(err, inbox.ErrDuplicate)
}

func claimHoldEndsWhenLost(s suite) {
	c, err := s.Inbox.Claim(s.ctx(), newEntry("1"), inbox.MinLease)
	s.checkSuccess(err)
	err = c.Hold(s.ctx(), func(ctx context.Context) error {
		// Another holder claims the message when its lease has expired. A renewal may be too late
		// to prevent that.
		for ctx.Err() == nil {
			ctx := context.WithoutCancel(ctx)
			s.checkSuccess(s.Lapse(ctx))
			if _, err := s.Other.Claim(ctx, newEntry("1"), time.Minute); !errors.Is(err, inbox.ErrInProgress) {
				s.checkSuccess(err)
				break
			}
		}

		<-ctx.Done()
		s.checkError(context.Cause(ctx), inbox.ErrClaimLost)
		return ctx.Err()
	})
	s.checkError(err, inbox.ErrClaimLost)
	c = s.mustClaim(s.Inbox, newEntry("2"))
	s.checkError(c.Hold(s.ctx(), func(context.Context) error { return errHandler }), errHandler)
	s.checkSuccess(c.Hold(s.ctx(), func(context.Context) error { return nil }))
}

func claimingOnce(s suite) {
	begun := make(chan struct{})
	asked := make(chan struct{})
	done := make(chan error, 1)
	begin := sync.OnceFunc(func() { close(begun) })
	go func() {
		done <- s.Inbox.Once(s.ctx(), newEntry("1"), func(ctx context.Context) error {
			begin()
			<-asked
			return s.Inbox.Once(ctx, newEntry("1"), func(context.Context) error { return nil }, inbox.OnceConfig{})
		}, inbox.OnceConfig{Claim: true})
	}()

	var err error
	select {
	case err = <-done:
		s.Fatalf("the handler did not begin: %v", err)
	case <-begun:
		_, err = s.Other.Claim(s.ctx(), newEntry("1"), 0)
		close(asked)
	}

	s.checkError(err, inbox.ErrInProgress)
	s.checkSuccess(<-done)
	s.checkExists("1", true)

	_, err = s.countOnce(s.Other, newEntry("1"), inbox.OnceConfig{Claim: true})
	s.checkError(err, inbox.ErrDuplicate)

	held := s.mustClaim(s.Inbox, newEntry("2"))
	_, err = s.countOnce(s.Other, newEntry("2"), inbox.OnceConfig{Claim: true})
	s.checkError(err, inbox.ErrInProgress)
	s.checkSuccess(s.finishClaim(held))
	_, err = s.countOnce(s.Other, newEntry("2"), inbox.OnceConfig{Claim: true})
	s.checkError(err, inbox.ErrDuplicate)
}

func raceOfClaims(s suite) {
	const callers = 16
	var won atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			_, err := []*inbox.Inbox{s.Inbox, s.Other}[i%2].Claim(s.ctx(), newEntry("1"), time.Minute)
			switch {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, inbox.ErrInProgress):
				s.Errorf("caller %d: %v", i, err)
			}
		})
	}

	wg.Wait()
	if won.Load() != 1 {
		s.Fatalf("%d callers hold the claim, want 1", won.Load())
	}
}
