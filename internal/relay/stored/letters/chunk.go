package letters

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// chunkDocument is a part of the envelope of a letter. It is in the collection of the letters, so that it needs no further
// privilege. It also has the watcher and the outbox of its letter. No query for letters matches it, because it has no
// movedAt.
type chunkDocument struct {
	ID   string `bson:"_id"`
	Data []byte `bson:"data"`
}

// chunkID returns the `_id` of a chunk of the letter id, which begins with the id of the letter. Chunks sort in order.
func chunkID(id string, n int) string { return fmt.Sprintf("%s/%02d", id, n) }

// chunkGrace is how much longer than their letter chunks exist.
const chunkGrace = time.Hour

// letterChunk is a chunk that is ready to be written.
type letterChunk struct {
	letter *Prepared
	number int
}

func (c *letterChunk) data() []byte {
	from := c.number * chunkSize
	return c.letter.raw[from:min(from+chunkSize, len(c.letter.raw))]
}

// WriteChunks stores the envelopes of list that are too large for one document (N20), in fenced transactions of its own. It
// must be called before [Write]: if a crash follows, the next attempt overwrites the chunks. Without large letters, it does
// nothing. A few chunks fill a transaction, so the number that the server can write shows nothing about transactions of
// small documents.
func WriteChunks(ctx context.Context, fencer mongodb.Fencer, coll *mongo.Collection, list []*Prepared) error {
	chunks := chunksOf(list)
	if len(chunks) == 0 {
		return nil
	}

	return mongodb.WriteInParts(ctx, fencer, chunks, mongodb.Parts[letterChunk]{
		Doing: "storing large dead letters",
		Size:  func(chunk *letterChunk) int { return len(chunk.data()) },
		Write: func(tx context.Context, client *mongo.Client, part []letterChunk) error {
			// The owner's transactions may use another client.
			return upsertChunks(tx, mongodb.InClient(client, coll), part)
		},
	})
}

// WriteChunksIn is WriteChunks in the transaction of tx, for letters that are made in this transaction. coll is of the client of tx.
func WriteChunksIn(tx context.Context, coll *mongo.Collection, list []*Prepared) error {
	chunks := chunksOf(list)
	if len(chunks) == 0 {
		return nil
	}
	return upsertChunks(tx, coll, chunks)
}

func chunksOf(list []*Prepared) (chunks []letterChunk) {
	for _, p := range list {
		for n := range p.dead.Chunks {
			chunks = append(chunks, letterChunk{p, n})
		}
	}
	return chunks
}

func upsertChunks(tx context.Context, coll *mongo.Collection, part []letterChunk) error {
	models := make([]mongo.WriteModel, len(part))
	for i := range part {
		chunk := &part[i]
		set := bson.D{
			{Key: "watcher", Value: mongodb.Literal(chunk.letter.dead.Watcher)},
			{Key: "ns", Value: mongodb.Literal(chunk.letter.dead.NS)},
			{Key: "data", Value: mongodb.Literal(chunk.data())},
		}
		if expire := chunk.letter.expire; expire > 0 {
			// Chunks expire later than their letter.
			set = append(set, bson.E{Key: "expireAt", Value: bson.D{{Key: "$add", Value: bson.A{
				"$$NOW", (expire + chunkGrace).Milliseconds(),
			}}}})
		}

		models[i] = mongo.NewUpdateOneModel().SetUpsert(true).
			SetFilter(bson.D{{Key: "_id", Value: chunkID(chunk.letter.dead.ID, chunk.number)}}).
			SetUpdate(mongo.Pipeline{{{Key: "$set", Value: set}}})
	}

	_, err := coll.BulkWrite(tx, models)
	return mongodb.DescribeError(err, "writing to "+mongodb.Namespace(coll), "find, insert and update", mongodb.Namespace(coll))
}

// errMissingChunks is returned for a letter of which chunks are missing.
var errMissingChunks = errors.New("dead letter is incomplete")

// Open reads a letter with its whole envelope. It returns [mongodb.ErrNotFound] if the letter does
// not exist.
func Open(ctx context.Context, coll *mongo.Collection, id string) (Dead, error) {
	coll = mongodb.Majority(coll)

	var letter Dead
	err := coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}, isLetter}).Decode(&letter)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return Dead{}, fmt.Errorf("dead letter %s: %w", id, mongodb.ErrNotFound)
	}
	if err != nil {
		return Dead{}, fmt.Errorf("reading the dead letter %s: %w", id, err)
	}

	if letter.Chunks > 0 {
		letter.Envelope, err = readChunks(ctx, coll, letter)
	}
	return letter, err
}

// isLetter is the condition for a letter, which no chunk fulfills.
var isLetter = bson.E{Key: "movedAt", Value: bson.D{{Key: "$exists", Value: true}}}

// chunkIDs returns the ids of the chunks of the letter.
func (d *Dead) chunkIDs() []string {
	ids := make([]string, d.Chunks)
	for i := range ids {
		ids[i] = chunkID(d.ID, i)
	}
	return ids
}

// readChunks returns the envelope of a letter that is stored in chunks. It returns
// [errMissingChunks] if the stored bytes are not the whole envelope.
func readChunks(ctx context.Context, coll *mongo.Collection, letter Dead) (bson.Raw, error) {
	inOrder := options.Find().SetSort(bson.D{{Key: "_id", Value: 1}})
	chunks, err := mongodb.FindAll[chunkDocument](ctx, coll, "reading the chunks of dead letter "+letter.ID, idIn(letter.chunkIDs()), inOrder)
	if err != nil {
		return nil, err
	}

	raw := make([]byte, 0, letter.Size)
	for _, c := range chunks {
		raw = append(raw, c.Data...)
	}
	if len(chunks) != letter.Chunks || len(raw) != letter.Size {
		return nil, fmt.Errorf("%w: %s has %d of %d chunks, %d of %d bytes",
			errMissingChunks, letter.ID, len(chunks), letter.Chunks, len(raw), letter.Size)
	}
	return raw, nil
}
