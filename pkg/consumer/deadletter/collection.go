package deadletter

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/mongodb/schema"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/lettercount"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

const (
	maxInline  = 12 << 20 // bytes of a record in one document, which has at most 16 MiB
	chunkBytes = 8 << 20

	minExpiry = time.Second
	maxExpiry = math.MaxInt32 * time.Second
)

// errTooLarge reports that a letter does not fit in a document.
var errTooLarge = errors.New("the dead letter is larger than a document can be")

// collection is the store of letters in MongoDB. A value above 12 MiB is in separate documents of the collection.
type collection struct {
	coll   *mongo.Collection
	expiry time.Duration
}

// newCollection returns the store in the collection name of db. Its reads and writes cannot be rolled back.
func newCollection(db *mongo.Database, name string, expiry time.Duration) *collection {
	return &collection{expiry: expiry, coll: db.Collection(name, options.Collection().
		SetWriteConcern(concern.Majority()).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary()))}
}

// EnsureIndexes creates the indexes for queries and for the expiry.
func (c *collection) EnsureIndexes(ctx context.Context) error {
	models := []mongo.IndexModel{
		{Keys: bson.D{{Key: "givenUpAt", Value: -1}, {Key: "_id", Value: 1}}},
		{Keys: bson.D{{Key: "class", Value: 1}, {Key: "givenUpAt", Value: -1}}},
		{Keys: bson.D{{Key: "_id.message", Value: 1}}},
		{Keys: bson.D{{Key: "fingerprint", Value: 1}, {Key: "givenUpAt", Value: -1}}},
		{Keys: bson.D{{Key: "series", Value: 1}, {Key: "requeued.at", Value: 1}, {Key: "archived.at", Value: 1}}},
		// Letters in the archive expire.
		{Keys: bson.D{{Key: "expireAt", Value: 1}}, Options: options.Index().SetExpireAfterSeconds(0)},
	}

	err := schema.Change(ctx, c.coll, func(ctx context.Context) error {
		_, err := c.coll.Indexes().CreateMany(ctx, models)
		if err == nil && c.expiry > 0 {
			err = c.ensureExpiry(ctx)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("creating the indexes of %s: %w", c.coll.Name(), err)
	}
	return nil
}

// ensureExpiry creates the TTL index of the letters. If the index exists with another expiry, it changes the expiry.
func (c *collection) ensureExpiry(ctx context.Context) error {
	const name, indexOptionsConflict = "expiry", 85
	seconds := int32(c.expiry / time.Second)

	_, err := c.coll.Indexes().CreateOne(ctx, mongo.IndexModel{
		Keys:    bson.D{{Key: "givenUpAt", Value: 1}},
		Options: options.Index().SetName(name).SetExpireAfterSeconds(seconds),
	})
	if se, ok := errors.AsType[mongo.ServerError](err); !ok || !se.HasErrorCode(indexOptionsConflict) {
		return err
	}

	// The index exists with another expiry.
	change := bson.D{{Key: "name", Value: name}, {Key: "expireAfterSeconds", Value: seconds}}
	err = c.coll.Database().RunCommand(ctx, bson.D{{Key: "collMod", Value: c.coll.Name()}, {Key: "index", Value: change}}).Err()
	if err != nil {
		return fmt.Errorf("changing the expiry of dead letters to %s (grant collMod, or drop the index %s): %w",
			c.expiry, name, err)
	}
	return nil
}

// Transaction runs fn in a transaction of MongoDB.
func (c *collection) Transaction(ctx context.Context, fn func(ctx context.Context) error) error {
	return transaction.Run(ctx, c.coll.Database().Client(), fn)
}

// chunkID is the id of a chunk of a large value. It differs from all ids of letters, which have no field chunk. A chunk
// document has no class, which letters have.
type chunkID struct {
	ID    `bson:",inline"`
	Chunk int `bson:"chunk"`
}

// countChunks returns how many chunks have the value of a letter that was read without its value.
func (l *Letter) countChunks() int {
	if l.Value != nil {
		return 0
	}
	return (l.Size + chunkBytes - 1) / chunkBytes
}

// storedLetter is the document of a letter. A chunk has no series.
type storedLetter struct {
	Letter `bson:",inline"`
	// Series is of lettercount.SeriesOf. An index of it serves the counts alone, which the server cannot do with parts of the
	// _id.
	Series string `bson:"series"`
	// Fingerprint and Failure are of lettercount.FailureOf.
	Fingerprint string `bson:"fingerprint"`
	Failure     string `bson:"failure"`
}

// Put stores letter. The chunks are stored before the letter, so that a letter is never without its value.
func (c *collection) Put(ctx context.Context, letter *Letter) error {
	id := letter.ID
	failure := lettercount.FailureOf(letter.Reason, id.Group, id.Handler, letter.Class, id.Topic, letter.Name)
	stored := storedLetter{*letter, lettercount.SeriesOf(id.Group, id.Handler, letter.Class), failure.Fingerprint, failure.Message}

	if letter.countRecordBytes() > maxInline {
		stored.Value = nil
		for n := range stored.countChunks() {
			data := letter.Value[n*chunkBytes : min((n+1)*chunkBytes, len(letter.Value))]
			if err := c.upsert(ctx, letter.ID, chunkID{letter.ID, n}, bson.D{{Key: "data", Value: data}}); err != nil {
				return err
			}
		}
	}
	return c.upsert(ctx, letter.ID, letter.ID, stored)
}

// countRecordBytes returns how many bytes of the letter come from the record.
func (l *Letter) countRecordBytes() int {
	n := len(l.Key) + len(l.Value)
	for _, h := range l.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// upsert inserts a document of a letter with the time of the server. The fields of an existing document win, so a
// repetition changes nothing. Only a letter of a handler that was requeued or discarded is replaced: the handler has failed
// once more. Then its chunks have the same content, and do not expire with the archive any more. If no handler took the message,
// its record was only read once more, so the decision of the operator stays.
func (c *collection) upsert(ctx context.Context, letter ID, id, doc any) error {
	isDecided := bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "$gt", Value: bson.A{"$requeued", nil}}}, bson.D{{Key: "$gt", Value: bson.A{"$archived", nil}}},
	}}}
	kept, unset := any("$$ROOT"), mongo.Pipeline(nil)
	if letter.Handler != "" {
		kept = bson.D{{Key: "$cond", Value: bson.A{isDecided, bson.D{{Key: "_id", Value: "$_id"}}, "$$ROOT"}}}
		unset = mongo.Pipeline{{{Key: "$unset", Value: "expireAt"}}}
	}
	merged := bson.D{{Key: "$mergeObjects", Value: bson.A{
		bson.D{{Key: "$literal", Value: doc}}, bson.D{{Key: "givenUpAt", Value: "$$NOW"}}, kept,
	}}}
	update := append(mongo.Pipeline{{{Key: "$replaceWith", Value: merged}}}, unset...)

	_, err := c.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, update, options.UpdateOne().SetUpsert(true))
	switch {
	case setaside.IsTooLarge(err):
		return fmt.Errorf("%w: %w", errTooLarge, err)
	case err != nil && !mongo.IsDuplicateKeyError(err):
		// Two concurrent upserts of the same document can collide. One of them has stored it.
		return fmt.Errorf("writing dead letter %s: %w", letter, err)
	}
	return nil
}

// Get reads one letter with the chunks of its value.
func (c *collection) Get(ctx context.Context, id ID) (Letter, error) {
	var letter Letter
	err := c.coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&letter)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return letter, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	if err != nil {
		return letter, fmt.Errorf("reading dead letter %s: %w", id, err)
	}

	for n := range letter.countChunks() {
		var part struct {
			Data []byte `bson:"data"`
		}
		if err := c.coll.FindOne(ctx, bson.D{{Key: "_id", Value: chunkID{id, n}}}).Decode(&part); err != nil {
			return letter, fmt.Errorf("reading part %d of dead letter %s: %w", n+1, id, err)
		}
		letter.Value = append(letter.Value, part.Data...)
	}
	return letter, nil
}

// FindLatest returns the latest letters that query selects.
func (c *collection) FindLatest(ctx context.Context, query Query, after *Letter, limit int) ([]Letter, error) {
	return c.findOrdered(ctx, query, listing.Order{Field: "givenUpAt", Down: true, IDsUpward: true}, after, limit)
}

// FindOldest returns the oldest letters that query selects.
func (c *collection) FindOldest(ctx context.Context, query Query, after *Letter, limit int) ([]Letter, error) {
	return c.findOrdered(ctx, query, listing.Order{Field: "givenUpAt", IDsUpward: true}, after, limit)
}

func (c *collection) findOrdered(ctx context.Context, query Query, order listing.Order, after *Letter, limit int) ([]Letter, error) {
	filter := query.buildFilter()
	if after != nil {
		filter = listing.All(filter, order.After(after.GivenUpAt, after.ID))
	}

	opts := options.Find().SetSort(order.Sort()).SetLimit(int64(limit))
	if query.NoValues {
		opts.SetProjection(bson.D{{Key: "value", Value: 0}})
	}
	cur, err := cursor.Find(ctx, c.coll, filter, opts)
	var page []Letter
	bytes := 0
	for letter, err := range cursor.Each[Letter](ctx, "listing dead letters of "+c.coll.Name(), cur, err) {
		if err != nil {
			return nil, err
		}
		page = append(page, letter)
		// Whole letters may have a gigabyte.
		if bytes += letter.countRecordBytes(); bytes >= pageBytes {
			break
		}
	}
	return page, nil
}

// Count counts the letters that query selects.
func (c *collection) Count(ctx context.Context, query Query) (int64, error) {
	n, err := c.coll.CountDocuments(ctx, query.buildFilter())
	if err != nil {
		return 0, fmt.Errorf("counting dead letters of %s: %w", c.coll.Name(), err)
	}
	return n, nil
}

// Summarize counts the letters that query selects by their failure.
func (c *collection) Summarize(ctx context.Context, query Query) ([]Summary, error) {
	groupKey := bson.D{
		{Key: "group", Value: "$_id.group"},
		{Key: "handler", Value: "$_id.handler"},
		{Key: "topic", Value: "$_id.topic"},
		{Key: "name", Value: "$name"},
		{Key: "class", Value: "$class"},
		{Key: "fingerprint", Value: "$fingerprint"},
		{Key: "failure", Value: "$failure"},
	}
	cur, err := cursor.Aggregate(ctx, c.coll, listing.Summary(query.buildFilter(), groupKey, "givenUpAt", "requeued"))
	return cursor.All[Summary](ctx, "summarizing dead letters of "+c.coll.Name(), cur, err)
}

// findSelected returns those of the letters that query still selects, in the transaction of ctx. If another call changes one of them before
// the transaction has written it, that is a write conflict, which repeats the transaction.
func (c *collection) findSelected(ctx context.Context, query Query, ids []ID) (selected []ID, err error) {
	filter := listing.All(byIDs(ids), query.buildFilter())
	cur, err := cursor.Find(ctx, c.coll, filter, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	found, err := cursor.All[struct {
		ID ID `bson:"_id"`
	}](ctx, "reading dead letters of "+c.coll.Name(), cur, err)
	for _, letter := range found {
		selected = append(selected, letter.ID)
	}
	return selected, err
}

// byIDs returns the filter for the documents with these ids.
func byIDs[T any](ids []T) bson.D {
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
}

// MarkRequeued stores the mark of each letter that query still selects, with the server's time.
func (c *collection) MarkRequeued(ctx context.Context, query Query, marks map[ID]Requeued) (marked []ID, err error) {
	marked, err = c.findSelected(ctx, query, slices.Collect(maps.Keys(marks)))
	if err != nil || len(marked) == 0 {
		return nil, err
	}

	var models []mongo.WriteModel
	for _, id := range marked {
		models = append(models, mongo.NewUpdateOneModel().
			SetFilter(bson.D{{Key: "_id", Value: id}}).SetUpdate(listing.Mark("requeued", marks[id])))
	}
	if _, err := c.coll.BulkWrite(ctx, models); err != nil {
		return nil, fmt.Errorf("marking dead letters of %s as requeued: %w", c.coll.Name(), err)
	}
	return marked, nil
}

// chunkGrace is how much longer than their letter chunks exist.
const chunkGrace = time.Hour

// Archive marks the letters that query still selects as discarded. They expire with their chunks after keep.
func (c *collection) Archive(ctx context.Context, query Query, letters []Letter, actor string, keep time.Duration) (archived int64, err error) {
	expireAfter := func(wait time.Duration) bson.E {
		return bson.E{Key: "expireAt", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", wait.Milliseconds()}}}}
	}
	mark := bson.D{{Key: "at", Value: "$$NOW"}, {Key: "actor", Value: bson.D{{Key: "$literal", Value: actor}}}}

	archived, err = c.changeSelected(ctx, query, letters, func(ctx context.Context, ids []ID, chunks []chunkID) error {
		_, err := c.coll.UpdateMany(ctx, byIDs(ids), mongo.Pipeline{{{Key: "$set", Value: bson.D{
			{Key: "archived", Value: mark}, expireAfter(keep),
		}}}})
		if err != nil || len(chunks) == 0 {
			return err
		}
		_, err = c.coll.UpdateMany(ctx, byIDs(chunks), mongo.Pipeline{{{Key: "$set", Value: bson.D{expireAfter(keep + chunkGrace)}}}})
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("moving dead letters of %s into the archive: %w", c.coll.Name(), err)
	}
	return archived, nil
}

// Delete deletes the letters that query still selects, with their chunks.
func (c *collection) Delete(ctx context.Context, query Query, letters []Letter) (int64, error) {
	deleted, err := c.changeSelected(ctx, query, letters, func(ctx context.Context, ids []ID, chunks []chunkID) error {
		_, err := c.coll.DeleteMany(ctx, byIDs(ids))
		if err != nil || len(chunks) == 0 {
			return err
		}
		_, err = c.coll.DeleteMany(ctx, byIDs(chunks))
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("discarding dead letters of %s: %w", c.coll.Name(), err)
	}
	return deleted, nil
}

// changeSelected calls change with the ids of those letters that query still selects, and with the ids of the chunks that these may have. It
// returns the number of the letters. It is one transaction, because a letter without its chunks would be incomplete, and only their letter
// leads to chunks.
func (c *collection) changeSelected(
	ctx context.Context, query Query, letters []Letter, change func(ctx context.Context, ids []ID, chunks []chunkID) error,
) (changed int64, err error) {
	var all []ID
	for i := range letters {
		all = append(all, letters[i].ID)
	}

	err = c.Transaction(ctx, func(ctx context.Context) error {
		ids, err := c.findSelected(ctx, query, all)
		if changed = int64(len(ids)); err != nil || changed == 0 {
			return err
		}
		var chunks []chunkID
		for i := range letters {
			if !slices.Contains(ids, letters[i].ID) {
				continue
			}
			for n := range letters[i].countChunks() {
				chunks = append(chunks, chunkID{letters[i].ID, n})
			}
		}
		return change(ctx, ids, chunks)
	})
	return changed, err
}
