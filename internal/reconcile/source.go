package reconcile

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
)

const (
	// replyTimeout bounds one reply at first: a collection without the index on ts is sorted before the first one comes, and each time-out
	// doubles the bound, so that the sweep of a large one ends.
	replyTimeout = 5 * time.Minute
	firstReply   = 32 // documents, while their size is unknown
	maxReply     = 2000
)

var (
	noStamp   = bson.Timestamp{}
	lastStamp = bson.Timestamp{T: 1<<32 - 1, I: 1<<32 - 1}
)

// untouched is the condition for an envelope that is the stream's to send: one with a state or a due time is sent for a
// reason of its own, and one with sentAt was.
func untouched(and ...bson.E) bson.D {
	return append(bson.D{{Key: "state", Value: nil}, {Key: "dueAt", Value: nil}, {Key: "sentAt", Value: nil}}, and...)
}

// stamped are the envelopes of (after, to].
func stamped(after, to bson.Timestamp) bson.D {
	return untouched(bson.E{Key: "ts", Value: bson.D{{Key: "$gt", Value: after}, {Key: "$lte", Value: to}}})
}

// unstamped are the envelopes whose ts is missing, 0,0, or no timestamp: they stand on both sides of all stamps in the
// order of BSON, so that the index finds them. ($not and $type would read all of it.)
func unstamped() bson.D {
	side := func(op string, t bson.Timestamp) bson.D {
		return bson.D{{Key: "$expr", Value: bson.D{{Key: op, Value: bson.A{"$ts", t}}}}}
	}
	return untouched(bson.E{Key: "$or", Value: bson.A{side("$lte", noStamp), side("$gt", lastStamp)}})
}

// AnyUnstamped reports whether coll holds an envelope that only its presence tells of, among all that was committed up to
// now.
func AnyUnstamped(ctx context.Context, now bson.Timestamp, coll *mongo.Collection, p slot.Part) (bool, error) {
	sess, err := store.Causal(ctx, coll.Database().Client(), now)
	if err != nil {
		return false, err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	ctx = mongo.NewSessionContext(ctx, sess)
	err = store.Majority(coll).FindOne(ctx, p.And(unstamped()), options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})).Err()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking for envelopes without a stamp in %s: %w", store.Namespace(coll), err)
	}
	return true, nil
}

// source reads one collection. It survives faults: a cursor that is gone is opened again behind the last document.
type source struct {
	of        store.Outbox
	coll      *mongo.Collection
	db, name  []byte
	part      slot.Part
	to        bson.Timestamp
	unstamped bool
	target    int           // bytes that a reply should weigh
	wait      time.Duration // for a reply

	// last is the stamp of the latest document, or what to begin behind; at are the ids that were read with that very
	// stamp, for it may be shared: by copied documents, and by the shards of a cluster.
	last bson.Timestamp
	at   map[string]struct{}

	cur  *mongo.Cursor
	sess *mongo.Session
	docs int // read from this cursor, and their bytes
	size int

	ts bson.Timestamp
	id bson.RawValue
}

// open asks for what is behind last.
func (s *source) open(ctx context.Context) error {
	sess, err := store.Causal(ctx, s.coll.Database().Client(), s.to)
	if err != nil {
		return err
	}
	opts := options.Find().SetBatchSize(firstReply)
	filter := unstamped()
	if !s.unstamped {
		after := s.last
		if len(s.at) > 0 { // the same stamp again: what was read of it is left out by id
			after = previous(after)
		}
		filter = stamped(after, s.to)
		opts.SetSort(bson.D{{Key: "ts", Value: 1}}).SetAllowDiskUse(true)
	}
	cur, err := store.Majority(s.coll).Find(mongo.NewSessionContext(ctx, sess), s.part.And(filter), opts) // N21
	if err != nil {
		sess.EndSession(context.WithoutCancel(ctx))
		return fmt.Errorf("sweeping %s: %w", store.Namespace(s.coll), err)
	}
	s.cur, s.sess, s.docs, s.size = cur, sess, 0, 0
	return nil
}

// previous is the greatest timestamp below t.
func previous(t bson.Timestamp) bson.Timestamp {
	if t.I > 0 {
		return bson.Timestamp{T: t.T, I: t.I - 1}
	}
	return bson.Timestamp{T: t.T - 1, I: 1<<32 - 1}
}

// next moves to the next document, false at the end. After an error it may be called again.
func (s *source) next(ctx context.Context) (bool, error) {
	call, cancel := context.WithTimeout(ctx, s.wait)
	defer cancel()
	more, err := s.advance(call)
	if err != nil && call.Err() != nil && ctx.Err() == nil {
		s.wait *= 2
	}
	return more, err
}

func (s *source) advance(ctx context.Context) (bool, error) {
	if s.cur == nil {
		if err := s.open(ctx); err != nil {
			return false, err
		}
	}
	for s.cur.Next(ctx) {
		if s.took() {
			return true, nil
		}
	}
	err := s.cur.Err()
	s.close(ctx)
	if err != nil {
		return false, fmt.Errorf("sweeping %s: %w", store.Namespace(s.coll), err)
	}
	return false, nil
}

// took looks at the document under the cursor, and reports whether it is a new one.
func (s *source) took() bool {
	raw := s.cur.Current
	s.docs++
	s.size += len(raw)
	if s.cur.RemainingBatchLength() == 0 {
		s.cur.SetBatchSize(int32(max(1, min(maxReply, s.target*s.docs/max(s.size, 1)))))
	}
	s.id = raw.Lookup("_id")
	if s.unstamped {
		return true
	}
	s.ts = Stamp(raw)
	if s.ts != s.last {
		s.last = s.ts
		clear(s.at)
	}
	key := string(s.id.Type) + string(s.id.Value)
	if _, again := s.at[key]; again {
		return false
	}
	s.at[key] = struct{}{}
	return true
}

// close gives the cursor and the session back to the server.
func (s *source) close(ctx context.Context) {
	if s.cur == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = s.cur.Close(ctx) // an idle cursor ends by itself
	s.sess.EndSession(ctx)
	s.cur = nil
}
