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
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/retry"
)

// Fenced runs fn in a transaction that commits only while this process owns the watcher (N3): its first statement writes
// to the watcher document and names owner and epoch, so a take-over and the transaction cannot both happen. (A read would
// fence nothing: under snapshot isolation it does not conflict with the take-over.) The namespaces of dirty are added to
// the document in the same statement (N17).
//
// fn must use the context it is given, with collections of [mongo.SessionFromContext]'s client, and may run several
// times: after an unknown outcome it runs again although it may have been committed, so it must be idempotent. While
// the work is suspended Fenced waits. It returns once the transaction is majority committed, and else fn's error, ctx's
// end, or [ErrLeaseLost].
func (h *Held) Fenced(ctx context.Context, dirty []string, fn func(ctx context.Context) error) error {
	back := retry.Policy{Base: 20 * time.Millisecond, Cap: h.lease.cfg.Renew}.Start()
	for {
		if err := h.awaitValid(ctx); err != nil {
			return err
		}
		err := h.runTransaction(ctx, dirty, fn)
		switch {
		case err == nil:
			return nil
		case h.ctx.Err() != nil:
			return context.Cause(h.ctx)
		case ctx.Err() != nil || !mayRetryTransaction(err):
			return err
		}
		if back.Wait(ctx) != nil {
			return err
		}
	}
}

// runTransaction is one attempt. The turn is given back between two of them, so that renewals come through.
func (h *Held) runTransaction(ctx context.Context, dirty []string, fn func(ctx context.Context) error) error {
	if err := h.acquireTurn(ctx); err != nil {
		return err
	}
	defer h.releaseTurn()
	within, cancel := context.WithTimeoutCause(ctx, h.validFor(), errOutcomeUnknown)
	defer cancel()
	defer context.AfterFunc(h.ctx, cancel)()
	if err := h.session.StartTransaction(options.Transaction().SetReadConcern(readconcern.Majority()).
		SetWriteConcern(writeconcern.Majority()).SetReadPreference(readpref.Primary())); err != nil {
		return fmt.Errorf("starting transaction: %w", err)
	}
	err := h.fenceTransaction(mongo.NewSessionContext(within, h.session), dirty)
	if err == nil {
		err = fn(mongo.NewSessionContext(within, h.session))
	}
	if err == nil {
		err = h.commitTransaction(within)
	}
	if err != nil {
		h.abortTransaction(ctx)
	}
	if errors.Is(err, errNotOwner) {
		// The snapshot does not show the lease as ours; only the document itself tells whether it is lost.
		call, cancel := context.WithTimeout(ctx, h.lease.cfg.CallTimeout)
		defer cancel()
		if _, err := h.confirmWrite(call, h.seq, false); err != nil {
			return err
		}
		return errOutcomeUnknown
	}
	return err
}

// fenceTransaction is the first statement of each transaction (N3).
func (h *Held) fenceTransaction(ctx context.Context, dirty []string) error {
	call, cancel := context.WithTimeout(ctx, h.lease.cfg.CallTimeout)
	defer cancel()
	update := bson.D{{Key: "$inc", Value: bson.D{{Key: "fence", Value: int64(1)}}}}
	if len(dirty) > 0 {
		update = append(update, bson.E{Key: "$addToSet", Value: bson.D{{Key: "dirty", Value: bson.D{{Key: "$each", Value: dirty}}}}})
	}
	res, err := h.lease.coll.UpdateOne(call, bson.D{
		{Key: "_id", Value: h.lease.cfg.ID}, {Key: "owner", Value: h.acquired.Owner}, {Key: "epoch", Value: h.acquired.Epoch},
	}, update)
	if err != nil {
		return fmt.Errorf("fencing: %w", err)
	}
	if res.MatchedCount == 0 {
		return errNotOwner
	}
	return nil
}

// commitTransaction repeats the commit while its outcome is unknown and the lease lasts: a commit that is sent again does nothing
// twice.
func (h *Held) commitTransaction(ctx context.Context) error {
	for {
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.lease.cfg.CallTimeout)
		err := h.session.CommitTransaction(call)
		cancel()
		var le mongo.LabeledError
		unknown := mongo.IsTimeout(err) || errors.As(err, &le) && le.HasErrorLabel("UnknownTransactionCommitResult")
		if err == nil || !unknown || retry.Sleep(ctx, 10*time.Millisecond) != nil {
			return err
		}
	}
}

// abortTransaction ends what is left of the transaction. A server that did not hear of it, or hears of the transaction's first statement
// after its end, would keep the write lock on the watcher document for transactionLifetimeLimitSeconds, a minute, and our own
// renewals would wait behind it. So the session outnumbers the transaction; and where a statement that still runs is in the
// way of that, it is ended by name, and the next renewal outnumbers it. All of it together takes less than two calls may.
func (h *Held) abortTransaction(ctx context.Context) {
	within := func(do func(context.Context) error) error {
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.lease.cfg.CallTimeout/2)
		defer cancel()
		return do(call)
	}
	_ = within(h.session.AbortTransaction) // the driver does not tell what came of it
	h.mayHaveOrphan = true
	err := within(h.supersedeOrphan)
	if err == nil {
		return
	}
	h.log.Debug("cannot outnumber an aborted transaction yet", "error", err)
	err = within(func(call context.Context) error {
		return killSessions(call, h.lease.coll.Database().Client(), []bson.Raw{h.session.ID()})
	})
	if err != nil {
		h.log.Debug("cannot end the transaction's session", "error", err)
	}
}

// supersedeOrphan makes the server abort a transaction of our session that may be open there: the server does so when the session
// begins one with a higher number, and refuses later statements of the lower. That other one only reads, so it locks nothing
// that anybody waits for. Call it with the turn taken.
func (h *Held) supersedeOrphan(ctx context.Context) error {
	if !h.mayHaveOrphan {
		return nil
	}
	if err := h.session.StartTransaction(); err != nil {
		return fmt.Errorf("starting transaction: %w", err)
	}
	err := h.lease.coll.FindOne(mongo.NewSessionContext(ctx, h.session), bson.D{{Key: "_id", Value: h.lease.cfg.ID}}).Err()
	_ = h.session.AbortTransaction(ctx)
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("outnumbering a transaction: %w", err)
	}
	h.mayHaveOrphan = false
	return nil
}

// endForeignTransactions ends the transactions of commands and the API that may have kept a renewal waiting. One whose process is alive
// is repeated there.
func (h *Held) endForeignTransactions(ctx context.Context) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.lease.cfg.CallTimeout)
	defer cancel()
	doc, _, err := readDocument(call, h.lease.localColl, h.lease.cfg.ID) // reads do not wait for a transaction
	if err == nil && len(doc.Foreign) > 0 {
		h.log.Warn("the lease could not be renewed: ending the transactions of commands and the API over its document", "transactions", len(doc.Foreign))
		err = killSessions(call, h.lease.coll.Database().Client(), doc.Foreign)
	}
	if err != nil {
		h.log.Debug("cannot end others' transactions", "error", err)
	}
}
