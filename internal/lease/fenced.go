package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
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
	back := retry.Policy{Base: 20 * time.Millisecond, Cap: h.l.cfg.Renew}.Start()
	for yield := true; ; {
		if err := h.awaitValid(ctx); err != nil {
			return err
		}
		err := h.transact(ctx, dirty, yield, fn)
		switch {
		case err == nil:
			return nil
		case h.ctx.Err() != nil:
			return context.Cause(h.ctx)
		case ctx.Err() != nil || !transient(err):
			return err
		}
		if yield && errors.Is(err, errUnknown) {
			h.yieldToForeign(ctx)
			yield = false
		}
		if back.Wait(ctx) != nil {
			return err
		}
	}
}

// transact is one attempt. The turn is given back between two of them, so that renewals come through.
func (h *Held) transact(ctx context.Context, dirty []string, yield bool, fn func(ctx context.Context) error) error {
	if err := h.take(ctx); err != nil {
		return err
	}
	defer h.give()
	within, cancel := context.WithTimeoutCause(ctx, h.left(), errUnknown)
	defer cancel()
	defer context.AfterFunc(h.ctx, cancel)()
	if err := h.session.StartTransaction(options.Transaction().SetReadConcern(readconcern.Majority()).
		SetWriteConcern(writeconcern.Majority()).SetReadPreference(readpref.Primary())); err != nil {
		return fmt.Errorf("starting transaction: %w", err)
	}
	err := h.fence(mongo.NewSessionContext(within, h.session), dirty, yield)
	if err == nil {
		err = fn(mongo.NewSessionContext(within, h.session))
	}
	if err == nil {
		err = h.commit(within)
	}
	if err != nil {
		h.abort(ctx)
	}
	if errors.Is(err, errNotOurs) {
		// Either the snapshot does not show the lease as ours, and only the document itself tells whether it is lost; or a command waits.
		call, cancel := context.WithTimeout(ctx, h.l.cfg.CallTimeout)
		defer cancel()
		if _, err := h.confirm(call, h.seq, false); err != nil {
			return err
		}
		return errUnknown
	}
	return err
}

// fence is the first statement of each transaction (N3). With yield it matches nothing while a command waits for the fence.
func (h *Held) fence(ctx context.Context, dirty []string, yield bool) error {
	call, cancel := context.WithTimeout(ctx, h.l.cfg.CallTimeout)
	defer cancel()
	update := bson.D{{Key: "$inc", Value: bson.D{{Key: "fence", Value: int64(1)}}}}
	if len(dirty) > 0 {
		update = append(update, bson.E{Key: "$addToSet", Value: bson.D{{Key: "dirty", Value: bson.D{{Key: "$each", Value: dirty}}}}})
	}
	filter := bson.D{{Key: "_id", Value: h.l.cfg.ID}, {Key: "owner", Value: h.acq.Owner}, {Key: "epoch", Value: h.acq.Epoch}}
	if yield {
		filter = append(filter, bson.E{Key: "foreign", Value: bson.D{{Key: "$not", Value: bson.D{{Key: "$elemMatch", Value: bson.D{{Key: "$nin", Value: *h.yielded.Load()}}}}}}})
	}
	res, err := h.l.coll.UpdateOne(call, filter, update)
	if err != nil {
		return fmt.Errorf("fencing: %w", err)
	}
	if res.MatchedCount == 0 {
		return errNotOurs
	}
	return nil
}

const (
	yieldFor   = 2 * time.Second // a command that was killed leaves its session in the document
	yieldEvery = 10 * time.Millisecond
)

// yieldToForeign waits until no command is waiting for the fence. A command needs the fences of all slots in one transaction, and the
// server aborts the transaction if one owner is inside a transaction of its own: without pauses of busy owners the command would starve.
// After [yieldFor] the owner goes on, and does not yield to these sessions again.
func (h *Held) yieldToForeign(ctx context.Context) {
	for end := time.Now().Add(yieldFor); ; {
		call, cancel := context.WithTimeout(ctx, h.l.cfg.CallTimeout)
		doc, _, err := read(call, h.l.local, h.l.cfg.ID)
		cancel()
		waits := func(session bson.Raw) bool {
			return !slices.ContainsFunc(*h.yielded.Load(), func(old bson.Raw) bool { return bytes.Equal(old, session) })
		}
		if err != nil || !slices.ContainsFunc(doc.Foreign, waits) {
			return
		}
		if time.Now().After(end) {
			h.yielded.Store(&doc.Foreign)
			return
		}
		if retry.Sleep(ctx, yieldEvery) != nil {
			return
		}
	}
}

// commit repeats the commit while its outcome is unknown and the lease lasts: a commit that is sent again does nothing
// twice.
func (h *Held) commit(ctx context.Context) error {
	for {
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.l.cfg.CallTimeout)
		err := h.session.CommitTransaction(call)
		cancel()
		var le mongo.LabeledError
		unknown := mongo.IsTimeout(err) || errors.As(err, &le) && le.HasErrorLabel("UnknownTransactionCommitResult")
		if err == nil || !unknown || retry.Sleep(ctx, 10*time.Millisecond) != nil {
			return err
		}
	}
}

// abort ends what is left of the transaction. A server that did not hear of it, or hears of the transaction's first statement
// after its end, would keep the write lock on the watcher document for transactionLifetimeLimitSeconds, a minute, and our own
// renewals would wait behind it. So the session outnumbers the transaction; and where a statement that still runs is in the
// way of that, it is ended by name, and the next renewal outnumbers it. All of it together takes less than two calls may.
func (h *Held) abort(ctx context.Context) {
	within := func(do func(context.Context) error) error {
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.l.cfg.CallTimeout/2)
		defer cancel()
		return do(call)
	}
	_ = within(h.session.AbortTransaction) // the driver does not tell what came of it
	h.orphan = true
	err := within(h.endOrphan)
	if err == nil {
		return
	}
	h.log.Debug("cannot outnumber an aborted transaction yet", "error", err)
	err = within(func(call context.Context) error {
		return killSessions(call, h.l.coll.Database().Client(), []bson.Raw{h.session.ID()})
	})
	if err != nil {
		h.log.Debug("cannot end the transaction's session", "error", err)
	}
}

// endOrphan makes the server abort a transaction of our session that may be open there: the server does so when the session
// begins one with a higher number, and refuses later statements of the lower. That other one only reads, so it locks nothing
// that anybody waits for. Call it with the turn taken.
func (h *Held) endOrphan(ctx context.Context) error {
	if !h.orphan {
		return nil
	}
	if err := h.session.StartTransaction(); err != nil {
		return fmt.Errorf("starting transaction: %w", err)
	}
	err := h.l.coll.FindOne(mongo.NewSessionContext(ctx, h.session), bson.D{{Key: "_id", Value: h.l.cfg.ID}}).Err()
	_ = h.session.AbortTransaction(ctx)
	if err != nil && !missing(err) {
		return fmt.Errorf("outnumbering a transaction: %w", err)
	}
	h.orphan = false
	return nil
}

// endForeign ends the transactions of commands and the API that may have kept a renewal waiting. One whose process is alive
// is repeated there.
func (h *Held) endForeign(ctx context.Context) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.l.cfg.CallTimeout)
	defer cancel()
	doc, _, err := read(call, h.l.local, h.l.cfg.ID) // reads do not wait for a transaction
	if err == nil && len(doc.Foreign) > 0 {
		h.log.Warn("the lease could not be renewed: ending the transactions of commands and the API over its document", "transactions", len(doc.Foreign))
		err = killSessions(call, h.l.coll.Database().Client(), doc.Foreign)
	}
	if err != nil {
		h.log.Debug("cannot end others' transactions", "error", err)
	}
}
