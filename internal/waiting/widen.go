package waiting

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// Wider is an exception that has to wait for further topics.
type Wider struct {
	NS       string
	ID       bson.RawValue
	Delivery int32 // as it was read
	Topics   []string
}

// EachBehind calls take as [EachTaken] does, for each exception of coll after the position pos.
func EachBehind(ctx context.Context, coll *mongo.Collection, p slot.Range, pos string, take func(bson.Raw) error) error {
	filter := outboxes.IsException(bson.E{Key: "pos", Value: bson.D{{Key: "$gt", Value: pos}}})
	if err := eachWithoutPayload(ctx, coll, p.AddFilter(filter), take); err != nil {
		return fmt.Errorf("reading exceptions of %s after a position: %w", mongodb.Namespace(coll), err)
	}
	return nil
}

// WidenExceptions adds topics to those that exceptions wait for, in as many fenced transactions as their
// number requires. It is idempotent. It does not change an envelope that is no longer an exception, or
// that has become another delivery.
func WidenExceptions(ctx context.Context, f mongodb.Fencer, list []Wider) error {
	write := func(tx context.Context, c *mongo.Client, part []Wider) error {
		models := map[string][]mongo.WriteModel{}
		for i := range part {
			models[part[i].NS] = append(models[part[i].NS], part[i].update())
		}

		for ns, m := range models {
			coll, err := outboxes.Outboxed(c, ns)
			if err != nil {
				return err
			}
			if _, err := coll.BulkWrite(tx, m); err != nil {
				return mongodb.DescribeRefusal(err, "writing exceptions to "+ns, "find and update", ns, "")
			}
		}
		return nil
	}

	err := mongodb.WriteInParts(ctx, f, list, mongodb.Parts[Wider]{Top: MaxExceptions, Write: write})
	if err != nil {
		return fmt.Errorf("widening %d exceptions: %w", len(list), err)
	}
	return nil
}

func (w *Wider) update() mongo.WriteModel {
	return mongo.NewUpdateOneModel().SetHint(outboxes.PickedByID).SetFilter(guard(w.ID, "", w.Delivery)).
		SetUpdate(bson.D{{Key: "$addToSet", Value: bson.D{{Key: "pending", Value: bson.D{{Key: "$each", Value: w.Topics}}}}}})
}
