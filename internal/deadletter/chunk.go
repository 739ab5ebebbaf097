package deadletter

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
)

// chunkID is the letter's id and the number of the chunk: chunks sort in order, and stand beside their letter, so that
// they need no privilege of their own.
type chunkID struct {
	ID    `bson:",inline"`
	Chunk int `bson:"chunk"`
}

type chunkDocument struct {
	ID   chunkID `bson:"_id"`
	Data []byte  `bson:"data"`
}

// writeChunks writes the bodies of the letters that are too large for one document (N20), before the letters: a crash between
// leaves chunks that the repetition overwrites.
func writeChunks(ctx context.Context, f store.Fencer, part []preparedLetter) error {
	for i := range part {
		p := &part[i]
		for from, most := 0, MaxBytes/ChunkSize; from < p.dead.Chunks; {
			to := min(from+most, p.dead.Chunks)
			err := store.FencedSoon(ctx, f, nil, to-from, func(tx context.Context) error {
				s := mongo.SessionFromContext(tx)
				if s == nil {
					return errNoTransaction
				}
				return p.upsertChunks(tx, s.Client(), from, to)
			})
			if errors.Is(err, store.ErrSlow) {
				most = 1
				continue
			}
			if err != nil {
				return fmt.Errorf("moving a dead letter of %d bytes of %s: %w", len(p.raw), p.id.NS, err)
			}
			from = to
		}
	}
	return nil
}

func (p *preparedLetter) upsertChunks(tx context.Context, client *mongo.Client, from, to int) error {
	models := make([]mongo.WriteModel, 0, to-from)
	for n := from; n < to; n++ {
		data := p.raw[n*ChunkSize : min((n+1)*ChunkSize, len(p.raw))]
		models = append(models, mongo.NewUpdateOneModel().SetUpsert(true).
			SetFilter(bson.D{{Key: "_id", Value: chunkID{p.id, n}}}).
			SetUpdate(bson.D{
				{Key: "$set", Value: bson.D{{Key: "data", Value: data}}},
				{Key: "$currentDate", Value: bson.D{{Key: "chunkedAt", Value: true}}},
			}))
	}
	_, err := client.Database(p.db).Collection(Collection(p.coll)).BulkWrite(tx, models)
	return err
}

// errMissingChunks says that chunks of a letter are missing.
var errMissingChunks = errors.New("a dead letter is not whole")

// Open reads a letter, with its whole envelope. [store.ErrNotFound] if it is gone.
func Open(ctx context.Context, db *mongo.Database, id ID) (Dead, error) {
	coll := store.Majority(db.Collection(Collection(id.NS[min(len(db.Name())+1, len(id.NS)):])))
	var d Dead
	err := coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&d)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return Dead{}, fmt.Errorf("dead letter of %s: %w", id.NS, store.ErrNotFound)
	}
	if err != nil {
		return Dead{}, fmt.Errorf("reading a dead letter of %s: %w", id.NS, err)
	}
	if d.Chunks > 0 {
		d.Envelope, err = readChunks(ctx, coll, d)
	}
	return d, err
}

func readChunks(ctx context.Context, coll *mongo.Collection, d Dead) (bson.Raw, error) {
	ids := make(bson.A, d.Chunks)
	for i := range ids {
		ids[i] = chunkID{d.ID, i}
	}
	cur, err := coll.Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		return nil, fmt.Errorf("reading the chunks of a dead letter of %s: %w", d.ID.NS, err)
	}
	var parts []chunkDocument
	if err := cur.All(ctx, &parts); err != nil {
		return nil, fmt.Errorf("reading the chunks of a dead letter of %s: %w", d.ID.NS, err)
	}
	raw := make([]byte, 0, d.Size)
	for _, c := range parts {
		raw = append(raw, c.Data...)
	}
	if len(parts) != d.Chunks || len(raw) != d.Size {
		return nil, fmt.Errorf("%w: %s has %d of %d chunks, %d of %d bytes", errMissingChunks, d.ID, len(parts), d.Chunks, len(raw), d.Size)
	}
	return raw, nil
}
