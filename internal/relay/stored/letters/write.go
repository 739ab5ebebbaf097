package letters

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Write stores the letters in the transaction of tx, with the server time now. It is idempotent: a letter that exists
// stays as it is. coll is the collection of the letters, of the client of tx. The chunks of large letters must have been
// written by [WriteChunks]: a crash in between leaves chunks without a letter, which do no harm.
//
// An error of a single letter is a [mongo.BulkWriteException] whose indexes are those of list.
func Write(tx context.Context, coll *mongo.Collection, now time.Time, list []*Prepared) error {
	if len(list) == 0 {
		return nil
	}

	models := make([]mongo.WriteModel, len(list))
	for i, p := range list {
		p.setTimes(now)
		// An operator instead of a pipeline: a malformed envelope may repeat a field, and only plain operators keep its
		// bytes.
		models[i] = mongo.NewUpdateOneModel().SetUpsert(true).
			SetFilter(bson.D{{Key: "_id", Value: p.dead.ID}}).
			SetUpdate(bson.D{{Key: "$setOnInsert", Value: p.dead.Content}})
	}
	_, err := coll.BulkWrite(tx, models)
	return mongodb.DescribeError(err, "writing dead letters to "+mongodb.Namespace(coll), "find, insert and update", mongodb.Namespace(coll))
}
