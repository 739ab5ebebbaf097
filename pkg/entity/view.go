package entity

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outbox/guard"
)

// mongoView is a view in a collection of MongoDB.
type mongoView struct {
	name    string
	coll    *guard.Collection
	deleted *guard.Collection // versions of deleted entities
	client  *mongo.Client
	field   string // of the version
	sagas   sagaCheck
}

// onMongoView returns a view in the collection coll. field is the field of the version in its
// documents. It does no I/O.
func onMongoView(coll *mongo.Collection, field string) entities.View {
	return &mongoView{
		name:    coll.Name(),
		coll:    guard.NewCollection(coll, guard.WithoutTransaction()),
		deleted: guard.NewCollection(deletedCollection(coll), guard.WithoutTransaction()),
		client:  coll.Database().Client(),
		field:   field,
		sagas:   sagaCheck{coll: coll},
	}
}

func (v *mongoView) Name() string { return v.name }

// Apply stores the states: see entities.View. It is correct without a transaction and with concurrent
// processes. A deletion is first recorded and then done. A document is first written and then
// compared with the recorded deletions. So whichever comes second sees the other one.
func (v *mongoView) Apply(ctx context.Context, states []entities.State) error {
	// The transaction of another cluster cannot include this collection.
	if session := mongo.SessionFromContext(ctx); session != nil && session.Client() != v.client {
		ctx = outbox.Outside(ctx)
	}

	if err := v.sagas.run(ctx); err != nil {
		return err
	}

	var deletions, deletes, writes []mongo.WriteModel
	var written []bson.RawValue
	version := make(map[string]int64, len(states))
	for _, s := range states {
		if s.Doc == nil {
			// A repeated or older deletion does not lower the recorded version.
			deletions = append(deletions, mongo.NewUpdateOneModel().
				SetFilter(idFilter(s.ID, nil)).
				SetUpdate(bson.D{{Key: "$max", Value: bson.D{{Key: v.field, Value: s.Version}}}}).
				SetUpsert(true))
			deletes = append(deletes, mongo.NewDeleteOneModel().SetFilter(v.upToFilter(s.ID, s.Version)))
			continue
		}

		writes = append(writes, mongo.NewUpdateOneModel().
			SetFilter(idFilter(s.ID, nil)).
			SetUpdate(v.replaceUnlessNewer(s)).
			SetUpsert(true))
		written = append(written, s.ID)
		version[mapKey(s.ID)] = s.Version
	}

	// The order of these three writes makes the result correct without a transaction.
	for _, b := range []struct {
		c      *guard.Collection
		models []mongo.WriteModel
	}{{v.deleted, deletions}, {v.coll, deletes}, {v.coll, writes}} {
		if err := bulkWrite(ctx, b.c, b.models); err != nil {
			return err
		}
	}

	return v.reconcileDeletions(ctx, written, version)
}

// reconcileDeletions removes written documents that were deleted in a later version, and removes
// recorded deletions that are older than the written documents.
func (v *mongoView) reconcileDeletions(ctx context.Context, written []bson.RawValue, version map[string]int64) error {
	if len(written) == 0 {
		return nil
	}

	deletions, err := findAll(ctx, v.deleted, idsFilter(written, nil), options.Find())
	if err != nil {
		return err
	}

	var undo, outdated []mongo.WriteModel
	for _, d := range deletions {
		id := d.Lookup("_id")
		deleted, err := readVersion(d, v.field)
		if err != nil {
			return err
		}

		// The deletion is newer than the document that was just written.
		if deleted >= version[mapKey(id)] {
			undo = append(undo, mongo.NewDeleteOneModel().SetFilter(v.upToFilter(id, deleted)))
		} else {
			outdated = append(outdated, mongo.NewDeleteOneModel().SetFilter(v.upToFilter(id, version[mapKey(id)]-1)))
		}
	}

	if err := bulkWrite(ctx, v.coll, undo); err != nil {
		return err
	}
	return bulkWrite(ctx, v.deleted, outdated)
}

// bulkWrite sends the models in one unordered command, or nothing if there are none.
func bulkWrite(ctx context.Context, collection *guard.Collection, models []mongo.WriteModel) error {
	if len(models) == 0 {
		return nil
	}

	_, err := collection.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	return err
}

// upToFilter returns a filter for the document with this id if it has at most this version, or
// none.
func (v *mongoView) upToFilter(id bson.RawValue, version int64) bson.D {
	notNewer := bson.D{{Key: "$not", Value: bson.D{{Key: "$gt", Value: version}}}}
	return bson.D{{Key: "_id", Value: id}, {Key: v.field, Value: notNewer}}
}

// replaceUnlessNewer returns an update that replaces the document if it has an older version or
// none. A version in the filter of an upsert would not work: the upsert would try to insert a
// second document with the same _id, and the error would end the transaction.
func (v *mongoView) replaceUnlessNewer(state entities.State) mongo.Pipeline {
	field := "$" + v.field
	stored := bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$isNumber", Value: field}}, field, int64(0)}}}
	return mongo.Pipeline{{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{
		bson.D{{Key: "$lt", Value: bson.A{stored, state.Version}}},
		bson.D{{Key: "$literal", Value: state.Doc}},
		"$$ROOT",
	}}}}}}
}
