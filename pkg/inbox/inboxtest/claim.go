package inboxtest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/pkg/inbox"
)

func claimIsExclusive(s suite) {
	c := s.claim(s.Inbox, entry("1"))
	if c.Attempt() != 1 || c.Entry() != entry("1") {
		s.Fatalf("attempt %d at %v", c.Attempt(), c.Entry())
	}
	for _, x := range []Inbox{s.Inbox, s.Other} {
		_, err := x.Claim(s.ctx(), entry("1"), 0)
		s.want(err, inbox.ErrClaimed)
		var claimed *inbox.ClaimedError
		if !errors.As(err, &claimed) || claimed.Until.IsZero() {
			s.Fatalf("the error is %#v, want a *ClaimedError with its end", err)
		}
	}
	s.exists("1", false)
	s.ok(s.handled(c))
	s.ok(c.Handled(s.ctx())) // changes nothing
	s.exists("1", true)
	s.ok(c.Release(s.ctx()))
	s.ok(c.Release(s.ctx()))
	_, err := s.Other.Claim(s.ctx(), entry("1"), 0)
	s.want(err, inbox.ErrDuplicate)
	s.fresh([]bool{false}, entry("1"))
	other := entry("1")
	other.Key.Consumer = "group/b"
	s.ok(s.handled(s.claim(s.Other, other)))
}

func claimMovesTheWatermark(s suite) {
	c := s.claim(s.Inbox, placed("1", 0, 10))
	s.ok(s.handled(c))
	s.ok(s.Expire(s.ctx()))
	s.ok(s.Lapse(s.ctx()))
	_, err := s.Inbox.Claim(s.ctx(), placed("1", 0, 10), 0)
	s.want(err, inbox.ErrDuplicate)
	s.fresh([]bool{false, true}, placed("0", 0, 9), placed("2", 0, 11))
}

func claimIsReleasedAndDeferred(s suite) {
	c := s.claim(s.Inbox, entry("1"))
	s.ok(c.Release(s.ctx()))
	c = s.claim(s.Other, entry("1"))
	if c.Attempt() != 2 {
		s.Fatalf("attempt %d, want 2", c.Attempt())
	}
	s.ok(c.Defer(s.ctx(), time.Hour))
	_, err := s.Inbox.Claim(s.ctx(), entry("1"), 0)
	s.want(err, inbox.ErrClaimed)
	s.ok(s.Lapse(s.ctx()))
	if c := s.claim(s.Inbox, entry("1")); c.Attempt() != 3 {
		s.Fatalf("attempt %d, want 3", c.Attempt())
	}
}

func claimOutsideOfTransactions(s suite) {
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		_, err := s.Inbox.Claim(ctx, entry("1"), 0)
		return err
	})
	s.want(err, inbox.ErrInTransaction)
	c := s.claim(s.Inbox, entry("1"))
	s.ok(c.Handled(s.ctx())) // without one: at once
	s.exists("1", true)
}

func claimLapses(s suite) {
	old := s.claim(s.Inbox, entry("1"))
	s.ok(s.Lapse(s.ctx()))
	now := s.claim(s.Other, entry("1"))
	if now.Attempt() != 2 {
		s.Fatalf("attempt %d, want 2", now.Attempt())
	}
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if _, err := s.Inbox.Admit(ctx, []inbox.Entry{entry("effect")}); err != nil {
			return err
		}
		return old.Handled(ctx)
	})
	s.want(err, inbox.ErrClaimLost)
	var lost *inbox.ClaimLostError
	if !errors.As(err, &lost) || lost.Key != entry("1").Key {
		s.Fatalf("the error is %#v, want a *ClaimLostError with the key", err)
	}
	s.exists("effect", false)
	s.exists("1", false)
	s.ok(old.Release(s.ctx())) // of what is not its own any more
	_, err = s.Inbox.Claim(s.ctx(), entry("1"), 0)
	s.want(err, inbox.ErrClaimed)
	s.ok(s.handled(now))
	s.exists("1", true)
	s.want(s.handled(old), inbox.ErrClaimLost)
}

func claimHandledRollsBack(s suite) {
	c := s.claim(s.Inbox, placed("1", 0, 10))
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if err := c.Handled(ctx); err != nil {
			return err
		}
		return errHandler
	})
	s.want(err, errHandler)
	s.exists("1", false)
	_, err = s.Other.Claim(s.ctx(), placed("1", 0, 10), 0)
	s.want(err, inbox.ErrClaimed)
	s.ok(s.handled(c))
	s.exists("1", true)
}

// claimAndAdmit mixes the modes, as a deployment does that changes from one to the other.
func claimAndAdmit(s suite) {
	c := s.claim(s.Inbox, entry("1"))
	_, err := s.admit(s.Other, entry("2"), entry("1"))
	s.want(err, inbox.ErrClaimed)
	s.exists("2", false)
	s.ok(s.Lapse(s.ctx()))
	s.fresh([]bool{true, true}, entry("2"), entry("1"))
	s.want(s.handled(c), inbox.ErrClaimLost)
	_, err = s.Other.Claim(s.ctx(), entry("1"), 0)
	s.want(err, inbox.ErrDuplicate)
}

func claimHoldEndsWhenLost(s suite) {
	c, err := s.Inbox.Claim(s.ctx(), entry("1"), inbox.MinLease)
	s.ok(err)
	err = c.Hold(s.ctx(), func(ctx context.Context) error {
		// Taken by another as soon as its lease is over, which renewals may be late to prevent.
		for ctx.Err() == nil {
			ctx := context.WithoutCancel(ctx)
			s.ok(s.Lapse(ctx))
			if _, err := s.Other.Claim(ctx, entry("1"), time.Minute); !errors.Is(err, inbox.ErrClaimed) {
				s.ok(err)
				break
			}
		}
		<-ctx.Done()
		s.want(context.Cause(ctx), inbox.ErrClaimLost)
		return ctx.Err()
	})
	s.want(err, inbox.ErrClaimLost)
	c = s.claim(s.Inbox, entry("2"))
	s.want(c.Hold(s.ctx(), func(context.Context) error { return errHandler }), errHandler)
	s.ok(c.Hold(s.ctx(), func(context.Context) error { return nil }))
}

func eagerOnce(s suite) {
	begun, asked, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	begin := sync.OnceFunc(func() { close(begun) })
	go func() {
		done <- s.Inbox.Once(s.ctx(), consumerA, "1", func(ctx context.Context) error {
			begin()
			<-asked
			return s.Inbox.Once(ctx, consumerA, "1", func(context.Context) error { return nil })
		}, inbox.Using(inbox.Eager))
	}()
	var err error
	select {
	case err = <-done:
		s.Fatalf("the handler did not begin: %v", err)
	case <-begun:
		_, err = s.Other.Claim(s.ctx(), entry("1"), 0)
		close(asked)
	}
	s.want(err, inbox.ErrClaimed)
	s.ok(<-done)
	s.exists("1", true)
	_, err = s.once(s.Other, "1", inbox.Using(inbox.Eager))
	s.want(err, inbox.ErrDuplicate)
	held := s.claim(s.Inbox, entry("2"))
	_, err = s.once(s.Other, "2", inbox.Using(inbox.Eager))
	s.want(err, inbox.ErrClaimed)
	s.ok(s.handled(held))
	_, err = s.once(s.Other, "2", inbox.Using(inbox.Eager))
	s.want(err, inbox.ErrDuplicate)
}

func raceOfClaims(s suite) {
	const callers = 16
	var won atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			_, err := []Inbox{s.Inbox, s.Other}[i%2].Claim(s.ctx(), entry("1"), time.Minute)
			switch {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, inbox.ErrClaimed):
				s.Errorf("caller %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		s.Fatalf("%d hold the claim", won.Load())
	}
}
