package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// The fields of a marker are {_id: {c, n, i, g}, s, at, k, t, p, f, o, e, a}:
//
//	_id    consumer (not for IDOnly), namespace, id, and the generation if the id is a PlaceID of a later one
//	s      state: handled or claimed
//	at     time of the last change of the state
//	k      end of the retention, for the TTL index
//	t p f  topic, partition, offset, for operators
//	o e    owner and epoch of the last claim
//	a      number of claims
//
// A lease is {_id, o, e, until}, with the _id of its marker. It is a separate document because it
// is renewed while the transaction of the handler runs. If the marker contained the lease, each
// renewal would conflict with the transaction that marks the message as handled.
const (
	stateHandled = "handled"
	stateClaimed = "claimed"
)

// marker contains the fields of a marker that are read.
type marker struct {
	ID       bson.Raw `bson:"_id"`
	State    string   `bson:"s"`
	Owner    string   `bson:"o"`
	Epoch    int64    `bson:"e"`
	Attempts int      `bson:"a"`
}

// markerID returns the _id of the marker of an entry, in the given generation of its partition.
func (x *Inbox) markerID(e Entry, generation int64) (bson.Raw, error) {
	var d bson.D
	if x.identityKind == IDAndConsumer {
		d = append(d, bson.E{Key: "c", Value: e.Key.Consumer})
	}
	d = append(d, bson.E{Key: "n", Value: e.Key.Namespace}, bson.E{Key: "i", Value: e.Key.ID})

	// N29: the same place in a recreated topic is another message.
	if generation > 0 && e.isPlaceID() {
		d = append(d, bson.E{Key: "g", Value: generation})
	}

	raw, err := bson.Marshal(d)
	if err != nil {
		return nil, fmt.Errorf("encoding the identity of %s: %w", e.Key, err)
	}

	return raw, nil
}

// isPlaceID reports whether the id contains nothing but the place.
func (e Entry) isPlaceID() bool {
	p := e.Place
	return p.Topic != "" && e.Key.ID == PlaceID(p.Topic, p.Partition, p.Offset)
}

// Every update of a marker must set the fields of expiryFields or expiryFieldsAt. A marker without
// k would never be deleted.

// expiryFieldsAt returns the time and the end of the retention for a change at the time now.
func (x *Inbox) expiryFieldsAt(now time.Time) bson.D {
	return bson.D{{Key: "at", Value: now}, {Key: "k", Value: now.Add(x.retention)}}
}

// expiryFields is expiryFieldsAt for an update by pipeline, with the time of the server.
func (x *Inbox) expiryFields() bson.D {
	return bson.D{{Key: "at", Value: "$$NOW"}, {Key: "k", Value: afterNow(x.retention)}}
}

// afterNow returns the time d after the server's current time, for an update by pipeline.
func afterNow(d time.Duration) bson.D {
	return bson.D{{Key: "$add", Value: bson.A{"$$NOW", d.Milliseconds()}}}
}

// newHandledMarker returns the document of a marker for a handled message.
func (x *Inbox) newHandledMarker(id bson.Raw, p Place, now time.Time) bson.D {
	d := append(bson.D{{Key: "_id", Value: id}, {Key: "s", Value: stateHandled}}, x.expiryFieldsAt(now)...)
	return append(d, placeFields(p)...)
}

// handledUpdate returns the update that marks a claimed message as handled.
func (x *Inbox) handledUpdate() bson.A {
	return bson.A{bson.D{{Key: "$set", Value: append(bson.D{{Key: "s", Value: stateHandled}}, x.expiryFields()...)}}}
}

// placeFields returns the fields of a marker for the place of its message.
func placeFields(p Place) bson.D {
	if p.Topic == "" {
		return nil
	}
	return bson.D{{Key: "t", Value: p.Topic}, {Key: "p", Value: p.Partition}, {Key: "f", Value: p.Offset}}
}

// serverTime returns the server's time of the last reply in the transaction, with a precision of
// one second. On an idle replica set it may be ten seconds slow, because the set writes its own
// time in this interval.
func serverTime(ctx context.Context) (time.Time, error) {
	ts := mongo.SessionFromContext(ctx).OperationTime()
	if ts == nil {
		return time.Time{}, errors.New("the server's replies have no operation time; transactions need a replica set")
	}

	return time.Unix(int64(ts.T), 0), nil
}

const codeDuplicateKey = 11000

// duplicateKeys returns the keys that the server rejected as duplicates. It returns nil if err
// reports another problem as well.
func duplicateKeys(err error, keys []Key) []Key {
	var bulk mongo.BulkWriteException
	if !errors.As(err, &bulk) || bulk.WriteConcernError != nil {
		return nil
	}

	var dup []Key
	for _, w := range bulk.WriteErrors {
		if w.Code != codeDuplicateKey || w.Index < 0 || w.Index >= len(keys) {
			return nil
		}
		dup = append(dup, keys[w.Index])
	}

	return dup
}
