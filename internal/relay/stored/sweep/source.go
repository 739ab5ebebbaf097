package sweep

import (
	"context"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

const (
	// responseTimeout bounds the first wait for a response. Without an index on ts the server sorts the
	// collection before it responds. Each timeout doubles the bound, so that the sweep of a large
	// collection ends.
	responseTimeout = 5 * time.Minute
	// guessedSize is the size of a document while none is known.
	guessedSize = 64 << 10
	// maxIDsAtLast bounds the ids of one stamp that are kept. Further ones are repeated after a failed read.
	maxIDsAtLast = 10_000
)

var lastStamp = bson.Timestamp{T: 1<<32 - 1, I: 1<<32 - 1}

// streamFilter matches the envelopes that the stream has to send or to move to the dead letters, together with the conditions in and.
func streamFilter(and ...bson.E) bson.D { return append(bson.D{envelope.Undelivered()}, and...) }

// stampedFilter matches the envelopes with a stamp in (after, until].
func stampedFilter(after, until bson.Timestamp) bson.D {
	return streamFilter(envelope.Stamped(bson.E{Key: "$gt", Value: after}, bson.E{Key: "$lte", Value: until}))
}

// unstampedFilter matches the envelopes without a stamp, except those with an ObjectId whose time is in leftOut.
// $expr prevents the server from using the index on _id, whose order is not that of insertion. No expression
// selects UUIDs by version, so [source] leaves them out itself.
func unstampedFilter(leftOut idRange) bson.D {
	filter := streamFilter(outboxes.Unstamped())
	if leftOut.isEmpty() {
		return filter
	}

	isObjectID := bson.D{{Key: "$eq", Value: bson.A{bson.D{{Key: "$type", Value: "$_id"}}, "objectId"}}}
	begins := bson.D{{Key: "$gte", Value: bson.A{"$_id", outboxes.FirstObjectID(leftOut.from)}}}
	ends := bson.D{{Key: "$lt", Value: bson.A{"$_id", outboxes.FirstObjectID(leftOut.to)}}}
	return append(filter, bson.E{Key: "$expr", Value: bson.D{
		{Key: "$not", Value: bson.A{bson.D{{Key: "$and", Value: bson.A{isObjectID, begins, ends}}}}},
	}})
}

// HasUnstamped reports whether coll holds an envelope without a stamp that was committed up to now and
// that the stream has to send.
func HasUnstamped(ctx context.Context, now bson.Timestamp, coll *mongo.Collection, slot slot.Range) (bool, error) {
	session, err := mongodb.Causal(ctx, coll.Database().Client(), now)
	if err != nil {
		return false, err
	}
	defer session.EndSession(context.WithoutCancel(ctx))
	ctx = mongo.NewSessionContext(ctx, session)

	return mongodb.Exists(ctx, mongodb.Majority(coll), slot.AddFilter(unstampedFilter(idRange{})))
}

// source reads one collection for a sweep. After an error it can continue: it opens a new cursor after
// the last document.
type source struct {
	outbox        outboxes.Outbox
	coll          *mongo.Collection
	db, name      []byte
	slot          slot.Range
	to            bson.Timestamp
	unstamped     bool
	leftOut       idRange       // ids with such a time are left out
	responseBytes int           // wanted size of a response
	timeout       time.Duration // for a response

	// last is the stamp of the latest document, or the stamp after which to begin. idsAtLast are the ids
	// that were read with this stamp: copied documents and the shards of a cluster can share a stamp.
	last      bson.Timestamp
	idsAtLast map[string]struct{}

	cursor    *mongo.Cursor
	session   *mongo.Session
	docs      int        // read so far, with a guess
	docBytes  int        // of docs
	unread    []bson.Raw // the rest of the latest response
	heldBytes int64      // of the latest response

	// The current document. raw is nil after release.
	raw bson.Raw
	ts  bson.Timestamp
	id  bson.RawValue
}

// nextBatch returns the number of documents of the next response: the server limits a response by that. The mean size so far turns
// the wanted bytes into it.
func (s *source) nextBatch() int32 {
	return int32(max(1, min(changes.MaxDocuments, s.responseBytes*s.docs/max(s.docBytes, 1))))
}

// openCursor opens a cursor on the documents after last.
func (s *source) openCursor(ctx context.Context) error {
	// A member of the replica set that has not reached the end of the stretch waits, instead of
	// returning less.
	session, err := mongodb.Causal(ctx, s.coll.Database().Client(), s.to)
	if err != nil {
		return err
	}

	opts := options.Find().SetBatchSize(s.nextBatch())
	filter := unstampedFilter(s.leftOut)
	if !s.unstamped {
		// More documents may have the last stamp. The documents that were read are left out by their ids.
		after := s.last
		if len(s.idsAtLast) > 0 {
			after = mongodb.Preceding(after)
		}
		filter = stampedFilter(after, s.to)
		// Without the index on ts, the server sorts the collection itself, which may need more than the
		// memory of a query.
		opts.SetSort(bson.D{{Key: "ts", Value: 1}}).SetAllowDiskUse(true)
	}

	var opened *mongo.Cursor
	err = mongodb.ReadUnindexed(func(hint any) (err error) {
		opened, err = cursor.Find(mongo.NewSessionContext(ctx, session), mongodb.Majority(s.coll), s.slot.AddFilter(filter), opts.SetHint(hint)) // N21
		return err
	})
	if err != nil {
		session.EndSession(context.WithoutCancel(ctx))
		return fmt.Errorf("sweeping %s: %w", mongodb.Namespace(s.coll), err)
	}
	s.cursor, s.session = opened, session
	return nil
}

// nextWithTimeout moves to the next document and returns false at the end. It may be called again after
// an error. A timeout doubles the bound of the next call.
func (s *source) nextWithTimeout(ctx context.Context) (bool, error) {
	call, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()

	more, err := s.advanceCursor(call)
	if err != nil && call.Err() != nil && ctx.Err() == nil {
		s.timeout *= 2
	}
	return more, err
}

// advanceCursor moves to the next document that was not read before, and returns false at the end. It
// opens the cursor if there is none, and closes it at the end and after an error.
func (s *source) advanceCursor(ctx context.Context) (bool, error) {
	if s.cursor == nil {
		if err := s.openCursor(ctx); err != nil {
			return false, err
		}
	}

	for {
		for len(s.unread) > 0 {
			s.raw, s.unread = s.unread[0], s.unread[1:]
			if s.acceptCurrent() {
				return true, nil
			}
		}

		if more, err := s.fetchResponse(ctx); !more {
			s.closeCursor(ctx)
			return false, err
		}
	}
}

// fetchResponse replaces the latest response by the next one, and returns false at the end.
func (s *source) fetchResponse(ctx context.Context) (bool, error) {
	s.raw, s.unread, s.heldBytes = nil, nil, 0
	for s.cursor.Next(ctx) {
		s.unread = append(slices.Grow(s.unread, 1+s.cursor.RemainingBatchLength()), s.cursor.Current)
		s.heldBytes += int64(len(s.cursor.Current))
		if s.cursor.RemainingBatchLength() == 0 {
			break
		}
	}

	if err := s.cursor.Err(); err != nil {
		return false, fmt.Errorf("sweeping %s: %w", mongodb.Namespace(s.coll), err)
	}
	s.docs += len(s.unread)
	s.docBytes += int(s.heldBytes)
	s.cursor.SetBatchSize(s.nextBatch())
	return len(s.unread) > 0, nil
}

// release frees the latest response and keeps the stamp of the current document, which the source reads again later. With more
// documents of one stamp than idsAtLast has, release does nothing: the source would repeat the others without end.
func (s *source) release(ctx context.Context) {
	if s.raw == nil || len(s.idsAtLast) >= maxIDsAtLast {
		return
	}

	delete(s.idsAtLast, mongodb.ValueKey(s.id))
	if len(s.idsAtLast) == 0 {
		s.last = mongodb.Preceding(s.ts)
	}
	s.closeCursor(ctx)
}

// acceptCurrent reads the stamp and the id of the current document. It returns false if the document
// was read before, or if its id is left out.
func (s *source) acceptCurrent() bool {
	s.id = s.raw.Lookup("_id")
	if s.unstamped {
		at, hasTime := outboxes.IDTime(byte(s.id.Type), s.id.Value)
		return !hasTime || !s.leftOut.contains(at)
	}

	s.ts = outboxes.Stamp(s.raw)
	if s.ts != s.last {
		s.last = s.ts
		clear(s.idsAtLast)
	}

	key := mongodb.ValueKey(s.id)
	if _, known := s.idsAtLast[key]; known {
		return false
	}
	if len(s.idsAtLast) < maxIDsAtLast {
		s.idsAtLast[key] = struct{}{}
	}
	return true
}

// closeCursor frees the latest response, and closes the cursor and its session, if there is one. It blocks for at most a second.
func (s *source) closeCursor(ctx context.Context) {
	s.raw, s.unread, s.heldBytes, s.id = nil, nil, 0, bson.RawValue{}
	if s.cursor == nil {
		return
	}

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()

	// The server closes idle cursors itself.
	_ = s.cursor.Close(ctx)
	s.session.EndSession(ctx)
	s.cursor = nil
}
