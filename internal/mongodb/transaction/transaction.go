// Package transaction runs functions in transactions of MongoDB. A function that starts a transaction inside of
// another one joins it. pkg/outbox exports the package to services, with the contracts of its functions.
//
// Order: the writes of a function commit together, and a joined function commits with the outermost one. Blocking:
// Run blocks until the commit has an outcome, or until its context has ended for a second. It repeats the function after transient
// errors for up to two minutes, so the function may run more than once. If the connection was lost, Run ends its session on the server, in a
// goroutine if that takes longer than a second. Cost: one session, and one command for the commit.
package transaction

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/mongodb/unit"
)

// Run runs fn in a transaction that reads majority-committed data. See outbox.Box.Transaction.
func Run(ctx context.Context, client *mongo.Client, fn func(context.Context) error) error {
	return run(ctx, client, readconcern.Majority(), fn)
}

// RunSnapshot is Run, but all reads see the same point in time.
func RunSnapshot(ctx context.Context, client *mongo.Client, fn func(context.Context) error) error {
	return run(ctx, client, readconcern.Snapshot(), fn)
}

// run joins the transaction of ctx, or starts one in the session of ctx or in a new session.
func run(ctx context.Context, client *mongo.Client, rc *readconcern.ReadConcern, fn func(context.Context) error) error {
	sess := mongo.SessionFromContext(ctx)
	work := unitFromContext(ctx)

	switch {
	case sess == nil:
		return inNewSession(ctx, client, rc, fn)
	case sess.Client() != client:
		return fmt.Errorf("transaction: %w", mongo.ErrWrongClient)
	case work != nil:
		return work.runJoined(ctx, fn)
	case sess.TransactionRunning():
		// The starter of this transaction decides about the commit.
		return fn(ctx)
	default:
		_, err := inSession(ctx, sess, rc, fn)
		return err
	}
}

// inNewSession runs fn in a transaction of a new session of the driver.
func inNewSession(
	ctx context.Context, client *mongo.Client, rc *readconcern.ReadConcern, fn func(context.Context) error,
) error {
	sess, err := client.StartSession()
	if err != nil {
		return fmt.Errorf("transaction: starting a session: %w", err)
	}

	return inLentSession(ctx, sess, rc, fn, sess.EndSession)
}

// inLentSession runs fn in a transaction of sess, and gives sess back once the server has no transaction of it any more.
func inLentSession(
	ctx context.Context, sess *mongo.Session, rc *readconcern.ReadConcern, fn func(context.Context) error, giveBack func(ctx context.Context),
) (err error) {
	isOpen := false
	defer func() {
		ctx := context.WithoutCancel(ctx)
		// A session that is idle would keep the locks of its transaction, so its transaction ends before another one begins in it.
		if isOpen {
			go func() {
				defer giveBack(ctx)
				endUntilDone(ctx, sess)
			}()
			return
		}
		// This also aborts the transaction if fn panics.
		giveBack(ctx)
	}()

	isOpen, err = inSession(ctx, sess, rc, fn)
	return err
}

const (
	// maxRepeats bounds the time in which a transaction or its commit is repeated.
	maxRepeats = 120 * time.Second
	// maxAborted is how many attempts in a row may find that the server has aborted the transaction. A new primary does that once.
	maxAborted = 10
	// grace is how long a commit or an abort may continue after the context of the caller has ended. Otherwise the end of a
	// context would leave the outcome of many commits open.
	grace = time.Second
	// maxLife is how long the server keeps a transaction open whose client is gone.
	maxLife = time.Minute

	firstWait, longestWait = 5 * time.Millisecond, 500 * time.Millisecond
)

// inSession runs fn in a transaction of sess, which has none. It repeats the transaction after a transient error, with a growing
// wait, until ctx ends. It explains the error: a commit that failed, a server that has no transactions. isOpen reports whether the
// server may still have the transaction.
func inSession(
	ctx context.Context, sess *mongo.Session, rc *readconcern.ReadConcern, fn func(context.Context) error,
) (isOpen bool, err error) {
	limit := time.Now().Add(maxRepeats)
	aborted := 0 // attempts in a row
	for wait := firstWait; ; wait = min(2*wait, longestWait) {
		if err := ctx.Err(); err != nil {
			return false, err
		}

		isCommit := false
		isCommit, isOpen, err = runOnce(ctx, sess, rc, fn, limit)
		var labeled mongo.LabeledError
		isTransient := errors.As(err, &labeled) && labeled.HasErrorLabel("TransientTransactionError")
		if isOpen || !isTransient || time.Now().Add(wait).After(limit) {
			return isOpen, explainError(ctx, sess, isCommit, isOpen, err)
		}

		// The server aborts a transaction whose operation fails. If fn discards the error, a later operation or the commit fails.
		const noSuchTransaction = 251
		var server mongo.ServerError
		if errors.As(err, &server) && server.HasErrorCode(noSuchTransaction) {
			aborted++
		} else {
			aborted = 0
		}
		if aborted == maxAborted {
			return false, fmt.Errorf("%w: %w", ErrDiscarded, explainError(ctx, sess, isCommit, isOpen, err))
		}

		if sleep(ctx, wait) != nil {
			return false, ctx.Err()
		}
	}
}

// explainError adds to err what it means for the transaction.
func explainError(ctx context.Context, sess *mongo.Session, isCommit, isOpen bool, err error) error {
	if err == nil {
		return nil
	}
	switch explained := explainStandalone(ctx, sess.Client(), err); {
	case !isCommit:
		return explained
	case certainlyAborted(err):
		return fmt.Errorf("committing: nothing of the transaction was stored: %w", explained)
	default:
		return fmt.Errorf("committing: %w: %w", ErrCommitUnknown, explained)
	}
}

// runOnce runs one attempt of a transaction, and commits it. isCommit reports whether err is that of the commit.
func runOnce(
	ctx context.Context, sess *mongo.Session, rc *readconcern.ReadConcern, fn func(context.Context) error, limit time.Time,
) (isCommit, isOpen bool, err error) {
	if err := sess.StartTransaction(pinnedOptions(rc)); err != nil {
		return false, false, err
	}
	err = callOnce(mongo.NewSessionContext(ctx, sess), sess, fn)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return false, !abort(ctx, sess, err), err
	}

	err = commit(ctx, sess, limit)
	if err == nil || certainlyAborted(err) {
		return true, false, err
	}
	// Whether the commit arrives later or never: the transaction ends now.
	return true, !endOnServer(ctx, sess), err
}

// callOnce calls fn for one attempt. It returns an error if the transaction must not commit.
func callOnce(ctx context.Context, sess *mongo.Session, fn func(context.Context) error) error {
	work := &unitOfWork{sess: sess, work: new(unit.Work)}
	defer work.work.End()
	defer trackCallback()()
	if err := fn(context.WithValue(ctx, unitKey{}, work)); err != nil {
		return err
	}
	return work.endForCommit()
}

// commit commits the transaction of sess. It repeats the commit while its outcome is open, with a growing wait, until ctx ends. A
// transaction that stays open on the server locks its writes for a minute.
func commit(ctx context.Context, sess *mongo.Session, limit time.Time) error {
	call, cancel := withGrace(ctx)
	defer cancel()
	for wait := firstWait; ; wait = min(2*wait, longestWait) {
		err := sess.CommitTransaction(call)
		const maxTimeExpired = 50
		var server mongo.ServerError
		isOver := errors.As(err, &server) && server.HasErrorCode(maxTimeExpired) || time.Now().Add(wait).After(limit)
		if err == nil || certainlyAborted(err) || isOver || sleep(ctx, wait) != nil {
			return err
		}
	}
}

// abort aborts the transaction of sess because of err, unless fn has ended it. It returns false if the server may not have got the
// abort.
func abort(ctx context.Context, sess *mongo.Session, err error) bool {
	if !sess.TransactionRunning() {
		return true
	}

	// The driver does not report whether the abort has arrived. If the server has responded to the last command, it has.
	if ctx.Err() == nil && !mongo.IsNetworkError(err) && !mongo.IsTimeout(err) {
		call, cancel := withGrace(ctx)
		defer cancel()
		_ = sess.AbortTransaction(call)
		return call.Err() == nil
	}
	return endOnServer(ctx, sess)
}

// endOnServer makes the server end the transaction of sess, and reports whether the server has confirmed that. It tries for as long
// as the caller may wait.
func endOnServer(ctx context.Context, sess *mongo.Session) bool {
	// With a context that has ended, the driver forgets the transaction and sends nothing.
	ended, cancel := context.WithCancel(context.WithoutCancel(ctx))
	cancel()
	_ = sess.AbortTransaction(ended)

	call, cancel := withGrace(ctx)
	defer cancel()
	call, cancel = context.WithTimeout(call, grace)
	defer cancel()
	return endUntilDone(call, sess)
}

// endUntilDone ends the transactions of sess on the server. It repeats that until the server confirms it, or until the server would
// have ended them.
func endUntilDone(ctx context.Context, sess *mongo.Session) bool {
	ctx, cancel := context.WithTimeout(Outside(ctx), maxLife)
	defer cancel()
	command := bson.D{{Key: "killSessions", Value: bson.A{sess.ID()}}}
	for wait := firstWait; ; wait = min(2*wait, longestWait) {
		err := sess.Client().Database("admin").RunCommand(ctx, command).Err()
		// Any other response of the server will be the same each time.
		isResponse := errors.As(err, new(mongo.ServerError)) && !mongo.IsNetworkError(err) && !mongo.IsTimeout(err)
		if err == nil || isResponse {
			return true
		}
		if sleep(ctx, wait) != nil {
			return false
		}
	}
}

// withGrace returns a context that ends a moment after ctx.
func withGrace(ctx context.Context) (context.Context, context.CancelFunc) {
	later, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(grace, cancel)
		context.AfterFunc(later, func() { timer.Stop() })
	})
	return later, func() { stop(); cancel() }
}

// sleep blocks for about duration, or until ctx ends. Then it returns the error of ctx.
func sleep(ctx context.Context, duration time.Duration) error {
	timer := time.NewTimer(duration/2 + rand.N(duration))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// pinnedOptions returns options that do not depend on the configuration of the client.
func pinnedOptions(rc *readconcern.ReadConcern) *options.TransactionOptionsBuilder {
	return options.Transaction().
		SetReadConcern(rc).
		SetWriteConcern(concern.Majority()).
		SetReadPreference(readpref.Primary())
}

// certainlyAborted reports whether a commit that failed with err certainly did not take place. This is so if
// the server responded, and neither the server nor the driver leaves the outcome open.
func certainlyAborted(err error) bool {
	var failure mongo.CommandError
	if !errors.As(err, &failure) {
		return false
	}

	if failure.HasErrorLabel("TransientTransactionError") {
		return true
	}
	// If the driver finds no connection for its second attempt, it returns the error of the first one with the label
	// RetryableWriteError only. A server that is overloaded has not executed the commit.
	for _, label := range []string{"UnknownTransactionCommitResult", "RetryableWriteError", "RetryableError", "SystemOverloadedError"} {
		if failure.HasErrorLabel(label) {
			return false
		}
	}
	return !mongo.IsNetworkError(failure) && !mongo.IsTimeout(failure)
}

type unitKey struct{}

// unitOfWork is one attempt of a transaction that Run or WithWork has started. A nil unitOfWork stands for a
// transaction that was started elsewhere.
type unitOfWork struct {
	sess *mongo.Session // nil by WithWork
	work *unit.Work
}

// state returns the work of u, or nil for a nil u.
func (u *unitOfWork) state() *unit.Work {
	if u == nil {
		return nil
	}
	return u.work
}

// unitFromContext returns the unit of work that an operation with ctx would belong to. It returns nil if Run
// did not start the transaction of the session of ctx.
func unitFromContext(ctx context.Context) *unitOfWork {
	work, _ := ctx.Value(unitKey{}).(*unitOfWork)
	if work == nil || mongo.SessionFromContext(ctx) != work.sess {
		return nil
	}
	return work
}

// runJoined runs fn as a part of u. If fn fails or panics, u can only roll back.
func (u *unitOfWork) runJoined(ctx context.Context, fn func(context.Context) error) error {
	if err := Check(ctx); err != nil {
		return err
	}
	return u.work.Join(func() error { return fn(ctx) })
}

// endForCommit ends u, and returns an error if u must not commit. It is called after the callback has returned
// nil.
func (u *unitOfWork) endForCommit() error {
	if err := u.work.EndForCommit(); err != nil {
		return err
	}

	// If the callback itself has ended the transaction, the driver would report success.
	if !u.sess.TransactionRunning() {
		return ErrEnded
	}
	return nil
}
