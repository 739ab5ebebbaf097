package doctor

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// checkFields names the optional fields of the newest envelopes whose names differ from the contract only in case and separators. The
// relay sends such an envelope without the field. Fields that it needs are in the reason of a dead letter.
func (x outboxChecks) checkFields(ctx context.Context) finding {
	if x.cfg.DocumentMapping() != nil {
		return passed("mapping names the fields")
	}

	var misses []string
	list := x.mongo.outboxes.list
	// Each sample costs a query, so only the first collections are examined.
	for _, o := range list[:min(len(list), sampledMost)] {
		call, cancel := context.WithTimeout(ctx, lookTimeout)
		newest := options.Find().SetHint(bson.D{{Key: "$natural", Value: -1}}).SetLimit(sampledFields).
			SetProjection(bson.D{{Key: "payload", Value: 0}})
		coll := mongodb.Majority(x.mongo.client.Database(o.DB).Collection(o.Coll))
		err := mongodb.FindEach(call, coll, "sampling "+o.NS(), bson.D{}, func(raw bson.Raw) error {
			for _, miss := range envelope.NearMisses(raw) {
				if text := o.NS() + " has " + miss; !slices.Contains(misses, text) {
					misses = append(misses, text)
				}
			}
			return nil
		}, newest)
		cancel()
		if err != nil {
			return x.mongo.access.explainRejection(err)
		}
	}

	if len(misses) > 0 {
		return warned("correct the names in the service that writes the envelopes", "the relay ignores fields with a wrong name: %s", joinFew(misses, namesMost))
	}
	return passed("no field of the newest envelopes has nearly the name of another one")
}
