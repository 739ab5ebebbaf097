package reconciler

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

const (
	pollEvery   = time.Second
	maxInFlight = 10_000

	sureEvery  = time.Minute      // between two passes over everything, in case a signal is lost
	probeEvery = 10 * time.Second // the same while a topic is parked, or retries are stuck
	passShare  = 20               // while something is stuck, the pause is at least this many times the last pass, up to sureEvery
	flushEvery = 64               // envelopes between two flushes

	maxKeys      = 10_000  // keys that are queued one by one; with more, everything is scanned
	maxParked    = 100_000 // keys of parked partitions; with more, their topic counts as parked
	keysAtOnce   = 200     // keys of one query
	maxHeldInRow = 32      // consecutive envelopes held, before the server leaves out similar ones
	dueLimit     = 1000    // due retries of one query
	fewInFlight  = 100     // with fewer in flight, the next due retries are read

	firstResponse = 32 // documents of a page while their size is unknown
	pageDocs      = 1000
	pageBytes     = 4 << 20
)

// Sender publishes the waiting envelopes of one term. Each document of the store goes to the Outlet when its turn comes, and the
// result to the ledger.
//
// Order (N15): within an outbox, topic and key, an envelope is published only after all envelopes
// with a lower position, and an envelope that failed before is published alone. Others
// follow each other without waiting for acks. If one of them is returned, its key pauses
// until all envelopes of the key in flight have their results, and then starts again from its first
// envelope. An envelope of the stream waits until the resolved position has passed it, so that no earlier
// event of its key can still come.
//
// Cost: one query of an index every second, and further reads for a reason only. Memory: 10,000 envelopes without their bodies,
// and one page. Run blocks only in Publish.
//
// Wake may be called from any goroutine, at any time.
type Sender struct {
	config Config

	// Tests set these before Run.
	poll        time.Duration // between two queries for due retries
	maxInFlight int           // bounds the envelopes that are published and have no stored outcome yet

	wake chan struct{} // holds one token
	room chan struct{} // holds one token: a publication has ended

	mu             sync.Mutex
	inFlight       map[docID]*flight
	reserved       map[docID]struct{} // Discard removes them
	keyStates      map[orderKey]*keyState
	landedIDs      map[docID]bool        // ended since the page was requested; true stops the rest of the key
	parked         map[string]struct{}   // parked topics
	parkedKeys     map[keyTopic]struct{} // keys whose partition of a topic is parked
	stops          map[orderKey]keyStop
	current        keyTurn // the key that the pass reads
	publishedCount int     // envelopes published so far
	wakeCount      int     // calls of Wake
	work           pendingWork

	// Used only by Run.
	stuck    bool          // many retries are due, and none of them can be published
	lastPass time.Time     // the end of the last pass over everything
	passTook time.Duration // its duration
}

// docID is the id of a document of the store.
type docID = [waiting.IDSize]byte

// orderKey is a key of an outbox. Within it and one topic, envelopes keep their order.
type orderKey struct{ ns, key string }

// keyTopic is a key in one topic.
type keyTopic struct {
	orderKey
	topic string
}

// flight is one published envelope.
type flight struct {
	key     orderKey
	topics  []string // contains allTopics if they are unknown
	partial bool     // the envelope waits for more topics than these
	alone   bool     // nothing else of the key may be published to these topics
	wakes   int      // calls of Wake before it was published
}

// keyState counts the publications in flight of one key.
type keyState struct {
	count  int
	topics map[string]int
	alone  map[string]bool
	broken bool                // a record was rejected or returned: publish nothing until count is 0
	again  bool                // an envelope waits for count to be 0: read the key then
	resume map[string]struct{} // topics to resume then
}

// keyStop is the reason why no envelope of a key can be published to some topics: its first envelope waits
// for its next attempt, or for parked topics.
type keyStop struct {
	until  int64    // time of the next attempt in Unix milliseconds, or untilUnparked
	topics []string // the topics that the envelope waits for
}

// untilUnparked is the end of a stop that only Wake ends.
const untilUnparked = math.MaxInt64

// Outlet publishes envelopes outside of the order of the stream.
type Outlet interface {
	// Publish passes one envelope to the sink, for the given topics, or for all topics that it routes
	// to if topics is nil. It may block for room in the reconciler's share of the memory, and flushes
	// the sink before it does. A [*record.Rejection] means that the envelope is at fault. After any other
	// error nothing was sent. After nil, report is called exactly once, when each target has its
	// result. That may happen within Publish, and report does not block. The sink uses e during the
	// call only.
	Publish(ctx context.Context, e *outboxes.Envelope, topics []string, report func(record.Published)) error
	// Settle is called when the outcomes of these deliveries are majority-committed (N8): exactly once for
	// each delivery that was reported, unless the lease was lost before.
	Settle(tickets []record.Ticket)
	// OpenGate removes one waiting envelope from the gate of a key (N15): an envelope of the stream is sent
	// or dead for that topic.
	OpenGate(ns, topic, key string)
	// Reached returns the resolved position. The stream brings no more events at or before it.
	Reached() string
	// ReachedBySweep returns the position up to which the envelopes of sweeps owe their events to no other topic. It is "" while that is not
	// known.
	ReachedBySweep() string
	// ResumeKey continues deliveries of a key after one of them was rejected or returned. It has no effect
	// if none wait.
	ResumeKey(ns, topic, key string)
	// RouteTopics returns the topics of an envelope that does not list its targets.
	RouteTopics(e *outboxes.Envelope) ([]string, error)
	// TopicsWithHits returns the topics in which a takeover found records.
	TopicsWithHits() []string
	// FindHits returns the places of the records of an envelope that a takeover found at the ends of partitions (N7), and all
	// topics of the envelope. It looks for topics only; nil stands for all topics. The envelope has no payload.
	FindHits(e *outboxes.Envelope) (hits []record.Result, all []string)
	// Flush wakes the sink after a series of Publish calls.
	Flush()
}

// Store reads the waiting envelopes of the slot, as [waiting.Store].
type Store interface {
	Collection() *mongo.Collection
	Each(ctx context.Context, take func(document *waiting.Document) error) error
	EachWithoutPayload(ctx context.Context, topics []string, take func(document *waiting.Document) error) error
	DueKeys(ctx context.Context, near time.Time, skip []string, limit int) ([]waiting.DueKey, error)
	OfOutbox(ctx context.Context, db, coll, before string, limit int) ([]waiting.Document, error)
	ReadPage(ctx context.Context, scan *waiting.Scan, limit int, take func(raw bson.Raw) error) (more bool, err error)
}

// Ledger decides what becomes of an envelope, and stores that, as [ledger.Ledger].
type Ledger interface {
	Decide(document *waiting.Document, topics []string, results []record.Result) *ledger.Outcome
	Rejected(document *waiting.Document, topics []string, why *record.Rejection) *ledger.Outcome
	Add(list ...*ledger.Outcome)
	Store(ctx context.Context, list []*ledger.Outcome) error
}

// Config is the configuration of a Sender. Fields without a default are required.
type Config struct {
	Store   Store
	Ledger  Ledger
	Outlet  Outlet
	Mapping *envelope.Mapping // reads the documents; nil: they are envelopes of the contract
	Now     func() time.Time  // the time of the server, as this process estimates it
	Log     *slog.Logger
	// OnRetry is called with the error of each read that failed and is repeated, and OnRecovered after
	// the next one that succeeds.
	OnRetry     func(error)
	OnRecovered func()
	// Compacted reports whether a topic may keep only the newest record of a key (N10).
	Compacted func(topic string) bool
	// Entered holds envelopes that were stored as waiting, and Ready topics that can be written again.
	Entered *mailbox.Box[*waiting.Entry]
	Ready   *mailbox.Box[string]
}

// New returns a Sender whose first round scans everything. It publishes nothing before Run.
func New(cfg Config) *Sender {
	return &Sender{
		config:      cfg,
		poll:        pollEvery,
		maxInFlight: maxInFlight,
		wake:        make(chan struct{}, 1),
		room:        make(chan struct{}, 1),
		inFlight:    map[docID]*flight{},
		reserved:    map[docID]struct{}{},
		keyStates:   map[orderKey]*keyState{},
		landedIDs:   map[docID]bool{},
		parked:      map[string]struct{}{},
		parkedKeys:  map[keyTopic]struct{}{},
		stops:       map[orderKey]keyStop{},
		lastPass:    time.Now(),
		work: pendingWork{
			scanAll:  true,
			keys:     map[orderKey]struct{}{},
			nextPoll: map[orderKey]struct{}{},
			ahead:    map[orderKey]string{},
		},
	}
}

// Wake requests a pass over everything, because topic can be written again. "" stands for every topic.
// It does not block.
func (x *Sender) Wake(topic string) {
	x.mu.Lock()
	x.work.scanAll = true
	x.wakeCount++
	delete(x.parked, topic)
	if topic == "" {
		clear(x.parked)
	}
	maps.DeleteFunc(x.parkedKeys, func(keyTopic keyTopic, _ struct{}) bool { return topic == "" || keyTopic.topic == topic })
	maps.DeleteFunc(x.stops, func(_ orderKey, stop keyStop) bool { return stop.until == untilUnparked })
	x.mu.Unlock()

	retry.Signal(x.wake)
}

// queueEntered requests scans for envelopes that were just stored, so that they are published at once
// if it is their turn.
func (x *Sender) queueEntered(list []*waiting.Entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, e := range list {
		// These envelopes are scanned for another reason: when the attempt is due, when the topic can
		// be written again, or when the earlier envelope has been sent.
		key := orderKey{e.NS, e.Key}
		if !e.NextAt.IsZero() || x.allParkedLocked(key, e.Pending) || x.waitsForEarlierLocked(e) {
			continue
		}
		x.queueKeyLocked(x.work.keys, key)
	}
}

// allParkedLocked reports whether topics is not empty and all of them are parked for key.
func (x *Sender) allParkedLocked(key orderKey, topics []string) bool {
	for _, t := range topics {
		if !x.isParkedLocked(key, t) {
			return false
		}
	}
	return len(topics) > 0
}

// isParkedLocked reports whether topic, or its partition of key, is parked.
func (x *Sender) isParkedLocked(key orderKey, topic string) bool {
	_, ofTopic := x.parked[topic]
	_, ofKey := x.parkedKeys[keyTopic{key, topic}]
	return ofTopic || ofKey
}

// Run publishes until ctx ends, and returns its cause. It retries failed reads until they succeed. The
// FinishSent of the next owner finishes the envelopes that are in flight then.
func (x *Sender) Run(ctx context.Context) error {
	tick := time.NewTicker(x.poll)
	defer tick.Stop()
	backoff := retry.Reopen.Start()
	due := true

	for {
		err := x.RunRound(ctx, due)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			x.config.OnRetry(err)
			if backoff.Wait(ctx) != nil {
				return context.Cause(ctx)
			}

			// The failed round has lost its reasons.
			x.Wake("")
			due = true
			continue
		}

		if backoff.Attempts() > 0 {
			backoff.Reset()
			x.config.OnRecovered()
		}

		select {
		case <-x.wake:
			due = false
		case <-x.config.Entered.Ready():
			due = false
		case <-x.config.Ready.Ready():
			due = false
		case <-tick.C:
			due = true
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// isPassDue reports whether the time for a pass over everything has come.
func (x *Sender) isPassDue() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	pause := sureEvery
	if x.stuck || len(x.parked)+len(x.parkedKeys) > 0 {
		pause = min(sureEvery, max(probeEvery, passShare*x.passTook))
	}
	return time.Since(x.lastPass) >= pause
}

// RunRound reads and publishes the envelopes for which there is a reason. due is set at each poll. Run calls it.
func (x *Sender) RunRound(ctx context.Context, due bool) error {
	for _, topic := range x.config.Ready.Take(0) {
		x.Wake(topic)
	}
	x.queueEntered(x.config.Entered.Take(0))
	if due && x.isPassDue() {
		x.Wake("")
	}

	// The keys come first: if their set is full, they turn into a scan of everything.
	x.promoteKeys(due)
	all, moreDue := x.takeScanReasons()
	if due {
		x.stuck = false
	}

	if due || moreDue {
		if err := x.publishDue(ctx); err != nil {
			return err
		}
	}
	if err := x.scanKeys(ctx, x.takeQueuedKeys()); err != nil {
		return err
	}
	if !all {
		return nil
	}

	began := time.Now()
	if err := x.scanStore(ctx, scanPass{}); err != nil {
		return err
	}
	x.lastPass, x.passTook = time.Now(), time.Since(began)
	return nil
}

// scanKeys scans only the given keys, by outbox.
func (x *Sender) scanKeys(ctx context.Context, keys map[string][]string) error {
	for ns, list := range keys {
		for part := range slices.Chunk(list, keysAtOnce) {
			if err := x.scanStore(ctx, scanPass{ns: ns, keys: part}); err != nil {
				return err
			}
		}
	}
	return nil
}

// publishDue publishes the envelopes that are due. If one query does not return all of them,
// the next query follows when most of the first have ended. If none of the first can be published,
// retries are stuck: only a pass over everything finds the publishable retries that follow.
func (x *Sender) publishDue(ctx context.Context) error {
	keys, many, err := x.findDueKeys(ctx)
	if err != nil {
		return err
	}

	// Only this count shows whether the scan can publish envelopes.
	x.mu.Lock()
	before := x.publishedCount
	x.mu.Unlock()

	if err := x.scanKeys(ctx, keys); err != nil || !many {
		return err
	}

	x.mu.Lock()
	isMoving := x.publishedCount > before
	x.work.moreDue = isMoving || len(x.inFlight) > 0
	x.stuck = x.stuck || !x.work.moreDue
	// With few flights, the next read must not wait for their ends. But if nothing could be published, only such an end makes a difference.
	readMore := isMoving && len(x.inFlight) < fewInFlight
	x.mu.Unlock()
	if readMore {
		retry.Signal(x.wake)
	}
	return nil
}

// splitRejection returns err as a rejection if the envelope is at fault, and otherwise as other.
func splitRejection(err error) (rejected *record.Rejection, other error) {
	if errors.As(err, &rejected) {
		return rejected, nil
	}
	return nil, err
}
