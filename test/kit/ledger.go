//go:build unix

package kit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"

	"github.com/outrelay/outrelay/pkg/event"
)

// Fate is what became of an append.
type Fate int

// The fates of an append.
const (
	Committed Fate = iota
	Aborted
	Unknown // the commit returned an error; [Ledger.Settle] finds out
)

// Entry is one append.
type Entry struct {
	NS      string // database.collection
	ID      string // canonical text
	Key     string
	Topics  []string
	Payload []byte
	Null    bool // the payload is null
	Headers []event.Header
	Fate    Fate
	At      time.Time // when the commit returned
	// Unordered takes it out of its key's order: it was scheduled.
	Unordered bool
}

// identity tells an envelope from every other, also one of equal id in another collection.
type identity struct{ ns, id string }

// Ledger is what a scene's writers did, in the order in which each key's appends followed one another.
type Ledger struct {
	mu      sync.Mutex
	entries []*Entry
	known   map[identity]*Entry
	done    map[identity]bool // committed and then taken out by the test's own design: dead letters
}

func newLedger() *Ledger { return &Ledger{known: map[identity]*Entry{}, done: map[identity]bool{}} }

// Add records appends whose fate is known, in their order.
func (l *Ledger) Add(entries ...Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range entries {
		e := entries[i]
		l.entries = append(l.entries, &e)
		l.known[identity{e.NS, e.ID}] = &e
	}
}

// Dead says that this envelope is to be found among the dead letters and not in a topic.
func (l *Ledger) Dead(ns, id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done[identity{ns, id}] = true
}

// Expected are the committed entries that have to be in the topics, in order.
func (l *Ledger) Expected() []*Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []*Entry
	for _, e := range l.entries {
		if e.Fate == Committed && !l.done[identity{e.NS, e.ID}] {
			out = append(out, e)
		}
	}
	return out
}

// Committed is the number of committed entries.
func (l *Ledger) Committed() int { return len(l.Expected()) }

// Settle finds out what became of the appends whose commit returned an error: an envelope that is in its collection, or
// among the dead letters, was committed.
func (l *Ledger) Settle(ctx context.Context, client *mongo.Client) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if e.Fate != Unknown {
			continue
		}
		db, coll, _ := strings.Cut(e.NS, ".")
		id := event.ParseID(e.ID)
		err := client.Database(db).Collection(coll, options.Collection().SetReadConcern(readconcern.Majority())).FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Err()
		switch {
		case err == nil:
			e.Fate = Committed
		case errors.Is(err, mongo.ErrNoDocuments):
			e.Fate = Aborted
		default:
			return fmt.Errorf("settling %s: %w", e.ID, err)
		}
	}
	return nil
}

func (l *Ledger) snapshot() (entries []Entry, done map[identity]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	done = make(map[identity]bool, len(l.done))
	for k := range l.done {
		done[k] = true
	}
	for _, e := range l.entries {
		c := *e
		c.Topics = slices.Clone(e.Topics)
		entries = append(entries, c)
	}
	return entries, done
}
