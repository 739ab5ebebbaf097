package waiting

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/crash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Change is a change of a stored document by the owner.
type Change struct {
	DocumentID [IDSize]byte
	Reason     Reason   // "": only topics and places change
	Pending    []string // topics that do not have it yet; nil: as before
	// Sent has the places of records that are to be recorded with the delivery.
	Sent []outboxes.Place

	// Failure is a failed attempt. Attempts is the number of attempts before it, and NextAt is the time of the next one. If an operator
	// has reset the attempts since, the change has no effect except on topics and places.
	Failure   *record.Attempt
	Attempts  int32
	Uncounted int32 // with this attempt, as in a Document
	NextAt    time.Time
}

// appendModels appends the statements of the change. A repetition has no second effect.
func (c *Change) appendModels(models []mongo.WriteModel) []mongo.WriteModel {
	filter := byDocumentID(c.DocumentID)
	var set, update bson.D
	if c.Pending != nil {
		set = append(set, bson.E{Key: "topics", Value: joinTopics(c.Pending)})
	}
	if len(c.Sent) > 0 {
		each := bson.D{{Key: "$each", Value: c.Sent}}
		update = append(update, bson.E{Key: "$addToSet", Value: bson.D{{Key: "sent", Value: each}}})
	}

	switch {
	case c.Reason == "":
	case c.Failure == nil:
		set = append(set, bson.E{Key: "reason", Value: c.Reason})
		// It is found when its topic or its key is free again, not at a time.
		update = append(update, bson.E{Key: "$unset", Value: bson.D{{Key: "nextAt", Value: ""}}})
	default:
		// A topic that has the record must not get it again, also if an operator has changed the attempts.
		if len(set)+len(update) > 0 {
			models = append(models, newUpdate(filter, set, update))
		}
		failure := clipReason(c.Failure)
		filter = append(filter, bson.E{Key: "attempts", Value: c.Attempts})
		set = bson.D{
			{Key: "reason", Value: c.Reason}, {Key: "attempts", Value: c.Attempts + 1}, {Key: "nextAt", Value: c.NextAt}, {Key: "error", Value: failure},
		}
		if c.Uncounted > 0 {
			set = append(set, bson.E{Key: "uncounted", Value: c.Uncounted})
		}
		history := bson.D{{Key: "$each", Value: bson.A{failure}}, {Key: "$slice", Value: -record.KeptAttempts}}
		update = bson.D{{Key: "$push", Value: bson.D{{Key: "history", Value: history}}}}
	}
	return append(models, newUpdate(filter, set, update))
}

// newUpdate returns the statement that sets fields of one document, and makes the other changes of update.
func newUpdate(filter, set, update bson.D) mongo.WriteModel {
	if len(set) > 0 {
		update = append(update, bson.E{Key: "$set", Value: set})
	}
	return mongo.NewUpdateOneModel().SetFilter(filter).SetUpdate(update)
}

// WriteChanges writes changes of documents and removes documents, in the transaction of tx. It is idempotent. complete reports that
// every change and every removal had an effect. A repetition may find fewer documents.
func WriteChanges(tx context.Context, coll *mongo.Collection, changes []*Change, removed [][IDSize]byte) (complete bool, err error) {
	var models []mongo.WriteModel
	for _, c := range changes {
		models = c.appendModels(models)
	}
	expected := int64(len(models) + len(removed))
	if len(removed) > 0 {
		models = append(models, mongo.NewDeleteManyModel().SetFilter(byDocumentIDs(removed)))
	}
	if len(models) == 0 {
		return true, nil
	}

	res, err := coll.BulkWrite(tx, models)
	if err != nil {
		return false, mongodb.DescribeError(err, "writing the fate of waiting envelopes", "find, update and remove", mongodb.Namespace(coll))
	}
	crash.At("mid-waiting-write")
	return res.MatchedCount+res.DeletedCount == expected, nil
}

// ReadWhole calls take for each of the documents that exists, with envelope and history, in the transaction of tx if there
// is one. The bytes are valid only during the call.
func ReadWhole(tx context.Context, coll *mongo.Collection, ids [][IDSize]byte, take func(raw bson.Raw) error) error {
	if len(ids) == 0 {
		return nil
	}
	return mongodb.FindEach(tx, coll, "reading waiting envelopes", byDocumentIDs(ids), take)
}

// FindExisting returns which of the documents exist.
func FindExisting(ctx context.Context, coll *mongo.Collection, ids [][IDSize]byte) (map[[IDSize]byte]bool, error) {
	return findExisting(ctx, mongodb.Majority(coll), ids)
}

func findExisting(ctx context.Context, coll *mongo.Collection, ids [][IDSize]byte) (map[[IDSize]byte]bool, error) {
	found := make(map[[IDSize]byte]bool, len(ids))
	err := mongodb.FindEach(ctx, coll, "looking for waiting envelopes", byDocumentIDs(ids), func(raw bson.Raw) error {
		found[ReadDocument(raw).DocumentID] = true
		return nil
	}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	return found, err
}
