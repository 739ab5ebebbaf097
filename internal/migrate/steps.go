package migrate

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
)

// Kind is a kind of collection.
type Kind string

// The kinds of collections that steps work on. One of the state database is named [State]("events").
const (
	Outbox Kind = "outbox" // every watched collection
	Dead   Kind = "dead"   // the dead letters beside each, where there are any
)

// State is a collection of the state database.
func State(name string) Kind { return Kind(statePrefix + name) }

const statePrefix = "state."

// Step is one entry of the ledger. One that was released is never changed, moved or removed: what it got wrong is mended
// by a later one.
type Step struct {
	ID     string // four digits, ascending
	Name   string
	Create []Change
	Drop   []Change // indexes that are superseded; by name and keys
	// Breaking says that versions which do not know the step cannot work with what it leaves. They refuse to start.
	Breaking bool
}

// Change is one index on one kind of collection.
type Change struct {
	On    Kind
	Index store.Index
}

// Steps are all steps of this version, in their order.
func Steps() []Step {
	asc := func(fields ...string) bson.D {
		keys := make(bson.D, len(fields))
		for i, f := range fields {
			keys[i] = bson.E{Key: f, Value: int32(1)}
		}
		return keys
	}
	present := func(field string) bson.D {
		return bson.D{{Key: field, Value: bson.D{{Key: "$exists", Value: true}}}}
	}
	month := int32(30 * 24 * 60 * 60)
	return []Step{
		{ID: "0001", Name: "outbox and log of events", Create: []Change{
			{Outbox, store.Index{Name: "ts_1", Keys: asc("ts")}},
			{Outbox, store.Index{Name: "dueAt_1", Keys: asc("dueAt"), Partial: present("dueAt")}},
			{Outbox, store.Index{Name: "nextAt_1", Keys: asc("nextAt"), Partial: present("nextAt")}},
			{Outbox, store.Index{Name: "state_1_key_1_pos_1", Keys: asc("state", "key", "pos"), Partial: present("state")}},
			{State("events"), store.Index{Name: "at_1", Keys: asc("at"), TTL: &month}},
		}},
		{ID: "0002", Name: "replays", Create: []Change{
			{State("replays"), store.Index{Name: "finishedAt_1", Keys: asc("finishedAt"), TTL: &month}},
			{Outbox, store.Index{Name: "origin_1_replayOf_1", Keys: asc("origin", "replayOf"), Partial: bson.D{{Key: "origin", Value: "replay"}}}},
		}},
		{ID: "0003", Name: "queries of dead letters", Create: []Change{
			{Dead, store.Index{Name: "movedAt_1__id_1", Keys: asc("movedAt", "_id")}},
			{Dead, store.Index{Name: "pos_1__id_1", Keys: asc("pos", "_id")}},
			{Dead, store.Index{Name: "_id.id_1", Keys: asc("_id.id")}},
			{Dead, store.Index{Name: "key_1_movedAt_1", Keys: asc("key", "movedAt")}},
			{Dead, store.Index{Name: "class_1_movedAt_1", Keys: asc("class", "movedAt")}},
			{Dead, store.Index{Name: "type_1_movedAt_1", Keys: asc("type", "movedAt")}},
		}},
	}
}

// optionalIndexes are the names of indexes that the configuration turns on and off, so that they are neither declared nor
// superfluous: what removes documents after a time.
func optionalIndexes(on Kind) []string {
	switch on {
	case Outbox:
		return []string{store.SentIndexName}
	case Dead:
		return []string{"outrelay_expiry", "outrelay_expiry_of_chunks"}
	}
	return nil
}

// Checksum tells whether a step is the one that was applied: it covers all that the step does, and its name.
func (s Step) Checksum() string {
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %v\n", s.ID, s.Name, s.Breaking)
	for _, part := range []struct {
		verb string
		list []Change
	}{{"create", s.Create}, {"drop", s.Drop}} {
		for _, c := range part.list {
			spec, err := bson.Marshal(c.Index.Spec())
			if err != nil {
				panic("migrate: step " + s.ID + ": " + err.Error()) // steps are part of the program
			}
			fmt.Fprintf(h, "%s %q %x\n", part.verb, c.On, spec)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// declaredIndexes are the indexes that a kind of collection has after all steps.
func declaredIndexes(steps []Step, on Kind) []store.Index {
	var out []store.Index
	for _, s := range steps {
		for _, c := range s.Drop {
			if c.On == on {
				out = slices.DeleteFunc(out, func(i store.Index) bool { return i.Name == c.Index.Name })
			}
		}
		for _, c := range s.Create {
			if c.On == on {
				out = append(slices.DeleteFunc(out, func(i store.Index) bool { return i.Name == c.Index.Name }), c.Index)
			}
		}
	}
	return out
}

// supersededIndexes are the indexes that a step dropped and no later one made again.
func supersededIndexes(steps []Step, on Kind) []store.Index {
	now := declaredIndexes(steps, on)
	var out []store.Index
	for _, s := range steps {
		for _, c := range s.Drop {
			if c.On == on && !slices.ContainsFunc(now, func(i store.Index) bool { return i.Name == c.Index.Name }) {
				out = append(out, c.Index)
			}
		}
	}
	return out
}

// stateCollections are the collections of the state database that steps name.
func stateCollections(steps []Step) []string {
	var out []string
	for _, s := range steps {
		for _, c := range slices.Concat(s.Create, s.Drop) {
			if name, ok := stateCollectionName(c.On); ok && !slices.Contains(out, name) {
				out = append(out, name)
			}
		}
	}
	return out
}

func stateCollectionName(k Kind) (string, bool) {
	if len(k) > len(statePrefix) && k[:len(statePrefix)] == statePrefix {
		return string(k[len(statePrefix):]), true
	}
	return "", false
}
