package inbox_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/pkg/inbox"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

func nothing(context.Context) error { return nil }

// newInbox returns an inbox with its collections, and its database.
func newInbox(t *testing.T, opts ...inbox.Option) (*inbox.Inbox, *mongo.Database) {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	x := another(t, db, opts...)
	if err := x.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	return x, db
}

// another returns an inbox of another process.
func another(t *testing.T, db *mongo.Database, opts ...inbox.Option) *inbox.Inbox {
	t.Helper()
	x, err := inbox.New(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestAnEffectHappensOnce(t *testing.T) {
	t.Parallel()
	x, db := newInbox(t)
	long := strings.Repeat("x", 5000)
	keys := []inbox.Key{{"stripe", "1"}, {"stripe", "2"}, {"paypal", "1"}, {"stripe", long}, {"stripe", long + "y"}}
	for _, want := range []error{nil, inbox.ErrDuplicate} {
		for _, k := range keys {
			err := x.Once(t.Context(), k, func(ctx context.Context) error {
				_, err := db.Collection("effects").InsertOne(ctx, bson.D{})
				return err
			})
			if !errors.Is(err, want) {
				t.Errorf("%v: %v, want %v", k, err, want)
			}
		}
	}

	if n, err := db.Collection("effects").CountDocuments(t.Context(), bson.D{}); int(n) != len(keys) || err != nil {
		t.Errorf("%d effects, %v, want %d", n, err, len(keys))
	}

	for _, k := range keys {
		if ok, err := x.Handled(t.Context(), k); !ok || err != nil {
			t.Errorf("%v: handled %t, %v", k, ok, err)
		}
	}
	if ok, err := x.Handled(t.Context(), inbox.Key{Scope: "paypal", ID: "2"}); ok || err != nil {
		t.Errorf("a key that did not arrive: handled %t, %v", ok, err)
	}

	if n, err := x.Counts(t.Context()); n != (inbox.Counts{Markers: int64(len(keys))}) || err != nil {
		t.Errorf("%+v, %v", n, err)
	}
}

// Several calls in one transaction have their effects all or not at all. The error contains exactly
// the duplicates.
func TestSeveralKeysAreAllOrNothing(t *testing.T) {
	t.Parallel()
	x, db := newInbox(t)
	handleAll := func(ids ...string) error {
		return transaction.Run(t.Context(), db.Client(), func(ctx context.Context) error {
			var duplicates []error
			for _, id := range ids {
				err := x.Once(ctx, inbox.Key{Scope: "bank", ID: id}, nothing)
				if err != nil && !errors.Is(err, inbox.ErrDuplicate) {
					return err
				}
				duplicates = append(duplicates, err)
			}
			return errors.Join(duplicates...)
		})
	}
	if err := handleAll("1", "2"); err != nil {
		t.Fatal(err)
	}

	err := handleAll("3", "2", "4", "1")
	if !errors.Is(err, inbox.ErrDuplicate) || strings.Count(err.Error(), "handled before") != 2 {
		t.Errorf("the error is %v, want the duplicates 2 and 1", err)
	}
	if err := handleAll("3", "4"); err != nil {
		t.Errorf("the keys that came with duplicates cannot be handled: %v", err)
	}
}

// All callers with a scope together handle each id once. This includes the handlers of consumers,
// which call Once in their transactions.
func TestCallersShareAScope(t *testing.T) {
	t.Parallel()
	x, db := newInbox(t)
	effects := 0
	for range 3 {
		y := another(t, db)
		err := y.Once(t.Context(), inbox.Key{Scope: "all", ID: "1"}, func(context.Context) error {
			effects++
			return nil
		})
		if err != nil && !errors.Is(err, inbox.ErrDuplicate) {
			t.Fatal(err)
		}
	}

	if effects != 1 {
		t.Errorf("%d effects", effects)
	}
	if err := x.Once(t.Context(), inbox.Key{Scope: "another", ID: "1"}, nothing); err != nil {
		t.Error(err)
	}
}

func TestACallInProgressIsReported(t *testing.T) {
	t.Parallel()
	x, db := newInbox(t)
	k := inbox.Key{Scope: "stripe", ID: "1"}
	began, finish, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	begin := sync.OnceFunc(func() { close(began) })
	go func() {
		done <- x.Once(t.Context(), k, func(context.Context) error {
			begin()
			<-finish
			return nil
		}, inbox.WithClaim(time.Minute))
	}()
	<-began

	check := func(name string, err error, claim bool) {
		t.Helper()
		progress, ok := errors.AsType[*inbox.InProgressError](err)
		if !ok || !errors.Is(err, inbox.ErrInProgress) || progress.Key != k || progress.Until.IsZero() == claim {
			t.Errorf("%s: %#v", name, err)
		}
	}
	check("this process", x.Once(t.Context(), k, nothing, inbox.WithoutWaiting()), false)
	check("another process", another(t, db).Once(t.Context(), k, nothing), true)
	check("a claim of another process", another(t, db).Once(t.Context(), k, nothing, inbox.WithClaim(0)), true)

	// The error of another key comes from the function, so it is the caller's.
	outer := inbox.Key{Scope: "stripe", ID: "2"}
	check("within another key", another(t, db).Once(t.Context(), outer, func(ctx context.Context) error {
		return another(t, db).Once(ctx, k, nothing)
	}), true)

	close(finish)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := x.Once(t.Context(), k, nothing); !errors.Is(err, inbox.ErrDuplicate) {
		t.Error(err)
	}
}

func TestInvalidArguments(t *testing.T) {
	t.Parallel()
	if _, err := inbox.New(nil, inbox.WithCollection("a$b")); !errors.Is(err, inbox.ErrInvalid) || !strings.Contains(err.Error(), `"a$b"`) {
		t.Errorf("no database: %v", err)
	}

	x, db := newInbox(t)
	_, err := inbox.New(db, inbox.WithCollection("a$b"), inbox.WithRetention(time.Second), nil)
	if !errors.Is(err, inbox.ErrInvalid) || !strings.Contains(err.Error(), `"a$b"`) || !strings.Contains(err.Error(), "retention 1s") {
		t.Errorf("bad options: %v", err)
	}
	if _, err := inbox.New(db, inbox.WithCollection(""), inbox.WithRetention(0)); err != nil {
		t.Errorf("zero values: %v", err)
	}

	for _, k := range []inbox.Key{{"", "1"}, {"a", ""}, {strings.Repeat("a", 2000), "1"}} {
		if err := x.Once(t.Context(), k, nothing); !errors.Is(err, inbox.ErrInvalid) {
			t.Errorf("Once with %v: %v", k, err)
		}
		if _, err := x.Handled(t.Context(), k); !errors.Is(err, inbox.ErrInvalid) {
			t.Errorf("Handled with %v: %v", k, err)
		}
	}

	k := inbox.Key{Scope: "a", ID: "1"}
	if err := x.Once(t.Context(), k, nothing, inbox.WithClaim(time.Millisecond)); !errors.Is(err, inbox.ErrInvalid) {
		t.Errorf("a short lease: %v", err)
	}
	if _, err := x.Sweep(t.Context(), -1); !errors.Is(err, inbox.ErrInvalid) {
		t.Errorf("a negative limit: %v", err)
	}
	err = transaction.Run(t.Context(), db.Client(), func(ctx context.Context) error {
		return x.Once(ctx, k, nothing, inbox.WithClaim(0))
	})
	if !errors.Is(err, inbox.ErrInvalid) {
		t.Errorf("a claim in a transaction: %v", err)
	}
}
