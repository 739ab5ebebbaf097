package mongostore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// The fields of a marker are {_id: {c, n, i, g}, s, at, k, t, p, f, o, e, a, r}:
//
//	_id    consumer, namespace, id, and the generation if the id is a PlaceID of a later one
//	s      state: handled or claimed
//	at     time of the last change of the state
//	k      end of the retention, for the TTL index
//	t p f  topic, partition, offset, for operators
//	o e    owner and epoch of the last claim
//	a      number of claims
//	r      response of the handling: {f: fingerprint of the request, v: value}
//
// A lease is {_id, o, e, until}, with the _id of its marker. It is a separate document because it
// is renewed while the transaction of the handler runs. If the marker contained the lease, each
// renewal would conflict with the transaction that marks the message as handled.

// documentID returns the _id of the marker and the lease.
func documentID(id inbox.ID) bson.D {
	document := bson.D{
		{Key: "c", Value: id.Consumer},
		{Key: "n", Value: id.Namespace},
		{Key: "i", Value: id.Key.ID},
	}
	if id.Generation > 0 {
		document = append(document, bson.E{Key: "g", Value: id.Generation})
	}
	return document
}

// storedID is the _id of a marker or a lease. It is the inverse of documentID.
type storedID struct {
	Consumer   string `bson:"c"`
	Namespace  string `bson:"n"`
	ID         string `bson:"i"`
	Generation int64  `bson:"g"`
}

func (d storedID) id() inbox.ID {
	return inbox.ID{Key: inbox.Key{Consumer: d.Consumer, Namespace: d.Namespace, ID: d.ID}, Generation: d.Generation}
}

// idFilter returns a filter for the marker or the lease.
func idFilter(id inbox.ID) bson.D { return bson.D{{Key: "_id", Value: documentID(id)}} }

// idsFilter returns a filter for the markers or the leases.
func idsFilter(ids []inbox.ID) bson.D {
	list := make(bson.A, len(ids))
	for i, id := range ids {
		list[i] = documentID(id)
	}
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: list}}}}
}

// Every update of a marker must set the fields of expiryFields or expiryFieldsAt. A marker without
// k would never be deleted.

// expiryFieldsAt returns the time and the end of the retention for a change at the time now.
func (s *Store) expiryFieldsAt(now time.Time) bson.D {
	return bson.D{{Key: "at", Value: now}, {Key: "k", Value: now.Add(s.retention)}}
}

// expiryFields is expiryFieldsAt for an update by pipeline, with the time of the server.
func (s *Store) expiryFields() bson.D {
	return bson.D{{Key: "at", Value: "$$NOW"}, {Key: "k", Value: mongodb.AfterNow(s.retention)}}
}

// placeFields returns the fields of a marker for the place of its message.
func placeFields(place inbox.Place) bson.D {
	if place.Topic == "" {
		return nil
	}
	return bson.D{{Key: "t", Value: place.Topic}, {Key: "p", Value: place.Partition}, {Key: "f", Value: place.Offset}}
}

// ReadMarkers returns the stored markers with these ids.
func (s *Store) ReadMarkers(ctx context.Context, ids []inbox.ID) (map[inbox.ID]inbox.Marker, error) {
	fields := bson.D{{Key: "s", Value: 1}, {Key: "o", Value: 1}, {Key: "e", Value: 1}}
	cur, err := cursor.Find(ctx, s.markers, idsFilter(ids), options.Find().SetProjection(fields))
	return readByID[inbox.Marker](ctx, "reading markers", cur, err)
}

// readByID returns the markers or the leases of a cursor by their ids.
func readByID[V any](ctx context.Context, doing string, cur *mongo.Cursor, err error) (map[inbox.ID]V, error) {
	type stored struct {
		ID    storedID `bson:"_id"`
		Value V        `bson:",inline"`
	}
	docs, err := cursor.All[stored](ctx, doing, cur, err)
	found := make(map[inbox.ID]V, len(docs))
	for _, d := range docs {
		found[d.ID.id()] = d.Value
	}
	return found, err
}

// InsertMarkers inserts new markers with one command, in the transaction of ctx.
//
// If another transaction has written a marker since this one began, the insert is a write conflict
// (112). Then the transaction starts again. A marker that is older is a duplicate key (11000), which is
// inbox.ErrMarked.
func (s *Store) InsertMarkers(ctx context.Context, list []inbox.NewMarker) error {
	now, err := serverTime(ctx)
	if err != nil {
		return err
	}

	docs := make([]bson.D, len(list))
	for i, m := range list {
		document := bson.D{{Key: "_id", Value: documentID(m.ID)}, {Key: "s", Value: inbox.StateHandled}}
		document = append(document, s.expiryFieldsAt(now)...)
		docs[i] = append(document, placeFields(m.Place)...)
	}

	// InsertMany would encode each marker alone, and decode its _id again.
	command := bson.D{{Key: "insert", Value: s.markers.Name()}, {Key: "documents", Value: docs}}
	err = s.markers.Database().RunCommand(ctx, command).Err()
	if mongo.IsDuplicateKeyError(err) {
		err = fmt.Errorf("%w: %w", inbox.ErrMarked, err)
	}
	if err != nil {
		return fmt.Errorf("inserting markers: %w", err)
	}
	return nil
}

// ClaimMarker writes a claim into the marker and counts an attempt, unless the message was handled or
// the marker has the same or a later epoch. It returns the resulting marker.
func (s *Store) ClaimMarker(ctx context.Context, n inbox.NewMarker, holder inbox.Holder) (marker inbox.Marker, err error) {
	// A marker without an epoch was never claimed.
	epoch := bson.D{{Key: "$ifNull", Value: bson.A{"$e", int64(-1)}}}
	unavailable := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "$eq", Value: bson.A{"$s", inbox.StateHandled}}},
		bson.D{{Key: "$gte", Value: bson.A{epoch, holder.Epoch}}},
	}}}

	attempts := bson.D{{Key: "$ifNull", Value: bson.A{"$a", 0}}}
	fields := append(bson.D{
		{Key: "s", Value: inbox.StateClaimed},
		{Key: "o", Value: holder.Owner},
		{Key: "e", Value: holder.Epoch},
		{Key: "a", Value: bson.D{{Key: "$add", Value: bson.A{attempts, 1}}}},
	}, s.expiryFields()...)
	claimed := bson.D{{Key: "$mergeObjects", Value: bson.A{"$$ROOT", append(fields, placeFields(n.Place)...)}}}

	update := replaceIf(bson.D{{Key: "$not", Value: unavailable}}, claimed)
	err = s.markers.FindOneAndUpdate(ctx, idFilter(n.ID), update, upsertOptions()).Decode(&marker)
	return marker, err
}

// MarkHandled marks a claimed message as handled, if holder is still the holder. ok reports whether holder was the holder.
func (s *Store) MarkHandled(ctx context.Context, id inbox.ID, holder inbox.Holder, next inbox.NextHolder) (ok bool, err error) {
	filter := append(idFilter(id), bson.E{Key: "o", Value: holder.Owner}, bson.E{Key: "e", Value: holder.Epoch})
	set := append(bson.D{{Key: "s", Value: inbox.StateHandled}}, s.expiryFields()...)
	update := bson.A{bson.D{{Key: "$set", Value: set}}}
	if next == inbox.RemoveHolder {
		update = append(update, bson.D{{Key: "$unset", Value: "o"}})
	}

	res, err := s.markers.UpdateOne(ctx, filter, update)
	if err != nil {
		return false, fmt.Errorf("marking a message as handled: %w", err)
	}
	return res.MatchedCount > 0, nil
}

// responseField contains the response of a marker.
const responseField = "r"

// WriteResponse stores the response in the marker: see Store.WriteResponse. It is one update, in the transaction of ctx.
func (s *Store) WriteResponse(ctx context.Context, id inbox.ID, response inbox.Response) error {
	res, err := s.markers.UpdateOne(ctx, idFilter(id), bson.D{{Key: "$set", Value: bson.D{{Key: responseField, Value: response}}}})
	if err == nil && res.MatchedCount == 0 {
		err = errors.New("the marker does not exist")
	}
	if err != nil {
		return fmt.Errorf("storing the result of a message: %w", err)
	}
	return nil
}

// ReadResponse returns the response of the marker: see Store.ReadResponse. It is one query.
func (s *Store) ReadResponse(ctx context.Context, id inbox.ID) (*inbox.Response, error) {
	var marker struct {
		Response *inbox.Response `bson:"r"`
	}
	opts := options.FindOne().SetProjection(bson.D{{Key: responseField, Value: 1}})
	err := s.markers.FindOne(ctx, idFilter(id), opts).Decode(&marker)
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		return nil, fmt.Errorf("reading the result of a message: %w", err)
	}
	return marker.Response, nil
}
