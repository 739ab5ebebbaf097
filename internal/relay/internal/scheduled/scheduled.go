package scheduled

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

const (
	scheduleCache = 30_000 // envelopes that are cached before they are due
	schedulePoll  = 500 * time.Millisecond

	// horizon is the time by which an envelope of the stream is cached before it is due. The index
	// brings later ones in time.
	horizon = time.Minute

	maxScheduledInFlight = 50 * maxClaim // claimed and not finished; half a kilobyte each

	// A claim of fewer than smallClaim envelopes is followed by claimPause, so that a trickle does not
	// cost one transaction for each envelope.
	claimPause = 20 * time.Millisecond
	smallClaim = 100
)

// Config is the configuration of a Scheduled. Fields without a default are required.
type Config struct {
	Client    *mongo.Client // for reads; Fencer has the client of the transactions
	Fencer    mongodb.Fencer
	Claims    *mongo.Collection
	WatcherID string // id of the watcher document
	Outlet    Outlet // sends the envelopes that were claimed
	Ledger    *ledger.Ledger
	Mapping   *envelope.Mapping // reads the documents; nil: they are envelopes of the contract
	Now       func() time.Time  // the time of the server, as this process estimates it
	Log       *slog.Logger
	// OnRetry is called with the error of each read or write that failed and is repeated, and OnRecovered when no
	// collection has a failed one.
	OnRetry     func(error)
	OnRecovered func()
	// Collections returns the collections that may hold scheduled envelopes. It is called at each look
	// at the indexes.
	Collections func() []outboxes.Outbox
	Slot        slot.Range // the owner's slot; the zero value is all (N28)
	// Mark keeps the envelopes in their outboxes, without a due time.
	Mark bool

	// Poll is the time between two looks at the indexes. Defaults to 500 ms.
	Poll time.Duration
	// OnSent is called with the time between the due time and the ack of an envelope. It must not block.
	OnSent func(time.Duration)
}

// Scheduled sends envelopes with a due time when they are due by the clock of the server, for one term of
// ownership. N19
//
// The index on dueAt is authoritative. Scheduled reads it every Poll for envelopes that are due within five
// seconds. Calls of NoteScheduled are hints that only make it faster. Scheduled claims envelopes half a second before they are due, or
// up to three seconds if many are due at the same time, up to 1,000 at a time: one fenced transaction takes them from the outbox into one document, the claim, and decides
// against a cancellation. The owner that claimed them sends them at their due times without another read, and then removes the claim.
// A later owner finds the claim. An envelope that cannot be sent at once moves to the waiting envelopes, and is like any other from there.
//
// There is no order among scheduled envelopes, nor with others of their key. Memory: the cache, the ids
// of up to 50,000 envelopes in flight, and 16 MiB of them. A collection costs a read each Poll.
type Scheduled struct {
	Config
	timers    *timerCache
	claimed   chan []dueEnvelope
	recovered []dueEnvelope     // claimed by earlier owners; from Recover to sendClaimed
	bytes     atomic.Int64      // of the claimed envelopes that have no outcome
	feedWake  chan struct{}     // holds one token: read the indexes now
	room      chan struct{}     // holds one token: an envelope in flight has ended
	claimSize *mongodb.PartSize // envelopes of one claim; used only by claimDue
	ahead     time.Duration     // how long before its due time an envelope is claimed; used only by claimDue
	claimCost time.Duration     // of one envelope; used only by claimDue
	lastRound time.Duration     // duration of the latest look at all collections; used only by feedTimers

	positions atomic.Uint32 // distinguishes the positions of envelopes that were claimed in the same second

	began time.Time // pauses are measured from it, because the clock of this machine may be set

	mu          sync.Mutex
	collections map[string]*scheduledCollection
	failing     map[collectionStep]int // failed attempts in a row
}

// scheduledCollection is the state of one collection.
type scheduledCollection struct {
	ns       string
	db, name []byte
	coll     *mongo.Collection

	indexEntries atomic.Int64 // entries in the heap that came from the index
	lastHint     atomic.Int64 // when the stream last brought a scheduled envelope, in Unix milliseconds
	passPending  atomic.Bool  // a pass over the index waits until the heap has room
	pausedUntil  atomic.Int64 // it cannot be read or claimed before; as the time since Scheduled.began

	// Used only by feedTimers.
	cursor    *mongo.Cursor
	passBegan time.Time
	passTook  time.Duration // time spent reading in the pass
	nextPass  time.Time     // when the next pass begins
}

// The pause of a collection that cannot be read or claimed. It doubles with each attempt.
const (
	firstPause   = time.Second
	longestPause = 30 * time.Second
)

// keepAfterHint is the time for which a collection is read after a call of NoteScheduled although Collections does
// not return it.
const keepAfterHint = 5 * time.Minute

// New returns a Scheduled. NoteScheduled may be called at once, and nothing is sent before Run.
func New(cfg Config) *Scheduled {
	if cfg.Poll <= 0 {
		cfg.Poll = schedulePoll
	}

	return &Scheduled{
		Config:      cfg,
		timers:      newTimers(scheduleCache),
		claimed:     make(chan []dueEnvelope),
		feedWake:    make(chan struct{}, 1),
		room:        make(chan struct{}, 1),
		claimSize:   mongodb.NewPartSize(maxClaim),
		claimCost:   firstClaimCost,
		began:       time.Now(),
		collections: map[string]*scheduledCollection{},
		failing:     map[collectionStep]int{},
	}
}

// NoteScheduled adds a scheduled envelope of the stream as a hint. It copies the id and does not block.
func (s *Scheduled) NoteScheduled(ns string, id bson.RawValue, dueAt time.Time) {
	collection := s.findOrAddCollection(ns)
	now := s.Now()
	collection.lastHint.Store(now.UnixMilli())
	if dueAt.Before(now.Add(horizon)) && !s.isPaused(collection) {
		s.timers.addCopy(collection, id, dueAt.UnixMilli(), false)
	}
}

// Run works until ctx ends, and returns its cause. It returns early with an error if the lease is lost
// or the outlet fails. Envelopes that were claimed are in the store, where the next owner finds
// them.
func (s *Scheduled) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.feedTimers(ctx) })
	group.Go(func() error { return s.claimDue(ctx) })
	group.Go(func() error { return s.sendClaimed(ctx) })
	return group.Wait()
}

// findOrAddCollection returns the state of a collection, and adds it at the first call.
func (s *Scheduled) findOrAddCollection(ns string) *scheduledCollection {
	s.mu.Lock()
	defer s.mu.Unlock()
	if collection, ok := s.collections[ns]; ok {
		return collection
	}

	// The caller's text may alias a reply.
	coll := outboxes.CollectionOf(s.Client, strings.Clone(ns))
	collection := &scheduledCollection{
		ns:   mongodb.Namespace(coll),
		db:   []byte(coll.Database().Name()),
		name: []byte(coll.Name()),
		coll: coll,
	}
	s.collections[collection.ns] = collection
	return collection
}

// watchedCollections returns the state of the collections that Collections returns, and of those with a
// recent call of NoteScheduled, which Collections returns before the stream's position passes their envelopes. It
// removes all other collections with their entries in the heap.
func (s *Scheduled) watchedCollections() []*scheduledCollection {
	listed := map[*scheduledCollection]struct{}{}
	for _, o := range s.Collections() {
		listed[s.findOrAddCollection(o.NS())] = struct{}{}
	}

	since := s.Now().Add(-keepAfterHint).UnixMilli()
	s.mu.Lock()
	gone := map[*scheduledCollection]struct{}{}
	out := make([]*scheduledCollection, 0, len(s.collections))
	for ns, c := range s.collections {
		if _, ok := listed[c]; ok || c.lastHint.Load() > since {
			out = append(out, c)
			continue
		}
		gone[c] = struct{}{}
		delete(s.collections, ns)
	}
	s.mu.Unlock()
	for c := range gone {
		s.reportSuccess(collectionStep{c, true})
		s.reportSuccess(collectionStep{c, false})
	}

	// The locks of the timers and of the collections are never held together.
	if len(gone) > 0 {
		s.timers.removeEntries(func(collection *scheduledCollection) bool { _, ok := gone[collection]; return ok })
		for c := range gone {
			c.closeCursor()
		}
	}
	return out
}

// collectionStep is what failed for a collection: the claim, or the read of its index.
type collectionStep struct {
	collection *scheduledCollection
	claim      bool
}

// pauseCollection pauses a collection that cannot be read or claimed, so that it does not delay the others. Its index brings its
// envelopes again.
func (s *Scheduled) pauseCollection(step collectionStep, err error) {
	s.mu.Lock()
	s.failing[step]++
	pause := min(firstPause<<min(s.failing[step]-1, 10), longestPause)
	s.mu.Unlock()

	collection := step.collection
	collection.pausedUntil.Store(int64(time.Since(s.began) + pause))
	s.timers.removeEntries(func(scheduledCollection *scheduledCollection) bool { return scheduledCollection == collection })
	s.OnRetry(err)
}

func (s *Scheduled) isPaused(collection *scheduledCollection) bool {
	return time.Since(s.began) < time.Duration(collection.pausedUntil.Load())
}

// reportSuccess records that a collection can be read or claimed, or is gone.
func (s *Scheduled) reportSuccess(step collectionStep) {
	s.mu.Lock()
	_, failed := s.failing[step]
	delete(s.failing, step)
	last := failed && len(s.failing) == 0
	s.mu.Unlock()

	if last {
		s.OnRecovered()
	}
}
