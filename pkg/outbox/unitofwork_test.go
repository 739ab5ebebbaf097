package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outbox/guard"
)

func id(name string, v any) bson.D { return bson.D{{Key: name, Value: v}} }

// just drops the result of a call and returns its error.
func just[R any](_ R, err error) error { return err }

func TestSessionFromContextAndCheck(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	check := func(what string, ctx context.Context, want error) {
		t.Helper()
		if err := outbox.CheckTransaction(ctx); !errors.Is(err, want) {
			t.Errorf("%s: %v", what, err)
		}
	}

	check("no session", ctx, outbox.ErrNoTransaction)
	sess, err := b.client.StartSession()
	if err != nil {
		t.Fatal(err)
	}

	defer sess.EndSession(ctx)
	byHand := mongo.NewSessionContext(ctx, sess)
	check("a session without transaction", byHand, outbox.ErrNoTransaction)
	if err := sess.StartTransaction(); err != nil {
		t.Fatal(err)
	}

	check("by hand", byHand, nil)
	if err := sess.AbortTransaction(ctx); err != nil {
		t.Fatal(err)
	}

	check("aborted by hand", byHand, outbox.ErrNoTransaction)
	var leaked context.Context
	if err := b.box.Transaction(byHand, func(ctx context.Context) error {
		leaked = ctx
		check("inside", ctx, nil)
		check("outside on purpose", outbox.Outside(ctx), outbox.ErrNoTransaction)
		return nil
	}); err != nil {
		t.Error(err)
	}

	// The next transaction of the session is independent of the leaked one.
	if err := sess.StartTransaction(); err != nil {
		t.Fatal(err)
	}

	check("leaked", leaked, outbox.ErrTransactionEnded)
	if err := b.box.Transaction(leaked, func(context.Context) error { return nil }); !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Errorf("begun after completion: %v", err)
	}
}

func TestSetRollbackOnly(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	cause := errors.New("half of it is missing")
	err := b.box.Transaction(ctx, func(ctx context.Context) error {
		if err := b.box.Append(ctx, newEvent("a")); err != nil {
			return err
		}

		if !outbox.SetRollbackOnly(ctx, cause) || !outbox.SetRollbackOnly(ctx, nil) {
			t.Error("not done")
		}

		return nil
	})
	if !errors.Is(err, outbox.ErrRollbackOnly) || !errors.Is(err, cause) {
		t.Error(err)
	}

	if outbox.SetRollbackOnly(ctx, cause) {
		t.Error("done without a transaction")
	}

	b.checkTypes(t)
}

// A handler in a transaction commits once if it returns nil, and rolls back and returns its error otherwise. It
// joins an existing transaction.
func TestHandlerIsOneTransaction(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b := setup(t, w.options())
	no := errors.New("no")
	inTransaction := func(handle func(ctx context.Context, typ string) error) func(ctx context.Context, typ string) error {
		return func(ctx context.Context, typ string) error {
			return b.box.Transaction(ctx, func(ctx context.Context) error { return handle(ctx, typ) })
		}
	}
	inner := inTransaction(func(ctx context.Context, typ string) error { return b.box.Append(ctx, newEvent(typ)) })
	h := inTransaction(func(ctx context.Context, typ string) error {
		if s := mongo.SessionFromContext(ctx); s == nil || !s.TransactionRunning() {
			t.Error("no transaction")
		}

		if err := errors.Join(inner(ctx, typ), inner(ctx, typ+" too")); err != nil {
			return err
		}
		if typ == "bad" {
			return no
		}

		return nil
	})
	if err := h(t.Context(), "good"); err != nil {
		t.Error(err)
	}

	if err := h(t.Context(), "bad"); !errors.Is(err, no) {
		t.Error(err)
	}

	b.checkTypes(t, "good", "good too")
	w.checkCommands(t, map[string]int{"commitTransaction": 1})
}

// With three levels there is one begin and one commit, and a failure in the innermost rolls all of
// it back.
func TestNestedTransactionsAreCounted(t *testing.T) {
	t.Parallel()
	no := errors.New("no")
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprint(fails), func(t *testing.T) {
			t.Parallel()
			w := new(watch)
			b := setup(t, w.options())
			step := func(typ string, next func(context.Context) error) func(context.Context) error {
				return func(ctx context.Context) error {
					return b.box.Transaction(ctx, func(ctx context.Context) error {
						if err := b.box.Append(ctx, newEvent(typ)); err != nil {
							return err
						}
						return next(ctx)
					})
				}
			}

			err := step("1", step("2", step("3", func(context.Context) error {
				if fails {
					return no
				}
				return nil
			})))(t.Context())

			if fails {
				if !errors.Is(err, no) {
					t.Error(err)
				}

				b.checkTypes(t)
				w.checkCommands(t, map[string]int{"commitTransaction": 0})
				return
			}
			if err != nil {
				t.Fatal(err)
			}

			b.checkTypes(t, "1", "2", "3")
			w.checkCommands(t, map[string]int{"commitTransaction": 1})
		})
	}
}

// The commit must not happen while a joined transaction is running.
func TestJoinedTransactionLeftRunning(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var wg sync.WaitGroup
	entered, release := make(chan struct{}), make(chan struct{})
	err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
		wg.Go(func() {
			_ = b.box.Transaction(ctx, func(context.Context) error {
				close(entered)
				<-release
				return nil
			})
		})

		<-entered
		return b.box.Append(t.Context(), newEvent("x"), newEvent("y"))
	})
	if !errors.Is(err, outbox.ErrNoTransaction) {
		t.Error(err)
	}

	close(release)
	wg.Wait()
	entered, release = make(chan struct{}), make(chan struct{})
	err = b.box.Transaction(t.Context(), func(ctx context.Context) error {
		if err := b.box.Append(ctx, newEvent("a")); err != nil {
			return err
		}

		wg.Go(func() {
			_ = b.box.Transaction(ctx, func(context.Context) error {
				close(entered)
				<-release
				return nil
			})
		})

		<-entered
		return nil
	})

	close(release)
	wg.Wait()
	if !errors.Is(err, outbox.ErrRollbackOnly) {
		t.Error(err)
	}

	b.checkTypes(t)
}

func TestNestedTransactionAfterTheCallbackEndedIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
		if err := b.box.Append(ctx, newEvent("a")); err != nil {
			return err
		}
		if err := mongo.SessionFromContext(ctx).AbortTransaction(ctx); err != nil {
			return err
		}

		ran := false
		err := b.box.Transaction(ctx, func(context.Context) error { ran = true; return nil })
		if !errors.Is(err, outbox.ErrTransactionEnded) || ran {
			t.Errorf("joined an ended transaction: %v, ran %v", err, ran)
		}

		return nil
	})
	if !errors.Is(err, outbox.ErrTransactionEnded) {
		t.Error(err)
	}
}

// A transaction on a standalone server is a typed error. Calls that need none work there, in the
// same handler.
func TestStandaloneServer(t *testing.T) {
	t.Parallel()
	c := newStandalone(t)
	db := c.Database("shop")
	var logged stacktest.Buffer
	box, err := outbox.New(db, outbox.WithoutTransaction(), outbox.WithLogger(slog.New(slog.NewTextHandler(&logged, nil))))
	if err != nil {
		t.Fatal(err)
	}

	orders := guard.NewCollection(db.Collection("orders"), guard.WithoutTransaction())
	handler := func(ctx context.Context, order string) error {
		if err := just(orders.InsertOne(ctx, id("_id", order))); err != nil {
			return err
		}
		return box.Append(ctx, newEvent("OrderPlaced"))
	}
	if err := box.Transaction(t.Context(), func(ctx context.Context) error { return handler(ctx, "a") }); !errors.Is(err, outbox.ErrStandalone) || !errors.As(err, new(mongo.ServerError)) {
		t.Errorf("a transaction: %v", err)
	}

	if err := box.Transaction(t.Context(), func(ctx context.Context) error { _ = handler(ctx, "a"); return nil }); !errors.Is(err, outbox.ErrStandalone) {
		t.Errorf("a transaction whose callback swallows it: %v", err)
	}

	for _, order := range []string{"b", "c"} {
		if err := handler(t.Context(), order); err != nil {
			t.Errorf("without a transaction: %v", err)
		}
	}
	if n := strings.Count(logged.String(), "no relay can read the events"); n != 1 {
		t.Errorf("%d warnings, want 1:\n%s", n, logged.String())
	}

	if n, err := orders.CountDocuments(t.Context(), bson.D{}); n != 2 || err != nil {
		t.Errorf("%d orders, %v", n, err)
	}
}

// The code of the server does not prove a standalone: a replica set uses it for other errors too.
func TestIllegalOperationOfAReplicaSetIsNotStandalone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	illegal := mongo.CommandError{Code: 20, Message: "no"}
	err := b.box.Transaction(t.Context(), func(context.Context) error { return illegal })
	if errors.Is(err, outbox.ErrStandalone) || !errors.As(err, new(mongo.CommandError)) {
		t.Error(err)
	}
}

// newStandalone returns a client of a separate server without a replica set. It uses the program of
// the shared server.
func newStandalone(t *testing.T) *mongo.Client {
	t.Helper()
	path, err := exec.LookPath("mongod")
	if err != nil {
		var status struct{ PID int64 }
		if err := stacktest.Client(t).Database("admin").RunCommand(t.Context(), bson.D{{Key: "serverStatus", Value: 1}}).Decode(&status); err != nil {
			t.Fatal(err)
		}
		if path, err = os.Readlink(fmt.Sprintf("/proc/%d/exe", status.PID)); err != nil {
			t.Fatal(err)
		}
	}

	for range 5 {
		if c := startStandalone(t, path); c != nil {
			return c
		}
	}

	t.Fatal("no port stayed free until the server took it")
	return nil
}

// startStandalone returns nil if another program has taken the port.
func startStandalone(t *testing.T, path string) *mongo.Client {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	port := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}

	cmd := exec.Command(path, "--port", strconv.Itoa(port), "--bind_ip", "127.0.0.1", "--dbpath", t.TempDir(), "--wiredTigerCacheSizeGB", "0.25", "--nounixsocket", "--quiet")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	ended := make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	go func() { _ = cmd.Wait(); cancel(); close(ended) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
	c, err := mongo.Connect(options.Client().ApplyURI(fmt.Sprintf("mongodb://127.0.0.1:%d/", port)).SetServerSelectionTimeout(2 * time.Minute))
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = c.Disconnect(context.WithoutCancel(t.Context())) })
	var status struct{ PID int64 }
	err = c.Database("admin").RunCommand(ctx, bson.D{{Key: "serverStatus", Value: 1}}).Decode(&status)
	if err == nil && status.PID == int64(cmd.Process.Pid) {
		return c
	}

	t.Logf("a server on port %d: process %d responds, %d is wanted; %v", port, status.PID, cmd.Process.Pid, err)
	return nil
}
