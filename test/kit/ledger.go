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

// Fate is the outcome of an append.
type Fate int

// The fates of an append.
const (
	Committed Fate = iota
	Aborted
	Unknown // the commit returned an error; see [Ledger.ResolveUnknown]
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
	// Unordered excludes a scheduled event from the order of its key.
	Unordered bool
}

// identity identifies an envelope. Envelopes in different collections may have the same id.
type identity struct{ ns, id string }

// Ledger lists the appends of a scene's writers. The appends of a key are in their order.
type Ledger struct {
	mu         sync.Mutex
	entries    []*Entry
	byIdentity map[identity]*Entry
	dead       map[identity]bool // committed envelopes that must become dead letters
}

func newLedger() *Ledger {
	return &Ledger{byIdentity: map[identity]*Entry{}, dead: map[identity]bool{}}
}

// Add adds appends in their order.
func (l *Ledger) Add(entries ...Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range entries {
		entry := entries[i]
		l.entries = append(l.entries, &entry)
		l.byIdentity[identity{entry.NS, entry.ID}] = &entry
	}
}

// MarkDead marks an envelope that must become a dead letter and must not be in a topic.
func (l *Ledger) MarkDead(ns, id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dead[identity{ns, id}] = true
}

// MarkCancelled marks a scheduled envelope that its service has cancelled: it must not be in a topic.
func (l *Ledger) MarkCancelled(ns, id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byIdentity[identity{ns, id}].Fate = Aborted
}

// ExpectedEntries returns the committed entries that must be in the topics, in order.
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

// CountCommitted returns the number of committed entries, without dead letters.
func (l *Ledger) CountCommitted() int { return len(l.ExpectedEntries()) }

// ResolveUnknown determines the fate of appends whose commit returned an error. If the envelope is in
// its collection, the append was committed.
func (l *Ledger) ResolveUnknown(ctx context.Context, client *mongo.Client) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if e.Fate != Unknown {
			continue
		}

		db, coll, _ := strings.Cut(e.NS, ".")
		id := event.ParseID(e.ID)
		majority := options.Collection().SetReadConcern(readconcern.Majority())
		err := client.Database(db).Collection(coll, majority).FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Err()
		switch {
		case err == nil:
			e.Fate = Committed
		case errors.Is(err, mongo.ErrNoDocuments):
			e.Fate = Aborted
		default:
			return fmt.Errorf("resolving the append of %s: %w", e.ID, err)
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
		entry := *e
		entry.Topics = slices.Clone(e.Topics)
		entries = append(entries, entry)
	}
	return entries, done
}
