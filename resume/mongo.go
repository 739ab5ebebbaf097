package resume

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// NewMongo is a Store in a collection, one document for each name. It reads and writes by majority on the primary,
// whatever the client says, so that a checkpoint that was saved is never rolled back. It does no I/O itself.
func NewMongo(coll *mongo.Collection) Store {
	return &mongoStore{coll.Clone(options.Collection().
		SetWriteConcern(writeconcern.Majority()).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary()))}
}

type mongoStore struct{ coll *mongo.Collection }

// stored is the document of a checkpoint. Order is the string by which positions compare: it lets the server refuse, in
// the filter of the write itself, to go back.
type stored struct {
	Name         string             `bson:"_id"`
	Order        string             `bson:"order"`
	Token        Token              `bson:"token"`
	ClusterTime  bson.Timestamp     `bson:"clusterTime"`
	Collections  []storedCollection `bson:"collections"`
	PipelineHash string             `bson:"pipelineHash"`
}

type storedCollection struct {
	NS   string      `bson:"ns"`
	UUID bson.Binary `bson:"uuid"`
}

func (s *mongoStore) Load(ctx context.Context, name string) (Checkpoint, error) {
	var d stored
	err := s.coll.FindOne(ctx, bson.D{{Key: "_id", Value: name}}).Decode(&d)
	if errors.Is(err, mongo.ErrNoDocuments) {
		err = ErrNotFound
	}
	if err != nil {
		return Checkpoint{}, fmt.Errorf("loading checkpoint %q: %w", name, err)
	}
	c := Checkpoint{Position: Position{Token: d.Token, ClusterTime: d.ClusterTime}, PipelineHash: d.PipelineHash}
	for _, dc := range d.Collections {
		k := Collection{NS: dc.NS}
		if copy(k.UUID[:], dc.UUID.Data) != len(k.UUID) {
			return Checkpoint{}, fmt.Errorf("loading checkpoint %q: the UUID of %s has %d bytes", name, dc.NS, len(dc.UUID.Data))
		}
		c.Collections = append(c.Collections, k)
	}
	return c, nil
}

func (s *mongoStore) Save(ctx context.Context, name string, c Checkpoint) error {
	if c.IsZero() {
		return fmt.Errorf("saving checkpoint %q: %w", name, errZero)
	}
	d := stored{
		Name: name, Order: c.order(), Token: c.Token, ClusterTime: c.ClusterTime, PipelineHash: c.PipelineHash,
		Collections: make([]storedCollection, len(c.Collections)),
	}
	for i, k := range c.Collections {
		d.Collections[i] = storedCollection{NS: k.NS, UUID: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: k.UUID[:]}}
	}
	// A stored order that is higher makes the filter miss, and the upsert that follows collides on _id.
	filter := bson.D{{Key: "_id", Value: name}, {Key: "order", Value: bson.D{{Key: "$lte", Value: d.Order}}}}
	_, err := s.coll.ReplaceOne(ctx, filter, d, options.Replace().SetUpsert(true))
	if mongo.IsDuplicateKeyError(err) {
		// Either the stored one is ahead, or two first saves collided; the same write without the upsert tells.
		var res *mongo.UpdateResult
		if res, err = s.coll.ReplaceOne(ctx, filter, d); err == nil && res.MatchedCount == 0 {
			err = ErrStale
		}
	}
	if err != nil {
		return fmt.Errorf("saving checkpoint %q: %w", name, err)
	}
	return nil
}
