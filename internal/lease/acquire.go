package lease

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/retry"
)

// Lease contends for one watcher document. One goroutine at a time calls Acquire; the rest may be called from any.
type Lease struct {
	cfg        Config
	coll       *mongo.Collection // majority on the primary
	localColl  *mongo.Collection // the primary's own state
	log        *slog.Logger
	clock      func() time.Duration
	replicaSet string
	holdOff    atomic.Int64 // on clock
	standing   atomic.Pointer[Standing]
	watches    sync.WaitGroup
}

// Standing is how this process stands to the watcher.
type Standing struct {
	Held   bool
	Reason string // why it is not held, for people; "" when held
	Owner  string // owner last seen
	Node   string // node of that owner
	Epoch  int64  // last seen
}

// New checks cfg; it does no I/O.
func New(cfg Config) (*Lease, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	l := &Lease{
		cfg:        cfg,
		coll:       withMajority(cfg.Collection),
		localColl:  withMajority(cfg.Collection).Clone(options.Collection().SetReadConcern(readconcern.Local())),
		log:        cfg.Log.With("watcher", cfg.ID),
		clock:      bootClock,
		replicaSet: cfg.ReplicaSetID,
	}
	l.holdOff.Store(int64(l.clock()))
	l.standing.Store(&Standing{Reason: "not started"})
	return l, nil
}

// Standing is the state last seen; it does no I/O.
func (l *Lease) Standing() Standing { return *l.standing.Load() }

// HoldOff keeps this process from acquiring for d, so that an owner that stepped down does not take over from itself (N6).
func (l *Lease) HoldOff(d time.Duration) { l.holdOff.Store(int64(l.clock() + d)) }

// Acquire blocks until this process owns the watcher. Meanwhile it stands by: it wakes when the owner releases, when the
// lease expires, when an operator changes control, and every half ttl. Errors of the server are waited out; only ctx's
// end and an [ErrCopiedState] are returned. The caller must Release what it gets, or let it expire.
func (l *Lease) Acquire(ctx context.Context) (*Held, error) {
	if err := l.resolveReplicaSet(ctx); err != nil {
		return nil, err
	}
	w := l.newWatch()
	h, err := l.standBy(ctx, w)
	w.stop()
	if err != nil {
		l.watches.Wait()
		return nil, err
	}
	crash.At("after-lease")
	return h, nil
}

// resolveReplicaSet learns the replica set's id once.
func (l *Lease) resolveReplicaSet(ctx context.Context) error {
	if l.replicaSet != "" {
		return nil
	}
	back := retry.Policy{Base: 50 * time.Millisecond, Cap: 2 * time.Second}.Start()
	for {
		call, cancel := context.WithTimeout(ctx, l.cfg.CallTimeout)
		id, err := ReplicaSetID(call, l.coll.Database().Client())
		cancel()
		if err == nil {
			if l.replicaSet = id; id == "" {
				l.log.Warn("the replica set does not tell its id, so copied state cannot be recognised; grant the action replSetGetConfig on the cluster (role clusterMonitor) to the relay's user")
			}
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if back.Attempts() == 0 {
			l.log.Warn("cannot reach MongoDB to stand for the lease", "error", err, "advice", adviceFor(err))
		}
		if err := back.Wait(ctx); err != nil {
			return err
		}
	}
}

// standBy looks at the document, and attempts when it seems free, until it is ours.
func (l *Lease) standBy(ctx context.Context, w *documentWatch) (*Held, error) {
	back := retry.Policy{Base: 50 * time.Millisecond, Cap: min(2*time.Second, l.cfg.TTL)}.Start()
	c, err := l.newContender()
	if err != nil {
		return nil, err
	}
	for ctx.Err() == nil {
		h, wait, err := c.acquireIfFree(ctx)
		var copied *CopiedStateError
		var absent *absentError
		switch {
		case h != nil:
			return h, nil
		case errors.As(err, &copied):
			c.endSession()
			return nil, err
		case errors.As(err, &absent):
			c.endSession()
			return nil, absent.error
		case err != nil && ctx.Err() == nil:
			if back.Attempts() == 0 {
				l.log.Warn("cannot look at the lease", "error", err, "advice", adviceFor(err))
			}
			l.setStanding(Standing{Reason: "MongoDB: " + err.Error()})
			wait = back.Next()
		default:
			back.Reset()
			w.arm()
		}
		w.waitForChange(ctx, wait)
	}
	c.endSession()
	return nil, context.Cause(ctx)
}

// acquireIfFree reads the document and attempts to acquire if nothing seems to be against it. Without an error and without a
// Held it returns how long to wait if nothing wakes us.
func (c *contender) acquireIfFree(ctx context.Context) (*Held, time.Duration, error) {
	l := c.lease
	call, cancel := context.WithTimeout(ctx, l.cfg.CallTimeout)
	defer cancel()
	// Not a majority read: it may be a moment behind, and miss a release that lies before the start of the stream which
	// is to tell of it. What is read here is only a hint; the attempt is judged by the server.
	doc, now, err := readDocument(call, l.localColl, l.cfg.ID)
	if err != nil && !isNotFound(err) {
		return nil, 0, err
	}
	_, ours := c.sentAt[doc.Owner]
	absent := err != nil
	if absent {
		if again, err := l.checkAbsent(call); again > 0 || err != nil {
			return nil, again, err
		}
	}
	if !absent && !ours {
		if wait, why := l.reasonToWait(call, &doc, now); wait > 0 {
			l.setStanding(Standing{Reason: why, Owner: doc.Owner, Node: doc.Node, Epoch: doc.Epoch})
			return nil, min(wait, l.pollInterval()), nil
		}
		if err := l.checkCopiedState(&doc); err != nil {
			return nil, 0, err
		}
		l.endOpenTransactions(ctx, &doc)
	}
	done := func(bool) {}
	if l.cfg.Admit != nil && !ours {
		var wait time.Duration
		if wait, done = l.cfg.Admit(doc.Control.Pin == l.cfg.Node); wait > 0 {
			l.setStanding(Standing{Reason: "other nodes have room for it", Owner: doc.Owner, Node: doc.Node, Epoch: doc.Epoch})
			return nil, wait, nil
		}
	}
	h, err := c.attemptAcquire(ctx, absent)
	done(h != nil)
	return h, randomDelay(l.cfg.TTL), err
}

// removalRecheck is after how long a document is looked for again that was removed a moment ago.
const removalRecheck = 50 * time.Millisecond

// checkAbsent asks whether a document that is not there may be made; again is when to look, if that cannot be told yet. What took
// its place was written in the same transaction: only when a majority of the nodes has it does every reader of Absent see it.
func (l *Lease) checkAbsent(ctx context.Context) (again time.Duration, err error) {
	if l.cfg.Absent == nil {
		return 0, nil
	}
	if _, _, err := readDocument(ctx, l.coll, l.cfg.ID); err == nil {
		return removalRecheck, nil
	} else if !isNotFound(err) {
		return 0, err
	}
	if err := l.cfg.Absent(ctx); err != nil {
		return 0, &absentError{err}
	}
	return 0, nil
}

// absentError is one of Config.Absent.
type absentError struct{ error }

// reasonToWait tells for how long, from now, the document says no to this node, and why; 0 is: attempt.
func (l *Lease) reasonToWait(ctx context.Context, doc *Document, now time.Time) (time.Duration, string) {
	c, left := doc.Control, doc.ExpiresAt.Sub(now)
	if off := time.Duration(l.holdOff.Load()) - l.clock(); off > 0 {
		return max(off, time.Millisecond), "holding off after stepping down"
	}
	switch {
	case l.cfg.Paused:
		if left > 0 {
			return min(left, time.Second), "owned by " + doc.Node
		}
	case c.Paused:
		return l.pollInterval(), "paused by an operator"
	case c.stepsDown(l.cfg.Node, now):
		return c.StepDownUntil.Sub(now), "an operator asked this node to step down until " + c.StepDownUntil.UTC().Format(time.RFC3339)
	case c.Pin != "" && c.Pin != l.cfg.Node:
		why := "pinned to node " + c.Pin
		if l.cfg.NodeAlive != nil && l.cfg.NodeAlive(ctx, c.Pin) {
			return l.pollInterval(), why
		}
		if lapse := left + pinLapse*l.cfg.TTL; lapse > 0 {
			return lapse, why
		}
	case left > 0:
		return left + randomDelay(l.cfg.TTL), "owned by " + doc.Node
	}
	return 0, ""
}

// pollInterval is the backstop of a standby that nothing wakes.
func (l *Lease) pollInterval() time.Duration { return l.cfg.TTL / 2 }

func (l *Lease) setStanding(s Standing) {
	old := l.standing.Swap(&s)
	if s.Epoch > 0 {
		l.cfg.Metrics.LeaseEpoch.Set(float64(s.Epoch))
	}
	if s.Held {
		l.cfg.Metrics.LeaseOwner.Set(1)
		return
	}
	l.cfg.Metrics.LeaseOwner.Set(0)
	l.cfg.Metrics.LeaseSuspended.Set(0)
	if old.Reason != s.Reason || old.Owner != s.Owner {
		l.log.Info("standing by", "reason", s.Reason, "epoch", s.Epoch)
	}
}

// N5.
func (l *Lease) checkCopiedState(doc *Document) error {
	if l.replicaSet != "" && doc.ReplicaSetID != "" && doc.ReplicaSetID != l.replicaSet {
		return &CopiedStateError{ID: l.cfg.ID, Stored: doc.ReplicaSetID, Here: l.replicaSet}
	}
	return nil
}

// endOpenTransactions ends the transactions that may be open over a document whose lease seems free: that of the last owner,
// if it was killed, and those of commands and the API. The server would keep them, and with them the write lock on the
// document, for transactionLifetimeLimitSeconds, a minute; nobody could acquire so long. A user may end its own sessions
// without a privilege; with another user we wait the minute.
func (l *Lease) endOpenTransactions(ctx context.Context, doc *Document) {
	call, cancel := context.WithTimeout(ctx, l.cfg.CallTimeout)
	defer cancel()
	if err := killSessions(call, l.coll.Database().Client(), doc.openSessions()); err != nil {
		l.log.Debug("cannot end the transactions over the document", "error", err)
	}
}

// openSessions are those that may have a transaction open over the document while nobody renews it.
func (d *Document) openSessions() []bson.Raw {
	list := slices.Clone(d.Foreign)
	if raw, ok := d.Session.DocumentOK(); ok && d.Owner != "" {
		list = append(list, raw)
	}
	return list
}

// killSessions aborts the transactions of sessions of our own user. Those whose transaction is over are not harmed.
func killSessions(ctx context.Context, client *mongo.Client, list []bson.Raw) error {
	if len(list) == 0 {
		return nil // an empty list means all sessions of the user
	}
	return client.Database("admin").RunCommand(ctx, bson.D{{Key: "killSessions", Value: list}}).Err()
}

// contender is one call of Acquire. It remembers the name and the moment of each attempt: one whose answer was lost may
// have won, and a later one then finds the lease its own, counted from when the winning attempt was sent.
type contender struct {
	lease   *Lease
	claim   claim
	session *mongo.Session
	sentAt  map[string]time.Duration
}

func (l *Lease) newContender() (*contender, error) {
	s, err := l.coll.Database().Client().StartSession()
	if err != nil {
		return nil, fmt.Errorf("starting session: %w", err)
	}
	return &contender{lease: l, session: s, sentAt: make(map[string]time.Duration), claim: claim{
		node: l.cfg.Node, address: l.cfg.Address, version: l.cfg.Version, instance: uuid.NewString(),
		replicaSet: l.replicaSet, session: s.ID(), ttl: l.cfg.TTL, paused: l.cfg.Paused,
	}}, nil
}

func (c *contender) endSession() {
	ctx, cancel := context.WithTimeout(context.Background(), c.lease.cfg.CallTimeout)
	defer cancel()
	c.session.EndSession(ctx)
}

// ownerName is the node and a random value, so that two acquisitions are never mistaken for one (N1).
func ownerName(node string) string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return node + "/" + hex.EncodeToString(b[:])
}

// attemptAcquire sends the acquisition. Neither a Held nor an error means that the lease is another's, or, unless the document may be
// made, that it has gone.
func (c *contender) attemptAcquire(ctx context.Context, create bool) (*Held, error) {
	l := c.lease
	// A call under way is not cut off: the lease would be ours without our knowing.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.cfg.CallTimeout)
	defer cancel()
	c.claim.owner = ownerName(l.cfg.Node)
	c.sentAt[c.claim.owner] = l.clock()
	var doc Document
	err := l.coll.FindOneAndUpdate(call, bson.D{{Key: "_id", Value: l.cfg.ID}}, c.claim.acquirePipeline(),
		options.FindOneAndUpdate().SetUpsert(create).SetReturnDocument(options.After)).Decode(&doc)
	if err != nil && !mongo.IsDuplicateKeyError(err) && !errors.Is(err, mongo.ErrNoDocuments) {
		return nil, fmt.Errorf("acquiring watcher %s: %w", l.cfg.ID, err)
	}
	if sent, ours := c.sentAt[doc.Owner]; ours {
		return newHeld(ctx, c, doc, sent), nil
	}
	delete(c.sentAt, c.claim.owner) // a definite no, or created by another at the same moment
	return nil, l.checkCopiedState(&doc)
}
