package admin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/store"
)

// ErrNoCollections says that the watcher has not registered any collection.
var ErrNoCollections = errors.New("it has no collections")

// Swept is how much a sweep would deliver again of one collection.
type Swept struct {
	Collection string `json:"collection"`
	Envelopes  int64  `json:"envelopes"`
}

// RecoverPlan counts what [Operator.Recover] would have delivered: of each collection that the watcher has registered, the
// envelopes from that time on, and those without a stamp, that neither wait nor were marked as sent. A sweep begins some
// minutes before from, so it is a few more; what is appended until it runs comes on top. It reads the collections.
func (o Operator) RecoverPlan(ctx context.Context, from time.Time) ([]Swept, error) {
	claims, err := store.NewRegistry(o.State.Collection("collections")).Claims(ctx, o.Watcher)
	if err != nil {
		return nil, err
	}
	if len(claims) == 0 {
		return nil, fmt.Errorf("watcher %s: %w", o.Watcher, ErrNoCollections)
	}
	filter := bson.D{{Key: "state", Value: nil}, {Key: "dueAt", Value: nil}, {Key: "sentAt", Value: nil}}
	if !from.IsZero() {
		earlier := bson.D{{Key: "$gt", Value: bson.Timestamp{}}, {Key: "$lt", Value: bson.Timestamp{T: uint32(from.Unix())}}}
		filter = append(filter, bson.E{Key: "$nor", Value: bson.A{bson.D{{Key: "ts", Value: earlier}}}})
	}
	out := make([]Swept, len(claims))
	for i, c := range claims {
		coll, err := store.Outboxed(o.State.Client(), c.NS)
		if err != nil {
			return nil, err
		}
		n, err := store.Majority(coll).CountDocuments(ctx, filter)
		if err != nil {
			return nil, fmt.Errorf("counting envelopes of %s: %w", c.NS, err)
		}
		out[i] = Swept{c.NS, n}
	}
	return out, nil
}
