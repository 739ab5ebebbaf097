package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var errHandler = errors.New("the handler fails")

func onceRunsOnce(s suite) {
	runs, err := s.once(s.Inbox, "1")
	s.ok(err)
	if runs != 1 {
		s.Fatalf("the handler ran %d times", runs)
	}
	for _, x := range []Inbox{s.Inbox, s.Other} {
		runs, err := s.once(x, "1")
		s.want(err, inbox.ErrDuplicate)
		var dup *inbox.DuplicateError
		if !errors.As(err, &dup) || len(dup.Keys) != 1 || dup.Keys[0] != entry("1").Key {
			s.Fatalf("the error is %#v, want a *DuplicateError with the key", err)
		}
		if runs != 0 {
			s.Fatal("the handler ran for a duplicate")
		}
	}
	s.exists("1", true)
}

func onceFailureLeavesNothing(s suite) {
	for _, mode := range []inbox.Mode{inbox.Optimistic, inbox.Eager} {
		id := mode.String()
		err := s.Inbox.Once(s.ctx(), consumerA, id, func(ctx context.Context) error {
			if mode == inbox.Optimistic {
				if _, err := s.Inbox.Admit(ctx, []inbox.Entry{entry("effect of " + id)}); err != nil {
					return err
				}
			}
			return errHandler
		}, inbox.Using(mode))
		s.want(err, errHandler)
		s.exists(id, false)
		s.exists("effect of "+id, false)
		runs, err := s.once(s.Other, id, inbox.Using(mode))
		s.ok(err)
		if runs != 1 {
			s.Fatalf("%s: a failed message ran %d times more, want 1", mode, runs)
		}
	}
}

func onceWithinOnce(s suite) {
	var inner int
	err := s.Inbox.Once(s.ctx(), consumerA, "1", func(ctx context.Context) error {
		return s.Inbox.Once(ctx, consumerA, "1", func(ctx context.Context) error {
			fresh, err := s.Inbox.Admit(ctx, []inbox.Entry{entry("1")})
			if err == nil && !fresh[0] {
				err = errors.New("the message that is being handled is not fresh")
			}
			inner++
			return err
		})
	})
	s.ok(err)
	if inner != 1 {
		s.Fatalf("the inner handler ran %d times", inner)
	}
	_, err = s.once(s.Inbox, "1")
	s.want(err, inbox.ErrDuplicate)
}

func onceInTheCallersTransaction(s suite) {
	once := func(ctx context.Context) error {
		return s.Inbox.Once(ctx, consumerA, "1", func(context.Context) error { return nil })
	}
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if err := once(ctx); err != nil {
			return err
		}
		return errHandler
	})
	s.want(err, errHandler)
	s.exists("1", false)
	s.ok(s.Transaction(s.ctx(), once))
	// A duplicate is told, and the transaction around it may commit what else it did.
	s.ok(s.Transaction(s.ctx(), func(ctx context.Context) error {
		if err := once(ctx); !errors.Is(err, inbox.ErrDuplicate) {
			return fmt.Errorf("the error is %w, want a duplicate", err)
		}
		_, err := s.Inbox.Admit(ctx, []inbox.Entry{entry("2")})
		return err
	}))
	s.exists("2", true)
}

func noneRunsAlways(s suite) {
	for range 2 {
		runs, err := s.once(s.Inbox, "1", inbox.Using(inbox.None))
		s.ok(err)
		if runs != 1 {
			s.Fatalf("the handler ran %d times", runs)
		}
	}
	s.exists("1", false)
}

func admitAnswersEachEntry(s suite) {
	s.fresh(nil)
	s.fresh([]bool{true, true, false}, entry("1"), entry("2"), entry("1"))
	s.fresh([]bool{false, true, false, false}, entry("2"), entry("3"), entry("1"), entry("3"))
}

func admitNeedsATransaction(s suite) {
	_, err := s.Inbox.Admit(s.ctx(), []inbox.Entry{entry("1")})
	s.want(err, outbox.ErrNoTransaction)
	s.exists("1", false)
}

func admitRollsBack(s suite) {
	list := []inbox.Entry{placed("1", 0, 10), placed("2", 1, 11)}
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if _, err := s.Inbox.Admit(ctx, list); err != nil {
			return err
		}
		return errHandler
	})
	s.want(err, errHandler)
	s.exists("1", false)
	s.fresh([]bool{true, true}, list...)
}

func invalidEntries(s suite) {
	for name, e := range map[string]inbox.Entry{
		"no consumer":  {Key: inbox.Key{ID: "1"}},
		"no id":        {Key: inbox.Key{Consumer: consumerA}},
		"lane too far": placed("1", inbox.Lanes, 0),
		"offset":       placed("1", 0, -1),
	} {
		if _, err := s.admit(s.Inbox, e); !errors.Is(err, inbox.ErrInvalid) {
			s.Errorf("%s: Admit answers %v", name, err)
		}
		if err := s.Inbox.Pass(s.ctx(), []inbox.Entry{e}); !errors.Is(err, inbox.ErrInvalid) {
			s.Errorf("%s: Pass answers %v", name, err)
		}
		if _, err := s.Inbox.Claim(s.ctx(), e, 0); !errors.Is(err, inbox.ErrInvalid) {
			s.Errorf("%s: Claim answers %v", name, err)
		}
	}
	long := placed(strings.Repeat("x", 2000), 0, 1)
	if _, err := s.admit(s.Inbox, long); !errors.Is(err, inbox.ErrInvalid) || len(err.Error()) > 1000 {
		s.Errorf("a long id: Admit answers %v", err)
	}
	s.ok(s.Inbox.Pass(s.ctx(), []inbox.Entry{long})) // a watermark does not depend on it
}

func consumersAndNamespacesAreApart(s suite) {
	b := inbox.Entry{Key: inbox.Key{Consumer: "group/b", ID: "1"}}
	ns := inbox.Entry{Key: inbox.Key{Consumer: consumerA, Namespace: "shop.outbox", ID: "1"}}
	s.fresh([]bool{true, true, true}, entry("1"), b, ns)
	s.fresh([]bool{false, false, false}, ns, b, entry("1"))
	runs, err := s.once(s.Inbox, "2")
	s.ok(err)
	more, err := s.once(s.Inbox, "2", inbox.InNamespace("shop.outbox"))
	s.ok(err)
	if runs+more != 2 {
		s.Fatal("the same id of another namespace was taken for a duplicate")
	}
}

func watermarkOutlivesMarkers(s suite) {
	s.fresh([]bool{true, true, true}, placed("1", 0, 10), bare(0, 12), placed("2", 0, 13))
	s.fresh([]bool{true}, entry("3"))
	s.ok(s.Expire(s.ctx()))
	s.exists("1", false)
	s.fresh([]bool{false, false, false, false}, placed("1", 0, 10), bare(0, 12), placed("2", 0, 13), placed("hole", 0, 11))
	s.fresh([]bool{true}, entry("3")) // from nowhere: its marker was all there was
	_, err := s.once(s.Inbox, "1", inbox.At(placed("1", 0, 10).Place))
	s.want(err, inbox.ErrDuplicate)
	_, err = s.Inbox.Claim(s.ctx(), placed("2", 0, 13), 0)
	s.want(err, inbox.ErrDuplicate)
	s.fresh([]bool{true}, placed("2", 0, 14)) // sent again by its producer, after the retention
}

func watermarkMovesPastDuplicates(s suite) {
	s.fresh([]bool{true}, placed("1", 0, 10))
	s.fresh([]bool{false}, placed("1", 0, 20))
	s.ok(s.Expire(s.ctx()))
	s.fresh([]bool{false, true}, placed("1", 0, 20), placed("2", 0, 21))
}

func lanesAreApart(s suite) {
	s.fresh([]bool{true}, placed("1", 0, 100))
	other := placed("2", 0, 50)
	other.Place.Partition = 4
	third := placed("3", 0, 50)
	third.Place.Topic = "payments"
	fourth := placed("4", 0, 50)
	fourth.Key.Consumer = "group/b"
	s.fresh([]bool{true, false, true, true, true}, placed("5", 1, 50), placed("6", 0, 50), other, third, fourth)
}

func passMovesWithoutMarking(s suite) {
	s.ok(s.Inbox.Pass(s.ctx(), []inbox.Entry{placed("1", 0, 10), placed("2", 1, 11), entry("3")}))
	s.exists("1", false)
	s.fresh([]bool{false, false, true}, placed("1", 0, 10), placed("2", 1, 11), entry("3"))
	retry := placed("1", 0, 0)
	retry.Place.Topic = "orders.retry"
	s.fresh([]bool{true}, retry)
	err := s.Transaction(s.ctx(), func(ctx context.Context) error {
		if err := s.Inbox.Pass(ctx, []inbox.Entry{placed("4", 2, 12)}); err != nil {
			return err
		}
		return errHandler
	})
	s.want(err, errHandler)
	s.fresh([]bool{true}, placed("4", 2, 12))
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
			switch _, err := s.once(x, "1"); {
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
		s.Fatalf("%d calls took effect and %d were duplicates", done.Load(), duplicates.Load())
	}
}

// raceOfAdmit lets batches that overlap run at once. Their order within a transaction differs, so they conflict in all
// ways there are; in the end each identity was fresh in exactly one that committed.
func raceOfAdmit(s suite) {
	const callers, ids = 8, 6
	var committed [ids]atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			var list []inbox.Entry
			for j := range ids {
				list = append(list, entry(fmt.Sprint((i+j)%ids)))
			}
			fresh, err := s.admit([]Inbox{s.Inbox, s.Other}[i%2], list...)
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
			s.Errorf("identity %d was handled %d times", id, n)
		}
	}
}
