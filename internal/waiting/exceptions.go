package waiting

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

const (
	pollEvery   = 500 * time.Millisecond
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

	firstReply = 32 // documents of a page while their size is unknown
	pageDocs   = 1000
	pageBytes  = 4 << 20
)

// Exceptions publishes the retried, blocked and parked envelopes of one term. Each envelope with a
// state in the dirty collections of a watcher goes to the Outlet when its turn comes, and its fate to
// the Finisher.
//
// Order (N15): within a collection, topic and key, an envelope is published only after all envelopes
// with a lower position, and an envelope that failed before is published alone. Blocked and parked
// envelopes follow each other without waiting for acks. If one of them is returned, its key pauses
// until all envelopes of the key in flight have been answered, and then starts again from its first
// envelope. An exception of the stream waits until the watermark has passed it, so that no earlier
// event of its key can still come.
//
// Cost: one indexed query for each dirty collection every 500 ms, and further reads for a reason only.
// While Collections is empty there are no queries. Memory: 10,000 envelopes without their bodies,
// and one page. Run blocks only in Publish.
//
// Wake and QueueWritten may be called from any goroutine, at any time.
type Exceptions struct {
	config Config

	// Tests set these before Run.
	poll        time.Duration // between two queries for due retries
	maxInFlight int           // bounds the envelopes that are published and have no written fate yet

	wake chan struct{} // holds one token
	room chan struct{} // holds one token: a publication has ended

	mu             sync.Mutex
	inFlight       map[string]*flight
	keyStates      map[orderKey]*keyState
	landedIDs      map[string]bool       // ended since the page was requested; true stops the rest of the key
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

// orderKey is a key of a collection. Within it and one topic, envelopes keep their order.
type orderKey struct{ ns, key string }

// keyTopic is a key in one topic.
type keyTopic struct {
	orderKey
	topic string
}

// keyRef is a key as text and as it is stored.
type keyRef struct {
	orderKey
	stored bson.RawValue
}

// flight is one published envelope.
type flight struct {
	ref     keyRef
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
	broken bool                // a record was refused or returned: publish nothing until count is 0
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

// Config is the configuration of Exceptions. Fields without a default are required.
type Config struct {
	Shared
	// Collections returns the dirty collections. It is called often.
	Collections func() []outboxes.Outbox
	Finisher    *Finisher
	// Route returns the topics of an envelope that does not list its targets.
	Route func(e *outboxes.Envelope) ([]string, error)
	// Check returns an error for an envelope that neither a relay nor an operator made an exception.
	// Such an envelope becomes a dead letter at once.
	Check func(v *envelope.View) error
	// Compacted reports whether a topic may keep only the newest record of a key (N10).
	Compacted func(topic string) bool
}

// New returns an Exceptions whose first round scans everything. It publishes nothing before Run.
func New(c Config) *Exceptions {
	return &Exceptions{
		config:      c,
		poll:        pollEvery,
		maxInFlight: maxInFlight,
		wake:        make(chan struct{}, 1),
		room:        make(chan struct{}, 1),
		inFlight:    map[string]*flight{},
		keyStates:   map[orderKey]*keyState{},
		landedIDs:   map[string]bool{},
		parked:      map[string]struct{}{},
		parkedKeys:  map[keyTopic]struct{}{},
		stops:       map[orderKey]keyStop{},
		lastPass:    time.Now(),
		work: pendingWork{
			scanAll:  true,
			keys:     map[orderKey]bson.RawValue{},
			nextPoll: map[orderKey]bson.RawValue{},
			ahead:    map[orderKey]keyAhead{},
		},
	}
}

// Wake requests a pass over everything, because topic can be written again. "" stands for every topic.
// It does not block.
func (x *Exceptions) Wake(topic string) {
	x.mu.Lock()
	x.work.scanAll = true
	x.wakeCount++
	delete(x.parked, topic)
	if topic == "" {
		clear(x.parked)
	}
	maps.DeleteFunc(x.parkedKeys, func(k keyTopic, _ struct{}) bool { return topic == "" || k.topic == topic })
	maps.DeleteFunc(x.stops, func(_ orderKey, s keyStop) bool { return s.until == untilUnparked })
	x.mu.Unlock()

	retry.Signal(x.wake)
}

// QueueWritten requests scans for exceptions that were just written, so that they are published at once
// if it is their turn. It does not block.
func (x *Exceptions) QueueWritten(list []Exception) {
	x.mu.Lock()
	for i := range list {
		e := &list[i]

		// These exceptions are scanned for another reason: when the attempt is due, when the topic can
		// be written again, or when the earlier envelope has been finished.
		waitsForAttempt := e.State == envelope.StateRetry && e.Delay > 0
		key := orderKey{e.NS, e.Key}
		if waitsForAttempt || x.allParkedLocked(key, e.Pending) || x.waitsBehindLocked(e) {
			continue
		}

		ref := keyRef{key, e.Raw.Lookup("key")}
		if ref.stored.Type != bson.TypeString {
			ref.stored = stringValue(e.Key)
		}
		x.queueKeyLocked(x.work.keys, ref)
	}
	x.mu.Unlock()

	retry.Signal(x.wake)
}

// allParkedLocked reports whether topics is not empty and all of them are parked for key.
func (x *Exceptions) allParkedLocked(key orderKey, topics []string) bool {
	for _, t := range topics {
		if !x.isParkedLocked(key, t) {
			return false
		}
	}
	return len(topics) > 0
}

// isParkedLocked reports whether topic, or its partition of key, is parked.
func (x *Exceptions) isParkedLocked(key orderKey, topic string) bool {
	_, ofTopic := x.parked[topic]
	_, ofKey := x.parkedKeys[keyTopic{key, topic}]
	return ofTopic || ofKey
}

// Run publishes until ctx ends, and returns its cause. It retries failed reads until they succeed. The
// fates of envelopes that are then in flight are left to the Finisher.
func (x *Exceptions) Run(ctx context.Context) error {
	tick := time.NewTicker(x.poll)
	defer tick.Stop()
	backoff := retry.Reopen.Start()
	due := true

	for {
		err := x.runRound(ctx, due)
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
		case <-tick.C:
			due = true
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// isPassDue reports whether the time for a pass over everything has come.
func (x *Exceptions) isPassDue() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	pause := sureEvery
	if x.stuck || len(x.parked)+len(x.parkedKeys) > 0 {
		pause = min(sureEvery, max(probeEvery, passShare*x.passTook))
	}
	return time.Since(x.lastPass) >= pause
}

// runRound reads and publishes the exceptions for which there is a reason. due is set at each poll.
func (x *Exceptions) runRound(ctx context.Context, due bool) error {
	collections := x.config.Collections()
	if len(collections) == 0 {
		return nil
	}

	if due && x.isPassDue() {
		x.Wake("")
	}
	// The keys come first: if their set is full, they turn into a scan of everything.
	x.promoteKeys(due)
	all, moreDue := x.takeScanReasons()
	if due {
		x.stuck = false
	}

	began := time.Now()
	for _, c := range collections {
		keys := x.takeQueuedKeys(c.NS())
		if due || moreDue {
			if err := x.publishDueRetries(ctx, c); err != nil {
				return err
			}
		}
		if err := x.scanKeys(ctx, c, keys); err != nil {
			return err
		}

		if all {
			if err := x.scanCollection(ctx, c, scanPass{}); err != nil {
				return err
			}
		}
	}

	if all {
		x.lastPass, x.passTook = time.Now(), time.Since(began)
	}
	return nil
}

// scanKeys scans only the given keys of c.
func (x *Exceptions) scanKeys(ctx context.Context, c outboxes.Outbox, keys []bson.RawValue) error {
	for part := range slices.Chunk(keys, keysAtOnce) {
		if err := x.scanCollection(ctx, c, scanPass{keys: part}); err != nil {
			return err
		}
	}
	return nil
}

// publishDueRetries publishes the retries of c that are due. If one query does not return all of them,
// the next query follows when most of the first have ended. If none of the first can be published,
// retries are stuck: only a pass over everything finds the publishable retries that follow.
func (x *Exceptions) publishDueRetries(ctx context.Context, c outboxes.Outbox) error {
	keys, many, err := x.findDueKeys(ctx, c)
	if err != nil {
		return err
	}

	// Only this count shows whether the scan can publish envelopes.
	x.mu.Lock()
	before := x.publishedCount
	x.mu.Unlock()

	if err := x.scanKeys(ctx, c, keys); err != nil || !many {
		return err
	}

	x.mu.Lock()
	x.work.moreDue = x.publishedCount > before || len(x.inFlight) > 0
	x.stuck = x.stuck || !x.work.moreDue
	// With few flights, the next read must not wait for their ends.
	readMore := x.work.moreDue && len(x.inFlight) < fewInFlight
	x.mu.Unlock()
	if readMore {
		retry.Signal(x.wake)
	}
	return nil
}

// splitRefusal returns err as a refusal if the envelope is at fault, and otherwise as other.
func splitRefusal(err error) (refused *record.Refusal, other error) {
	if errors.As(err, &refused) {
		return refused, nil
	}
	return nil, err
}

// stringValue returns s as a BSON value.
func stringValue(s string) bson.RawValue {
	_, v, _ := bson.MarshalValue(s)
	return bson.RawValue{Type: bson.TypeString, Value: v}
}
