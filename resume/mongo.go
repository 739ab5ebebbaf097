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

// NewMongo returns a Store in a collection, with one document for each name. It reads and writes
// with majority concern on the primary, even if the client is configured otherwise, so a saved
// checkpoint is never rolled back. NewMongo does no I/O.
func NewMongo(coll *mongo.Collection) Store {
	// A set with writeConcernMajorityJournalDefault: false would otherwise acknowledge before it writes to the journals.
	journaled := true
	return &mongoStore{coll.Clone(options.Collection().
		SetWriteConcern(&writeconcern.WriteConcern{W: writeconcern.WCMajority, Journal: &journaled}).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary()))}
}

// mongoStore is a Store in a collection.
type mongoStore struct{ coll *mongo.Collection }

// storedCheckpoint is the document of a checkpoint. Order is the sortKey of the position: with it
// in the filter of a write, the server rejects an earlier position.
type storedCheckpoint struct {
	Name         string             `bson:"_id"`
	Order        string             `bson:"order"`
	Token        Token              `bson:"token"`
	ClusterTime  bson.Timestamp     `bson:"clusterTime"`
	Collections  []storedCollection `bson:"collections"`
	PipelineHash string             `bson:"pipelineHash"`
}

// storedCollection is a Collection in the document of a checkpoint.
type storedCollection struct {
	NS   string      `bson:"ns"`
	UUID bson.Binary `bson:"uuid"`
}

// Load returns the checkpoint with this name: see Store.
func (s *mongoStore) Load(ctx context.Context, name string) (Checkpoint, error) {
	var checkpoint storedCheckpoint
	err := s.coll.FindOne(ctx, bson.D{{Key: "_id", Value: name}}).Decode(&checkpoint)
	if errors.Is(err, mongo.ErrNoDocuments) {
		err = ErrNotFound
	}
	if err != nil {
		return Checkpoint{}, fmt.Errorf("loading checkpoint %q: %w", name, err)
	}

	loaded := Checkpoint{Position: Position{Token: checkpoint.Token, ClusterTime: checkpoint.ClusterTime}, PipelineHash: checkpoint.PipelineHash}
	for _, dc := range checkpoint.Collections {
		collection := Collection{NS: dc.NS}
		if copy(collection.UUID[:], dc.UUID.Data) != len(collection.UUID) {
			return Checkpoint{}, fmt.Errorf("loading checkpoint %q: the UUID of %s has %d bytes, want %d",
				name, dc.NS, len(dc.UUID.Data), len(collection.UUID))
		}

		loaded.Collections = append(loaded.Collections, collection)
	}

	return loaded, nil
}

// Save stores a checkpoint: see Store. It needs one command, or two if the stored one is later.
func (s *mongoStore) Save(ctx context.Context, name string, checkpoint Checkpoint) error {
	if checkpoint.IsZero() {
		return fmt.Errorf("saving checkpoint %q: %w", name, errZeroPosition)
	}

	storedCheckpoint := storedCheckpoint{
		Name:         name,
		Order:        checkpoint.sortKey(),
		Token:        checkpoint.Token,
		ClusterTime:  checkpoint.ClusterTime,
		PipelineHash: checkpoint.PipelineHash,
		Collections:  make([]storedCollection, len(checkpoint.Collections)),
	}
	for i, k := range checkpoint.Collections {
		storedCheckpoint.Collections[i] = storedCollection{NS: k.NS, UUID: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: k.UUID[:]}}
	}

	// If the stored position is later, the filter does not match, and the upsert violates the
	// unique index of _id.
	filter := bson.D{{Key: "_id", Value: name}, {Key: "order", Value: bson.D{{Key: "$lte", Value: storedCheckpoint.Order}}}}
	_, err := s.coll.ReplaceOne(ctx, filter, storedCheckpoint, options.Replace().SetUpsert(true))
	if mongo.IsDuplicateKeyError(err) {
		// Either the stored position is later, or two first saves collided. The same write without
		// the upsert shows which.
		var res *mongo.UpdateResult
		res, err = s.coll.ReplaceOne(ctx, filter, storedCheckpoint)
		if err == nil && res.MatchedCount == 0 {
			err = ErrStale
		}
	}
	if err != nil {
		return fmt.Errorf("saving checkpoint %q: %w", name, err)
	}
	return nil
}
