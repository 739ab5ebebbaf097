package scheduled

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

const (
	// claimAhead is how long before its due time an envelope may be claimed. So many envelopes that are due at one moment are in memory
	// when it comes. A service can no longer cancel or reschedule a claimed envelope.
	claimAhead = time.Second
	// claimDelay is the part of claimAhead by which a claim waits for further envelopes: it begins when the first one is due within
	// seven eighths of claimAhead. Otherwise a trickle of envelopes would cost one transaction each.
	claimDelay = 8

	defaultPoll = 500 * time.Millisecond

	// maxClaim is how many scheduled envelopes one fenced transaction claims at most (N3), and maxClaimBytes how many bytes of them, unless
	// one is larger. It is larger than other transactions, because the fixed cost of a transaction is that of several hundred envelopes.
	// While a claim is written, its bytes are several times in memory.
	maxClaim      = 2 * mongodb.MaxDocuments
	maxClaimBytes = 4 << 20
	// claimCollections bounds the statements of one transaction, because the lease cannot be renewed while it runs.
	claimCollections = 100

	maxScheduledInFlight = 50_000 // claimed and not finished; half a kilobyte each
	// maxClaimedBytes bounds the claimed envelopes in memory that have no outcome. One claim more may be added.
	maxClaimedBytes = 2 * mongodb.MaxBytes

	// A claim of fewer than smallClaim envelopes is followed by claimPause, so that a trickle at short notice does not cost one
	// transaction for each envelope.
	claimPause = 20 * time.Millisecond
	smallClaim = 100
)

// Config is the configuration of a Scheduled. Fields without a default are required.
type Config struct {
	Client    *mongo.Client // for reads; Fencer has the client of the transactions
	Fencer    mongodb.Fencer
	Claims    *mongo.Collection
	Watchers  *mongo.Collection
	WatcherID string // id of the watcher document
	Outlet    Outlet // sends the envelopes that were claimed
	Ledger    *ledger.Ledger
	Mapping   *envelope.Mapping // reads the documents; nil: they are envelopes of the contract
	Now       func() time.Time  // the time of the server, as this process estimates it; it decides nothing about due times
	Log       *slog.Logger
	// OnRetry is called with the error of each read or write that failed and is repeated, and OnRecovered when no
	// collection has a failed one.
	OnRetry     func(error)
	OnRecovered func()
	// Collections returns the collections that may hold scheduled envelopes. It is called every Poll.
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
// The index on dueAt is authoritative. Scheduled looks every Poll for the envelope of each collection that is due first. Calls of
// NoteScheduled are hints that only make it faster. It claims the envelopes that are due within a second, up to 2,000 at a time: one
// fenced transaction takes them from the outbox into one document, the claim, and decides against a cancellation. The owner that claimed
// them sends them at their due times without another read, and then removes the claim. A later owner finds the claim. An envelope that
// cannot be sent at once moves to the waiting envelopes, and is like any other from there.
//
// There is no order among scheduled envelopes, nor with others of their key. Memory: 16 MiB of envelopes and one claim, at most 50,000 of
// them. A collection costs a read of one document each Poll.
type Scheduled struct {
	Config
	held  held
	out   outgoing      // used only by sendClaimed
	wake  chan struct{} // holds one token: the first envelope of a collection has changed
	room  chan struct{} // holds one token: an envelope in flight has ended
	count atomic.Int64  // claimed envelopes that have no outcome
	bytes atomic.Int64  // of these

	maxClaim int           // tests set this and ahead before Run
	ahead    time.Duration // claimAhead
	lookWake chan struct{} // holds one token: look at an index now

	positions atomic.Uint32 // distinguishes the positions of envelopes that were claimed in the same second

	mu          sync.Mutex
	collections map[string]*scheduledCollection
	failing     int           // series of failures that have not ended
	lookTook    time.Duration // mean time of a look
}

// New returns a Scheduled. NoteScheduled may be called at once, and nothing is sent before Run.
func New(cfg Config) *Scheduled {
	if cfg.Poll <= 0 {
		cfg.Poll = defaultPoll
	}

	return &Scheduled{
		Config:      cfg,
		held:        held{wake: make(chan struct{}, 1)},
		wake:        make(chan struct{}, 1),
		room:        make(chan struct{}, 1),
		lookWake:    make(chan struct{}, 1),
		maxClaim:    maxClaim,
		ahead:       claimAhead,
		collections: map[string]*scheduledCollection{},
	}
}

// Run works until ctx ends, and returns its cause. It returns early with an error if the lease is lost
// or the outlet fails. Envelopes that were claimed are in the store, where the next owner finds
// them.
func (s *Scheduled) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.lookForDue(ctx) })
	group.Go(func() error { return s.claimDue(ctx) })
	group.Go(func() error { return s.sendClaimed(ctx) })
	return group.Wait()
}
