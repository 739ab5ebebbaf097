package bodystore

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// The defaults of GridFS.
const (
	defaultBucket = "outrelay_bodies"
	defaultTTL    = 30 * 24 * time.Hour
)

// GridFS stores bodies in a GridFS bucket of MongoDB, and sweeps them when their time to live is over. The time to live
// starts when the body is stored. It is measured by the clocks of the processes that store and sweep. It must be longer than
// a message can take: the retention of the outbox and the topic, retries, and dead letters that may be requeued.
//
// Bodies are written and read outside of any transaction. An abort does not remove them, and a transaction does not delay
// them.
type GridFS struct {
	bucket *mongo.GridFSBucket
	name   string
	ttl    time.Duration
	log    *slog.Logger
	now    func() time.Time
	every  time.Duration // between the sweeps of Run
}

// Option configures GridFS. Zero and nil mean the default, negative means none, as in package consumer.
type Option interface{ apply(*GridFS) }

type optionFunc func(*GridFS)

func (f optionFunc) apply(gridFS *GridFS) { f(gridFS) }

// WithBucket sets the name of the bucket. Defaults to outrelay_bodies.
func WithBucket(name string) Option {
	return optionFunc(func(gridFS *GridFS) { gridFS.name = cmp.Or(name, defaultBucket) })
}

// WithTTL sets how long bodies are kept, at least one second. Defaults to 30 days: longer than Kafka keeps
// records by default, 7 days, plus time for a dead letter to be requeued. A negative ttl means no limit: bodies are never deleted.
func WithTTL(ttl time.Duration) Option {
	return optionFunc(func(gridFS *GridFS) { gridFS.ttl = cmp.Or(ttl, defaultTTL) })
}

// WithLogger sets the logger for failed sweeps of Run. Defaults to slog.Default.
func WithLogger(log *slog.Logger) Option {
	return optionFunc(func(gridFS *GridFS) { gridFS.log = cmp.Or(log, slog.Default()) })
}

// NewGridFS returns a store in db. It does no I/O. The error lists every problem.
func NewGridFS(db *mongo.Database, opts ...Option) (*GridFS, error) {
	gridFS := &GridFS{name: defaultBucket, ttl: defaultTTL, log: slog.Default(), now: time.Now, every: sweepInterval}
	for _, o := range opts {
		if o != nil {
			o.apply(gridFS)
		}
	}

	var problems []error
	if db == nil {
		problems = append(problems, errors.New("bodystore: the database is nil"))
	}
	if gridFS.ttl >= 0 && gridFS.ttl < time.Second {
		problems = append(problems, fmt.Errorf("bodystore: WithTTL: time to live of %s: set at least 1 s", gridFS.ttl))
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}

	// A body must be as durable as its event, and visible to each consumer.
	majority := options.Database().SetWriteConcern(concern.Majority()).
		SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary())
	gridFS.bucket = db.Client().Database(db.Name(), majority).GridFSBucket(options.GridFSBucket().SetName(gridFS.name))
	return gridFS, nil
}

// withoutSession returns ctx without its session, so that calls run outside of its transaction.
func withoutSession(ctx context.Context) context.Context { return mongo.NewSessionContext(ctx, nil) }

// Put implements Store.
func (g *GridFS) Put(ctx context.Context, body []byte) (string, error) {
	ctx = withoutSession(ctx)
	id, err := g.bucket.UploadFromStream(ctx, "body", bytes.NewReader(body))
	if err != nil {
		return "", fmt.Errorf("writing to bucket %s: %w", g.name, err)
	}
	return id.Hex(), nil
}

// Get implements Store. It reads the chunks alone. The description of a file is not trusted: someone who can write to the store
// could make it claim any length. So the memory grows with the bytes that arrive.
func (g *GridFS) Get(ctx context.Context, ref string, size int) ([]byte, error) {
	id, err := bson.ObjectIDFromHex(ref)
	if err != nil {
		return nil, fmt.Errorf("%w: invalid reference %q", ErrGone, ref[:min(len(ref), 64)])
	}

	ctx = withoutSession(ctx)
	cur, err := cursor.Find(ctx, g.bucket.GetChunksCollection(), bson.D{{Key: "files_id", Value: id}}, options.Find().
		SetSort(bson.D{{Key: "n", Value: 1}}).SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "n", Value: 1}, {Key: "data", Value: 1}}))
	if err != nil {
		return nil, fmt.Errorf("reading from bucket %s: %w", g.name, err)
	}
	defer cur.Close(context.WithoutCancel(ctx))

	var body []byte
	for n := int32(0); len(body) <= size && cur.Next(ctx); n++ {
		number, _ := cur.Current.Lookup("n").AsInt64OK()
		_, data, ok := cur.Current.Lookup("data").BinaryOK()
		// Another chunk is missing, or is no chunk.
		if !ok || number != int64(n) {
			return nil, ErrGone
		}
		body = append(body, data...)
	}
	if err := cur.Err(); err != nil {
		return nil, fmt.Errorf("reading from bucket %s: %w", g.name, err)
	}
	// A sweep can delete the chunks during the download.
	if len(body) < size {
		return nil, ErrGone
	}
	return body, nil
}

// sweepBatch is how many bodies a sweep deletes with one statement.
const sweepBatch = 100

// sweep deletes all bodies that are older than the time to live, oldest first, and the chunks of uploads that never finished. It returns the
// number of bodies that it deleted.
func (g *GridFS) sweep(ctx context.Context) (swept int, err error) {
	if g.ttl < 0 {
		return 0, nil
	}
	ctx = withoutSession(ctx)
	files, chunks := g.bucket.GetFilesCollection(), g.bucket.GetChunksCollection()

	swept, err = g.deleteInBatches(ctx, files, g.ttl, nil, func(ids bson.D) error {
		// Chunks are deleted first. After a crash in between, the next sweep finds a file without chunks easily. Chunks
		// without a file are harder to find.
		if _, err := chunks.DeleteMany(ctx, bson.D{{Key: "files_id", Value: ids}}); err != nil {
			return err
		}
		_, err := files.DeleteMany(ctx, bson.D{{Key: "_id", Value: ids}})
		return err
	})
	if err == nil {
		// A day more than the bodies: an upload that still runs has chunks without a file. All other chunks of that age are deleted by
		// now, so the server looks only at orphans.
		_, err = g.deleteInBatches(ctx, chunks, g.ttl+24*time.Hour, mongo.Pipeline{
			{{Key: "$lookup", Value: bson.D{
				{Key: "from", Value: g.name + ".files"},
				{Key: "localField", Value: "files_id"},
				{Key: "foreignField", Value: "_id"},
				{Key: "as", Value: "file"},
			}}},
			{{Key: "$match", Value: bson.D{{Key: "file", Value: bson.A{}}}}},
		}, func(ids bson.D) error {
			_, err := chunks.DeleteMany(ctx, bson.D{{Key: "_id", Value: ids}})
			return err
		})
	}
	if err != nil {
		return swept, fmt.Errorf("sweeping bucket %s: %w", g.name, err)
	}
	return swept, nil
}

// deleteInBatches calls remove with a condition for the ids of the documents of coll that are older than age and that stages return, until
// there are none. It returns their number.
func (g *GridFS) deleteInBatches(
	ctx context.Context, coll *mongo.Collection, age time.Duration, stages mongo.Pipeline, remove func(ids bson.D) error,
) (removed int, err error) {
	// An ObjectID begins with its creation time, so ids compare like times.
	oldest := bson.NewObjectIDFromTimestamp(g.now().Add(-age))
	pipeline := slices.Concat(mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: oldest}}}}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		{{Key: "$project", Value: bson.D{{Key: "files_id", Value: 1}}}},
	}, stages, mongo.Pipeline{{{Key: "$limit", Value: sweepBatch}}})

	for {
		ids, err := g.findIDs(ctx, coll, pipeline)
		if err != nil || len(ids) == 0 {
			return removed, err
		}
		if err := remove(bson.D{{Key: "$in", Value: ids}}); err != nil {
			return removed, err
		}
		removed += len(ids)
	}
}

// findIDs returns the ids of the documents that the pipeline returns.
func (g *GridFS) findIDs(ctx context.Context, coll *mongo.Collection, stages mongo.Pipeline) ([]bson.ObjectID, error) {
	cur, err := cursor.Aggregate(ctx, coll, stages)
	docs, err := cursor.All[struct {
		ID bson.ObjectID `bson:"_id"`
	}](ctx, "reading ids", cur, err)

	ids := make([]bson.ObjectID, len(docs))
	for i, d := range docs {
		ids[i] = d.ID
	}
	return ids, err
}

// sweepInterval is the time between two sweeps of Run.
const sweepInterval = time.Hour

// Run deletes the bodies that are older than the time to live, every hour. It blocks until ctx ends, and then returns nil. A failed sweep is
// logged, and the next one tries again. Several processes may run it.
func (g *GridFS) Run(ctx context.Context) error {
	for {
		if n, err := g.sweep(ctx); err != nil && ctx.Err() == nil {
			g.log.WarnContext(ctx, "sweeping claim check bodies fails; the next sweep tries again",
				"bucket", g.name, "swept", n, "error", err)
		}
		if retry.Sleep(ctx, g.every) != nil {
			return nil
		}
	}
}
