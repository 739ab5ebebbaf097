package memory

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/pkg/outbox"
)

type account struct {
	Balance int    `bson:"balance"`
	Note    string `bson:"-"`
}

func TestTableRollsBackWithItsTransaction(t *testing.T) {
	t.Parallel()
	db := NewDB()
	accounts := NewTable[string, account](db, "accounts")
	ctx := t.Context()
	if err := accounts.Insert(ctx, "a", account{Balance: 1, Note: "not stored"}); err != nil {
		t.Fatal(err)
	}

	if got, err := accounts.Get(ctx, "a"); err != nil || got != (account{Balance: 1}) {
		t.Errorf("%+v, %v", got, err)
	}

	if err := accounts.Insert(ctx, "a", account{}); !mongo.IsDuplicateKeyError(err) {
		t.Errorf("inserted twice: %v", err)
	}

	if _, err := accounts.Get(ctx, "b"); !errors.Is(err, mongo.ErrNoDocuments) {
		t.Errorf("not there: %v", err)
	}

	no := errors.New("no")
	if err := db.Transaction(ctx, func(ctx context.Context) error {
		if _, err := accounts.Get(ctx, "b"); !errors.Is(err, mongo.ErrNoDocuments) {
			t.Errorf("not there: %v", err)
		}

		if err := errors.Join(accounts.Delete(ctx, "a"), accounts.Delete(ctx, "nobody"), accounts.Put(ctx, "b", account{Balance: 2}), accounts.Put(ctx, "b", account{Balance: 3})); err != nil {
			t.Error(err)
		}

		if all, err := accounts.All(ctx); err != nil || len(all) != 1 || all["b"].Balance != 3 {
			t.Errorf("inside: %v, %v", all, err)
		}

		if all, err := accounts.All(context.WithoutCancel(t.Context())); err != nil || len(all) != 1 {
			t.Errorf("outside: %v, %v", all, err)
		}

		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	if all, err := accounts.All(ctx); err != nil || len(all) != 1 || all["a"].Balance != 1 {
		t.Errorf("after the rollback: %v, %v", all, err)
	}
}

func TestWriteConflictsStartAfresh(t *testing.T) {
	t.Parallel()
	db := NewDB()
	counter := NewTable[int, account](db, "counter")
	var wg sync.WaitGroup
	const workers, each = 8, 25
	for range workers {
		wg.Go(func() {
			for range each {
				if err := db.Transaction(t.Context(), func(ctx context.Context) error {
					a, err := counter.Get(ctx, 1)
					if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
						return err
					}

					a.Balance++
					return counter.Put(ctx, 1, a)
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}

	wg.Wait()
	if a, err := counter.Get(t.Context(), 1); err != nil || a.Balance != workers*each {
		t.Errorf("%d increments, want %d: %v", a.Balance, workers*each, err)
	}

	if n := len(db.findOrAddTable("counter").rows); n != 1 || len(db.findOrAddTable("counter").rows[mustIntKey(t, 1)].versions) != 1 {
		t.Errorf("%d rows; unused versions are kept", n)
	}
}

func mustIntKey(t *testing.T, n int) string {
	t.Helper()
	key, err := encodeKey(n)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// A write outside of a transaction waits for a conflicting transaction, or until its context ends.
func TestWriteWaitsForTheTransactionInTheWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := NewDB()
		table := NewTable[string, account](db, "t")
		outside := make(chan error, 2)
		ctx, cancel := context.WithCancel(t.Context())
		if err := db.Transaction(t.Context(), func(inside context.Context) error {
			if err := table.Put(inside, "a", account{Balance: 1}); err != nil {
				return err
			}

			go func() { outside <- table.Put(t.Context(), "a", account{Balance: 2}) }()
			synctest.Wait()
			if len(outside) > 0 {
				t.Error("it did not wait")
			}

			go func() { outside <- table.Put(ctx, "a", account{Balance: 3}) }()
			synctest.Wait()
			cancel()
			if err := <-outside; !errors.Is(err, context.Canceled) {
				t.Errorf("one whose context ended: %v", err)
			}

			return nil
		}); err != nil {
			t.Fatal(err)
		}

		if err := <-outside; err != nil {
			t.Error(err)
		}

		if a, err := table.Get(t.Context(), "a"); err != nil || a.Balance != 2 {
			t.Errorf("%+v, %v", a, err)
		}
	})
}

// If the callback ignores a conflict, the transaction still starts again, as on a server.
// A callback may return a transient error each time, without a conflict. As with the driver, its transaction ends after two minutes.
func TestATransactionIsNotRepeatedForever(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		transient := mongo.CommandError{Labels: []string{"TransientTransactionError"}}
		began := time.Now()
		err := NewDB().Transaction(t.Context(), func(context.Context) error { return transient })
		if took := time.Since(began); !isTransient(err) || took < transactionLimit || took > transactionLimit+time.Second {
			t.Errorf("%v after %v", err, took)
		}
	})
}

func TestSwallowedConflictStartsAfresh(t *testing.T) {
	t.Parallel()
	db := NewDB()
	table := NewTable[string, account](db, "t")
	runs := 0
	if err := db.Transaction(t.Context(), func(ctx context.Context) error {
		runs++
		if _, err := table.All(ctx); err != nil {
			return err
		}

		if runs == 1 {
			if err := table.Put(t.Context(), "a", account{Balance: 1}); err != nil {
				return err
			}
		}

		_ = table.Put(ctx, "a", account{Balance: 2})
		if runs == 1 {
			if err := table.Put(ctx, "b", account{}); !errors.Is(err, outbox.ErrRollbackOnly) {
				t.Errorf("after the conflict: %v", err)
			}
		}

		return nil
	}); err != nil || runs != 2 {
		t.Errorf("%d runs, %v", runs, err)
	}
}

// A model: after any sequence of transactions and rollbacks, the table has the same contents as a
// map.
func TestTableModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		db := NewDB()
		table := NewTable[int, account](db, "t")
		model := map[int]account{}
		no := errors.New("no")
		for range rapid.IntRange(1, 8).Draw(rt, "transactions") {
			next := map[int]account{}
			for k, v := range model {
				next[k] = v
			}

			fail := rapid.Bool().Draw(rt, "fail")
			err := db.Transaction(t.Context(), func(ctx context.Context) error {
				for range rapid.IntRange(0, 5).Draw(rt, "steps") {
					key, value := rapid.IntRange(0, 3).Draw(rt, "key"), account{Balance: rapid.IntRange(0, 9).Draw(rt, "value")}
					if rapid.Bool().Draw(rt, "delete") {
						delete(next, key)
						if err := table.Delete(ctx, key); err != nil {
							return err
						}
					} else {
						next[key] = value
						if err := table.Put(ctx, key, value); err != nil {
							return err
						}
					}
				}

				if fail {
					return no
				}

				return nil
			})
			if fail != errors.Is(err, no) || !fail && err != nil {
				rt.Fatal(err)
			}

			if !fail {
				model = next
			}

			all, err := table.All(t.Context())
			if err != nil || len(all) != len(model) {
				rt.Fatalf("%v, want %v: %v", all, model, err)
			}

			for k, v := range model {
				if all[k] != v {
					rt.Fatalf("%v, want %v", all, model)
				}
			}
		}
	})
}
