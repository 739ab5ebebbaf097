package lease

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
)

// Fenced runs fn in a transaction that commits only while this process owns the watcher (N3). The first
// statement of the transaction writes to the watcher document and names owner and epoch, so a takeover
// and the transaction cannot both succeed. (A read would not fence: under snapshot isolation it does
// not conflict with the takeover.) The same statement makes the update also of the document, unless it is nil.
//
// fn must use the context it receives, with collections of [mongo.SessionFromContext]'s client. If the
// outcome of a transaction is unknown, fn runs again although the transaction may have committed, so fn
// must be idempotent. Fenced blocks while the work is suspended. It returns nil once the transaction is
// majority committed. Otherwise it returns the error of fn, the cause of ctx, or [ErrLeaseLost]. It logs a
// transaction that fails again and again, or that fn gives up because it is too slow.
func (h *Held) Fenced(ctx context.Context, also bson.D, fn func(ctx context.Context) error) error {
	back := retry.Policy{Base: 20 * time.Millisecond, Cap: h.lease.cfg.Renew}.Start()
	began := time.Now()
	logged, last := began, error(nil)
	reported := false
	defer func() {
		if reported {
			h.endTrouble()
		}
	}()
	for {
		if err := h.awaitValid(ctx); err != nil {
			return err
		}

		err := h.runTransaction(ctx, also, fn)
		if err == nil {
			return nil
		}
		// The ownership has ended: its cause explains more than the error of the transaction.
		if h.ctx.Err() != nil {
			return context.Cause(h.ctx)
		}

		if errors.Is(err, mongodb.ErrSlow) {
			h.log.Warn("a transaction of the owner does not end in time; the next one is smaller",
				"attempts", back.Attempts(), "error", last, "fix", fixFor(last))
		}
		if ctx.Err() != nil || !mayRetryTransaction(err) {
			return err
		}
		last = err

		if back.Wait(ctx) != nil {
			return err
		}
		if back.Attempts()%warnEvery == 0 || time.Since(logged) >= warnAfter {
			logged = time.Now()
			h.log.Warn("a transaction of the owner fails again and again", "error", err, "fix", fixFor(err))
			h.reportTrouble(err, began, !reported)
			reported = true
		}
	}
}

// reportTrouble reports that a call of Fenced fails again and again since began. first is true for the first report of
// that call.
func (h *Held) reportTrouble(err error, began time.Time, first bool) {
	h.troubles.Lock()
	defer h.troubles.Unlock()
	if first {
		h.failing++
	}
	if h.lease.cfg.Trouble != nil {
		h.lease.cfg.Trouble(err, began)
	}
}

// endTrouble ends what reportTrouble reported. Another call may still fail.
func (h *Held) endTrouble() {
	h.troubles.Lock()
	defer h.troubles.Unlock()
	h.failing--
	if h.failing == 0 && h.lease.cfg.Trouble != nil {
		h.lease.cfg.Trouble(nil, time.Time{})
	}
}

// An operation that keeps failing is logged each warnEvery attempts, or after warnAfter: one attempt may take seconds.
const (
	warnEvery = 20
	warnAfter = 10 * time.Second
)

// runTransaction makes one attempt. It releases the turn at the end, so that renewals can run between
// two attempts.
func (h *Held) runTransaction(ctx context.Context, also bson.D, fn func(ctx context.Context) error) error {
	if err := h.acquireTurn(ctx); err != nil {
		return err
	}
	defer h.releaseTurn()

	// The next owner could not write the document while the transaction holds its lock, so the
	// transaction ends before the lease does.
	within, cancel := context.WithTimeoutCause(ctx, h.validFor(), errOutcomeUnknown)
	defer cancel()
	defer context.AfterFunc(h.ctx, cancel)()

	if err := h.session.StartTransaction(options.Transaction().SetReadConcern(readconcern.Majority()).
		SetWriteConcern(concern.Majority()).SetReadPreference(readpref.Primary())); err != nil {
		return fmt.Errorf("starting transaction: %w", err)
	}
	err := h.fenceTransaction(mongo.NewSessionContext(within, h.session), also)
	if err == nil {
		err = fn(mongo.NewSessionContext(within, h.session))
	}
	if err == nil {
		err = mongodb.Commit(within, h.session, h.lease.cfg.CallTimeout)
	}
	if err != nil {
		h.abortTransaction(ctx)
	}

	if errors.Is(err, errNotOwner) {
		// The snapshot of the transaction does not show this process as the owner. Only the document itself decides whether the
		// lease is lost.
		call, cancel := context.WithTimeout(ctx, h.lease.cfg.CallTimeout)
		defer cancel()
		if _, err := h.confirmWrite(call, h.seq, renewing); err != nil {
			return err
		}
		return errOutcomeUnknown
	}
	return err
}

// fenceTransaction is the first statement of each transaction (N3). It returns errNotOwner if this
// process does not own the document.
func (h *Held) fenceTransaction(ctx context.Context, also bson.D) error {
	call, cancel := context.WithTimeout(ctx, h.lease.cfg.CallTimeout)
	defer cancel()

	update := append(bson.D{{Key: "$inc", Value: bson.D{{Key: "fence", Value: int64(1)}}}}, also...)

	filter := bson.D{
		{Key: "_id", Value: h.lease.cfg.ID}, {Key: "owner", Value: h.acquired.Owner}, {Key: "epoch", Value: h.acquired.Epoch},
	}
	res, err := h.lease.coll.UpdateOne(call, filter, update)
	if err != nil {
		return fmt.Errorf("fencing: %w", err)
	}
	if res.MatchedCount == 0 {
		return errNotOwner
	}
	return nil
}

// abortTransaction aborts the transaction of the session. If the abort does not reach the server, or the
// first statement of the transaction arrives after the abort, the server keeps the write lock on the
// watcher document for transactionLifetimeLimitSeconds, a minute. The renewals of this process would
// wait for that lock. So abortTransaction supersedes the transaction with a later one of the session. If
// a statement that still runs prevents this, it kills the session's operations, and the next renewal
// supersedes the transaction. Everything together takes less time than two calls may.
func (h *Held) abortTransaction(ctx context.Context) {
	withTimeout := func(do func(context.Context) error) error {
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.lease.cfg.CallTimeout/2)
		defer cancel()
		return do(call)
	}

	// The driver does not return whether the abort succeeded.
	_ = withTimeout(h.session.AbortTransaction)
	h.mayHaveOrphan = true
	err := withTimeout(h.supersedeOrphan)
	if err == nil {
		return
	}

	h.log.Debug("cannot supersede an aborted transaction yet", "error", err)
	err = withTimeout(func(call context.Context) error {
		return mongodb.KillSessions(call, h.lease.coll.Database().Client(), []bson.Raw{h.session.ID()})
	})
	if err != nil {
		h.log.Debug("cannot end the session of the transaction", "error", err)
	}
}

// supersedeOrphan makes the server abort a transaction of this session that may still be open. When the
// session starts a transaction with a higher number, the server aborts the lower one and rejects its
// later statements. The new transaction only reads, so it takes no lock that blocks other writers. The
// caller must hold the turn.
func (h *Held) supersedeOrphan(ctx context.Context) error {
	if !h.mayHaveOrphan {
		return nil
	}
	if err := h.session.StartTransaction(); err != nil {
		return fmt.Errorf("starting transaction: %w", err)
	}

	read := h.lease.coll.FindOne(mongo.NewSessionContext(ctx, h.session), bson.D{{Key: "_id", Value: h.lease.cfg.ID}})
	err := read.Err()
	// The read alone ends the earlier transaction. The server ends this one too if its abort is lost.
	_ = h.session.AbortTransaction(ctx)
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("ending the transaction of an earlier attempt: %w", err)
	}

	h.mayHaveOrphan = false
	return nil
}
