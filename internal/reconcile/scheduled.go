package reconcile

import (
	"context"
	"crypto/rand"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	scheduleCache = 20_000
	schedulePoll  = 500 * time.Millisecond

	// lookahead is how far before its time an envelope is taken from the index; more than the time between two looks.
	lookahead = time.Second
	// horizon is how far ahead an envelope of the stream is kept in memory: the index brings the others in time.
	horizon = time.Minute
	// idleRecheck is how often a collection without scheduled envelopes is asked nevertheless: what is appended during a gap of
	// the stream is not told by Saw.
	idleRecheck = 5 * time.Second

	maxScheduledInFlight = 100 * store.MaxClaim // claimed and not finished; 150 bytes each once they are sent
	claimPause           = 20 * time.Millisecond
	smallClaim           = 100 // a claim of fewer is followed by a breath, so that a trickle is not a transaction for each envelope
)

// ScheduledConfig is what a Scheduled works with. What has no default is needed.
type ScheduledConfig struct {
	Client *mongo.Client // for reads
	Fencer store.Fencer
	// Epoch is that of the term: claims of lower ones are taken over. There is one Scheduled for an epoch, because a second
	// one would wait for what the first has claimed.
	Epoch int64
	// Collections are those that may hold scheduled envelopes. It is asked at each look.
	Collections func() []store.Outbox
	Part        slot.Part // the owner's slot; the zero value is all (N28)
	Outlet      Outlet
	// Finisher is that of the same term, of this Scheduled alone. It runs beside.
	Finisher *Finisher
	// Now is the server's time, as well as it is known here. Only the server's own decides.
	Now func() time.Time

	// Poll is how often the index is asked. Defaults to 500 ms.
	Poll time.Duration
	// Cache bounds the envelopes that are remembered before their time. Defaults to 20,000.
	Cache int
	// Log defaults to none.
	Log *slog.Logger
	// Late, if not nil, hears how long after its time an envelope was acked. It must not block.
	Late func(time.Duration)
	// Trouble, if not nil, hears of each read or write that did not succeed and is tried again.
	Trouble func(error)
}

// Scheduled sends envelopes with a due time when it has come, by the server's clock, for one term of ownership. N19
//
// The index on dueAt is the truth, asked every Poll for what is due within a second; what the stream tells by Saw is a hint
// that makes it quicker. Whatever is due is claimed, up to 1,000 at a time in one fenced transaction whose filter decides,
// read back as it was claimed, published, and handed to the Finisher. A claim stays until the envelope is finished or has
// become an exception, because its target cannot be written or refused it; a successor takes it over. Claiming, publishing
// and finishing overlap.
//
// There is no order, neither among scheduled envelopes nor with others of their key. Memory: the cache, up to 100,000
// envelopes on their way by id, and one reply of a read. A collection with scheduled envelopes costs a read each Poll, one
// without them two reads each five seconds.
type Scheduled struct {
	ScheduledConfig
	claim         store.DueClaim
	timers        *timerCache
	claimedGroups chan []claimGroup
	feedWake      chan struct{}   // 1 slot: the index is to be asked now
	room          chan struct{}   // 1 slot: something has landed
	claimSize     *store.PartSize // envelopes of one claim; for the one who claims
	lastRound     time.Duration   // that the latest look at all collections took; for the one who asks the index

	// For the one who publishes.
	view     event.View
	envelope Envelope

	running      atomic.Bool
	indexHasMore atomic.Bool // an index has more of what is due than the heap has room for

	mu          sync.Mutex
	collections map[string]*scheduledCollection
}

// scheduledCollection is what is known of one collection.
type scheduledCollection struct {
	ns       string
	db, name []byte
	coll     *mongo.Collection

	indexEntries atomic.Int64 // entries in the heap that came from the index
	lastHint     atomic.Int64 // when the stream last brought a scheduled envelope, Unix milliseconds
	idle         atomic.Bool  // it holds no scheduled envelope, as far as is known
	passPending  atomic.Bool  // a pass over the index waits until the heap has room

	// For the one who asks the index.
	cursor          *mongo.Cursor
	passBegan       time.Time     // the pass
	passTook        time.Duration // to read it
	passFound       int           // in it
	restedAfterPass bool          // idle after it
	nextPass        time.Time     // when to begin the next one
	checkedAhead    time.Time     // when it was last looked for anything ahead
	failed          bool

	// For the one who reads what is claimed.
	envelopeSize int // bytes of an envelope, as last seen
}

// keepAfterHint is how long a collection is asked because the stream told of it, although it is not on the list.
const keepAfterHint = 5 * time.Minute

// NewScheduled makes it ready for Saw; Run does the work.
func NewScheduled(cfg ScheduledConfig) *Scheduled {
	if cfg.Poll <= 0 {
		cfg.Poll = schedulePoll
	}
	if cfg.Cache <= 0 {
		cfg.Cache = scheduleCache
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Scheduled{
		ScheduledConfig: cfg,
		claim:           store.DueClaim{Token: rand.Text(), Epoch: cfg.Epoch},
		timers:          newTimers(cfg.Cache),
		claimedGroups:   make(chan []claimGroup, 1),
		feedWake:        make(chan struct{}, 1),
		room:            make(chan struct{}, 1),
		claimSize:       store.NewPartSize(store.MaxClaim),
		collections:     map[string]*scheduledCollection{},
	}
	cfg.Finisher.scheduled = s
	return s
}

// Saw hears of a scheduled envelope that the stream brought. It does not block; the id is copied.
func (s *Scheduled) Saw(ns string, id bson.RawValue, dueAt time.Time) {
	c := s.findOrAddCollection(ns)
	if c == nil {
		return
	}
	now := s.Now()
	c.lastHint.Store(now.UnixMilli())
	if c.idle.CompareAndSwap(true, false) {
		signal(s.feedWake)
	}
	if dueAt.Before(now.Add(horizon)) {
		s.timers.addCopy(c, id, dueAt.UnixMilli(), false)
	}
}

// Run works until ctx ends, and returns its cause, or an error that makes going on pointless: the lease is lost.
// What is on its way when it ends stays claimed and is found by the next owner.
func (s *Scheduled) Run(ctx context.Context) error {
	s.running.Store(true)
	defer s.running.Store(false)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.feedTimers(ctx) })
	g.Go(func() error { return s.claimDue(ctx) })
	g.Go(func() error { return s.publishClaimed(ctx) })
	return g.Wait()
}

// hasClaimable implements timetable. What an index has still to bring counts as due.
func (s *Scheduled) hasClaimable() bool {
	if !s.running.Load() {
		return false
	}
	now := s.Now().UnixMilli()
	if s.timers.hasDue(now, maxScheduledInFlight) {
		return true
	}
	return s.indexHasMore.Load() && s.timers.countInFlight() < maxScheduledInFlight
}

func (s *Scheduled) claimToken() string { return s.claim.Token }

func (s *Scheduled) endFlights(flights []uint64) { s.endTimers(flights...) }

var _ dueSource = (*Scheduled)(nil)

// findOrAddCollection is that of a collection, made at the first call; nil for what is no full name.
func (s *Scheduled) findOrAddCollection(ns string) *scheduledCollection {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, ok := s.collections[ns]; ok {
		return c
	}
	db, name, ok := strings.Cut(ns, ".")
	if !ok || db == "" || name == "" {
		return nil
	}
	c := &scheduledCollection{ns: strings.Clone(ns), db: []byte(db), name: []byte(name), coll: s.Client.Database(db).Collection(name)}
	s.collections[c.ns] = c
	return c
}

// watchedCollections are the calendars of the collections of now, and those that the stream has told of: they are on the list before
// the stream's position passes that. What is left out is forgotten.
func (s *Scheduled) watchedCollections() []*scheduledCollection {
	now := map[*scheduledCollection]struct{}{}
	for _, o := range s.Collections() {
		if c := s.findOrAddCollection(o.NS()); c != nil {
			now[c] = struct{}{}
		}
	}
	since := s.Now().Add(-keepAfterHint).UnixMilli()
	s.mu.Lock()
	gone := map[*scheduledCollection]struct{}{}
	out := make([]*scheduledCollection, 0, len(s.collections))
	for ns, c := range s.collections {
		if _, ok := now[c]; ok || c.lastHint.Load() > since {
			out = append(out, c)
			continue
		}
		gone[c] = struct{}{}
		delete(s.collections, ns)
	}
	s.mu.Unlock()
	if len(gone) > 0 {
		s.timers.removeEntries(func(c *scheduledCollection) bool { _, ok := gone[c]; return ok })
		for c := range gone {
			c.closeCursor()
		}
	}
	return out
}

func (s *Scheduled) reportTrouble(err error) {
	if s.Trouble != nil {
		s.Trouble(err)
	}
}
