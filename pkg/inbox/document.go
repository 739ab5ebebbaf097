package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// The fields of a marker: {_id: {c, n, i, g}, s, at, k, t, p, f, o, e, a}.
//
//	_id  consumer (absent for IDOnly), namespace, id, and the generation for a PlaceID of a later one
//	s    handled or claimed
//	at   when it came to that        k  until when it is kept, by which the TTL index removes it
//	t p f topic, partition, offset; for people
//	o e  owner and epoch of the last claim       a  how many claims there were
//
// A lease is {_id: that of the marker, o, e, until}. It is a document of its own because it is renewed while the handler's
// transaction runs: were it the marker, each renewal would be a write conflict for the transaction that turns the marker
// to handled.
const (
	stateHandled = "handled"
	stateClaimed = "claimed"
)

// marker is what is read of a marker.
type marker struct {
	ID       bson.Raw `bson:"_id"`
	State    string   `bson:"s"`
	Owner    string   `bson:"o"`
	Epoch    int64    `bson:"e"`
	Attempts int      `bson:"a"`
}

// identity is the _id of the marker of an entry, in the generation of its partition.
func (x *Inbox) identity(e Entry, generation int64) (bson.Raw, error) {
	var d bson.D
	if x.identityKind == IDAndConsumer {
		d = append(d, bson.E{Key: "c", Value: e.Key.Consumer})
	}
	d = append(d, bson.E{Key: "n", Value: e.Key.Namespace}, bson.E{Key: "i", Value: e.Key.ID})
	if generation > 0 && e.derived() {
		d = append(d, bson.E{Key: "g", Value: generation}) // N29: the same place of the topic's next life is another message
	}
	raw, err := bson.Marshal(d)
	if err != nil {
		return nil, fmt.Errorf("encoding the identity of %s: %w", e.Key, err)
	}
	return raw, nil
}

// derived says whether the id says no more than the place.
func (e Entry) derived() bool {
	p := e.Place
	return p.Topic != "" && e.Key.ID == PlaceID(p.Topic, p.Partition, p.Offset)
}

// Every way to a marker goes through expiry or expiryAt: a marker without k would stay for ever.

func (x *Inbox) expiryAt(now time.Time) bson.D {
	return bson.D{{Key: "at", Value: now}, {Key: "k", Value: now.Add(x.retention)}}
}

func (x *Inbox) expiry() bson.D {
	return bson.D{{Key: "at", Value: "$$NOW"}, {Key: "k", Value: after(x.retention)}}
}

// after is that long after the server's now, in an update by pipeline.
func after(d time.Duration) bson.D {
	return bson.D{{Key: "$add", Value: bson.A{"$$NOW", d.Milliseconds()}}}
}

// handledMarker is a new marker.
func (x *Inbox) handledMarker(id bson.Raw, p Place, now time.Time) bson.D {
	d := append(bson.D{{Key: "_id", Value: id}, {Key: "s", Value: stateHandled}}, x.expiryAt(now)...)
	return append(d, placeFields(p)...)
}

// toHandled turns a claimed marker.
func (x *Inbox) toHandled() bson.A {
	return bson.A{bson.D{{Key: "$set", Value: append(bson.D{{Key: "s", Value: stateHandled}}, x.expiry()...)}}}
}

func placeFields(p Place) bson.D {
	if p.Topic == "" {
		return nil
	}
	return bson.D{{Key: "t", Value: p.Topic}, {Key: "p", Value: p.Partition}, {Key: "f", Value: p.Offset}}
}

// serverTime is the server's clock as of the last reply in the transaction, to the second. On an idle replica set it may
// be ten seconds behind, the interval at which the set writes its own time down.
func serverTime(ctx context.Context) (time.Time, error) {
	ts := mongo.SessionFromContext(ctx).OperationTime()
	if ts == nil {
		return time.Time{}, errors.New("the server's replies have no operation time; transactions need a replica set")
	}
	return time.Unix(int64(ts.T), 0), nil
}

const codeDuplicateKey = 11000

// duplicates are the entries that the server refused as duplicates; none if the error is about anything else as well.
func duplicates(err error, keys []Key) []Key {
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
