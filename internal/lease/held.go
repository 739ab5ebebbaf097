package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/resume"
)

// Held is one term of ownership. Its methods may be called from any goroutine; writes of the owner's fields follow one
// another, whoever asks for them.
type Held struct {
	lease    *Lease
	log      *slog.Logger
	acquired Document
	session  *mongo.Session

	ctx    context.Context
	cancel context.CancelCauseFunc

	deadline       atomic.Int64 // on Lease.clock; past it work is suspended (N2)
	extended       atomic.Pointer[chan struct{}]
	lastWrite      atomic.Int64 // on Lease.clock: when the last successful write was sent
	lastCheckpoint atomic.Int64 // on Lease.clock: when the position was last written
	source         atomic.Pointer[func() Checkpoint]
	control        chan Control // 1 slot, the latest
	dirty          atomic.Pointer[[]string]
	suspended      atomic.Bool

	turn chan struct{} // 1 slot: held by whoever writes the owner's fields; guards what follows
	// seq is the number of the last write sent, whatever became of it.
	seq           int64
	savedPosition resume.Position
	offsets       map[string][]int64
	storedOffsets map[string][]int64 // offsets as the last write of them that succeeded had them; nil: unknown
	roundTrips    roundTrips
	lastControl   Control // last sent to control
	mayHaveOrphan bool    // a transaction of our session may be open at the server

	lapsedPin atomic.Pointer[string] // see Lapsed; written with the turn taken
}

func newHeld(ctx context.Context, c *contender, doc Document, sent time.Duration) *Held {
	l := c.lease
	h := &Held{
		lease: l, acquired: doc, session: c.session,
		log:           l.log.With("epoch", doc.Epoch),
		control:       make(chan Control, 1),
		turn:          make(chan struct{}, 1),
		seq:           doc.Seq,
		savedPosition: doc.Position(),
		offsets:       doc.OffsetMap(),
	}
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	pulse := make(chan struct{})
	h.extended.Store(&pulse)
	h.lastCheckpoint.Store(int64(sent))
	h.dirty.Store(&doc.Dirty)
	h.extendDeadline(sent)
	l.cfg.Metrics.Takeovers.Inc()
	l.setStanding(Standing{Held: true, Owner: doc.Owner, Node: doc.Node, Epoch: doc.Epoch})
	h.log.Info("lease acquired", "owner", doc.Owner)
	h.lapsedPin.Store(new(string))
	if pin := doc.Control.Pin; pin != "" && pin != l.cfg.Node && !l.cfg.Paused {
		h.lapsedPin.Store(&pin)
		h.log.Error("ALARM: the watcher is pinned to a node that gives no sign of life; running it here", "pin", pin, "advice", "start that node, or end the pin")
	}
	return h
}

// Document is the watcher document as the acquisition returned it: the token, offsets and senders to go on from (N1).
func (h *Held) Document() Document { return h.acquired }

// Context ends with cause [ErrLeaseLost] or [ErrReleased]; it carries the values of the context given to Acquire.
func (h *Held) Context() context.Context { return h.ctx }

// Control delivers what operators ask, latest only, whenever it changes. A Control with Yield set means: drain and
// Release now.
func (h *Held) Control() <-chan Control { return h.control }

// Dirty are the collections with exceptions or scheduled envelopes, as the last write of the document showed them: others than
// the owner add to them (N17). The list is shared; do not change it.
func (h *Held) Dirty() []string { return *h.dirty.Load() }

// Lapsed is the node that the watcher is pinned to while this term disregards the pin, because that node gives no sign of
// life; "" otherwise.
func (h *Held) Lapsed() string { return *h.lapsedPin.Load() }

// Cleaned notes that a fenced transaction took a collection off that list, before the next renewal shows it.
func (h *Held) Cleaned(ns string) {
	rest := slices.DeleteFunc(slices.Clone(h.Dirty()), func(x string) bool { return x == ns })
	h.dirty.Store(&rest)
}

// SetSource names the function that renewals ask for the present checkpoint. It must not block, nor call back into the
// Held.
func (h *Held) SetSource(f func() Checkpoint) { h.source.Store(&f) }

// Valid reports whether work may be done now: it is false from the guard before the expiry until a renewal succeeds (N2).
// It costs a read of the clock.
func (h *Held) Valid() bool { return int64(h.lease.clock()) < h.deadline.Load() }

// validFor is how long Valid stays true without a renewal.
func (h *Held) validFor() time.Duration { return time.Duration(h.deadline.Load()) - h.lease.clock() }

// extendDeadline moves the deadline after a write that was sent at sent and succeeded.
func (h *Held) extendDeadline(sent time.Duration) {
	end := sent + h.lease.cfg.TTL - guardTime(h.lease.cfg.TTL, h.lease.cfg.Guard, h.roundTrips.p99())
	h.deadline.Store(int64(end))
	h.lastWrite.Store(int64(sent))
	fresh := make(chan struct{})
	close(*h.extended.Swap(&fresh))
}

// awaitValid blocks while the work is suspended.
func (h *Held) awaitValid(ctx context.Context) error {
	for {
		pulse := *h.extended.Load()
		switch {
		case h.ctx.Err() != nil:
			return context.Cause(h.ctx)
		case h.Valid():
			return nil
		}
		select {
		case <-pulse:
		case <-h.ctx.Done():
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// acquireTurn waits for the turn to write the owner's fields.
func (h *Held) acquireTurn(ctx context.Context) error {
	select {
	case h.turn <- struct{}{}:
	case <-h.ctx.Done():
		return context.Cause(h.ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if h.ctx.Err() != nil {
		<-h.turn
		return context.Cause(h.ctx)
	}
	return nil
}

func (h *Held) releaseTurn() { <-h.turn }

// markLost ends the term.
func (h *Held) markLost(why error) error {
	err := ErrLeaseLost
	if why != nil {
		err = fmt.Errorf("%w: %w", ErrLeaseLost, why)
	}
	h.deadline.Store(math.MinInt64)
	if h.ctx.Err() == nil {
		h.cancel(err)
		h.lease.cfg.Metrics.LeaseLost.Inc()
		h.lease.setStanding(Standing{Reason: "the lease was lost", Epoch: h.acquired.Epoch})
		h.log.Warn("lease lost; everything begun under it ends", "error", err)
		h.endSession()
	}
	return context.Cause(h.ctx)
}

// endSession gives the session back. It is called with the turn taken, so no transaction is under way.
func (h *Held) endSession() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(h.ctx), h.lease.cfg.CallTimeout)
	defer cancel()
	h.session.EndSession(ctx)
}

// ownerFields is what a write of the owner's fields returns.
type ownerFields struct {
	Owner     string    `bson:"owner"`
	Epoch     int64     `bson:"epoch"`
	Seq       int64     `bson:"seq"`
	Control   Control   `bson:"control"`
	RenewedAt time.Time `bson:"renewedAt"`
	Dirty     []string  `bson:"dirty"`
}

// writeOwnerFields sets fields and renews, or releases, in one fenced statement. Call it with the turn taken. Its errors are
// [ErrLeaseLost] and those of the server, after which the outcome is not known: the next write has a higher seq and
// settles it, because a late one with a lower seq matches nothing any more.
func (h *Held) writeOwnerFields(ctx context.Context, fields bson.D, release bool) (ownerFields, error) {
	h.seq++ // N1: never the same seq for another content
	seq, l := h.seq, h.lease
	set := append(bson.D{
		{Key: "seq", Value: seq},
		{Key: "renewedAt", Value: "$$NOW"},
		{Key: "expiresAt", Value: op("$add", "$$NOW", l.cfg.TTL.Milliseconds())},
	}, fields...)
	if release {
		set[2].Value = "$$NOW"
		set = append(set, bson.E{Key: "owner", Value: lit(nil)})
	}
	// N1: own fields only, never control, and no comparison of tokens: after a restore that would look like a lost lease.
	filter := bson.D{
		{Key: "_id", Value: l.cfg.ID},
		{Key: "owner", Value: h.acquired.Owner},
		{Key: "epoch", Value: h.acquired.Epoch},
		{Key: "seq", Value: bson.D{{Key: "$lt", Value: seq}}},
	}
	opts := options.FindOneAndUpdate().SetReturnDocument(options.After).SetProjection(bson.D{
		{Key: "owner", Value: 1}, {Key: "epoch", Value: 1}, {Key: "seq", Value: 1}, {Key: "control", Value: 1}, {Key: "renewedAt", Value: 1}, {Key: "dirty", Value: 1},
	})
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.cfg.CallTimeout)
	defer cancel()
	if err := h.supersedeOrphan(call); err != nil {
		return ownerFields{}, err
	}
	first := l.clock()
	for again := false; ; again = true {
		sent := l.clock()
		var v ownerFields
		err := l.coll.FindOneAndUpdate(call, filter, mongo.Pipeline{{{Key: "$set", Value: set}}}, opts).Decode(&v)
		switch {
		case errors.Is(err, mongo.ErrNoDocuments):
			v, err = h.confirmWrite(call, seq, release)
			sent = first // the earliest that may have been applied
		case err != nil && !again && mayBeApplied(err):
			continue
		}
		if mongo.IsTimeout(err) || call.Err() != nil && err != nil {
			h.endForeignTransactions(ctx)
		}
		if err != nil {
			return ownerFields{}, err
		}
		h.roundTrips.record(l.clock() - sent)
		h.dirty.Store(&v.Dirty)
		if !release {
			h.extendDeadline(sent)
		}
		return v, nil
	}
}

// confirmWrite reads the document after a write matched nothing: it may be this very write that was applied before its answer
// was lost (N1). Another's epoch is the loss; a document that shows neither is not up to date yet.
func (h *Held) confirmWrite(ctx context.Context, seq int64, released bool) (ownerFields, error) {
	var v ownerFields
	err := h.lease.coll.FindOne(ctx, bson.D{{Key: "_id", Value: h.lease.cfg.ID}}, options.FindOne().SetProjection(bson.D{
		{Key: "owner", Value: 1}, {Key: "epoch", Value: 1}, {Key: "seq", Value: 1}, {Key: "control", Value: 1}, {Key: "renewedAt", Value: 1}, {Key: "dirty", Value: 1},
	})).Decode(&v)
	switch {
	case errors.Is(err, mongo.ErrNoDocuments):
		return ownerFields{}, h.markLost(fmt.Errorf("%w: %s was deleted; run `outrelay recover`", ErrVanished, h.lease.cfg.ID))
	case err != nil:
		return ownerFields{}, fmt.Errorf("reading back the watcher document: %w", err)
	case v.Epoch > h.acquired.Epoch:
		return ownerFields{}, h.markLost(fmt.Errorf("epoch %d of %s took over from epoch %d", v.Epoch, v.Owner, h.acquired.Epoch))
	case v.Epoch < h.acquired.Epoch && !h.Valid():
		// The document went back, as a restore does, and stayed there past our deadline.
		return ownerFields{}, h.markLost(fmt.Errorf("the document went back from epoch %d to %d", h.acquired.Epoch, v.Epoch))
	case v.Epoch < h.acquired.Epoch:
		return ownerFields{}, errOutcomeUnknown
	case v.Owner == h.acquired.Owner && v.Seq == seq && !released, v.Owner == "" && v.Seq == seq && released:
		return v, nil
	case v.Owner != h.acquired.Owner:
		return ownerFields{}, h.markLost(errors.New("it was released"))
	}
	return ownerFields{}, errOutcomeUnknown
}
