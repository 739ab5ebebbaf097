package migrate

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// Kind is a kind of collection.
type Kind string

// The kinds of collections that steps change. [State] returns the kind of a collection of the state
// database.
const (
	Outbox Kind = "outbox" // every watched collection
	Dead   Kind = "dead"   // the dead letters of a watched collection, if there are any
)

// stateKind returns the kind of the named collection of the state database.
func stateKind(name string) Kind { return Kind(statePrefix + name) }

const statePrefix = "state."

// Step is one entry of the ledger. A released step is never changed, moved or removed. A later step
// corrects its mistakes.
type Step struct {
	ID     string // four digits, ascending
	Name   string
	Create []Change
	Drop   []Change // superseded indexes, by name and keys
	// Breaking means that versions without the step cannot work with its result. They refuse to
	// start.
	Breaking bool
}

// Change is one index on one kind of collection.
type Change struct {
	On    Kind
	Index mongodb.Index
}

// Steps returns all steps of this version, in order.
func Steps() []Step {
	present := func(field string) bson.D {
		return bson.D{{Key: field, Value: bson.D{{Key: "$exists", Value: true}}}}
	}
	month := int32(30 * 24 * 60 * 60)

	return []Step{
		{ID: "0001", Name: "outbox and log of events", Create: []Change{
			{Outbox, mongodb.Index{Name: "ts_1", Keys: mongodb.Ascending("ts")}},
			{Outbox, mongodb.Index{Name: "dueAt_1", Keys: mongodb.Ascending("dueAt"), Partial: present("dueAt")}},
			{Outbox, mongodb.Index{Name: "nextAt_1", Keys: mongodb.Ascending("nextAt"), Partial: present("nextAt")}},
			{Outbox, mongodb.Index{Name: "state_1_key_1_pos_1", Keys: mongodb.Ascending("state", "key", "pos"), Partial: present("state")}},
			{stateKind("events"), mongodb.Index{Name: "at_1", Keys: mongodb.Ascending("at"), TTL: &month}},
		}},
		{ID: "0002", Name: "replays", Create: []Change{
			{stateKind("replays"), mongodb.Index{Name: "finishedAt_1", Keys: mongodb.Ascending("finishedAt"), TTL: &month}},
			{Outbox, mongodb.Index{
				Name: "origin_1_replayOf_1", Keys: mongodb.Ascending("origin", "replayOf"),
				Partial: bson.D{{Key: "origin", Value: "replay"}},
			}},
		}},
		{ID: "0003", Name: "queries of dead letters", Create: []Change{
			{Dead, mongodb.Index{Name: "movedAt_1__id_1", Keys: mongodb.Ascending("movedAt", "_id")}},
			{Dead, mongodb.Index{Name: "pos_1__id_1", Keys: mongodb.Ascending("pos", "_id")}},
			{Dead, mongodb.Index{Name: "_id.id_1", Keys: mongodb.Ascending("_id.id")}},
			{Dead, mongodb.Index{Name: "key_1_movedAt_1", Keys: mongodb.Ascending("key", "movedAt")}},
			{Dead, mongodb.Index{Name: "class_1_movedAt_1", Keys: mongodb.Ascending("class", "movedAt")}},
			{Dead, mongodb.Index{Name: "type_1_movedAt_1", Keys: mongodb.Ascending("type", "movedAt")}},
		}},
		{ID: "0004", Name: "a slot fetches its own exceptions", Create: []Change{
			{Outbox, mongodb.Index{Name: "dueAt_1_slot_1", Keys: mongodb.Ascending("dueAt", "slot"), Partial: present("dueAt")}},
			{Outbox, mongodb.Index{Name: "nextAt_1_slot_1", Keys: mongodb.Ascending("nextAt", "slot"), Partial: present("nextAt")}},
			{Outbox, mongodb.Index{Name: "state_1_key_1_pos_1_slot_1", Keys: mongodb.Ascending("state", "key", "pos", "slot"), Partial: present("state")}},
		}, Drop: []Change{
			{Outbox, mongodb.Index{Name: "dueAt_1", Keys: mongodb.Ascending("dueAt"), Partial: present("dueAt")}},
			{Outbox, mongodb.Index{Name: "nextAt_1", Keys: mongodb.Ascending("nextAt"), Partial: present("nextAt")}},
			{Outbox, mongodb.Index{Name: "state_1_key_1_pos_1", Keys: mongodb.Ascending("state", "key", "pos"), Partial: present("state")}},
		}},
	}
}

// optionalIndexes returns the names of indexes that the configuration turns on and off. They remove
// documents after a time. So they are neither declared nor superfluous.
func optionalIndexes(on Kind) []string {
	switch on {
	case Outbox:
		return []string{outboxes.SentIndexName}
	case Dead:
		return []string{"outrelay_expiry", "outrelay_expiry_of_chunks"}
	}
	return nil
}

// Checksum returns a hash of the step: its id, name and all its changes. It shows whether an applied step
// has the same declaration.
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
				// The steps are part of the program, so this is a bug.
				panic("migrate: step " + s.ID + ": " + err.Error())
			}
			fmt.Fprintf(h, "%s %q %x\n", part.verb, c.On, spec)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// hasIndexNamed reports whether list has an index of that name.
func hasIndexNamed(list []mongodb.Index, name string) bool {
	return slices.ContainsFunc(list, func(i mongodb.Index) bool { return i.Name == name })
}

// declaredIndexes returns the indexes that a kind of collection has after all steps.
func declaredIndexes(steps []Step, on Kind) []mongodb.Index {
	var out []mongodb.Index
	remove := func(name string) {
		out = slices.DeleteFunc(out, func(i mongodb.Index) bool { return i.Name == name })
	}

	for _, s := range steps {
		for _, c := range s.Drop {
			if c.On == on {
				remove(c.Index.Name)
			}
		}
		for _, c := range s.Create {
			if c.On == on {
				// A step may declare an index again with other options.
				remove(c.Index.Name)
				out = append(out, c.Index)
			}
		}
	}
	return out
}

// supersededIndexes returns the indexes that a step drops and no later step creates again.
func supersededIndexes(steps []Step, on Kind) []mongodb.Index {
	declared := declaredIndexes(steps, on)
	var out []mongodb.Index
	for _, s := range steps {
		for _, c := range s.Drop {
			if c.On == on && !hasIndexNamed(declared, c.Index.Name) {
				out = append(out, c.Index)
			}
		}
	}
	return out
}

// stateCollections returns the names of the collections of the state database in steps.
func stateCollections(steps []Step) []string {
	var out []string
	for _, s := range steps {
		for _, c := range slices.Concat(s.Create, s.Drop) {
			name, ok := strings.CutPrefix(string(c.On), statePrefix)
			if ok && !slices.Contains(out, name) {
				out = append(out, name)
			}
		}
	}
	return out
}
