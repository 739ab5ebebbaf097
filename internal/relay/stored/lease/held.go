package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/resume"
)

// Held is one ownership of the watcher, from the acquisition to the release or loss. Its methods are safe
// for concurrent use. Writes of the owner's fields run one after the other.
type Held struct {
	lease    *Lease
	log      *slog.Logger
	acquired acquisition
	session  *mongo.Session

	ctx    context.Context
	cancel context.CancelCauseFunc

	deadline       atomic.Int64                  // on Lease.clock; past it work is suspended (N2)
	extended       atomic.Pointer[chan struct{}] // closed and replaced when deadline moves
	lastWrite      atomic.Int64                  // on Lease.clock: when the last successful write was sent
	lastCheckpoint atomic.Int64                  // on Lease.clock: when the position was last saved
	yield          chan string                   // 1 slot, the latest
	suspended      atomic.Bool
	lapsedPin      atomic.Pointer[string] // see Lapsed; the turn is required to write it

	troubles sync.Mutex // guards failing, and the order of the reports
	failing  int        // calls of Fenced that are reported to fail again and again

	// turn has one slot. A goroutine that writes the owner's fields occupies it. It guards the fields below.
	turn chan struct{}

	seq           int64           // number of the last write that was sent, successful or not
	sentPosition  resume.Position // latest position of any write, whose outcome may be unknown
	savedPosition resume.Position
	offsets       map[string][]int64
	storedOffsets map[string][]int64 // offsets as last written with success; nil if unknown
	yieldReason   string             // of the last renewal
	mayHaveOrphan bool               // a transaction of the session may be open at the server
}

// acquisition is the document as it was acquired, and the time of the renewal before.
type acquisition struct {
	Document
	renewedBefore time.Time
	releasedEpoch int64
}

// newHeld returns the ownership that the acquisition of contender returned as doc. sent is when the acquisition
// was sent.
func newHeld(ctx context.Context, contender *contender, doc Document, sent time.Duration) *Held {
	lease := contender.lease
	held := &Held{
		lease: lease, acquired: acquisition{doc, contender.renewedBefore, contender.releasedEpoch}, session: contender.session,
		log:   lease.log.With("epoch", doc.Epoch),
		yield: make(chan string, 1),
		turn:  make(chan struct{}, 1),

		seq:           doc.Seq,
		sentPosition:  doc.Position(),
		savedPosition: doc.Position(),
		offsets:       doc.OffsetMap(),
	}
	// The ownership outlasts the context of Acquire: only a release or a loss ends it.
	held.ctx, held.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	extended := make(chan struct{})
	held.extended.Store(&extended)
	held.lastCheckpoint.Store(int64(sent))
	held.lapsedPin.Store(new(string))
	held.extendDeadline(sent)

	lease.cfg.Metrics.Takeovers.Inc()
	lease.cfg.Metrics.LeaseOwner.Set(1)
	lease.cfg.Metrics.LeaseEpoch.Set(float64(doc.Epoch))
	lease.reason.Store(new(string))
	lease.standby.reset()
	held.log.Info("lease acquired", "owner", doc.Owner)

	if pin := doc.Control.Pin; pin != "" && pin != lease.cfg.Node && !lease.cfg.AcquirePaused {
		held.lapsedPin.Store(&pin)
		held.log.Error("ALARM: the watcher is pinned to a node that is not responding; this node runs it", "pin", pin,
			"fix", "start that node, or remove the pin")
	}
	return held
}

// Document returns the watcher document as the acquisition returned it: the token, offsets and senders
// from which the owner continues (N1).
func (h *Held) Document() Document { return h.acquired.Document }

// RenewedBefore returns when an earlier owner renewed the lease last, or zero if there was none. The document has the time of the
// acquisition instead.
func (h *Held) RenewedBefore() time.Time { return h.acquired.renewedBefore }

// AfterRelease reports whether the owner before has released the lease, so that it sends nothing any more.
func (h *Held) AfterRelease() bool { return h.acquired.releasedEpoch == h.acquired.Epoch-1 }

// Context returns a context that ends with cause [ErrLeaseLost] or [ErrReleased]. It carries the values
// of the context of Acquire.
func (h *Held) Context() context.Context { return h.ctx }

// Yield returns a channel that delivers why the owner must drain and Release now, when operators request it.
func (h *Held) Yield() <-chan string { return h.yield }

// LapsedPin returns the node of a pin that this owner disregards because the node is not responding, or "".
func (h *Held) LapsedPin() string { return *h.lapsedPin.Load() }

// Valid reports whether work may be done now. It returns false from the guard time before the expiry
// until a renewal succeeds (N2). It costs one read of the clock.
func (h *Held) Valid() bool { return int64(h.lease.clock()) < h.deadline.Load() }

// validFor returns how long Valid stays true without a renewal.
func (h *Held) validFor() time.Duration { return time.Duration(h.deadline.Load()) - h.lease.clock() }

// extendDeadline moves the deadline after a successful write that was sent at the time sent.
func (h *Held) extendDeadline(sent time.Duration) {
	cfg := &h.lease.cfg
	deadline := sent + cfg.TTL - guardTime(cfg.TTL)
	h.deadline.Store(int64(deadline))
	h.lastWrite.Store(int64(sent))

	fresh := make(chan struct{})
	close(*h.extended.Swap(&fresh))
}

// awaitValid blocks while the work is suspended. It returns an error if the ownership or ctx ends.
func (h *Held) awaitValid(ctx context.Context) error {
	for {
		// Loaded before the check, so that an extension after the check is not missed.
		extended := *h.extended.Load()
		if h.ctx.Err() != nil {
			return context.Cause(h.ctx)
		}
		if h.Valid() {
			return nil
		}

		select {
		case <-extended:
		case <-h.ctx.Done():
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// acquireTurn blocks until this goroutine may write the owner's fields.
func (h *Held) acquireTurn(ctx context.Context) error {
	select {
	case h.turn <- struct{}{}:
	case <-h.ctx.Done():
		return context.Cause(h.ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}

	// The select chooses at random when the ownership has ended as well.
	if h.ctx.Err() != nil {
		<-h.turn
		return context.Cause(h.ctx)
	}
	return nil
}

func (h *Held) releaseTurn() { <-h.turn }

// markLost ends the ownership as lost and returns the cause. The caller must hold the turn.
func (h *Held) markLost(reason error) error {
	err := ErrLeaseLost
	if reason != nil {
		err = fmt.Errorf("%w: %w", ErrLeaseLost, reason)
	}
	h.deadline.Store(math.MinInt64)

	if h.ctx.Err() == nil {
		h.cancel(err)
		h.lease.cfg.Metrics.LeaseLost.Inc()
		h.lease.noteStandingBy("the lease was lost", h.acquired.Epoch)
		h.log.Warn("lease lost; ending all work under it", "error", err)
		h.endSession()
	}
	return context.Cause(h.ctx)
}

// endSession ends the session. The caller holds the turn, so no transaction is under way.
func (h *Held) endSession() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(h.ctx), h.lease.cfg.CallTimeout)
	defer cancel()
	h.session.EndSession(ctx)
}

// ownerFields are the fields that a write of the owner returns.
type ownerFields struct {
	Owner     string    `bson:"owner"`
	Epoch     int64     `bson:"epoch"`
	Seq       int64     `bson:"seq"`
	Control   Control   `bson:"control"`
	RenewedAt time.Time `bson:"renewedAt"`
}

// purpose is the purpose of a write of the owner.
type purpose bool

const (
	renewing  purpose = false
	releasing purpose = true
)

// ownerProjection is the projection that yields ownerFields.
var ownerProjection = mongodb.Fields("owner", "epoch", "seq", "control", "renewedAt")

// writeOwnerFields sets fields and renews the lease, or releases it, in one fenced statement. The caller
// must hold the turn. It returns [ErrLeaseLost] or an error of the server. After an error of the server
// the outcome is unknown. The next write has a higher seq and settles it: a delayed write with a lower
// seq no longer matches.
func (h *Held) writeOwnerFields(ctx context.Context, fields bson.D, purpose purpose) (ownerFields, error) {
	// N1: two writes with different content never have the same seq.
	h.seq++
	lease, seq := h.lease, h.seq

	set := bson.D{{Key: "seq", Value: seq}, {Key: "renewedAt", Value: "$$NOW"}}
	if purpose == releasing {
		set = append(set, bson.E{Key: "expiresAt", Value: "$$NOW"})
		set = append(set, fields...)
		set = append(set, bson.E{Key: "owner", Value: mongodb.Literal(nil)})
	} else {
		set = append(set, bson.E{Key: "expiresAt", Value: op("$add", "$$NOW", lease.cfg.TTL.Milliseconds())})
		set = append(set, fields...)
	}

	// N1: a write sets only the owner's fields, never control. The filter does not compare tokens: after
	// a restore, a different token would look like a lost lease.
	filter := bson.D{
		{Key: "_id", Value: lease.cfg.ID},
		{Key: "owner", Value: h.acquired.Owner},
		{Key: "epoch", Value: h.acquired.Epoch},
		{Key: "seq", Value: bson.D{{Key: "$lt", Value: seq}}},
	}
	opts := options.FindOneAndUpdate().SetReturnDocument(options.After).SetProjection(ownerProjection)

	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), lease.cfg.CallTimeout)
	defer cancel()
	if err := h.supersedeOrphan(call); err != nil {
		return ownerFields{}, err
	}

	firstSent := lease.clock()
	for resent := false; ; resent = true {
		sent := lease.clock()
		var stored ownerFields
		err := lease.coll.FindOneAndUpdate(call, filter, mongo.Pipeline{{{Key: "$set", Value: set}}}, opts).Decode(&stored)
		if errors.Is(err, mongo.ErrNoDocuments) {
			stored, err = h.confirmWrite(call, seq, purpose)
			// If the write was applied, it may have been the first one.
			sent = firstSent
		} else if err != nil && !resent && mayBeApplied(err) {
			continue
		}

		if err != nil {
			return ownerFields{}, err
		}

		if purpose == renewing {
			h.extendDeadline(sent)
		}
		return stored, nil
	}
}

// confirmWrite reads the document after a write matched no document. The server may have applied this
// very write before its response was lost (N1). A higher epoch means that the lease is lost. If the
// document shows neither, it is not up to date yet, and the error is errOutcomeUnknown. The caller must
// hold the turn.
func (h *Held) confirmWrite(ctx context.Context, seq int64, purpose purpose) (ownerFields, error) {
	filter := bson.D{{Key: "_id", Value: h.lease.cfg.ID}}
	var fields ownerFields
	err := h.lease.coll.FindOne(ctx, filter, options.FindOne().SetProjection(ownerProjection)).Decode(&fields)
	if errors.Is(err, mongo.ErrNoDocuments) {
		id := h.lease.cfg.ID
		return ownerFields{}, h.markLost(fmt.Errorf("%w: %s was deleted; run `outrelay recover`", errVanished, id))
	}
	if err != nil {
		return ownerFields{}, fmt.Errorf("reading back the watcher document: %w", err)
	}

	epoch := h.acquired.Epoch
	if fields.Epoch > epoch {
		return ownerFields{}, h.markLost(fmt.Errorf("epoch %d of %s took over from epoch %d", fields.Epoch, fields.Owner, epoch))
	}
	if fields.Epoch < epoch {
		// A restore sets the document back. It counts as a loss if that lasts past the deadline.
		if h.Valid() {
			return ownerFields{}, errOutcomeUnknown
		}
		return ownerFields{}, h.markLost(fmt.Errorf("the document went back from epoch %d to %d", epoch, fields.Epoch))
	}

	expectedOwner := h.acquired.Owner
	if purpose == releasing {
		expectedOwner = ""
	}
	if fields.Owner == expectedOwner && fields.Seq == seq {
		return fields, nil
	}
	if fields.Owner != h.acquired.Owner {
		return ownerFields{}, h.markLost(errors.New("it was released"))
	}
	return ownerFields{}, errOutcomeUnknown
}
