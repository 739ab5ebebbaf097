// Package rates shares the rate limits of handlers among the members of a group.
//
// A limit is a row of slots, one for each call, with the same distance in time. A member reserves a block of slots with one write, and
// uses each slot when its time has come. So the members together never exceed the limit. A slot that is not used in time is lost.
// Slots that were reserved for another rate hold up a later reservation for at most a minute.
//
// Order: reservations of one limit follow each other. Blocking: Reserve is one command, without a retry. Cost: one write for a block.
package rates

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
)

// Limit is a rate limit.
type Limit struct {
	Name  string        // of the handler in the inbox
	Every time.Duration // between two calls
	Burst int           // calls that may follow a pause at once; at least 1
}

// Window is how far back in time a slot may lie.
func (l Limit) Window() time.Duration { return time.Duration(l.Burst-1) * l.Every }

// Store stores the slots of limits.
type Store interface {
	// Reserve reserves n slots. The first one is after the last reserved one, and at most the window of the limit before the present
	// time. If the last reservation was for another rate and lies more than MaxLeftover ahead, the first one is one call after the
	// present time. Reserve returns the time from the present to the first slot, which is negative if the slot lies in the past.
	Reserve(ctx context.Context, limit Limit, n int) (time.Duration, error)
}

// MaxLeftover is how far ahead slots of another rate may lie. During a rolling deployment members use both rates, so their slots count.
// Slots that are farther ahead are left of a much lower rate, for which a handler would wait too long.
const MaxLeftover = time.Minute

// Mongo is a Store in a MongoDB database.
type Mongo struct{ coll *mongo.Collection }

// NewMongo returns a store in db. It does no I/O.
func NewMongo(db *mongo.Database) *Mongo {
	opts := options.Collection().SetWriteConcern(concern.Majority()).SetReadPreference(readpref.Primary())
	return &Mongo{db.Collection(record.RatesCollection, opts)}
}

// Reserve reserves slots by the clock of the server: see Store.Reserve. The document of a limit is {_id, first, next, now, every},
// in microseconds: the first slot of the last reservation, the first free slot, the time of the reservation, and its time between calls.
func (m *Mongo) Reserve(ctx context.Context, limit Limit, n int) (time.Duration, error) {
	now := bson.D{{Key: "$multiply", Value: bson.A{bson.D{{Key: "$toLong", Value: "$$NOW"}}, int64(1000)}}}
	every := limit.Every.Microseconds()
	earliest := bson.D{{Key: "$subtract", Value: bson.A{"$now", limit.Window().Microseconds()}}}
	soon := bson.D{{Key: "$add", Value: bson.A{"$now", every}}}
	isStale := bson.D{{Key: "$and", Value: bson.A{
		bson.D{{Key: "$ne", Value: bson.A{"$every", every}}},
		bson.D{{Key: "$gt", Value: bson.A{"$next", bson.D{{Key: "$add", Value: bson.A{"$now", MaxLeftover.Microseconds()}}}}}},
	}}}
	next := bson.D{{Key: "$cond", Value: bson.A{isStale, soon, "$next"}}}
	// If the clock has gone back since the last reservation, its slots go back with it. Otherwise they would lie as far ahead as the step.
	step := bson.D{{Key: "$max", Value: bson.A{int64(0), bson.D{{Key: "$subtract", Value: bson.A{"$now", now}}}}}}
	update := mongo.Pipeline{
		{{Key: "$set", Value: bson.D{{Key: "next", Value: bson.D{{Key: "$subtract", Value: bson.A{"$next", step}}}}}}},
		{{Key: "$set", Value: bson.D{{Key: "now", Value: now}}}},
		{{Key: "$set", Value: bson.D{{Key: "first", Value: bson.D{{Key: "$max", Value: bson.A{next, earliest}}}}}}},
		{{Key: "$set", Value: bson.D{
			{Key: "next", Value: bson.D{{Key: "$add", Value: bson.A{"$first", int64(n) * every}}}}, {Key: "every", Value: every},
		}}},
	}

	// The driver would repeat FindOneAndUpdate without a pause until the deadline of ctx.
	var response struct {
		Value struct{ First, Now int64 }
	}
	err := m.coll.Database().RunCommand(mongo.NewSessionContext(ctx, nil), bson.D{
		{Key: "findAndModify", Value: m.coll.Name()},
		{Key: "query", Value: bson.D{{Key: "_id", Value: limit.Name}}},
		{Key: "update", Value: update},
		{Key: "upsert", Value: true},
		{Key: "new", Value: true},
		concern.MajorityOfCommand(),
	}).Decode(&response)
	if err != nil {
		return 0, fmt.Errorf("reserving calls of handler %s in %s.%s: %w", limit.Name, m.coll.Database().Name(), m.coll.Name(), err)
	}
	return time.Duration(response.Value.First-response.Value.Now) * time.Microsecond, nil
}
