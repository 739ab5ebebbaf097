package waiting

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// widening is an exception that has to wait for further topics.
type widening struct {
	NS       string
	ID       bson.RawValue
	Delivery int32 // as it was read
	Topics   []string
}

// EachBehind calls take as [EachTaken] does, for each exception of coll after the position pos.
func EachBehind(ctx context.Context, coll *mongo.Collection, p slot.Range, pos string, take func(bson.Raw) error) error {
	filter := outboxes.IsException(bson.E{Key: "pos", Value: bson.D{{Key: "$gt", Value: pos}}})
	return eachWithoutPayload(ctx, coll, p.AddFilter(filter), take)
}

// widenExceptions adds topics to the pending topics of exceptions, in as many fenced transactions as
// their number requires. It is idempotent. It leaves unchanged an envelope that is no longer an
// exception or has become another delivery.
func widenExceptions(ctx context.Context, f mongodb.Fencer, list []widening) error {
	write := func(tx context.Context, c *mongo.Client, part []widening) error {
		models := map[string][]mongo.WriteModel{}
		for i := range part {
			models[part[i].NS] = append(models[part[i].NS], part[i].updateModel())
		}
		return outboxes.BulkWrite(tx, c, models, "find and update")
	}

	return mongodb.WriteInParts(ctx, f, list, mongodb.Parts[widening]{
		Doing: "widening exceptions", Write: write,
	})
}

// updateModel returns the statement that adds the topics.
func (w *widening) updateModel() mongo.WriteModel {
	return mongo.NewUpdateOneModel().SetHint(outboxes.PickedByID).SetFilter(matchPublished(w.ID, "", w.Delivery)).
		SetUpdate(bson.D{{Key: "$addToSet", Value: bson.D{{Key: "pending", Value: bson.D{{Key: "$each", Value: w.Topics}}}}}})
}
