package entity

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/outbox"
)

type mongoView struct {
	coll, gone *outbox.Collection
	client     *mongo.Client
	field      string
}

// OnMongoView is coll as a View; field is where its documents have their version.
func OnMongoView(coll *mongo.Collection, field string) (View, error) {
	c, err := outbox.NewCollection(coll, outbox.WithoutTransaction())
	if err != nil {
		return nil, err
	}
	gone, err := outbox.NewCollection(deletedOf(coll), outbox.WithoutTransaction())
	if err != nil {
		return nil, err
	}
	return &mongoView{c, gone, coll.Database().Client(), field}, nil
}

func (v *mongoView) Name() string { return v.coll.Name() }

// Apply is right also without a transaction, and with another process in between: a deletion is first noted and then done,
// a document first written and then compared with the notes, so whichever comes second sees the other.
func (v *mongoView) Apply(ctx context.Context, states []State) error {
	if s := mongo.SessionFromContext(ctx); s != nil && s.Client() != v.client {
		ctx = outbox.Outside(ctx) // a transaction of another cluster
	}
	var notes, deletes, writes []mongo.WriteModel
	var written []bson.RawValue
	version := make(map[string]int64, len(states))
	for _, s := range states {
		if s.Doc == nil {
			notes = append(notes, mongo.NewUpdateOneModel().SetFilter(byID(s.ID, nil)).
				SetUpdate(bson.D{{Key: "$max", Value: bson.D{{Key: v.field, Value: s.Version}}}}).SetUpsert(true))
			deletes = append(deletes, mongo.NewDeleteOneModel().SetFilter(v.upTo(s.ID, s.Version)))
			continue
		}
		writes = append(writes, mongo.NewUpdateOneModel().SetFilter(byID(s.ID, nil)).SetUpdate(v.unlessNewer(s)).SetUpsert(true))
		written = append(written, s.ID)
		version[keyOf(s.ID)] = s.Version
	}
	for _, b := range []struct {
		c      *outbox.Collection
		models []mongo.WriteModel
	}{{v.gone, notes}, {v.coll, deletes}, {v.coll, writes}} {
		if err := bulk(ctx, b.c, b.models); err != nil {
			return err
		}
	}
	return v.compare(ctx, written, version)
}

// compare undoes writes of what was deleted since, and forgets deletions that are older than the writes.
func (v *mongoView) compare(ctx context.Context, written []bson.RawValue, version map[string]int64) error {
	if len(written) == 0 {
		return nil
	}
	notes, err := all(ctx, v.gone, byIDs(written, nil), options.Find())
	if err != nil {
		return err
	}
	var undo, forget []mongo.WriteModel
	for _, n := range notes {
		id := n.Lookup("_id")
		deleted, err := versionOf(n, v.field)
		if err != nil {
			return err
		}
		if deleted >= version[keyOf(id)] {
			undo = append(undo, mongo.NewDeleteOneModel().SetFilter(v.upTo(id, deleted)))
		} else {
			forget = append(forget, mongo.NewDeleteOneModel().SetFilter(v.upTo(id, version[keyOf(id)]-1)))
		}
	}
	if err := bulk(ctx, v.coll, undo); err != nil {
		return err
	}
	return bulk(ctx, v.gone, forget)
}

func bulk(ctx context.Context, c *outbox.Collection, models []mongo.WriteModel) error {
	if len(models) == 0 {
		return nil
	}
	_, err := c.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	return err
}

// upTo matches the document up to that version, and one without any.
func (v *mongoView) upTo(id bson.RawValue, version int64) bson.D {
	return bson.D{{Key: "_id", Value: id}, {Key: v.field, Value: bson.D{{Key: "$not", Value: bson.D{{Key: "$gt", Value: version}}}}}}
}

// unlessNewer replaces the document, if that has an older version or none, in one step: a filter by version beside an upsert
// would insert a second one and fail on the _id, which ends a transaction.
func (v *mongoView) unlessNewer(s State) mongo.Pipeline {
	field := "$" + v.field
	stored := bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$isNumber", Value: field}}, field, int64(0)}}}
	return mongo.Pipeline{{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{
		bson.D{{Key: "$lt", Value: bson.A{stored, s.Version}}},
		bson.D{{Key: "$literal", Value: s.Doc}},
		"$$ROOT",
	}}}}}}
}
