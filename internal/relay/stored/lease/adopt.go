package lease

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/resume"
)

// AdoptedHash is the pipeline hash of a position that another publisher reached. It equals no real hash, so the next owner opens its stream
// at the time of the position and drops the events up to its token (N23).
const AdoptedHash = "adopted"

// Vacant is a watcher document that had no owner when it was read.
type Vacant struct {
	ID     string
	Exists bool
	Epoch  int64
}

// AdoptPosition stores pos in the documents of all slots of a watcher, in one transaction. If a node has acquired one of them since it was
// read, AdoptPosition changes nothing and returns [ErrNotHeld].
func AdoptPosition(ctx context.Context, coll *mongo.Collection, docs []Vacant, pos resume.Position, replicaSet string) error {
	err := mongodb.InTransaction(ctx, coll.Database().Client(), func(tx context.Context) error {
		for _, d := range docs {
			if err := adoptOne(tx, coll, d, pos, replicaSet); err != nil {
				return err
			}
		}
		return nil
	})

	// The document did not exist when it was read.
	if mongo.IsDuplicateKeyError(err) {
		err = fmt.Errorf("%w: another process has created the document", ErrNotHeld)
	}
	if err != nil {
		return fmt.Errorf("adopting a position: %w", err)
	}
	return nil
}

// adoptOne stores pos in one document, and creates the document if there is none.
func adoptOne(tx context.Context, coll *mongo.Collection, document Vacant, pos resume.Position, replicaSet string) error {
	fields := bson.D{
		{Key: "token", Value: pos.Token},
		{Key: "clusterTime", Value: pos.ClusterTime},
		{Key: "pipelineHash", Value: AdoptedHash},
	}
	if replicaSet != "" {
		fields = append(fields, bson.E{Key: "replicaSetId", Value: replicaSet})
	}

	if !document.Exists {
		_, err := coll.InsertOne(tx, append(bson.D{
			{Key: "_id", Value: document.ID},
			{Key: "owner", Value: nil},
			{Key: "expiresAt", Value: time.UnixMilli(0)},
			{Key: "instance", Value: uuid.NewString()},
		}, fields...))
		return err
	}

	// The condition is evaluated by the server: the owner may have changed since the document was read.
	vacant := op("$and",
		op("$lte", mongodb.IfNull("$expiresAt", time.UnixMilli(0)), "$$NOW"),
		op("$eq", mongodb.IfNull("$epoch", int64(0)), document.Epoch))
	res, err := coll.UpdateOne(tx, bson.D{{Key: "_id", Value: document.ID}, {Key: "$expr", Value: vacant}}, bson.D{
		{Key: "$set", Value: fields},
		// They describe the position that is replaced.
		{Key: "$unset", Value: bson.D{{Key: "collections", Value: ""}, {Key: "passed", Value: ""}, {Key: "swept", Value: ""}}},
	})

	if err == nil && res.MatchedCount == 0 {
		err = fmt.Errorf("%w: %s has been acquired in the meantime; stop outrelay on all nodes first", ErrNotHeld, document.ID)
	}
	return err
}
