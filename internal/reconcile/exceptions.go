package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	defaultPoll   = 500 * time.Millisecond
	defaultFlying = 10_000
	probeEvery    = 10 * time.Second // a parked topic is tried with its first envelopes, should its wake-up be lost
	sureEvery     = time.Minute      // everything is looked at, should any other signal be lost
	flushEvery    = 64               // envelopes
	mostKeys      = 10_000           // keys that are remembered one by one; beyond, everything is looked at
	keysAtOnce    = 200              // keys of one query
	heldAtOnce    = 32               // envelopes of a key that cannot go, before the server leaves out what is like them
	dueAtOnce     = 1000             // due retries of one query
	fewFlying     = 100              // when the next ones are asked for
	stuckEvery    = 10 * time.Second // so many due ones that cannot go make a pass over everything worth it
	stuckShare    = 20               // where that takes long, the next one comes so many times later
	pageDocs      = 1000
	pageBytes     = 4 << 20
)

// Exceptions is the loop over the retried, blocked and parked envelopes of one term: whatever of a watcher's collections has
// a state goes to the Outlet when its turn comes, and its fate to the Finisher.
//
// Order (N15): per collection, topic and key an envelope is published only when every one with a lower position was, and a
// failed one goes alone. Envelopes that are merely held go one behind the other, without waiting for answers; as soon as one of them
// comes back, the rest of its key is given up and begins anew when all of it is back. An exception of the stream waits
// until the watermark has passed it, so that nothing earlier of its key can still come.
//
// Cost: one indexed query per dirty collection and Poll, and reads of what has a reason to be looked at; no query at all
// while Collections is empty. Memory: MaxFlying envelopes without their bodies, and one page. Run blocks in Publish only.
//
// All fields but those with a default are needed. Wake and Written may be called from any goroutine, at any time.
type Exceptions struct {
	Client      *mongo.Client
	Collections func() []store.Outbox // the dirty ones; called often
	Outlet      Outlet
	Finisher    *Finisher
	// Route tells the topics of an envelope that does not list its targets. nil: only the Outlet knows, and such an envelope
	// takes its turn for all topics at once.
	Route func(e *Envelope) ([]string, error)
	// Check refuses an envelope that no relay and no operator made an exception: it is dead at once, whatever else it says.
	// nil accepts all.
	Check func(v *event.View) error
	// Standing tells which records of an envelope a read-back has found, for those topics (nil: all that it routes to). Take
	// acks those of them that are still there, and sends nothing; if there are any, answer is called once as by
	// Outlet.Publish, else it returns false. Envelopes have neither body nor headers. nil where nothing is found late.
	Standing func(e *Envelope, topics []string) []Hit
	Take     func(e *Envelope, topics []string, answer func(record.Published)) bool

	// Compacted reports whether a topic may keep only the newest record of a key (N10). nil: none does.
	Compacted func(topic string) bool

	Now  func() time.Time // the server's
	Poll time.Duration    // defaults to 500 ms
	// MaxFlying bounds the envelopes that are published and not written down yet. Defaults to 10,000.
	MaxFlying int
	Log       *slog.Logger // nil for none
	Trouble   func(error)  // hears of reads that failed and are made again; nil for nobody
	Well      func()       // hears that they succeed again; nil for nobody

	once sync.Once
	wake chan struct{} // holds one token
	room chan struct{} // holds one token: something has landed

	mu     sync.Mutex
	flying map[string]*flight
	keys   map[orderKey]*keyState
	landed map[string]bool     // since the page was asked for; true if the rest of the key has to wait
	parked map[string]struct{} // topics that take nothing
	held   map[orderKey]bool   // keys whose first envelope is due and waits for a parked topic
	cur    turn                // the key that the pass is at
	taken  int                 // envelopes published so far
	asleep map[orderKey]sleeping
	stuck  time.Time // when a pass over everything may be made again because of what is due and cannot go
	jobs   jobs
	found  []found // not looked at yet

	late late // of the goroutine of Run
}

// orderKey is the scope of an order, but for the topic.
type orderKey struct{ ns, key string }

// keyRef is a key as text and as it is stored.
type keyRef struct {
	orderKey
	stored bson.RawValue
}

// flight is one published envelope.
type flight struct {
	ref     keyRef
	topics  []string // "" stands for all
	partial bool     // it waits for more topics than these
	alone   bool
}

// keyState is what is in flight of one key.
type keyState struct {
	n      int
	topics map[string]int
	alone  map[string]bool
	broken bool // something came back: nothing more until all of it is back
	resume map[string]struct{}
}

// sleeping is a key whose first envelope waits for its next attempt.
type sleeping struct {
	until  int64    // Unix milliseconds
	topics []string // that it waits for
}

// jobs is what has a reason to be looked at.
type jobs struct {
	all    bool
	due    bool // more retries are due than were asked for
	topics map[string]struct{}
	keys   map[orderKey]bson.RawValue
	later  map[orderKey]bson.RawValue // at the next poll
	ahead  map[orderKey]ahead         // when the watermark has come to them
	aheadN string                     // the lowest position that found no room there; "" for none
}

type ahead struct {
	stored bson.RawValue
	pos    string
}

func (x *Exceptions) init() {
	x.once.Do(func() {
		x.wake, x.room = make(chan struct{}, 1), make(chan struct{}, 1)
		x.flying, x.keys, x.landed = map[string]*flight{}, map[orderKey]*keyState{}, map[string]bool{}
		x.parked, x.held, x.asleep = map[string]struct{}{}, map[orderKey]bool{}, map[orderKey]sleeping{}
		x.jobs = jobs{
			all: true, topics: map[string]struct{}{}, keys: map[orderKey]bson.RawValue{},
			later: map[orderKey]bson.RawValue{}, ahead: map[orderKey]ahead{},
		}
		if x.Poll <= 0 {
			x.Poll = defaultPoll
		}
		if x.MaxFlying <= 0 {
			x.MaxFlying = defaultFlying
		}
		if x.Log == nil {
			x.Log = slog.New(slog.DiscardHandler)
		}
	})
}

// Wake says that a topic can be written again, or, with "", that everything should be looked at. It does not block.
func (x *Exceptions) Wake(topic string) {
	x.init()
	x.mu.Lock()
	if topic == "" {
		x.jobs.all = true
		clear(x.parked)
	} else {
		delete(x.parked, topic)
		x.jobs.topics[topic] = struct{}{}
	}
	clear(x.held)
	x.mu.Unlock()
	poke(x.wake)
}

// Written says that these exceptions were just written, so that those whose turn it is go on at once. It does not block.
func (x *Exceptions) Written(list []store.Exception) {
	x.init()
	x.mu.Lock()
	for i := range list {
		e := &list[i]
		if e.State == event.StateRetry && e.Delay > 0 || x.allParked(e.Pending) || x.stands(e) {
			continue // its time, its topic, or what is before it will call
		}
		ref := keyRef{orderKey{e.NS, e.Key}, e.Raw.Lookup("key")}
		if ref.stored.Type != bson.TypeString {
			ref.stored = text(e.Key)
		}
		x.look(x.jobs.keys, ref)
	}
	x.mu.Unlock()
	poke(x.wake)
}

func (x *Exceptions) allParked(topics []string) bool {
	for _, t := range topics {
		if _, ok := x.parked[t]; !ok {
			return false
		}
	}
	return len(topics) > 0
}

// look remembers that a key has to be looked at.
func (x *Exceptions) look(at map[orderKey]bson.RawValue, ref keyRef) {
	if len(at) >= mostKeys {
		x.jobs.all = true
		return
	}
	at[ref.orderKey] = keep(ref.stored)
}

// Flying tells of which keys something is published and not written down yet.
func (x *Exceptions) Flying(each func(ns, key string)) {
	x.init()
	x.mu.Lock()
	defer x.mu.Unlock()
	for k := range x.keys {
		each(k.ns, k.key)
	}
}

// Run publishes until ctx ends, and returns its cause. Faults of the server are waited out. What is in flight then is the
// Finisher's to write.
func (x *Exceptions) Run(ctx context.Context) error {
	x.init()
	tick := time.NewTicker(x.Poll)
	defer tick.Stop()
	back := retry.Reopen.Start()
	probed, sure := time.Now(), time.Now()
	due := true
	for {
		switch now := time.Now(); {
		case due && now.Sub(sure) >= sureEvery:
			sure, probed = now, now
			x.Wake("")
		case due && now.Sub(probed) >= probeEvery:
			probed = now
			x.probe()
		}
		err := x.round(ctx, due)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			if x.Trouble != nil {
				x.Trouble(err)
			}
			if back.Wait(ctx) != nil {
				return context.Cause(ctx)
			}
			x.Wake("")
			due = true
			continue
		case back.Attempts() > 0:
			back.Reset()
			if x.Well != nil {
				x.Well()
			}
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

// probe tries the parked topics.
func (x *Exceptions) probe() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for t := range x.parked {
		x.jobs.topics[t] = struct{}{}
	}
	clear(x.parked)
	clear(x.held)
}

// round does what there is a reason for.
func (x *Exceptions) round(ctx context.Context, due bool) error {
	colls := x.Collections()
	if err := x.reclaim(ctx, colls, due); err != nil {
		return err
	}
	if len(colls) == 0 {
		return nil
	}
	x.promote(due)
	all, more, topics := x.passes()
	for _, c := range colls {
		keys := x.keysOf(c.NS())
		if due || more {
			if err := x.retries(ctx, c); err != nil {
				return err
			}
		}
		if err := x.lookUp(ctx, c, keys); err != nil {
			return err
		}
		var err error
		switch {
		case all:
			err = x.pass(ctx, c, reading{sparing: true})
		case len(topics) > 0:
			err = x.pass(ctx, c, reading{sparing: true, only: topics})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// lookUp makes passes over keys.
func (x *Exceptions) lookUp(ctx context.Context, c store.Outbox, keys []bson.RawValue) error {
	for len(keys) > 0 {
		part := keys[:min(len(keys), keysAtOnce)]
		keys = keys[len(part):]
		if err := x.pass(ctx, c, reading{keys: part}); err != nil {
			return err
		}
	}
	return nil
}

// retries publishes what is due. Where more is due than one query tells, the next one follows as soon as most of this has
// landed; if nothing of it may go yet, what may is behind it.
func (x *Exceptions) retries(ctx context.Context, c store.Outbox) error {
	keys, many, err := x.due(ctx, c)
	if err != nil {
		return err
	}
	x.mu.Lock()
	before := x.taken
	x.mu.Unlock()
	if err := x.lookUp(ctx, c, keys); err != nil || !many {
		return err
	}
	x.mu.Lock()
	stuck := x.taken == before && len(x.flying) == 0 && time.Now().After(x.stuck)
	x.jobs.due = x.taken > before || len(x.flying) > 0
	again := x.jobs.due && len(x.flying) < fewFlying
	x.mu.Unlock()
	if again {
		poke(x.wake)
	}
	if !stuck {
		return nil
	}
	began := time.Now()
	err = x.pass(ctx, c, reading{})
	x.mu.Lock()
	x.stuck = time.Now().Add(max(stuckEvery, stuckShare*time.Since(began)))
	x.mu.Unlock()
	return err
}

// promote makes jobs of what has waited for the watermark or for the next poll.
func (x *Exceptions) promote(due bool) {
	reached := x.Outlet.Reached()
	x.mu.Lock()
	defer x.mu.Unlock()
	for k, a := range x.jobs.ahead {
		if a.pos <= reached {
			delete(x.jobs.ahead, k)
			x.look(x.jobs.keys, keyRef{k, a.stored})
		}
	}
	if x.jobs.aheadN != "" && x.jobs.aheadN <= reached {
		x.jobs.all, x.jobs.aheadN = true, ""
	}
	if due {
		for k, stored := range x.jobs.later {
			delete(x.jobs.later, k)
			x.look(x.jobs.keys, keyRef{k, stored})
		}
	}
}

// passes takes the reasons for passes over whole collections.
func (x *Exceptions) passes() (all, due bool, topics []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for t := range x.jobs.topics {
		topics = append(topics, t)
	}
	clear(x.jobs.topics)
	all, x.jobs.all = x.jobs.all, false
	due, x.jobs.due = x.jobs.due, false
	return all, due, topics
}

func (x *Exceptions) keysOf(ns string) []bson.RawValue {
	x.mu.Lock()
	defer x.mu.Unlock()
	var refs []bson.RawValue
	for k, stored := range x.jobs.keys {
		if k.ns == ns {
			delete(x.jobs.keys, k)
			refs = append(refs, stored)
		}
	}
	return refs
}

// due asks for retries whose time has come, and names their keys but for those that are in flight or wait for a parked topic. many says that there may
// be more.
func (x *Exceptions) due(ctx context.Context, c store.Outbox) (refs []bson.RawValue, many bool, err error) {
	x.mu.Lock()
	skip := x.parkedTopics()
	x.mu.Unlock()
	found, err := store.DueRetries(ctx, x.Client.Database(c.DB).Collection(c.Coll), x.Now(), skip, dueAtOnce, c.Part)
	if err != nil {
		return nil, false, err
	}
	seen := map[string]struct{}{}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, k := range found {
		stored := keep(k.Key)
		key := orderKey{c.NS(), keyText(k.Key, k.AggregateID)}
		if _, again := seen[idKey(stored)]; again || x.keys[key] != nil || x.held[key] {
			continue
		}
		seen[idKey(stored)] = struct{}{}
		refs = append(refs, stored)
	}
	return refs, len(found) >= dueAtOnce, nil
}

func (x *Exceptions) parkedTopics() []string {
	list := make([]string, 0, len(x.parked))
	for t := range x.parked {
		list = append(list, t)
	}
	return list
}

// unusable reports an error of Publish that is not the envelope's.
func unusable(err error) (why *record.Refusal, bad error) {
	if errors.As(err, &why) {
		return why, nil
	}
	return nil, err
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// text is a string as a value of BSON.
func text(s string) bson.RawValue {
	_, v, _ := bson.MarshalValue(s)
	return bson.RawValue{Type: bson.TypeString, Value: v}
}

// keep copies a value, null for a missing one.
func keep(v bson.RawValue) bson.RawValue {
	if v.Type == 0 {
		v.Type = bson.TypeNull
	}
	return bson.RawValue{Type: v.Type, Value: append([]byte(nil), v.Value...)}
}
