package changestream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/resume"
)

// slim is the state of reading around events that do not fit a reply (N24). A document of up to 16 MiB is legal, but its change event
// repeats the `_id` three times, twice of them in hexadecimal, and then exceeds what the server can send: it fails the whole
// reply, with all small events in front of the large one (code 10334).
//
// While slim is on, the pipeline leaves out the documents of events that are near the limit, and only those; they are
// fetched by `_id`. It ends behind the first such event: its own token is not opened at again before anything
// newer is known, because the server builds the event anew to check the token.
type slim struct {
	on     bool
	byTime bool   // also a slim stream could not be opened by token
	poison string // token data of the last event whose document was fetched
	events int
	silent int // empty replies; the first one after an opening says nothing
}

// slimLimit is what an event may weigh before its document is left out: the server's limit is 16 MiB + 16 KiB, and the sum below leaves
// out less than a kilobyte.
const slimLimit = 15 << 20

// slimStage leaves out a document whose event would come near the limit: the document, its key, and its token.
var slimStage = bson.D{{Key: "$set", Value: bson.D{{Key: "fullDocument", Value: bson.D{{Key: "$cond", Value: bson.A{
	bson.D{{Key: "$gt", Value: bson.A{bson.D{{Key: "$add", Value: bson.A{
		bson.D{{Key: "$ifNull", Value: bson.A{bson.D{{Key: "$bsonSize", Value: "$fullDocument"}}, 0}}},
		bson.D{{Key: "$ifNull", Value: bson.A{bson.D{{Key: "$bsonSize", Value: "$documentKey"}}, 0}}},
		bson.D{{Key: "$strLenBytes", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$_id._data", ""}}}}},
	}}}, slimLimit}}},
	"$$REMOVE",
	"$fullDocument",
}}}}}}}

// oversize answers 10334: read slim, then slim by time, then give up. N24
func (r *run) oversize(ctx context.Context, code int, err error) error {
	switch t, ok := r.pos.Time(); {
	case !r.slim.on:
		r.slim = slim{on: true}
	case !r.slim.byTime && !r.byTime && ok:
		r.slim.byTime = true
		r.startAt(t)
	default:
		return &GapError{Code: code, Reason: GapOversize, Position: r.pos, Err: err}
	}
	r.s.cfg.Metrics.restart("oversize")
	r.s.cfg.Log.Warn("a document is too large for a change event; fetching it by its _id", "code", code)
	_ = retry.Sleep(ctx, r.backoff.Next()) // grows when this happens again without progress
	return nil
}

// passed reports whether whole events can be read again: the position is behind the fetched document, or there was none among
// as many events as the failed reply can have held.
func (s *slim) passed(pos resume.Position, silent bool) bool {
	if s.poison != "" {
		return pos.Token.Data() > s.poison
	}
	if silent {
		s.silent++
	}
	return s.silent > 1 || s.events >= maxDocuments
}

// restore puts back the documents that were left out.
func (r *run) restore(ctx context.Context, b *Batch) error {
	var ev Event
	for i, raw := range b.Docs {
		if err := Parse(raw, &ev); err != nil {
			return err
		}
		r.slim.events++
		if ev.Op != Insert || ev.HasDocument {
			continue
		}
		doc, err := r.s.document(ctx, &ev)
		if err != nil {
			return fmt.Errorf("fetching a document that is too large for a change event: %w", err)
		}
		r.slim.poison = string(ev.Data)
		b.Docs[i] = rebuild(raw, doc)
		b.Bytes += len(b.Docs[i]) - len(raw)
	}
	return nil
}

// document fetches the document of an insert by its `_id`: majority, on the primary, not before the event's time (N21, N22).
// It is nil when the document is gone. What an update made of the document meanwhile is what comes.
func (s *Stream) document(ctx context.Context, ev *Event) (bson.Raw, error) {
	sess, err := s.cfg.Client.StartSession(options.Session().SetCausalConsistency(true))
	if err != nil {
		return nil, err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	if err := sess.AdvanceOperationTime(&ev.ClusterTime); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(mongo.NewSessionContext(ctx, sess), openTimeout)
	defer cancel()
	coll := s.cfg.Client.Database(string(ev.DB)).Collection(string(ev.Coll),
		options.Collection().SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary()))
	raw, err := coll.FindOne(ctx, bson.D{{Key: "_id", Value: bson.RawValue{Type: bson.Type(ev.IDType), Value: ev.ID}}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil, nil
	}
	return raw, err
}

// goneNote says, in the event, why it has no document.
const goneNote = "the document was too large for a change event and is no longer in the collection"

// rebuild is the event with doc as its fullDocument, or with the note if doc is nil. The result may be larger than BSON's limit for a
// document: it never leaves the process.
func rebuild(raw []byte, doc bson.Raw) []byte {
	typ, name, val := byte(typeDocument), "fullDocument", []byte(doc)
	if doc == nil {
		typ, name = typeString, noteField
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
