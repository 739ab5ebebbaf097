package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// errHandler is the error of a handler that fails.
var errHandler = errors.New("the handler fails")

func onceRunsOnce(s suite) {
	runs, err := s.countOnce(s.Inbox, newEntry("1"), inbox.OnceConfig{})
	s.checkSuccess(err)
	if runs != 1 {
		s.Fatalf("the handler ran %d times, want 1", runs)
	}

	for _, x := range []*inbox.Inbox{s.Inbox, s.Other} {
		runs, err := s.countOnce(x, newEntry("1"), inbox.OnceConfig{})
		s.checkError(err, inbox.ErrDuplicate)
		var dup *inbox.DuplicateError
		if !errors.As(err, &dup) || dup.Key != newEntry("1").Key {
			s.Fatalf("the error is %#v, want a *DuplicateError with the key", err)
		}
		if runs != 0 {
			s.Fatal("the handler ran for a duplicate")
		}
	}

	s.checkExists("1", true)
}

func onceFailureLeavesNothing(s suite) {
	for _, claim := range []bool{false, true} {
		c := inbox.OnceConfig{Claim: claim}
		id := fmt.Sprintf("claim %t", claim)
		err := s.Inbox.Once(s.ctx(), newEntry(id), func(ctx context.Context) error {
			if !claim {
				if _, err := s.Inbox.Admit(ctx, []inbox.Entry{newEntry("effect of " + id)}); err != nil {
					return err
				}
			}

			return errHandler
		}, c)
		s.checkError(err, errHandler)
		s.checkExists(id, false)
		s.checkExists("effect of "+id, false)
		runs, err := s.countOnce(s.Other, newEntry(id), c)
		s.checkSuccess(err)
		if runs != 1 {
			s.Fatalf("%s: the handler ran %d times after a failure, want 1", id, runs)
		}
	}
}

func onceWithinOnce(s suite) {
	var inner int
	err := s.Inbox.Once(s.ctx(), newEntry("1"), func(ctx context.Context) error {
		return s.Inbox.Once(ctx, newEntry("1"), func(ctx context.Context) error {
			fresh, err := s.Inbox.Admit(ctx, []inbox.Entry{newEntry("1")})
			if err == nil && !fresh[0] {
				err = errors.New("the message that is being handled is not fresh")
			}

			inner++
			return err
		}, inbox.OnceConfig{})
	}, inbox.OnceConfig{})
	s.checkSuccess(err)
	if inner != 1 {
		s.Fatalf("the inner handler ran %d times, want 1", inner)
	}

	_, err = s.countOnce(s.Inbox, newEntry("1"), inbox.OnceConfig{})
	s.checkError(err, inbox.ErrDuplicate)
}

func onceInTheCallersTransaction(s suite) {
	once := func(ctx context.Context) error {
		return s.Inbox.Once(ctx, newEntry("1"), func(context.Context) error { return nil }, inbox.OnceConfig{})
	}
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if err := once(ctx); err != nil {
			return err
		}
		return errHandler
	})
	s.checkError(err, errHandler)

	s.checkExists("1", false)
	s.checkSuccess(s.Transaction(s.ctx(), once))

	// A duplicate is reported, but the transaction may commit its other writes.
	s.checkSuccess(s.Transaction(s.ctx(), func(ctx context.Context) error {
		if err := once(ctx); !errors.Is(err, inbox.ErrDuplicate) {
			return fmt.Errorf("the error is %w, want a duplicate", err)
		}

		_, err := s.Inbox.Admit(ctx, []inbox.Entry{newEntry("2")})
		return err
	}))

	s.checkExists("2", true)
}

func admitAnswersEachEntry(s suite) {
	s.checkFresh(nil)
	s.checkFresh([]bool{true, true, false}, newEntry("1"), newEntry("2"), newEntry("1"))
	s.checkFresh([]bool{false, true, false, false}, newEntry("2"), newEntry("3"), newEntry("1"), newEntry("3"))
}

func admitNeedsATransaction(s suite) {
	_, err := s.Inbox.Admit(s.ctx(), []inbox.Entry{newEntry("1")})
	s.checkError(err, outbox.ErrNoTransaction)
	s.checkExists("1", false)
}

func admitRollsBack(s suite) {
	list := []inbox.Entry{placedEntry("1", 0, 10), placedEntry("2", 1, 11)}
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if _, err := s.Inbox.Admit(ctx, list); err != nil {
			return err
		}
		return errHandler
	})
	s.checkError(err, errHandler)
	s.checkExists("1", false)
	s.checkFresh([]bool{true, true}, list...)
}

func invalidEntries(s suite) {
	for name, e := range map[string]inbox.Entry{
		"no consumer":  {Key: inbox.Key{ID: "1"}},
		"no id":        {Key: inbox.Key{Consumer: consumerA}},
		"lane too far": placedEntry("1", inbox.Lanes, 0),
		"offset":       placedEntry("1", 0, -1),
	} {
		if _, err := s.admitInTransaction(s.Inbox, e); !errors.Is(err, inbox.ErrInvalid) {
			s.Errorf("%s: Admit returned %v", name, err)
		}

		if err := s.Inbox.Pass(s.ctx(), []inbox.Entry{e}); !errors.Is(err, inbox.ErrInvalid) {
			s.Errorf("%s: Pass returned %v", name, err)
		}

		if _, err := s.Inbox.Claim(s.ctx(), e, 0); !errors.Is(err, inbox.ErrInvalid) {
			s.Errorf("%s: Claim returned %v", name, err)
		}
	}

	long := placedEntry(strings.Repeat("x", 2000), 0, 1)
	if _, err := s.admitInTransaction(s.Inbox, long); !errors.Is(err, inbox.ErrInvalid) || len(err.Error()) > 1000 {
		s.Errorf("a long id: Admit returned %v", err)
	}

	// A watermark does not depend on the id.
	s.checkSuccess(s.Inbox.Pass(s.ctx(), []inbox.Entry{long}))
}

func consumersAndNamespacesAreApart(s suite) {
	b := inbox.Entry{Key: inbox.Key{Consumer: "group/b", ID: "1"}}
	ns := inbox.Entry{Key: inbox.Key{Consumer: consumerA, Namespace: "shop.outbox", ID: "1"}}
	s.checkFresh([]bool{true, true, true}, newEntry("1"), b, ns)
	s.checkFresh([]bool{false, false, false}, ns, b, newEntry("1"))
	runs, err := s.countOnce(s.Inbox, newEntry("2"), inbox.OnceConfig{})
	s.checkSuccess(err)
	ns.Key.ID = "2"
	more, err := s.countOnce(s.Inbox, ns, inbox.OnceConfig{})
	s.checkSuccess(err)
	if runs+more != 2 {
		s.Fatal("the same id in another namespace was treated as a duplicate")
	}
}

func watermarkOutlivesMarkers(s suite) {
	s.checkFresh([]bool{true, true, true}, placedEntry("1", 0, 10), entryWithoutID(0, 12), placedEntry("2", 0, 13))
	s.checkFresh([]bool{true}, newEntry("3"))
	s.checkSuccess(s.Expire(s.ctx()))
	s.checkExists("1", false)

	// The watermark still rejects the records, including offsets without a record.
	s.checkFresh([]bool{false, false, false, false},
		placedEntry("1", 0, 10), entryWithoutID(0, 12), placedEntry("2", 0, 13), placedEntry("hole", 0, 11))

	// A message without a place had only its marker.
	s.checkFresh([]bool{true}, newEntry("3"))

	_, err := s.countOnce(s.Inbox, placedEntry("1", 0, 10), inbox.OnceConfig{})
	s.checkError(err, inbox.ErrDuplicate)
	_, err = s.Inbox.Claim(s.ctx(), placedEntry("2", 0, 13), 0)
	s.checkError(err, inbox.ErrDuplicate)

	// The producer has sent the message again after the retention.
	s.checkFresh([]bool{true}, placedEntry("2", 0, 14))
}

func watermarkMovesPastDuplicates(s suite) {
	s.checkFresh([]bool{true}, placedEntry("1", 0, 10))
	s.checkFresh([]bool{false}, placedEntry("1", 0, 20))
	s.checkSuccess(s.Expire(s.ctx()))
	s.checkFresh([]bool{false, true}, placedEntry("1", 0, 20), placedEntry("2", 0, 21))
}

func lanesAreApart(s suite) {
	s.checkFresh([]bool{true}, placedEntry("1", 0, 100))
	other := placedEntry("2", 0, 50)
	other.Place.Partition = 4
	third := placedEntry("3", 0, 50)
	third.Place.Topic = "payments"
	fourth := placedEntry("4", 0, 50)
	fourth.Key.Consumer = "group/b"

	s.checkFresh([]bool{true, false, true, true, true},
		placedEntry("5", 1, 50), placedEntry("6", 0, 50), other, third, fourth)
}

func passMovesWithoutMarking(s suite) {
	s.checkSuccess(s.Inbox.Pass(s.ctx(), []inbox.Entry{placedEntry("1", 0, 10), placedEntry("2", 1, 11), newEntry("3")}))
	s.checkExists("1", false)
	s.checkFresh([]bool{false, false, true}, placedEntry("1", 0, 10), placedEntry("2", 1, 11), newEntry("3"))
	retry := placedEntry("1", 0, 0)
	retry.Place.Topic = "orders.retry"
	s.checkFresh([]bool{true}, retry)
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if err := s.Inbox.Pass(ctx, []inbox.Entry{placedEntry("4", 2, 12)}); err != nil {
			return err
		}
		return errHandler
	})

	s.checkError(err, errHandler)
	s.checkFresh([]bool{true}, placedEntry("4", 2, 12))
}

func raceOfOnce(s suite) {
	const callers = 24
	var done, duplicates atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			x := s.Inbox
			if i%2 == 1 {
				x = s.Other
			}

			_, err := s.countOnce(x, newEntry("1"), inbox.OnceConfig{})
			switch {
			case err == nil:
				done.Add(1)
			case errors.Is(err, inbox.ErrDuplicate):
				duplicates.Add(1)
			default:
				s.Errorf("caller %d: %v", i, err)
			}
		})
	}

	wg.Wait()
	if done.Load() != 1 || duplicates.Load() != callers-1 {
		s.Fatalf("%d calls took effect and %d were duplicates, want 1 and %d", done.Load(), duplicates.Load(), callers-1)
	}
}

// raceOfAdmit runs overlapping batches at the same time. Their order within a transaction differs,
// so they conflict in different ways. In the end, each identity was fresh in exactly one committed
// transaction.
func raceOfAdmit(s suite) {
	const callers, ids = 8, 6
	var committed [ids]atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			var list []inbox.Entry
			for j := range ids {
				list = append(list, newEntry(fmt.Sprint((i+j)%ids)))
			}

			fresh, err := s.admitInTransaction([]*inbox.Inbox{s.Inbox, s.Other}[i%2], list...)
			if err != nil {
				s.Errorf("caller %d: %v", i, err)
				return
			}

			for j := range ids {
				if fresh[j] {
					committed[(i+j)%ids].Add(1)
				}
			}
		})
	}

	wg.Wait()
	for id := range committed {
		if n := committed[id].Load(); n != 1 {
			s.Errorf("identity %d was handled %d times, want 1", id, n)
		}
	}
}
