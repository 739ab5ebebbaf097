package lease

import (
	"context"
	cryptorand "crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// Lease competes for one watcher document. One goroutine at a time may call Acquire. The other methods
// are safe for concurrent use.
type Lease struct {
	cfg        Config
	coll       *mongo.Collection // reads and writes with majority on the primary
	localColl  *mongo.Collection // reads the primary's latest state
	log        *slog.Logger
	clock      func() time.Duration
	replicaSet string
	holdOff    atomic.Int64 // on clock: no attempt before this time
	standby    loggedReasons
	reason     atomic.Pointer[string] // why the lease is not held, for people; "" while it is held
}

// New returns a Lease. It does no I/O.
func New(cfg Config) *Lease {
	cfg = cfg.withDefaults()

	coll := mongodb.Majority(cfg.Collection)
	lease := &Lease{
		cfg:        cfg,
		coll:       coll,
		localColl:  coll.Clone(options.Collection().SetReadConcern(readconcern.Local())),
		log:        cfg.Log.With("watcher", cfg.ID),
		clock:      BootClock,
		replicaSet: cfg.ReplicaSetID,
	}
	lease.holdOff.Store(int64(lease.clock()))
	lease.reason.Store(new(string))
	return lease
}

// HoldOff keeps this process from acquiring for duration, so that an owner that stepped down does not take
// over from itself (N6).
func (l *Lease) HoldOff(duration time.Duration) { l.holdOff.Store(int64(l.clock() + duration)) }

// Acquire blocks until this process owns the watcher. Until then it stands by, and reads the document every
// [pollEvery]. Errors of the server are retried. Acquire returns an error only when ctx ends, when the state was
// copied from another replica set, or when Config.MayCreate fails. The caller must Release the lease or let it expire.
func (l *Lease) Acquire(ctx context.Context) (*Held, error) {
	if err := l.resolveReplicaSet(ctx); err != nil {
		return nil, err
	}

	held, err := l.standBy(ctx)
	if err == nil {
		crash.At("after-lease")
	}
	return held, err
}

// resolveReplicaSet reads the id of the replica set on the first call. It blocks until the server
// responds or ctx ends.
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
			l.replicaSet = id
			if id == "" {
				l.log.Warn("cannot read the id of the replica set; copied state is not detected", "fix",
					"grant the action replSetGetConfig on the cluster (role clusterMonitor) to the relay's user")
			}
			return nil
		}

		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		// One line for each outage: the attempts would fill the log.
		if back.Attempts() == 0 {
			l.log.Warn("cannot reach MongoDB to acquire the lease; trying again", "error", err, "fix", fixFor(err))
		}
		if err := back.Wait(ctx); err != nil {
			return err
		}
	}
}

// pollEvery is the longest time between two reads of a standby. A read by id costs the server less than a change
// stream, which compares every entry of the oplog with the id of the document.
const pollEvery = 100 * time.Millisecond

// standBy reads the document again and again, and attempts to acquire it whenever it seems free. It
// returns when an attempt succeeds or no further attempt can.
func (l *Lease) standBy(ctx context.Context) (*Held, error) {
	back := retry.Policy{Base: 50 * time.Millisecond, Cap: min(2*time.Second, l.cfg.TTL)}.Start()
	contender, err := l.newContender()
	if err != nil {
		return nil, err
	}

	for ctx.Err() == nil {
		held, err := contender.acquireIfFree(ctx)
		if held != nil {
			return held, nil
		}

		if final, ok := errors.AsType[*finalError](err); ok {
			contender.endSession()
			return nil, final.error
		}

		// The random part separates standbys that wait for the same release or expiry.
		wait := pollEvery/2 + rand.N(pollEvery/2)
		// An error at the end of ctx is no problem of the server.
		if err != nil && ctx.Err() == nil {
			if back.Attempts() == 0 {
				l.log.Warn("cannot read the lease; trying again", "error", err, "fix", fixFor(err))
			}
			wait = back.Next()
		} else {
			if err == nil && back.Attempts() > 0 {
				l.log.Info("the lease can be read again")
			}
			back.Reset()
		}
		_ = retry.Sleep(ctx, wait)
	}

	contender.endSession()
	return nil, context.Cause(ctx)
}

// acquireIfFree reads the document and attempts to acquire the lease if nothing seems to prevent it. It
// returns neither a Held nor an error if something does.
func (c *contender) acquireIfFree(ctx context.Context) (*Held, error) {
	lease := c.lease
	call, cancel := context.WithTimeout(ctx, lease.cfg.CallTimeout)
	defer cancel()

	// Not a majority read, which may be a moment behind. The result is only a hint: the server decides the
	// attempt.
	doc, now, err := readDocument(call, lease.localColl, lease.cfg.ID)
	if err != nil && !isNotFound(err) {
		return nil, err
	}
	absent := err != nil
	// The response to an earlier attempt was lost. This process owns the lease already, so nothing
	// below may delay it.
	_, ours := c.sentAt[doc.Owner]

	if absent {
		if exists, err := lease.checkAbsent(call); exists || err != nil {
			return nil, err
		}
	}

	if !absent && !ours {
		c.renewedBefore = doc.RenewedAt
		c.releasedEpoch = -1
		if doc.Owner == "" {
			c.releasedEpoch = doc.Epoch
		}
		c.watchSilence(&doc)
		if reason := c.reasonToWait(call, &doc, now); reason != "" {
			lease.noteStandingBy(reason, doc.Epoch)
			return nil, nil
		}
		if err := lease.checkCopiedState(&doc); err != nil {
			return nil, err
		}
		lease.endOpenTransactions(ctx, &doc)
	}

	done := func(bool) {}
	if lease.cfg.MayAttempt != nil && !ours {
		if done = lease.cfg.MayAttempt(doc.Control.Pin == lease.cfg.Node); done == nil {
			lease.noteStandingBy("other nodes have room for it", doc.Epoch)
			return nil, nil
		}
	}

	held, err := c.attemptAcquire(ctx, absent)
	done(held != nil)
	return held, err
}

// checkAbsent calls Config.MayCreate for a missing document. exists means that a majority read still finds the
// document. Its removal and the documents that replace it were written in one transaction. MayCreate can see those
// documents for certain only when a majority of the nodes has the transaction.
func (l *Lease) checkAbsent(ctx context.Context) (exists bool, err error) {
	if l.cfg.MayCreate == nil {
		return false, nil
	}
	if _, _, err := readDocument(ctx, l.coll, l.cfg.ID); !isNotFound(err) {
		return err == nil, err
	}

	if err := l.cfg.MayCreate(ctx); err != nil {
		return false, &finalError{err}
	}
	return false, nil
}

// silentTTLs is how many ttl an owner may be silent before its lease counts as expired, whatever its expiry says.
const silentTTLs = 3

// silence is how long the document of an owner has not changed, by the monotonic clock of this process.
type silence struct {
	epoch, seq int64
	ttl        time.Duration // the longer one of the owner's and of this process's
	since      time.Time
	lastRead   time.Time
}

// watchSilence measures how long the owner has not renewed its lease. The expiry in the document is a time of the server.
// If the clock of a primary was ahead, it may be hours away although the owner is dead. Fencing keeps an owner from writing
// that is only silent.
func (c *contender) watchSilence(doc *Document) {
	quiet, now := &c.silence, time.Now()
	ttl := max(c.lease.cfg.TTL, time.Duration(doc.TTLMS)*time.Millisecond)
	// What happened between two reads that are far apart is unknown.
	if doc.Epoch != quiet.epoch || doc.Seq != quiet.seq || ttl != quiet.ttl || now.Sub(quiet.lastRead) > c.lease.cfg.TTL {
		*quiet = silence{epoch: doc.Epoch, seq: doc.Seq, ttl: ttl, since: now}
	}
	quiet.lastRead = now
}

// isSilent reports whether the owner has been silent for so many ttl.
func (s *silence) isSilent(ttls int) bool {
	return s.ttl > 0 && s.lastRead.Sub(s.since) >= time.Duration(ttls)*s.ttl
}

// reasonToWait returns why the document keeps this node from acquiring now, or "" if the node may attempt.
func (c *contender) reasonToWait(ctx context.Context, doc *Document, now time.Time) string {
	lease := c.lease
	if lease.clock() < time.Duration(lease.holdOff.Load()) {
		return "holding off after stepping down"
	}

	control := doc.Control
	switch {
	// A command on a stopped watcher ignores the orders of operators, but not a live owner.
	case lease.cfg.AcquirePaused:
	case control.Paused:
		return "paused by an operator"
	case control.stepsDown(lease.cfg.Node, now):
		return "an operator requested a step-down of this node until " + control.StepDownUntil.UTC().Format(time.RFC3339)
	case control.Pin != "" && control.Pin != lease.cfg.Node:
		alive := lease.cfg.NodeAlive != nil && lease.cfg.NodeAlive(ctx, control.Pin)
		// A dead node must not keep its pin for good.
		if alive || doc.ExpiresAt.Add(pinLapse*lease.cfg.TTL).After(now) && !c.silence.isSilent(pinLapse) {
			return "pinned to node " + control.Pin
		}
	}

	switch {
	case !doc.ExpiresAt.After(now):
		return ""
	case !c.silence.isSilent(silentTTLs):
		return "owned by " + doc.Node
	}
	if reported := (silence{epoch: doc.Epoch, seq: doc.Seq}); c.reported != reported {
		c.reported = reported
		lease.log.Warn("taking a lease over whose owner is silent, although its expiry is in the future", "owner", doc.Node,
			"expires", doc.ExpiresAt, "server", now, "silent", c.silence.lastRead.Sub(c.silence.since).Round(time.Millisecond),
			"fix", "check the clocks of the members of the replica set")
	}
	return ""
}

// standbyRepeat is how long the reason for standing by is not logged again. Reasons may alternate while one problem lasts.
const standbyRepeat = time.Minute

// noteStandingBy notes why this process does not hold the lease, and logs each reason once in standbyRepeat.
// epoch is the last epoch that was seen, or 0.
func (l *Lease) noteStandingBy(reason string, epoch int64) {
	l.cfg.Metrics.LeaseOwner.Set(0)
	l.cfg.Metrics.LeaseSuspended.Set(0)
	if epoch > 0 {
		l.cfg.Metrics.LeaseEpoch.Set(float64(epoch))
	}
	l.reason.Store(&reason)
	if l.cfg.OnStandby != nil {
		l.cfg.OnStandby()
	}
	if l.standby.isNew(reason, l.clock()) {
		l.log.Info("standing by", "reason", reason, "epoch", epoch)
	}
}

// checkCopiedState returns an [errCopiedState] if the document was written on another replica set (N5).
func (l *Lease) checkCopiedState(doc *Document) error {
	if err := doc.CheckHome(l.replicaSet); err != nil {
		return &finalError{fmt.Errorf("acquiring watcher %s: %w", l.cfg.ID, err)}
	}
	return nil
}

// CheckHome returns an error if the document was written on a replica set with another id. An id of "" is unknown.
func (d Document) CheckHome(replicaSet string) error {
	if replicaSet == "" || d.ReplicaSetID == "" || d.ReplicaSetID == replicaSet {
		return nil
	}
	return fmt.Errorf("%w (written on %s, this is %s): run `outrelay recover --accept-copy` to accept it here", errCopiedState, d.ReplicaSetID, replicaSet)
}

// endOpenTransactions ends the transactions that may be open on a document whose lease seems free: the
// transaction of the last owner, if it was killed, and transactions of commands and the API. Otherwise
// the server would keep their write lock on the document for transactionLifetimeLimitSeconds, a minute,
// and no node could acquire the lease in that time. A user may end its own sessions without a
// privilege. If the sessions belong to another user, the standby waits for the minute.
func (l *Lease) endOpenTransactions(ctx context.Context, doc *Document) {
	call, cancel := context.WithTimeout(ctx, l.cfg.CallTimeout)
	defer cancel()
	if err := mongodb.KillSessions(call, l.coll.Database().Client(), doc.openSessions()); err != nil {
		l.log.Debug("cannot end the open transactions on the watcher document", "error", err)
	}
}

// openSessions returns the sessions that may have a transaction open on the document after its lease
// expired.
func (d *Document) openSessions() []bson.Raw {
	if raw, ok := d.Session.DocumentOK(); ok && d.Owner != "" {
		return []bson.Raw{raw}
	}
	return nil
}

// contender is the state of one call of Acquire. It records owner name and time of each attempt. If the
// response to a successful attempt was lost, a later attempt finds one of these names in the document.
// The lease then counts from the time at which the successful attempt was sent.
type contender struct {
	lease    *Lease
	session  *mongo.Session
	instance string // of a new document
	sentAt   map[string]time.Duration

	renewedBefore time.Time // when an earlier owner renewed the lease, as last read
	releasedEpoch int64     // of the owner that had released the lease, as last read; -1: it had not
	silence       silence
	reported      silence // the silence that was logged
}

func (l *Lease) newContender() (*contender, error) {
	session, err := l.coll.Database().Client().StartSession()
	if err != nil {
		return nil, fmt.Errorf("starting session: %w", err)
	}
	return &contender{lease: l, session: session, instance: uuid.NewString(), sentAt: map[string]time.Duration{}}, nil
}

func (c *contender) endSession() {
	ctx, cancel := context.WithTimeout(context.Background(), c.lease.cfg.CallTimeout)
	defer cancel()
	c.session.EndSession(ctx)
}

// ownerName returns the node with a random suffix, so that no two acquisitions have the same owner (N1).
func ownerName(node string) string {
	var random [6]byte
	_, _ = cryptorand.Read(random[:]) // never fails
	return node + "/" + hex.EncodeToString(random[:])
}

// attemptAcquire sends one acquisition. If it returns neither a Held nor an error, another process has
// the lease, or the document is missing and create is false.
func (c *contender) attemptAcquire(ctx context.Context, create bool) (*Held, error) {
	lease := c.lease
	// The end of ctx does not interrupt the call. Otherwise this process could own the lease without
	// knowing it.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), lease.cfg.CallTimeout)
	defer cancel()
	owner := ownerName(lease.cfg.Node)
	// N2: the lease counts from before the request, because the server may apply it at any time after
	// this.
	c.sentAt[owner] = lease.clock()

	var doc Document
	err := lease.coll.FindOneAndUpdate(call, bson.D{{Key: "_id", Value: lease.cfg.ID}}, c.acquirePipeline(owner),
		options.FindOneAndUpdate().SetUpsert(create).SetReturnDocument(options.After)).Decode(&doc)
	if err != nil && !mongo.IsDuplicateKeyError(err) && !errors.Is(err, mongo.ErrNoDocuments) {
		return nil, fmt.Errorf("acquiring watcher %s: %w", lease.cfg.ID, err)
	}

	if sent, ours := c.sentAt[doc.Owner]; ours {
		return newHeld(ctx, c, doc, sent), nil
	}

	// This attempt has failed for certain, or another process created the document at the same moment.
	delete(c.sentAt, owner)
	return nil, lease.checkCopiedState(&doc)
}

// loggedReasons has the reasons for standing by that were logged, with their times by the clock of the lease.
type loggedReasons struct {
	mu sync.Mutex
	at map[string]time.Duration
}

// isNew reports whether a reason has to be logged, and notes it.
func (r *loggedReasons) isNew(reason string, now time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if loggedAt, ok := r.at[reason]; ok && now-loggedAt < standbyRepeat {
		return false
	}

	maps.DeleteFunc(r.at, func(_ string, loggedAt time.Duration) bool { return now-loggedAt >= standbyRepeat })
	if r.at == nil {
		r.at = map[string]time.Duration{}
	}
	r.at[reason] = now
	return true
}

// reset makes every reason new.
func (r *loggedReasons) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.at)
}
