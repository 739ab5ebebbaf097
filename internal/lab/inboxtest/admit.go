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

func onceRunsOnce(suite suite) {
	runs, err := suite.countOnce(suite.Inbox, newEntry("1"), inbox.OnceConfig{})
	suite.checkSuccess(err)
	if runs != 1 {
		suite.Fatalf("the handler ran %d times, want 1", runs)
	}

	for _, x := range []*inbox.Inbox{suite.Inbox, suite.Other} {
		runs, err := suite.countOnce(x, newEntry("1"), inbox.OnceConfig{})
		suite.checkError(err, inbox.ErrDuplicate)
		var dup *inbox.DuplicateError
		if !errors.As(err, &dup) || dup.Key != newEntry("1").Key {
			suite.Fatalf("the error is %#v, want a *DuplicateError with the key", err)
		}
		if runs != 0 {
			suite.Fatal("the handler ran for a duplicate")
		}
	}

	suite.checkExists("1")
}

func onceFailureLeavesNothing(suite suite) {
	for _, claim := range []bool{false, true} {
		cfg := inbox.OnceConfig{Claim: claim}
		id := fmt.Sprintf("claim %t", claim)
		err := suite.Inbox.Once(suite.ctx(), newEntry(id), func(ctx context.Context) error {
			if !claim {
				if _, err := suite.Inbox.Admit(ctx, []inbox.Entry{newEntry("effect of " + id)}); err != nil {
					return err
				}
			}

			return errHandler
		}, cfg)
		suite.checkError(err, errHandler)
		suite.checkMissing(id)
		suite.checkMissing("effect of " + id)
		runs, err := suite.countOnce(suite.Other, newEntry(id), cfg)
		suite.checkSuccess(err)
		if runs != 1 {
			suite.Fatalf("%s: the handler ran %d times after a failure, want 1", id, runs)
		}
	}
}

func onceWithinOnce(suite suite) {
	var inner int
	err := suite.Inbox.Once(suite.ctx(), newEntry("1"), func(ctx context.Context) error {
		return suite.Inbox.Once(ctx, newEntry("1"), func(ctx context.Context) error {
			fresh, err := suite.Inbox.Admit(ctx, []inbox.Entry{newEntry("1")})
			if err == nil && !fresh[0] {
				err = errors.New("the message that is being handled is not fresh")
			}

			inner++
			return err
		}, inbox.OnceConfig{})
	}, inbox.OnceConfig{})
	suite.checkSuccess(err)
	if inner != 1 {
		suite.Fatalf("the inner handler ran %d times, want 1", inner)
	}

	_, err = suite.countOnce(suite.Inbox, newEntry("1"), inbox.OnceConfig{})
	suite.checkError(err, inbox.ErrDuplicate)
}

func onceInTheCallersTransaction(suite suite) {
	once := func(ctx context.Context) error {
		return suite.Inbox.Once(ctx, newEntry("1"), func(context.Context) error { return nil }, inbox.OnceConfig{})
	}
	err := suite.Transaction(suite.ctx(), func(ctx context.Context) error {
		if err := once(ctx); err != nil {
			return err
		}
		return errHandler
	})
	suite.checkError(err, errHandler)

	suite.checkMissing("1")
	suite.checkSuccess(suite.Transaction(suite.ctx(), once))

	// A duplicate is reported, but the transaction may commit its other writes.
	suite.checkSuccess(suite.Transaction(suite.ctx(), func(ctx context.Context) error {
		if err := once(ctx); !errors.Is(err, inbox.ErrDuplicate) {
			return fmt.Errorf("the error is %w, want a duplicate", err)
		}

		_, err := suite.Inbox.Admit(ctx, []inbox.Entry{newEntry("2")})
		return err
	}))

	suite.checkExists("2")
}

func admitDecidesEachEntry(suite suite) {
	suite.checkFresh(nil)
	suite.checkFresh([]bool{true, true, false}, newEntry("1"), newEntry("2"), newEntry("1"))
	suite.checkFresh([]bool{false, true, false, false}, newEntry("2"), newEntry("3"), newEntry("1"), newEntry("3"))
}

func admitNewRejectsMarkedEntries(suite suite) {
	fresh, err := suite.admitNewInTransaction(suite.Inbox, placedEntry("1", 0, 10), placedEntry("2", 0, 11), placedEntry("1", 0, 12))
	suite.checkSuccess(err)
	if fmt.Sprint(fresh) != "[true true false]" {
		suite.Fatalf("fresh is %v, want only the first of each identity", fresh)
	}

	// The marker of another process counts, and nothing of the transaction is stored.
	for _, x := range []*inbox.Inbox{suite.Inbox, suite.Other} {
		_, err := suite.admitNewInTransaction(x, placedEntry("3", 0, 13), placedEntry("2", 0, 14))
		suite.checkError(err, inbox.ErrMarked)
		suite.checkMissing("3")
	}
	suite.mustClaim(suite.Other, newEntry("claimed"))
	_, err = suite.admitNewInTransaction(suite.Inbox, placedEntry("claimed", 1, 20))
	suite.checkError(err, inbox.ErrMarked)
	suite.checkFresh([]bool{true, false}, placedEntry("3", 0, 13), placedEntry("2", 0, 14))

	// The watermark identifies a record that was handled, without its marker.
	fresh, err = suite.admitNewInTransaction(suite.Other, placedEntry("1", 0, 10), placedEntry("4", 0, 15))
	suite.checkSuccess(err)
	if fmt.Sprint(fresh) != "[false true]" {
		suite.Fatalf("fresh is %v, want only the record above the watermark", fresh)
	}

	_, err = suite.admitNewInTransaction(suite.Inbox, newEntry("5"))
	suite.checkError(err, inbox.ErrInvalid)
}

func admitNeedsATransaction(suite suite) {
	_, err := suite.Inbox.Admit(suite.ctx(), []inbox.Entry{newEntry("1")})
	suite.checkError(err, outbox.ErrNoTransaction)
	suite.checkMissing("1")
}

func admitRollsBack(suite suite) {
	list := []inbox.Entry{placedEntry("1", 0, 10), placedEntry("2", 1, 11)}
	err := suite.Transaction(suite.ctx(), func(ctx context.Context) error {
		if _, err := suite.Inbox.Admit(ctx, list); err != nil {
			return err
		}
		return errHandler
	})
	suite.checkError(err, errHandler)
	suite.checkMissing("1")
	suite.checkFresh([]bool{true, true}, list...)
}

func invalidEntries(suite suite) {
	for name, e := range map[string]inbox.Entry{
		"no consumer":  {Key: inbox.Key{ID: "1"}},
		"no id":        {Key: inbox.Key{Consumer: consumerA}},
		"lane too far": placedEntry("1", inbox.Lanes, 0),
		"offset":       placedEntry("1", 0, -1),
	} {
		if _, err := suite.admitInTransaction(suite.Inbox, e); !errors.Is(err, inbox.ErrInvalid) {
			suite.Errorf("%s: Admit returned %v", name, err)
		}

		if err := suite.Inbox.Pass(suite.ctx(), []inbox.Entry{e}); !errors.Is(err, inbox.ErrInvalid) {
			suite.Errorf("%s: Pass returned %v", name, err)
		}

		if _, err := suite.Inbox.Claim(suite.ctx(), e, 0); !errors.Is(err, inbox.ErrInvalid) {
			suite.Errorf("%s: Claim returned %v", name, err)
		}
	}

	long := placedEntry(strings.Repeat("x", 2000), 0, 1)
	if _, err := suite.admitInTransaction(suite.Inbox, long); !errors.Is(err, inbox.ErrInvalid) || len(err.Error()) > 1000 {
		suite.Errorf("a long id: Admit returned %v", err)
	}

	// A watermark does not depend on the id.
	suite.checkSuccess(suite.Inbox.Pass(suite.ctx(), []inbox.Entry{long}))
}

func consumersAndNamespacesAreApart(suite suite) {
	entry := inbox.Entry{Key: inbox.Key{Consumer: "group/b", ID: "1"}}
	ns := inbox.Entry{Key: inbox.Key{Consumer: consumerA, Namespace: "shop.outbox", ID: "1"}}
	suite.checkFresh([]bool{true, true, true}, newEntry("1"), entry, ns)
	suite.checkFresh([]bool{false, false, false}, ns, entry, newEntry("1"))
	runs, err := suite.countOnce(suite.Inbox, newEntry("2"), inbox.OnceConfig{})
	suite.checkSuccess(err)
	ns.Key.ID = "2"
	more, err := suite.countOnce(suite.Inbox, ns, inbox.OnceConfig{})
	suite.checkSuccess(err)
	if runs+more != 2 {
		suite.Fatal("the same id in another namespace was treated as a duplicate")
	}
}

func watermarkOutlivesMarkers(suite suite) {
	suite.checkFresh([]bool{true, true, true}, placedEntry("1", 0, 10), entryWithoutID(0, 12), placedEntry("2", 0, 13))
	suite.checkFresh([]bool{true}, newEntry("3"))
	suite.checkSuccess(suite.Expire(suite.ctx()))
	suite.checkMissing("1")

	// The watermark still rejects the records, including offsets without a record.
	suite.checkFresh([]bool{false, false, false, false},
		placedEntry("1", 0, 10), entryWithoutID(0, 12), placedEntry("2", 0, 13), placedEntry("hole", 0, 11))

	// A message without a place had only its marker.
	suite.checkFresh([]bool{true}, newEntry("3"))

	_, err := suite.countOnce(suite.Inbox, placedEntry("1", 0, 10), inbox.OnceConfig{})
	suite.checkError(err, inbox.ErrDuplicate)
	_, err = suite.Inbox.Claim(suite.ctx(), placedEntry("2", 0, 13), 0)
	suite.checkError(err, inbox.ErrDuplicate)

	// The producer has sent the message again after the retention.
	suite.checkFresh([]bool{true}, placedEntry("2", 0, 14))
}

func watermarkMovesPastDuplicates(suite suite) {
	suite.checkFresh([]bool{true}, placedEntry("1", 0, 10))
	suite.checkFresh([]bool{false}, placedEntry("1", 0, 20))
	suite.checkSuccess(suite.Expire(suite.ctx()))
	suite.checkFresh([]bool{false, true}, placedEntry("1", 0, 20), placedEntry("2", 0, 21))
}

func lanesAreApart(suite suite) {
	suite.checkFresh([]bool{true}, placedEntry("1", 0, 100))
	other := placedEntry("2", 0, 50)
	other.Place.Partition = 4
	third := placedEntry("3", 0, 50)
	third.Place.Topic = "payments"
	fourth := placedEntry("4", 0, 50)
	fourth.Key.Consumer = "group/b"

	suite.checkFresh([]bool{true, false, true, true, true},
		placedEntry("5", 1, 50), placedEntry("6", 0, 50), other, third, fourth)
}

func passMovesWithoutMarking(suite suite) {
	suite.checkSuccess(suite.Inbox.Pass(suite.ctx(), []inbox.Entry{placedEntry("1", 0, 10), placedEntry("2", 1, 11), newEntry("3")}))
	suite.checkMissing("1")
	suite.checkFresh([]bool{false, false, true}, placedEntry("1", 0, 10), placedEntry("2", 1, 11), newEntry("3"))
	retry := placedEntry("1", 0, 0)
	retry.Place.Topic = "orders.retry"
	suite.checkFresh([]bool{true}, retry)
	err := suite.Transaction(suite.ctx(), func(ctx context.Context) error {
		if err := suite.Inbox.Pass(ctx, []inbox.Entry{placedEntry("4", 2, 12)}); err != nil {
			return err
		}
		return errHandler
	})

	suite.checkError(err, errHandler)
	suite.checkFresh([]bool{true}, placedEntry("4", 2, 12))
}

func raceOfOnce(suite suite) {
	const callers = 24
	var done, duplicates atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			shared := suite.Inbox
			if i%2 == 1 {
				shared = suite.Other
			}

			_, err := suite.countOnce(shared, newEntry("1"), inbox.OnceConfig{})
			switch {
			case err == nil:
				done.Add(1)
			case errors.Is(err, inbox.ErrDuplicate):
				duplicates.Add(1)
			default:
				suite.Errorf("caller %d: %v", i, err)
			}
		})
	}

	wg.Wait()
	if done.Load() != 1 || duplicates.Load() != callers-1 {
		suite.Fatalf("%d calls took effect and %d were duplicates, want 1 and %d", done.Load(), duplicates.Load(), callers-1)
	}
}

// raceOfAdmit runs overlapping batches at the same time. Their order within a transaction differs,
// so they conflict in different ways, and each caller has a lane of its own. In the end, each identity was fresh in exactly one committed
// transaction.
func raceOfAdmit(suite suite) {
	const callers, ids = 8, 6
	var committed [ids]atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			var list []inbox.Entry
			for j := range ids {
				list = append(list, placedEntry(fmt.Sprint((i+j)%ids), int32(i), int64(j)))
			}

			// As a consumer does, some callers read the markers only if they have to.
			shared := []*inbox.Inbox{suite.Inbox, suite.Other}[i%2]
			admit := suite.admitNewInTransaction
			if i%4 > 1 {
				admit = suite.admitInTransaction
			}
			fresh, err := admit(shared, list...)
			if errors.Is(err, inbox.ErrMarked) {
				fresh, err = suite.admitInTransaction(shared, list...)
			}
			if err != nil {
				suite.Errorf("caller %d: %v", i, err)
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
			suite.Errorf("identity %d was handled %d times, want 1", id, n)
		}
	}
}
