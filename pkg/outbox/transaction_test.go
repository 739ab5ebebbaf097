package outbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// watch records the commands of a client.
type watch struct {
	mu   sync.Mutex
	cmds []bson.Raw
}

func (w *watch) options() *options.ClientOptions {
	return options.Client().SetMonitor(&mongoevent.CommandMonitor{Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.cmds = append(w.cmds, slices.Clone(e.Command))
	}})
}

func (w *watch) allCommands(name string) []bson.Raw {
	w.mu.Lock()
	defer w.mu.Unlock()
	var found []bson.Raw
	for _, c := range w.cmds {
		if elems, err := c.Elements(); err == nil && elems[0].Key() == name {
			found = append(found, c)
		}
	}
	return found
}

func (w *watch) lastCommand(t *testing.T, name string) bson.Raw {
	t.Helper()
	all := w.allCommands(name)
	if len(all) == 0 {
		t.Fatalf("no %s was sent", name)
	}
	return all[len(all)-1]
}

func (w *watch) checkCommands(t *testing.T, want map[string]int) {
	t.Helper()
	for name, n := range want {
		if got := len(w.allCommands(name)); got != n {
			t.Errorf("%d × %s, want %d", got, name, n)
		}
	}
}

func TestTransactionPinsItsConcerns(t *testing.T) {
	t.Parallel()
	for level, opts := range map[string][]outbox.TransactionOption{"majority": nil, "snapshot": {outbox.WithSnapshot()}} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			w := new(watch)
			b := setup(t, w.options().SetWriteConcern(writeconcern.W1()).SetReadPreference(readpref.SecondaryPreferred()))
			if err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
				// A read is rejected by the driver unless the transaction's preference is the primary.
				if _, err := b.db.Collection("orders").CountDocuments(ctx, bson.D{}); err != nil {
					return err
				}

				return b.box.Append(ctx, newEvent("a"))
			}, opts...); err != nil {
				t.Fatal(err)
			}

			if got := w.lastCommand(t, "commitTransaction").Lookup("writeConcern", "w").StringValue(); got != "majority" {
				t.Errorf("the commit has w %q", got)
			}

			if got := w.lastCommand(t, "aggregate").Lookup("readConcern", "level").StringValue(); got != level {
				t.Errorf("the transaction reads with %q", got)
			}

			b.checkTypes(t, "a")
		})
	}
}

// I2, the writing side: after an abort, the event is neither in the collection nor in the stream.
func TestI2_AbortedTransactionLeavesNothing(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	cs, err := b.coll.Watch(ctx, mongo.Pipeline{})
	if err != nil {
		t.Fatal(err)
	}

	defer cs.Close(ctx)
	no := errors.New("no")
	if err := b.box.Transaction(ctx, func(ctx context.Context) error {
		if err := b.box.Append(ctx, newEvent("aborted")); err != nil {
			return err
		}
		return no
	}); !errors.Is(err, no) {
		t.Fatal(err)
	}

	func() {
		defer func() { _ = recover() }()
		_ = b.box.Transaction(ctx, func(ctx context.Context) error {
			if err := b.box.Append(ctx, newEvent("panicked")); err != nil {
				return err
			}
			panic("in the callback")
		})
	}()

	if err := b.box.Transaction(ctx, func(ctx context.Context) error { return b.box.Append(ctx, newEvent("committed")) }); err != nil {
		t.Fatal(err)
	}

	b.checkTypes(t, "committed")
	if !cs.Next(ctx) || cs.Current.Lookup("fullDocument", "type").StringValue() != "committed" {
		t.Errorf("the stream shows %s, %v", cs.Current, cs.Err())
	}
}

func TestNestedTransactionJoins(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	if err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
		if err := b.box.Append(ctx, newEvent("outer")); err != nil {
			return err
		}

		outer := mongo.SessionFromContext(ctx)
		return b.box.Transaction(ctx, func(ctx context.Context) error {
			if mongo.SessionFromContext(ctx) != outer {
				t.Error("the inner transaction has another session")
			}
			return b.box.Append(ctx, newEvent("inner"))
		})
	}); err != nil {
		t.Fatal(err)
	}

	b.checkTypes(t, "outer", "inner")
	w.checkCommands(t, map[string]int{"commitTransaction": 1, "abortTransaction": 0})
}

func TestInnerErrorMakesRollbackOnly(t *testing.T) {
	t.Parallel()
	inner := errors.New("inner")
	for name, fail := range map[string]func(context.Context, bundle) error{
		"joined transaction fails": func(ctx context.Context, b bundle) error {
			_ = b.box.Transaction(ctx, func(context.Context) error { return inner })
			return inner
		},
		"joined transaction panics": func(ctx context.Context, b bundle) error {
			defer func() { _ = recover() }()
			_ = b.box.Transaction(ctx, func(context.Context) error { panic("x") })
			return nil
		},
		"server rejects the event": func(ctx context.Context, b bundle) error {
			e := newEvent("twice")
			_ = b.box.Append(ctx, e)
			_ = b.box.Append(ctx, e)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, runs := setup(t), 0
			err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
				runs++
				if err := b.box.Append(ctx, newEvent("before")); err != nil {
					return err
				}

				want := fail(ctx, b)
				err := b.box.Append(ctx, newEvent("after"))
				if !errors.Is(err, outbox.ErrRollbackOnly) || want != nil && !errors.Is(err, want) {
					t.Errorf("Append afterwards: %v", err)
				}

				if err := b.box.Transaction(ctx, func(context.Context) error { return nil }); !errors.Is(err, outbox.ErrRollbackOnly) {
					t.Errorf("a nested transaction afterwards: %v", err)
				}

				return nil // swallows it
			})
			if !errors.Is(err, outbox.ErrRollbackOnly) || runs != 1 {
				t.Errorf("after %d runs: %v", runs, err)
			}

			b.checkTypes(t)
		})
	}
}

func TestTransactionThatTheCallbackEnds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	plain := b.newBox(t, outbox.WithoutTransaction())
	var leaked context.Context
	err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
		leaked = ctx
		if err := b.box.Append(ctx, newEvent("a")); err != nil {
			return err
		}
		if err := mongo.SessionFromContext(ctx).AbortTransaction(ctx); err != nil {
			return err
		}

		if err := plain.Append(ctx, newEvent("outside")); !errors.Is(err, outbox.ErrTransactionEnded) {
			t.Errorf("Append after the abort: %v", err)
		}

		return nil
	})
	if !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Errorf("aborted by the callback, reported as %v", err)
	}

	if err := plain.Append(leaked, newEvent("late")); !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Errorf("Append with a leaked context: %v", err)
	}

	if err := b.box.Transaction(leaked, func(context.Context) error { return nil }); !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Errorf("Transaction with a leaked context: %v", err)
	}

	b.checkTypes(t)
}

func TestTransactionOfTheDriverIsJoined(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	sess, err := b.client.StartSession()
	if err != nil {
		t.Fatal(err)
	}

	defer sess.EndSession(t.Context())
	if _, err := sess.WithTransaction(t.Context(), func(ctx context.Context) (any, error) {
		return nil, b.box.Transaction(ctx, func(ctx context.Context) error { return b.box.Append(ctx, newEvent("joined")) })
	}); err != nil {
		t.Fatal(err)
	}

	b.checkTypes(t, "joined")
	w.checkCommands(t, map[string]int{"commitTransaction": 1})
	// A session without a transaction is used for a new one.
	if err := b.box.Transaction(mongo.NewSessionContext(t.Context(), sess), func(ctx context.Context) error {
		if mongo.SessionFromContext(ctx) != sess {
			t.Error("another session")
		}
		return b.box.Append(ctx, newEvent("own"))
	}); err != nil {
		t.Fatal(err)
	}

	b.checkTypes(t, "joined", "own")
}

func TestExplicitSessionBeatsTheAmbientOne(t *testing.T) {
	t.Parallel()
	b := setup(t)
	sess, err := b.client.StartSession()
	if err != nil {
		t.Fatal(err)
	}

	defer sess.EndSession(t.Context())
	no := errors.New("no")
	err = b.box.Transaction(t.Context(), func(ctx context.Context) error {
		explicit := mongo.NewSessionContext(ctx, sess)
		if err := b.box.Transaction(explicit, func(inner context.Context) error {
			if mongo.SessionFromContext(inner) != sess {
				t.Error("the callback has another session")
			}
			return b.box.Append(inner, newEvent("transaction"))
		}); err != nil {
			t.Error(err)
		}

		if err := b.box.Append(explicit, newEvent("rejected")); !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("the explicit session has no transaction: %v", err)
		}

		if err := sess.StartTransaction(); err != nil {
			return err
		}

		if err := b.box.Append(explicit, newEvent("call")); err != nil {
			t.Error(err)
		}

		if err := sess.CommitTransaction(ctx); err != nil {
			t.Error(err)
		}

		// The outer transaction is rolled back, and none of its writes is visible.
		return no
	})
	if !errors.Is(err, no) {
		t.Error(err)
	}

	b.checkTypes(t, "transaction", "call")
}

func TestSessionOfAnotherClientIsRejected(t *testing.T) {
	t.Parallel()
	b, other := setup(t), setup(t)
	err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
		return other.box.Transaction(ctx, func(context.Context) error { return nil })
	})
	if !errors.Is(err, mongo.ErrWrongClient) {
		t.Error(err)
	}
}

// The fail point is for the whole server, so the cases run one after the other.
func TestTransactionRetries(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		data    bson.D
		times   int
		swallow bool
		runs    int
		commits int
	}{
		{"write conflict", bson.D{{Key: "failCommands", Value: bson.A{"insert"}}, {Key: "errorCode", Value: 112}, {Key: "errorLabels", Value: bson.A{"TransientTransactionError"}}}, 1, false, 2, 1},
		{"swallowed write conflict", bson.D{{Key: "failCommands", Value: bson.A{"insert"}}, {Key: "errorCode", Value: 112}, {Key: "errorLabels", Value: bson.A{"TransientTransactionError"}}}, 1, true, 2, 1},
		{"commit of unknown outcome", bson.D{{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "errorCode", Value: 64}, {Key: "errorLabels", Value: bson.A{"UnknownTransactionCommitResult"}}}, 2, false, 1, 3},
		{"commit that must start afresh", bson.D{{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "errorCode", Value: 251}, {Key: "errorLabels", Value: bson.A{"TransientTransactionError"}}}, 1, false, 2, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			app, w := stacktest.Name(t), new(watch)
			b := setup(t, w.options().SetAppName(app))
			stacktest.FailCommand(t, app, bson.D{{Key: "times", Value: c.times}}, c.data)
			runs := 0
			err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
				runs++
				err := b.box.Append(ctx, newEvent("a"))
				if c.swallow {
					return nil
				}

				return err
			})
			if err != nil || runs != c.runs {
				t.Errorf("%d runs, want %d: %v", runs, c.runs, err)
			}

			w.checkCommands(t, map[string]int{"commitTransaction": c.commits})
			b.checkTypes(t, "a")
		})
	}
}

// The server aborts a transaction whose insert fails, so no repetition of the callback can commit.
func TestATransactionThatDiscardsAnErrorIsNotRepeatedForMinutes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	orders := b.db.Collection("orders")
	same := bson.D{{Key: "_id", Value: "same"}}

	if _, err := orders.InsertOne(t.Context(), same); err != nil {
		t.Fatal(err)
	}
	for _, after := range []string{"nothing", "an insert"} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		err := b.box.Transaction(ctx, func(ctx context.Context) error {
			_, _ = orders.InsertOne(ctx, same)
			if after == "an insert" {
				_, err := orders.InsertOne(ctx, bson.D{{Key: "_id", Value: "other"}})
				return err
			}
			return nil
		})
		if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "its error is discarded") {
			t.Errorf("%s after the insert: %v", after, err)
		}
	}
}

func TestTransactionEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	runs := 0
	err := b.box.Transaction(ctx, func(ctx context.Context) error {
		runs++
		if err := b.box.Append(ctx, newEvent("a")); err != nil {
			return err
		}

		cancel(errors.New("stop"))
		return b.box.Append(ctx, newEvent("b"))
	})
	if !errors.Is(err, context.Canceled) || runs != 1 {
		t.Errorf("after %d runs: %v", runs, err)
	}

	b.checkTypes(t)
}

// The driver would run the callback again with a context that has ended.
func TestTransactionIsNotRetriedAfterItsContext(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ctx, cancel := context.WithCancel(t.Context())
	runs := 0
	err := b.box.Transaction(ctx, func(ctx context.Context) error {
		runs++
		if err := b.box.Append(ctx, newEvent("a")); err != nil {
			return err
		}

		cancel()
		return mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}
	})
	if !errors.Is(err, context.Canceled) || runs != 1 {
		t.Errorf("after %d runs: %v", runs, err)
	}

	b.checkTypes(t)
}

// A caller can distinguish a failed commit from a failed callback, and a certain outcome from an
// unknown one.
func TestAFailedCommitReportsWhetherItsOutcomeIsUnknown(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		command string
		data    bson.D
		timeout time.Duration
		commit  bool
		unknown bool
	}{
		{"an insert is rejected", "insert", bson.D{{Key: "errorCode", Value: 20}}, 0, false, false},
		{"the commit is rejected", "commitTransaction", bson.D{{Key: "errorCode", Value: 20}}, 0, true, false},
		{"the commit is not confirmed", "commitTransaction", bson.D{{Key: "errorCode", Value: 50}, {Key: "errorLabels", Value: bson.A{"UnknownTransactionCommitResult"}}}, time.Second, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			app := stacktest.Name(t)
			opts := options.Client().SetAppName(app)
			if c.timeout > 0 {
				opts.SetTimeout(c.timeout)
			}

			b := setup(t, opts)
			coll := b.db.Collection("c")
			// The client of the test may have a short timeout.
			patient := stacktest.Client(t).Database(b.db.Name())
			if err := patient.CreateCollection(t.Context(), coll.Name()); err != nil {
				t.Fatal(err)
			}

			stacktest.FailCommand(t, app, "alwaysOn", append(bson.D{{Key: "failCommands", Value: bson.A{c.command}}}, c.data...))
			err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
				_, err := coll.InsertOne(ctx, bson.D{})
				return err
			})
			if err == nil || errors.Is(err, outbox.ErrCommitUnknown) != c.unknown || strings.HasPrefix(err.Error(), "committing: ") != c.commit {
				t.Errorf("%T: %v", err, err)
			}

			if server := mongo.ServerError(nil); !errors.As(err, &server) {
				t.Errorf("the driver's error is gone: %v", err)
			}
		})
	}
}

// If a connection breaks, the driver also fails the commits that wait for one, and does not repeat them. Their transactions
// would stay open on the server and lock their writes for a minute.
func TestALostConnectionLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]bson.D{
		"closed":    {{Key: "closeConnection", Value: true}},
		"shut down": {{Key: "errorCode", Value: 91}, {Key: "errorLabels", Value: bson.A{"RetryableWriteError"}}},
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); checkLostConnection(t, fault) })
	}
}

func checkLostConnection(t *testing.T, fault bson.D) {
	t.Helper()
	app := stacktest.Name(t)
	b := setup(t, options.Client().SetAppName(app).SetMaxPoolSize(1))
	coll := b.db.Collection("c")
	if err := b.db.CreateCollection(t.Context(), coll.Name()); err != nil {
		t.Fatal(err)
	}

	const n = 8
	stacktest.FailCommand(t, app, bson.D{{Key: "times", Value: 4}}, append(bson.D{
		{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 300},
	}, fault...))
	var inserted, ended sync.WaitGroup
	inserted.Add(n)
	errs := make([]error, n)
	for i := range errs {
		ended.Go(func() {
			arrived := sync.OnceFunc(inserted.Done)
			errs[i] = b.box.Transaction(t.Context(), func(ctx context.Context) error {
				defer func() { arrived(); inserted.Wait() }()
				_, err := coll.InsertOne(ctx, bson.D{{Key: "_id", Value: i}})
				return err
			})
		})
	}

	ended.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	if got, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || got != n {
		t.Errorf("%d of %d documents: %v", got, n, err)
	}
}
