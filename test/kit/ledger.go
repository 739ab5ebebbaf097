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
	Unknown // the commit returned an error; [Ledger.ResolveUnknown] finds out
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
	mu         sync.Mutex
	entries    []*Entry
	byIdentity map[identity]*Entry
	dead       map[identity]bool // committed and then taken out by the test's own design: dead letters
}

func newLedger() *Ledger {
	return &Ledger{byIdentity: map[identity]*Entry{}, dead: map[identity]bool{}}
}

// Add records appends whose fate is known, in their order.
func (l *Ledger) Add(entries ...Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range entries {
		e := entries[i]
		l.entries = append(l.entries, &e)
		l.byIdentity[identity{e.NS, e.ID}] = &e
	}
}

// MarkDead says that this envelope is to be found among the dead letters and not in a topic.
func (l *Ledger) MarkDead(ns, id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dead[identity{ns, id}] = true
}

// ExpectedEntries are the committed entries that have to be in the topics, in order.
func (l *Ledger) ExpectedEntries() []*Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []*Entry
	for _, e := range l.entries {
		if e.Fate == Committed && !l.dead[identity{e.NS, e.ID}] {
			out = append(out, e)
		}
	}
	return out
}

// CountCommitted is the number of committed entries.
func (l *Ledger) CountCommitted() int { return len(l.ExpectedEntries()) }

// ResolveUnknown finds out what became of the appends whose commit returned an error: an envelope that is in its collection, or
// among the dead letters, was committed.
func (l *Ledger) ResolveUnknown(ctx context.Context, client *mongo.Client) error {
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

func (l *Ledger) copyEntries() (entries []Entry, done map[identity]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	done = make(map[identity]bool, len(l.dead))
	for k := range l.dead {
		done[k] = true
	}
	for _, e := range l.entries {
		c := *e
		c.Topics = slices.Clone(e.Topics)
		entries = append(entries, c)
	}
	return entries, done
}
