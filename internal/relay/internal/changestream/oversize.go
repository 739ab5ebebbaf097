package changestream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

// slimMode is the state of reading around events that do not fit a response (N24). A document may have
// up to 16 MiB. Its change event repeats the `_id` three times, two of them in hexadecimal, and can
// then exceed the size that the server can send. The whole response fails with code 10334, including
// the small events before the large one.
//
// In slim mode, the pipeline omits the documents of events near the limit, and only those. The
// reader fetches these documents by `_id`. Slim mode ends after the first such event. The stream is
// not reopened at that event's own token before a later event is known, because the server builds
// the event again to check the token.
type slimMode struct {
	on     bool
	byTime bool // the slim stream could not be opened by token either

	// lastFetched is the position of the last event whose document was fetched.
	lastFetched resume.Position
	events      int

	// silent counts the empty responses. The first one after an opening proves nothing.
	silent int
}

// slimLimit is the size above which an event's document is omitted. The server's limit is 16 MiB +
// 16 KiB, and the sum in slimStage does not count less than a kilobyte.
const slimLimit = 15 << 20

// slimStage omits the document if its event is near the limit: the document, its key, and its token.
var slimStage = bson.D{{Key: "$set", Value: bson.D{{Key: "fullDocument", Value: bson.D{{Key: "$cond", Value: bson.A{
	bson.D{{Key: "$gt", Value: bson.A{bson.D{{Key: "$add", Value: bson.A{
		bson.D{{Key: "$ifNull", Value: bson.A{bson.D{{Key: "$bsonSize", Value: "$fullDocument"}}, 0}}},
		bson.D{{Key: "$ifNull", Value: bson.A{bson.D{{Key: "$bsonSize", Value: "$documentKey"}}, 0}}},
		bson.D{{Key: "$strLenBytes", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$_id._data", ""}}}}},
	}}}, slimLimit}}},
	"$$REMOVE",
	"$fullDocument",
}}}}}}}

// omitLargeDocuments switches to slim mode, and then to slim mode by time. It returns false if that was tried already.
func (r *run) omitLargeDocuments() bool {
	timestamp, hasTime := r.position.Time()
	switch {
	case !r.slim.on:
		r.slim = slimMode{on: true}
	case !r.slim.byTime && !r.byTime && hasTime:
		r.slim.byTime = true
		r.startAt(timestamp)
	default:
		return false
	}
	return true
}

// readAroundOversize handles an error that shows an event above a limit of the server, such as code 10334. It reads without
// large documents, and ends Run with a gap if that does not help. N24
func (r *run) readAroundOversize(ctx context.Context, code int, err error) error {
	if !r.omitLargeDocuments() {
		return &changes.GapError{Code: code, Reason: changes.GapOversize, Position: r.position, Err: err}
	}

	r.stream.cfg.Metrics.countRestart("oversize")
	r.stream.cfg.Log.Warn("a document is too large for a change event; fetching it by its _id", "code", code)

	// The wait grows if this happens again without progress.
	_ = retry.Sleep(ctx, r.backoff.Next())
	return nil
}

// hasPassed reports whether whole events can be read again: the position is after the fetched document,
// or there was no such document among as many events as the failed response can have held.
func (s *slimMode) hasPassed(pos resume.Position, silent bool) bool {
	if !s.lastFetched.IsZero() {
		return pos.Compare(s.lastFetched) > 0
	}

	if silent {
		s.silent++
	}
	return s.silent > 1 || s.events >= changes.MaxDocuments
}

// restoreDocuments fetches the documents that the pipeline omitted, and adds them to their events.
func (r *run) restoreDocuments(ctx context.Context, batch *changes.Batch) error {
	var ev changes.Event
	for i, raw := range batch.Docs {
		if err := changes.Parse(raw, &ev); err != nil {
			return err
		}
		r.slim.events++
		if ev.Op != changes.Insert || ev.HasDocument {
			continue
		}

		doc, err := r.stream.fetchDocument(ctx, &ev)
		if err != nil {
			return fmt.Errorf("fetching a document that is too large for a change event: %w", err)
		}

		r.slim.lastFetched = positionOf(&ev).Clone()
		batch.Docs[i] = rebuildEvent(raw, doc)
		batch.Bytes += len(batch.Docs[i]) - len(raw)
	}
	return nil
}

// fetchDocument reads the document of an insert by its `_id`: a majority read on the primary, not
// before the event's time (N21, N22). It returns nil if the document no longer exists. If the
// document was updated since the insert, the result contains the update.
func (s *Stream) fetchDocument(ctx context.Context, ev *changes.Event) (bson.Raw, error) {
	// Without the event's time, the read could miss the insert.
	session, err := mongodb.Causal(ctx, s.cfg.Client, ev.ClusterTime)
	if err != nil {
		return nil, err
	}
	defer session.EndSession(context.WithoutCancel(ctx))

	ctx, cancel := context.WithTimeout(mongo.NewSessionContext(ctx, session), openTimeout)
	defer cancel()
	coll := mongodb.Database(s.cfg.Client, string(ev.DB)).Collection(string(ev.Coll))
	raw, err := mongodb.Fetch(ctx, coll, bson.RawValue{Type: bson.Type(ev.IDType), Value: ev.ID})
	if errors.Is(err, mongodb.ErrNotFound) {
		return nil, nil
	}
	return raw, err
}

// goneNote is the note of an event whose document no longer exists.
const goneNote = "the document was too large for a change event and is no longer in the collection"

// rebuildEvent returns the event with doc as its fullDocument, or with the note if doc is nil. The
// result may exceed BSON's size limit for a document, because it never leaves the process.
func rebuildEvent(raw []byte, doc bson.Raw) []byte {
	typ, name, val := byte(bson.TypeEmbeddedDocument), "fullDocument", []byte(doc)
	if doc == nil {
		typ, name = byte(bson.TypeString), changes.NoteField
		val = binary.LittleEndian.AppendUint32(nil, uint32(len(goneNote)+1))
		val = append(append(val, goneNote...), 0)
	}

	out := make([]byte, 0, len(raw)+len(name)+len(val)+2)
	out = append(out, raw[:len(raw)-1]...)
	out = append(out, typ)
	out = append(append(out, name...), 0)
	out = append(append(out, val...), 0)
	binary.LittleEndian.PutUint32(out, uint32(len(out)))
	return out
}
