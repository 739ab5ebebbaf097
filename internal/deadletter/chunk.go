package deadletter

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// chunkID is the id of the letter and the number of the chunk, so that chunks sort in order. Chunks
// are in the same collection as their letter, so that they need no further privilege.
type chunkID struct {
	ID    `bson:",inline"`
	Chunk int `bson:"chunk"`
}

type chunkDocument struct {
	ID   chunkID `bson:"_id"`
	Data []byte  `bson:"data"`
}

// letterChunk is a part of the envelope of a letter.
type letterChunk struct {
	letter *preparedLetter
	number int
}

func (c *letterChunk) data() []byte {
	from := c.number * chunkSize
	return c.letter.raw[from:min(from+chunkSize, len(c.letter.raw))]
}

// writeChunks stores the envelopes that are too large for one document (N20). It must be called
// before the letters are written: if a crash follows, the next attempt overwrites the chunks. A few chunks fill a
// transaction, so the number that the server can write shows nothing about transactions of small documents.
func writeChunks(ctx context.Context, f mongodb.Fencer, letters []preparedLetter) error {
	var chunks []letterChunk
	for i := range letters {
		for n := range letters[i].dead.Chunks {
			chunks = append(chunks, letterChunk{&letters[i], n})
		}
	}

	return mongodb.WriteInParts(ctx, f, chunks, mongodb.Parts[letterChunk]{
		Doing: "storing large dead letters",
		Size:  func(c *letterChunk) int { return len(c.data()) },
		Write: upsertChunks,
	})
}

func upsertChunks(tx context.Context, client *mongo.Client, part []letterChunk) error {
	models := map[string][]mongo.WriteModel{}
	for i := range part {
		c := &part[i]
		dead := Collection(c.letter.id.NS)
		models[dead] = append(models[dead], mongo.NewUpdateOneModel().SetUpsert(true).
			SetFilter(bson.D{{Key: "_id", Value: chunkID{c.letter.id, c.number}}}).
			SetUpdate(bson.D{
				{Key: "$set", Value: bson.D{{Key: "data", Value: c.data()}}},
				{Key: "$currentDate", Value: bson.D{{Key: "chunkedAt", Value: true}}},
			}))
	}
	return outboxes.BulkWrite(tx, client, models, "find, insert and update")
}

// errMissingChunks is returned for a letter of which chunks are missing.
var errMissingChunks = errors.New("dead letter is incomplete")

// Open reads a letter with its whole envelope. It returns [mongodb.ErrNotFound] if the letter does
// not exist.
func Open(ctx context.Context, db *mongo.Database, id ID) (Dead, error) {
	outbox := id.NS[min(len(db.Name())+1, len(id.NS)):]
	coll := mongodb.Majority(db.Collection(Collection(outbox)))

	var d Dead
	err := coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&d)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return Dead{}, fmt.Errorf("dead letter of %s: %w", id.NS, mongodb.ErrNotFound)
	}
	if err != nil {
		return Dead{}, fmt.Errorf("reading a dead letter of %s: %w", id.NS, err)
	}

	if d.Chunks > 0 {
		d.Envelope, err = readChunks(ctx, coll, d)
	}
	return d, err
}

// readChunks returns the envelope of a letter that is stored in chunks. It returns
// [errMissingChunks] if the stored bytes are not the whole envelope.
func readChunks(ctx context.Context, coll *mongo.Collection, d Dead) (bson.Raw, error) {
	ids := make(bson.A, d.Chunks)
	for i := range ids {
		ids[i] = chunkID{d.ID, i}
	}

	inOrder := options.Find().SetSort(bson.D{{Key: "_id", Value: 1}})
	chunks, err := mongodb.FindAll[chunkDocument](ctx, coll, "reading the chunks of a dead letter of "+d.ID.NS, idIn(ids), inOrder)
	if err != nil {
		return nil, err
	}

	raw := make([]byte, 0, d.Size)
	for _, c := range chunks {
		raw = append(raw, c.Data...)
	}
	if len(chunks) != d.Chunks || len(raw) != d.Size {
		return nil, fmt.Errorf("%w: %s has %d of %d chunks, %d of %d bytes",
			errMissingChunks, d.ID, len(chunks), d.Chunks, len(raw), d.Size)
	}
	return raw, nil
}
