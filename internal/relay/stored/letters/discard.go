package letters

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// RejectedError is returned for a letter that cannot be requeued or discarded as it is. The reason includes the
// fix. Nothing was changed.
type RejectedError struct {
	Letter *Dead // without its envelope
	Reason string
	// Fields are the fields of the envelope, by their names in the contract, that an edit has to set.
	Fields []string
}

func (e *RejectedError) Error() string {
	return fmt.Sprintf("%s of id %s in %s: %s", e.Letter.ID, e.Letter.IDText(), e.Letter.NS, e.Reason)
}

// maxCheckpointWait bounds how long Discard waits until the watcher has passed the events of the
// letters.
const maxCheckpointWait = 2 * time.Second

// Discarding states what becomes of the letters of a discard.
type Discarding struct {
	Actor string
	// Archive is how long the letters stay in the archive; 0 removes them at once. Letters that are in the archive already
	// are removed at once.
	Archive time.Duration
}

// Discard moves the letters that match query and existed when it began into the archive, or removes them, and returns
// their number. If did is not nil, Discard calls it with the total after each part. watchers is the collection of the
// watcher documents.
//
// Discard takes no fence, because no envelope changes. Each part of at most [mongodb.MaxDocuments] letters is
// one majority write. If Discard is interrupted, the same call does the rest.
//
// Discard returns a [*RejectedError] and changes nothing if the watcher has not passed the event of
// a letter: only the letter keeps the next owner from sending that event (N15). Discard blocks up
// to 2 s until the watcher passes it.
func Discard(
	ctx context.Context, coll, watchers *mongo.Collection, query Query, how Discarding, did func(int64),
) (int64, error) {
	now, err := mongodb.ServerTime(ctx, coll.Database().Client())
	if err != nil {
		return 0, err
	}
	if query, err = query.RestrictToAction(now); err != nil {
		return 0, err
	}
	scan, err := NewScan(ctx, coll, query)
	if err != nil {
		return 0, err
	}
	// The checkpoint that passes these events may be a moment away.
	if err := waitUntilPassed(ctx, scan.coll, watchers, query); err != nil {
		return 0, err
	}

	discardPart, right := removePart, "remove"
	if how.Archive > 0 && !query.Archived {
		discardPart, right = how.archivePart, "update"
	}
	var total int64
	for {
		part, err := scan.nextPart(ctx, mongodb.MaxDocuments, math.MaxInt)
		if err != nil || len(part) == 0 {
			return total, err
		}

		discarded, err := discardPart(ctx, scan.coll, part, query)
		if err != nil {
			return total, mongodb.DescribeError(err, "discarding dead letters from "+mongodb.Namespace(coll), right, mongodb.Namespace(coll))
		}
		total += discarded
		if did != nil {
			did(total)
		}
	}
}

// removePart removes the letters in part with their chunks, and returns the number of removed
// letters.
func removePart(ctx context.Context, coll *mongo.Collection, part []scanEntry, query Query) (int64, error) {
	return changePart(ctx, coll, part, query, func(tx context.Context, ids, chunks []string) error {
		_, err := coll.DeleteMany(tx, idIn(slices.Concat(ids, chunks)))
		return err
	})
}

// archivePart moves the letters in part into the archive, and returns their number.
func (d Discarding) archivePart(ctx context.Context, coll *mongo.Collection, part []scanEntry, query Query) (int64, error) {
	now, err := mongodb.ServerTime(ctx, coll.Database().Client())
	if err != nil {
		return 0, err
	}

	until := now.Add(d.Archive)
	return changePart(ctx, coll, part, query, func(tx context.Context, ids, chunks []string) error {
		if len(chunks) > 0 {
			if _, err := coll.UpdateMany(tx, idIn(chunks), setFields(bson.E{Key: "expireAt", Value: until.Add(chunkGrace)})); err != nil {
				return err
			}
		}
		// An operator instead of a pipeline: only plain operators keep the bytes of a malformed envelope.
		_, err := coll.UpdateMany(tx, idIn(ids), setFields(
			bson.E{Key: "archived", Value: Archived{At: now, Actor: d.Actor}}, bson.E{Key: "expireAt", Value: until}))
		return err
	})
}

// changePart calls change with the ids of those letters in part that query still selects, because one of them may have been requeued since
// the scan, and with the ids of their chunks. It returns the number of the letters. It is one transaction, because a letter without its
// chunks would be incomplete, and only their letter leads to chunks.
func changePart(
	ctx context.Context, coll *mongo.Collection, part []scanEntry, query Query, change func(tx context.Context, ids, chunks []string) error,
) (changed int64, err error) {
	all := make([]string, len(part))
	for i, p := range part {
		all[i] = p.ID
	}

	err = mongodb.InTransaction(ctx, coll.Database().Client(), func(tx context.Context) error {
		selected, err := mongodb.FindAll[scanEntry](tx, coll, "reading "+mongodb.Namespace(coll), listing.All(idIn(all), query.mongoFilter()),
			options.Find().SetProjection(mongodb.Fields("chunks")))
		changed = int64(len(selected))
		if err != nil || changed == 0 {
			return err
		}

		var ids, chunks []string
		for _, letter := range selected {
			ids = append(ids, letter.ID)
			for n := range letter.Chunks {
				chunks = append(chunks, chunkID(letter.ID, n))
			}
		}
		return change(tx, ids, chunks)
	})
	return changed, err
}

func setFields(fields ...bson.E) bson.D { return bson.D{{Key: "$set", Value: bson.D(fields)}} }

// waitUntilPassed blocks until the watcher has passed the events of all letters that match query. After
// maxCheckpointWait it returns a [*RejectedError] instead. A running watcher passes an event with
// its next checkpoint.
func waitUntilPassed(ctx context.Context, coll, watchers *mongo.Collection, query Query) error {
	began := time.Now()
	for {
		err := checkPassed(ctx, coll, watchers, query)
		var rejected *RejectedError
		if !errors.As(err, &rejected) || time.Since(began) > maxCheckpointWait {
			return err
		}

		if err := retry.Sleep(ctx, maxCheckpointWait/20); err != nil {
			return err
		}
	}
}

// checkPassed returns a [*RejectedError] if the event of a matching letter comes after the position
// of the watcher, or of the slot of the letter.
func checkPassed(ctx context.Context, coll, watchers *mongo.Collection, query Query) error {
	watchers = mongodb.Majority(watchers)
	ids, err := lease.ListIDs(ctx, watchers, query.Watcher)
	if err != nil {
		return err
	}

	for _, id := range ids {
		doc, _, err := lease.Read(ctx, watchers, id)
		noPosition := err == nil && doc.ClusterTime.IsZero()
		if errors.Is(err, lease.ErrNotFound) || noPosition {
			// Without a position, no owner resumes the stream before the event.
			continue
		}
		if err != nil {
			return err
		}

		_, part, _ := slot.ParseID(id)
		var letter Dead
		err = coll.FindOne(ctx, listing.All(afterPosition(query.Watcher, part, doc.Position()), query.mongoFilter()),
			options.FindOne().SetProjection(bson.D{{Key: "envelope", Value: 0}})).Decode(&letter)
		if err == nil {
			return &RejectedError{Letter: &letter, Reason: fmt.Sprintf("%s has not passed its event yet, and without the dead letter the next "+
				"owner would send the event; discard it when the watcher runs and is not held up", id)}
		}
		if !errors.Is(err, mongo.ErrNoDocuments) {
			return fmt.Errorf("finding dead letters in %s whose events are not passed: %w", mongodb.Namespace(coll), err)
		}
	}
	return nil
}
