package changestream

import (
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changes"
)

// skipStages returns the stages that leave out the events, one for each: MongoDB 6.0 cannot optimize a $nor of several. They are no
// part of the hash of the pipeline: the tokens stay valid.
func skipStages(list []changes.Skip) (stages []bson.D) {
	for _, s := range list {
		skipped := bson.D{
			{Key: "operationType", Value: "insert"},
			{Key: "ns.db", Value: s.DB},
			{Key: "ns.coll", Value: s.Coll},
			{Key: "documentKey._id", Value: s.ID},
			{Key: "clusterTime", Value: bson.D{{Key: "$lte", Value: s.Until}}},
		}
		stages = append(stages, bson.D{{Key: "$match", Value: bson.D{{Key: "$nor", Value: bson.A{skipped}}}}})
	}
	return stages
}
