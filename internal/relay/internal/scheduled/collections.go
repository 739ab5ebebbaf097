package scheduled

import (
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

const (
	// horizon is the time before its due time from which an envelope of the stream is a reason to look at the index. A periodic look
	// finds later ones in time.
	horizon = time.Minute
	// keepAfterHint is the time for which a collection is looked at after a call of NoteScheduled although Collections does not return it.
	keepAfterHint = 5 * time.Minute

	// The pause of a collection that cannot be read or claimed. It doubles with each attempt.
	firstPause   = time.Second
	longestPause = 30 * time.Second

	// The wait for an envelope that a service has locked. It doubles up to four seconds.
	lockedRetryDelay = 250 * time.Millisecond
	maxLockedShift   = 4
	// maxLocked bounds the locked envelopes of a collection, because each statement names them.
	maxLocked = 1000
)

// scheduledCollection is the state of one collection. Scheduled.mu guards all fields except ns and coll.
type scheduledCollection struct {
	ns   string
	coll *mongo.Collection

	// first is the due time of its first envelope in Unix milliseconds, as the latest look has found it, and claimAt is when that
	// envelope is to be claimed. A zero claimAt means that no envelope is known.
	first   int64
	claimAt time.Time

	lookAt    time.Time // when its index is looked at next
	looking   bool
	lookAgain bool // the present look may have missed an envelope
	stale     bool // the present look may have found an envelope that was claimed since
	lookedAt  time.Time
	hintedAt  time.Time // when the stream last brought a scheduled envelope

	// size bounds its envelopes in one claim. An outbox that does not end its claims in time makes only its own smaller.
	size *mongodb.PartSize

	pausedUntil               time.Time
	failedLooks, failedClaims int // in a row

	// suspects is the number of its first envelopes among which one prevents a claim, or 0.
	suspects int
	locked   []lockedEnvelope
}

// lockedEnvelope is an envelope that a service changes in a transaction that is open. It delays no other envelope.
type lockedEnvelope struct {
	id    bson.RawValue
	tries int
	retry time.Time
}

// exceptLocked returns the ids of the envelopes that a service has locked.
func (c *scheduledCollection) exceptLocked() []bson.RawValue {
	ids := make([]bson.RawValue, len(c.locked))
	for i := range c.locked {
		ids[i] = c.locked[i].id
	}
	return ids
}

// lockedUntil returns the ids of the locked envelopes that are to be tried again by now, and when the next one is to be.
func (c *scheduledCollection) lockedUntil(now time.Time) (ids []bson.RawValue, next time.Time) {
	for _, e := range c.locked {
		if !now.Before(e.retry) {
			ids = append(ids, e.id)
		} else if next.IsZero() || e.retry.Before(next) {
			next = e.retry
		}
	}
	return ids, next
}

// lock records that a service has locked an envelope.
func (c *scheduledCollection) lock(id bson.RawValue, now time.Time) {
	i := slices.IndexFunc(c.locked, func(e lockedEnvelope) bool { return e.id.Equal(id) })
	if i < 0 {
		c.locked = append(c.locked, lockedEnvelope{id: mongodb.CloneValue(id)})
		i = len(c.locked) - 1
	}
	e := &c.locked[i]
	e.retry = now.Add(lockedRetryDelay << min(e.tries, maxLockedShift))
	e.tries++
}

// unlock records that the locks of envelopes have ended.
func (c *scheduledCollection) unlock(ids []bson.RawValue) {
	c.locked = slices.DeleteFunc(c.locked, func(e lockedEnvelope) bool {
		return slices.ContainsFunc(ids, func(id bson.RawValue) bool { return id.Equal(e.id) })
	})
}

// isPaused reports whether the collection must not be read or claimed now.
func (c *scheduledCollection) isPaused(now time.Time) bool { return now.Before(c.pausedUntil) }

// NoteScheduled notes a scheduled envelope of the stream, which is a reason to look at the index. It does not block.
func (s *Scheduled) NoteScheduled(ns string, dueAt time.Time) {
	now := time.Now()
	s.mu.Lock()
	collection := s.findOrAddLocked(ns)
	collection.hintedAt = now
	// The index is right if the two differ. While claims follow each other, the next regular look finds earlier ones.
	isNews := collection.claimAt.After(now) && dueAt.UnixMilli() < collection.first || collection.claimAt.IsZero()
	if isNews && dueAt.Before(s.Now().Add(horizon)) {
		s.lookSoonLocked(collection)
	}
	s.mu.Unlock()
}

// lookSoonLocked requests a look at the index of collection. Looks at one index keep a small distance.
func (s *Scheduled) lookSoonLocked(collection *scheduledCollection) {
	if collection.looking {
		collection.lookAgain = true
		return
	}
	at := collection.lookedAt.Add(claimPause)

	if at.Before(collection.pausedUntil) {
		at = collection.pausedUntil
	}
	// The first look at a new collection has no time.
	if collection.lookAt.IsZero() || at.Before(collection.lookAt) {
		collection.lookAt = at
		retry.Signal(s.lookWake)
	}
}

// findOrAddLocked returns the state of a collection, and adds it at the first call.
func (s *Scheduled) findOrAddLocked(ns string) *scheduledCollection {
	if collection, ok := s.collections[ns]; ok {
		return collection
	}
	// The caller's text may alias a response.
	coll := outboxes.CollectionOf(s.Client, strings.Clone(ns))
	collection := &scheduledCollection{ns: mongodb.Namespace(coll), coll: coll, size: mongodb.NewPartSize(s.maxClaim)}
	s.collections[collection.ns] = collection
	return collection
}

// refreshCollections adds the collections that Collections returns, and removes those that it does not return any more. Those with a recent call
// of NoteScheduled stay: Collections returns them only later.
func (s *Scheduled) refreshCollections() {
	list := s.Collections()
	now := time.Now()
	s.mu.Lock()
	listed := make(map[string]struct{}, len(list))
	for _, o := range list {
		listed[s.findOrAddLocked(o.NS()).ns] = struct{}{}
	}
	recovered := false
	for ns, c := range s.collections {
		if _, ok := listed[ns]; !ok && now.Sub(c.hintedAt) >= keepAfterHint {
			recovered = s.endFailuresLocked(&c.failedLooks) || recovered
			recovered = s.endFailuresLocked(&c.failedClaims) || recovered
			delete(s.collections, ns)
		}
	}
	s.mu.Unlock()

	if recovered {
		s.OnRecovered()
	}
}

// pauseCollection pauses a collection after a failure, which failed counts, so that it does not delay the others.
func (s *Scheduled) pauseCollection(collection *scheduledCollection, failed *int, err error) {
	s.mu.Lock()
	// The end of a failure of a removed collection would not be noticed.
	if s.collections[collection.ns] != collection {
		s.mu.Unlock()
		return
	}

	if *failed == 0 {
		s.failing++
	}
	*failed++
	collection.pausedUntil = time.Now().Add(min(firstPause<<min(*failed-1, 10), longestPause))
	collection.claimAt, collection.lookAt = time.Time{}, collection.pausedUntil
	s.mu.Unlock()
	s.OnRetry(err)
}

// endFailuresLocked ends a series of failures. It reports whether it was the last one of all collections, and then OnRecovered is to be called.
func (s *Scheduled) endFailuresLocked(failed *int) (last bool) {
	if *failed == 0 {
		return false
	}
	*failed = 0
	s.failing--
	return s.failing == 0
}
