package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// ownEnd is less than the lifetime of an abandoned transaction, which is a minute.
const ownEnd = 40 * time.Second

func insertInto(coll *mongo.Collection, doc any) func(context.Context) error {
	return func(ctx context.Context) error {
		c := mongo.SessionFromContext(ctx).Client()
		_, err := c.Database(coll.Database().Name()).Collection("things").InsertOne(ctx, doc)
		return err
	}
}

func countThings(t *testing.T, coll *mongo.Collection) int64 {
	t.Helper()
	n, err := mongodb.Majority(coll.Database().Collection("things")).CountDocuments(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestN03_FencedIsSerialisedWithTheRenewals(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)

	// With a short ttl, a transaction could time out and run again.
	cfg := longConfig(coll, "a")
	cfg.CheckpointEvery = time.Millisecond
	h := mustAcquire(t, newLease(t, cfg))
	var n atomic.Uint32

	// The position moves each time.
	startRunOf(t, h, func() Checkpoint { return Checkpoint{Position: newPosition(n.Add(1))} })
	var wg sync.WaitGroup
	var runs atomic.Int64

	for i := range 4 {
		wg.Go(func() {
			for j := range 10 {
				also := bson.D{{Key: "$max", Value: bson.D{{Key: "beside", Value: fmt.Sprintf("82%d%d", i, j)}}}}
				err := h.Fenced(t.Context(), also, func(ctx context.Context) error {
					runs.Add(1)
					return insertInto(coll, bson.D{{Key: "i", Value: i}, {Key: "j", Value: j}})(ctx)
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}

	wg.Wait()
	d := readStored(t, coll)
	if got := countThings(t, coll); got != 40 || d.Fence != 40 || runs.Load() != 40 {
		t.Errorf("%d documents, fence %d, %d runs, want 40 of each: a renewal interfered", got, d.Fence, runs.Load())
	}
	if d.Beside != "8239" {
		t.Errorf("the further update has set %q, want 8239", d.Beside)
	}
}

func TestN03_FencedIsRejectedAfterASteal(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	b := mustAcquire(t, newLease(t, shortConfig(secondClient(t, coll), "b")))

	// The process was stopped directly after it had checked its deadline.
	h.deadline.Store(1 << 62)
	err := h.Fenced(t.Context(), bson.D{{Key: "$max", Value: bson.D{{Key: "beside", Value: "82"}}}}, insertInto(coll, bson.D{{Key: "zombie", Value: true}}))
	if !errors.Is(err, ErrLeaseLost) || !errors.Is(context.Cause(h.Context()), ErrLeaseLost) {
		t.Errorf("transaction of a deposed owner returned %v, want ErrLeaseLost", err)
	}

	d := readStored(t, coll)
	if countThings(t, coll) != 0 || d.Fence != 0 || d.Beside != "" || d.Owner != b.Document().Owner {
		t.Errorf("the deposed owner wrote: %+v", d)
	}

	_ = b.Release(t.Context(), nil)
}

func TestN03_AStealEndsATransactionUnderWay(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))

	// The owner is killed between its fence and its commit. The server would keep the transaction, with the lock on
	// the document, for a minute.
	if err := h.session.StartTransaction(); err != nil {
		t.Fatal(err)
	}

	ctx := mongo.NewSessionContext(t.Context(), h.session)
	if err := h.fenceTransaction(ctx, nil); err != nil {
		t.Fatal(err)
	}
	if err := insertInto(coll, bson.D{{Key: "zombie", Value: true}})(ctx); err != nil {
		t.Fatal(err)
	}

	start := time.Now()
	b := mustAcquire(t, newLease(t, shortConfig(secondClient(t, coll), "b")))
	if d := time.Since(start); d > ownEnd {
		t.Errorf("the takeover waited %v for a dead owner's transaction", d)
	} else {
		t.Logf("takeover after %v, ttl %v", d, h.lease.cfg.TTL)
	}
	if err := h.session.CommitTransaction(t.Context()); err == nil {
		t.Error("the dead owner's transaction was committed after the takeover")
	}
	if countThings(t, coll) != 0 {
		t.Error("the write of the dead owner was committed")
	}

	_ = b.Release(t.Context(), nil)
}

func TestN03_TransientErrorsAreRetriedAndOthersReturned(t *testing.T) {
	t.Parallel()
	coll, app := newCollection(t)
	h := mustAcquire(t, newLease(t, longConfig(coll, "a")))
	startRun(t, h)
	if err := h.Fenced(t.Context(), nil, insertInto(coll, bson.D{{Key: "n", Value: 0}})); err != nil {
		t.Fatal(err)
	}

	for i, data := range []bson.D{
		{
			{Key: "failCommands", Value: bson.A{"insert"}},
			{Key: "errorCode", Value: 112},
			{Key: "errorLabels", Value: bson.A{"TransientTransactionError"}},
		},
		{{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "closeConnection", Value: true}},
		{{Key: "failCommands", Value: bson.A{"update"}}, {Key: "closeConnection", Value: true}},
	} {
		off := failCommand(t, app, bson.D{{Key: "times", Value: 2}}, data)
		if err := h.Fenced(t.Context(), nil, insertInto(coll, bson.D{{Key: "n", Value: i + 1}})); err != nil {
			t.Errorf("case %d: %v", i, err)
		}
		off()
	}

	mine := errors.New("mine")
	if err := h.Fenced(t.Context(), nil, func(context.Context) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("Fenced returned %v, want the error of fn", err)
	}
	if n := countThings(t, coll); n != 4 {
		t.Errorf("%d documents after 4 transactions", n)
	}

	// The failed transactions left no lock that a renewal would wait for.
	start := time.Now()
	if err := h.Save(t.Context(), Update{}); err != nil || time.Since(start) > ownEnd {
		t.Errorf("the next renewal returned %v after %v", err, time.Since(start))
	}
}

// A transaction that cannot succeed delays everything after it, so an operator has to find its error in the log.
func TestN03_ATransactionThatKeepsFailingIsLogged(t *testing.T) {
	t.Parallel()
	h, _, log := acquireLogged(t)

	runs := 0
	err := h.Fenced(t.Context(), nil, func(context.Context) error {
		if runs++; runs <= warnEvery {
			return mongo.CommandError{Code: 112, Message: "write conflict", Labels: []string{"TransientTransactionError"}}
		}
		return nil
	})
	if n := strings.Count(log.String(), "fails again and again"); err != nil || n != 1 || !strings.Contains(log.String(), "write conflict") {
		t.Errorf("after %d attempts: %v, and this log:\n%s", runs, err, log)
	}
}

// acquireLogged acquires a lease whose attempts at a write follow each other quickly. It returns the name of the client, for fail
// points, and the log.
func acquireLogged(t *testing.T) (h *Held, app string, log *bytes.Buffer) {
	t.Helper()
	coll, app := newCollection(t)
	cfg := longConfig(coll, "a")
	// This is the longest pause between two attempts.
	cfg.Renew = 20 * time.Millisecond
	log = &bytes.Buffer{}
	cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	return mustAcquire(t, newLease(t, cfg)), app, log
}

// A transaction that is too slow is divided. Each part begins with few attempts again, so their number never shows the delay.
func TestN03_ATransactionThatIsTooSlowIsLogged(t *testing.T) {
	t.Parallel()
	h, _, log := acquireLogged(t)

	err := h.Fenced(t.Context(), nil, mongodb.LimitRuns(func(context.Context) error {
		return mongo.CommandError{Code: 112, Message: "write conflict", Labels: []string{"TransientTransactionError"}}
	}))
	if !errors.Is(err, mongodb.ErrSlow) {
		t.Errorf("the transaction ended with %v, want ErrSlow", err)
	}
	if n := strings.Count(log.String(), "does not end in time"); n != 1 || !strings.Contains(log.String(), "write conflict") {
		t.Errorf("%d lines about it in this log:\n%s", n, log)
	}
}

// The offsets of a new topic are saved before its first record. A write that fails again and again holds the topic, although
// renewals succeed.
func TestN09_ASaveThatKeepsFailingIsLogged(t *testing.T) {
	t.Parallel()
	h, app, log := acquireLogged(t)

	off := failCommand(t, app, bson.D{{Key: "times", Value: warnEvery}},
		bson.D{{Key: "failCommands", Value: bson.A{"findAndModify"}}, {Key: "errorCode", Value: 2}})
	defer off()
	err := h.Save(t.Context(), Update{})
	if n := strings.Count(log.String(), "cannot write the watcher document"); err != nil || n != 1 {
		t.Errorf("Save returned %v, and this log:\n%s", err, log)
	}
}

// If an abort fails, for example on a machine where every call times out, the owner still renews. Otherwise it
// would wait a minute for its own transaction.
func TestN03_ARenewalEndsATransactionThatCouldNotBeAborted(t *testing.T) {
	t.Parallel()
	coll, app := newCollection(t)
	h := mustAcquire(t, newLease(t, longConfig(coll, "a")))
	off := failCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"abortTransaction", "killSessions"}}, {Key: "errorCode", Value: 50},
	})
	defer off()
	mine := errors.New("mine")
	err := h.Fenced(t.Context(), nil, func(ctx context.Context) error {
		return errors.Join(insertInto(coll, bson.D{{Key: "n", Value: 0}})(ctx), mine)
	})
	if !errors.Is(err, mine) {
		t.Errorf("Fenced returned %v, want the error of fn", err)
	}

	start := time.Now()
	if err := h.Save(t.Context(), Update{}); err != nil || time.Since(start) > ownEnd {
		t.Errorf("the next renewal returned %v after %v", err, time.Since(start))
	}
	if err := h.Fenced(t.Context(), nil, insertInto(coll, bson.D{{Key: "n", Value: 1}})); err != nil {
		t.Error(err)
	}
	if n := countThings(t, coll); n != 1 {
		t.Errorf("%d documents after one aborted and one committed transaction", n)
	}
}
