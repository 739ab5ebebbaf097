package purge

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

const (
	// maxCandidates bounds the ids that a [Candidates] holds, about 5 MB.
	maxCandidates = 50_000

	// The search for envelopes whose ids contain no time reads every envelope without a stamp. After a search that
	// finds none, the next one is delayed, up to maxSearchPause.
	minSearchPause = 10 * time.Second
	maxSearchPause = 10 * time.Minute
)

// Candidates are envelopes of one collection without a stamp that the purge has read and not yet removed.
//
// Nothing in such an envelope shows that it was delivered. Therefore the purge reads its id first, and then the
// time of the cluster. The envelope was committed before this time. Once the positions of all slots and watchers
// have passed this time, the envelope was delivered or has a state (N25). Then exactly the envelopes that were read
// are removed, unless they have a state. A restart forgets the candidates, and they are read again.
//
// The retention counts from the time in the id. An envelope whose id contains none gets a stamp instead, in bulk,
// and the retention counts from there.
type Candidates struct {
	Limit int // of ids; 0 means maxCandidates

	readAt   bson.Timestamp  // a time after the ids were read
	expired  []bson.RawValue // to remove
	timeless []bson.RawValue // to stamp

	// drained is the latest known time before which no id of an envelope without a stamp was left. complete is the same
	// time for the candidates: once the expired candidates are removed, it becomes drained. It is zero if the read left
	// candidates out.
	drained, complete bson.Timestamp

	searchPause time.Duration // after a search for timeless ids that found none
	searchAfter time.Time
}

// Len returns how many envelopes were read and wait for the positions.
func (c *Candidates) Len() int { return len(c.expired) + len(c.timeless) }

// isFull reports whether the last read may have left envelopes out.
func (c *Candidates) isFull() bool { return c.Len() >= c.limit() }

func (c *Candidates) limit() int {
	if c.Limit > 0 {
		return c.Limit
	}
	return maxCandidates
}

// read reads new candidates. cut.Before is the boundary for the times in ids. If it fails, it keeps none.
func (c *Candidates) read(ctx context.Context, coll *mongo.Collection, cut Cut) (err error) {
	// Without readAt, nothing shows which position has passed the candidates (N25).
	defer func() {
		if err != nil {
			c.expired, c.timeless, c.complete = nil, nil, bson.Timestamp{}
		}
	}()
	for _, early := range cut.expiredIDs() {
		if err := c.readIDs(ctx, coll, early, cut); err != nil {
			return err
		}
	}
	c.complete = bson.Timestamp{}
	if !cut.IrregularIDs && !c.isFull() {
		c.complete = cut.Before
	}
	c.noteDrained()

	if now := time.Now(); !now.Before(c.searchAfter) {
		// Without this pause, a large outbox in which every id contains a time would be read every few seconds. It also
		// follows a search that takes too long.
		c.searchPause = min(max(2*c.searchPause, minSearchPause), maxSearchPause)
		c.searchAfter = now.Add(c.searchPause)

		found := c.Len()
		if err := c.readIDs(ctx, coll, cut.timelessIDs(now), cut); err != nil {
			return err
		}
		if c.Len() > found {
			c.searchPause, c.searchAfter = 0, now
		}
	}

	// This time is read after the candidates, so that every candidate was committed before it.
	c.readAt, err = mongodb.ClusterTime(ctx, coll.Database().Client())
	return err
}

// noteDrained updates drained once no expired candidate is left.
func (c *Candidates) noteDrained() {
	if len(c.expired) == 0 && c.complete.After(c.drained) {
		c.drained = c.complete
	}
}

// readIDs adds the envelopes without a stamp whose ids match.
func (c *Candidates) readIDs(ctx context.Context, coll *mongo.Collection, ids bson.E, cut Cut) error {
	left := c.limit() - c.Len()
	if left <= 0 {
		return nil
	}

	// A document that a majority does not have yet may be rolled back, and another one inserted with its id.
	ns := mongodb.Namespace(coll)
	return mongodb.FindEach(ctx, mongodb.Majority(coll), "looking for envelopes to purge of "+ns,
		outboxes.WithoutDueAt(ids, outboxes.Unstamped()),
		func(raw bson.Raw) error {
			id := mongodb.CloneValue(raw.Lookup("_id"))
			if cut.isExpired(id) {
				c.expired = append(c.expired, id)
			} else {
				c.timeless = append(c.timeless, id)
			}
			return nil
		}, options.Find().SetLimit(int64(left)).SetProjection(bson.D{{Key: "_id", Value: 1}}))
}

// isExpired reports whether the id contains a time before the cut that may be used.
func (c Cut) isExpired(id bson.RawValue) bool {
	at, ok := outboxes.IDTime(byte(id.Type), id.Value)
	return ok && !c.IrregularIDs && at.Before(c.Time())
}

// expiredIDs returns the conditions for ids with a time before the cut, one for each kind of id. By each, the server reads
// one range of the index on _id. Some UUIDs of other versions match as well.
func (c Cut) expiredIDs() []bson.E {
	if c.IrregularIDs {
		return nil
	}

	return outboxes.IDsBetween(time.Time{}, c.Time())
}

// timelessIDs returns the condition for ids without a usable time. It leaves out the ids that expiredIDs will match once
// they are older.
func (c Cut) timelessIDs(now time.Time) bson.E {
	if c.IrregularIDs {
		return bson.E{Key: "_id", Value: bson.D{{Key: "$exists", Value: true}}}
	}

	// An ObjectId is always read by its range, but most UUIDs before the cut contain no time.
	to := now.Add(outboxes.ClockMargin)
	objectIDs, uuids := outboxes.IDsBetween(time.Time{}, to)[0], outboxes.IDsBetween(c.Time(), to)[1]
	return bson.E{Key: "$nor", Value: bson.A{bson.D{objectIDs}, bson.D{uuids}}}
}

// purge removes or stamps up to n candidates. It does nothing until a position has passed them.
func (c *Candidates) purge(ctx context.Context, coll *mongo.Collection, cut Cut, n int) (deleted int64, err error) {
	if !cut.Position.After(c.readAt) {
		return 0, nil
	}

	// The statement checks again: an envelope may have got a state or a stamp since it was read.
	filter := func(ids []bson.RawValue) bson.D {
		return outboxes.WithoutDueAt(bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}, outboxes.Unstamped())
	}
	if part := c.expired[:min(n, len(c.expired))]; len(part) > 0 {
		deleted, err := cut.deleteMany(ctx, coll, filter(part), outboxes.PickedByID)
		if err != nil {
			return 0, err
		}
		c.expired = c.expired[len(part):]
		c.noteDrained()
		return deleted, nil
	}

	part := c.timeless[:min(n, len(c.timeless))]
	// The retention of an envelope without a time in its id counts from this stamp.
	stamp := mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "ts", Value: "$$CLUSTER_TIME"}}}}}
	update := bson.D{{Key: "q", Value: filter(part)}, {Key: "u", Value: stamp}, {Key: "multi", Value: true}, {Key: "hint", Value: outboxes.PickedByID}}
	_, err = cut.runWrite(ctx, coll, bson.D{{Key: "update", Value: coll.Name()}, {Key: "updates", Value: bson.A{update}}})
	if err != nil {
		ns := mongodb.Namespace(coll)
		return 0, mongodb.DescribeError(err, "stamping the delivered envelopes of "+ns, "update", ns)
	}
	c.timeless = c.timeless[len(part):]
	return 0, nil
}
