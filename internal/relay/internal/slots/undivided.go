package slots

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Bounds of the search for envelopes without a slot. All outboxes of a pattern usually have the same writers.
const (
	newestEnvelopes = 1000 // of an outbox
	sampledOutboxes = 20
	// A tenth of them may lack a slot: a few malformed envelopes, or a rare second writer, are no reason against more slots.
	undividedShare = 10
)

// Undivided counts the envelopes of an outbox that no number of slots divides, because they have no field slot.
type Undivided struct {
	Collection string `json:"collection"`
	Envelopes  int    `json:"envelopes"` // without a slot, of the newest ones
	Newest     int    `json:"newest"`    // how many of the newest were read
}

// findUndivided returns the outboxes of the watcher whose newest envelopes lack a slot.
func (r *resliceRun) findUndivided(ctx context.Context) ([]Undivided, error) {
	registry := outboxes.NewRegistry(r.state.Collection("collections"))
	list, err := registry.Registrations(ctx, r.cfg.Watcher)
	if err != nil {
		return nil, err
	}

	var found []Undivided
	for _, c := range list[:min(len(list), sampledOutboxes)] {
		db, name, _ := strings.Cut(c.NS, ".")
		undivided, err := countUndivided(ctx, mongodb.Majority(r.state.Client().Database(db).Collection(name)))
		if err != nil {
			return nil, err
		}
		if undivided.Envelopes > 0 {
			found = append(found, undivided)
		}
	}
	return found, nil
}

// countUndivided counts the envelopes without a slot among the newest envelopes of coll.
func countUndivided(ctx context.Context, coll *mongo.Collection) (Undivided, error) {
	undivided := Undivided{Collection: mongodb.Namespace(coll)}
	newest := options.Find().
		SetHint(bson.D{{Key: "$natural", Value: -1}}).
		SetLimit(newestEnvelopes).
		SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "slot", Value: 1}})

	err := mongodb.FindEach(ctx, coll, "reading the slots of the newest envelopes", bson.D{}, func(raw bson.Raw) error {
		undivided.Newest++
		if !raw.Lookup("slot").IsNumber() {
			undivided.Envelopes++
		}
		return nil
	}, newest)
	return undivided, err
}

// rejectUndivided returns a rejection if more slots would not divide most of the load of an outbox of found.
func rejectUndivided(found []Undivided) error {
	i := slices.IndexFunc(found, func(undivided Undivided) bool { return undivided.Envelopes*undividedShare > undivided.Newest })
	if i < 0 {
		return nil
	}

	undivided := found[i]
	return rejectionf("%d of the newest %d envelopes of %s have no field slot: they all belong to the first slot, so more slots would "+
		"not divide them. Let their writer set slot to murmur2(key) & 1023, as docs/envelope.md describes, or pass "+
		"--allow-undivided if other envelopes are worth it", undivided.Envelopes, undivided.Newest, undivided.Collection)
}

// String returns a sentence for the output of a reslice that is allowed nevertheless.
func (u Undivided) String() string {
	return fmt.Sprintf("%d of the newest %d envelopes of %s have no field slot, and stay in the first slot",
		u.Envelopes, u.Newest, u.Collection)
}
