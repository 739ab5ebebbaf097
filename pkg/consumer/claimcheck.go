package consumer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/event"
)

// BodyStore stores bodies that are too large for a record. *GridFS implements it.
type BodyStore interface {
	// Put stores a body and returns a reference to it. The reference contains no semicolon. After Put has returned, the
	// body must not be lost, even if a transaction of ctx aborts.
	Put(ctx context.Context, body []byte) (ref string, err error)
	// Get returns a body. It returns ErrBodyGone if the body does not exist.
	Get(ctx context.Context, ref string) ([]byte, error)
}

// ErrBodyGone reports that a body does not exist in its store: it was removed, or never stored.
var ErrBodyGone = errors.New("the body is gone from its store")

// DefaultClaimThreshold is the threshold of ClaimCheckOut if it is given 0, in bytes.
const DefaultClaimThreshold = 256 << 10

// ClaimCheckOut stores bodies above threshold bytes in the store, and puts a reference into the event. The record then has
// an empty value. ClaimCheckOut must be the innermost middleware, inside of Encrypt. If the transaction aborts, the body
// stays in the store until the store sweeps it.
func ClaimCheckOut(store BodyStore, threshold int) EmitMiddleware {
	if threshold <= 0 {
		threshold = DefaultClaimThreshold
	}

	return func(next Emit) Emit {
		return func(ctx context.Context, ev event.Event) error {
			body, err := ev.Payload()
			if err != nil {
				return err
			}
			if _, ok := ev.Header(headerClaimCheck); ok || len(body) <= threshold {
				return next(ctx, ev)
			}

			ref, err := store.Put(ctx, body)
			if err != nil {
				return fmt.Errorf("storing the body of event %s: %w", ev.ID(), err)
			}

			sum := sha256.Sum256(body)
			claim := ref + ";sha256=" + hex.EncodeToString(sum[:])
			return next(ctx, ev.With(event.WithPayload(event.Bytes(ev.ContentType(), nil)), event.WithHeader(headerClaimCheck, []byte(claim))))
		}
	}
}

// ClaimCheckIn loads the bodies that ClaimCheckOut stored: the handler gets a copy of the message with the whole body.
// ClaimCheckIn must be the outermost middleware, outside of Decrypt. Retry topics and dead letters keep the reference. If a
// body is gone or was changed, the error is an *InvalidError.
func ClaimCheckIn(store BodyStore) Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			claim, ok := m.Header(headerClaimCheck)
			if !ok {
				return next.Handle(ctx, m)
			}

			ref, want, _ := strings.Cut(string(claim), ";sha256=")
			body, err := store.Get(ctx, ref)
			if errors.Is(err, ErrBodyGone) {
				problem := "claim check: " + ErrBodyGone.Error()
				return &InvalidError{ID: m.ID, Type: m.Type, Problems: []string{problem}, Err: err}
			}
			if err != nil {
				return fmt.Errorf("reading the body of message %s: %w", m.ID, err)
			}
			if sum := sha256.Sum256(body); hex.EncodeToString(sum[:]) != want {
				problem := "claim check: the body differs from the stored checksum"
				return &InvalidError{ID: m.ID, Type: m.Type, Problems: []string{problem}}
			}

			c := m.Copy()
			c.Value = body
			c.DeleteHeader(headerClaimCheck)
			return next.Handle(ctx, c)
		})
	}
}

// The defaults of GridFS.
const (
	DefaultBodies    = "outrelay_bodies"
	DefaultBodiesTTL = 30 * 24 * time.Hour
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
}

// GridFSOption configures GridFS.
type GridFSOption func(*GridFS)

// Bodies sets the name of the bucket. Defaults to DefaultBodies.
func Bodies(name string) GridFSOption { return func(g *GridFS) { g.name = name } }

// BodiesTTL sets how long bodies are kept. Defaults to DefaultBodiesTTL.
func BodiesTTL(d time.Duration) GridFSOption { return func(g *GridFS) { g.ttl = d } }

// BodiesLogger sets the logger for failed sweeps of Run. Defaults to slog.Default.
func BodiesLogger(log *slog.Logger) GridFSOption { return func(g *GridFS) { g.log = log } }

// NewGridFS returns a body store in db. It does no I/O. Its errors are ErrConfiguration.
func NewGridFS(db *mongo.Database, opts ...GridFSOption) (*GridFS, error) {
	g := &GridFS{name: DefaultBodies, ttl: DefaultBodiesTTL, log: slog.Default(), now: time.Now}
	for _, o := range opts {
		o(g)
	}

	switch {
	case db == nil:
		return nil, fmt.Errorf("%w: bodies: the database is nil", ErrConfiguration)
	case g.name == "":
		return nil, fmt.Errorf("%w: bodies: the bucket has no name", ErrConfiguration)
	case g.ttl < time.Second:
		return nil, fmt.Errorf("%w: bodies: time to live of %s: set at least 1 s", ErrConfiguration, g.ttl)
	case g.log == nil:
		return nil, fmt.Errorf("%w: bodies: the logger is nil", ErrConfiguration)
	}

	majority := options.Database().SetWriteConcern(writeconcern.Majority()).
		SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary())
	g.bucket = db.Client().Database(db.Name(), majority).GridFSBucket(options.GridFSBucket().SetName(g.name))
	return g, nil
}

// withoutSession returns ctx without its session, so that calls run outside of its transaction.
func withoutSession(ctx context.Context) context.Context { return mongo.NewSessionContext(ctx, nil) }

// Put implements BodyStore.
func (g *GridFS) Put(ctx context.Context, body []byte) (string, error) {
	ctx = withoutSession(ctx)
	id, err := g.bucket.UploadFromStream(ctx, "body", bytes.NewReader(body))
	if err != nil {
		return "", fmt.Errorf("writing to bucket %s: %w", g.name, err)
	}
	return id.Hex(), nil
}

// Get implements BodyStore.
func (g *GridFS) Get(ctx context.Context, ref string) ([]byte, error) {
	id, err := bson.ObjectIDFromHex(ref)
	if err != nil {
		return nil, fmt.Errorf("%w: invalid reference %q", ErrBodyGone, clip(ref, 64))
	}

	stream, err := g.bucket.OpenDownloadStream(withoutSession(ctx), id)
	if errors.Is(err, mongo.ErrFileNotFound) {
		return nil, ErrBodyGone
	}
	if err != nil {
		return nil, fmt.Errorf("reading from bucket %s: %w", g.name, err)
	}
	defer stream.Close()

	buf := bytes.NewBuffer(make([]byte, 0, stream.GetFile().Length))
	_, err = io.Copy(buf, stream)
	// A sweep can delete the chunks during the download.
	if errors.Is(err, mongo.ErrMissingChunk) {
		return nil, ErrBodyGone
	}
	if err != nil {
		return nil, fmt.Errorf("reading from bucket %s: %w", g.name, err)
	}
	return buf.Bytes(), nil
}

// sweepBatch is how many bodies a sweep deletes with one statement.
const sweepBatch = 100

// Sweep deletes bodies that are older than the time to live, oldest first and at most limit. It returns how many it
// deleted. It also deletes the chunks of uploads that never finished.
func (g *GridFS) Sweep(ctx context.Context, limit int) (int, error) {
	ctx = withoutSession(ctx)
	files, chunks := g.bucket.GetFilesCollection(), g.bucket.GetChunksCollection()

	// An ObjectID begins with its creation time, so ids compare like times.
	oldest := bson.NewObjectIDFromTimestamp(g.now().Add(-g.ttl))
	expired := bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: oldest}}}}

	total := 0
	for total < limit {
		ids, err := g.findIDs(ctx, files, mongo.Pipeline{
			{{Key: "$match", Value: expired}},
			{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
			{{Key: "$limit", Value: min(sweepBatch, limit-total)}},
			{{Key: "$project", Value: bson.D{{Key: "_id", Value: 1}}}},
		})
		if err != nil {
			return total, g.wrapSweepError(err)
		}
		if len(ids) == 0 {
			break
		}

		// Chunks are deleted first. After a crash in between, the next sweep finds a file without chunks easily. Chunks
		// without a file are harder to find.
		in := bson.D{{Key: "$in", Value: ids}}
		if _, err := chunks.DeleteMany(ctx, bson.D{{Key: "files_id", Value: in}}); err != nil {
			return total, g.wrapSweepError(err)
		}
		if _, err := files.DeleteMany(ctx, bson.D{{Key: "_id", Value: in}}); err != nil {
			return total, g.wrapSweepError(err)
		}
		total += len(ids)
	}

	return total, g.sweepOrphans(ctx)
}

// sweepOrphans deletes chunks of uploads that never finished: chunks without a file.
func (g *GridFS) sweepOrphans(ctx context.Context) error {
	chunks := g.bucket.GetChunksCollection()
	cut := bson.NewObjectIDFromTimestamp(g.now().Add(-g.ttl - 24*time.Hour))

	ids, err := g.findIDs(ctx, chunks, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: cut}}}}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		{{Key: "$limit", Value: sweepBatch}},
		{{Key: "$lookup", Value: bson.D{
			{Key: "from", Value: g.name + ".files"},
			{Key: "localField", Value: "files_id"},
			{Key: "foreignField", Value: "_id"},
			{Key: "as", Value: "file"},
		}}},
		{{Key: "$match", Value: bson.D{{Key: "file", Value: bson.A{}}}}},
		{{Key: "$project", Value: bson.D{{Key: "_id", Value: 1}}}},
	})
	if err == nil && len(ids) > 0 {
		_, err = chunks.DeleteMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}})
	}
	if err != nil {
		return g.wrapSweepError(err)
	}
	return nil
}

func (g *GridFS) wrapSweepError(err error) error {
	return &MaintenanceError{Task: "sweeping bucket " + g.name, Err: err}
}

// findIDs returns the ids of the documents that the pipeline returns.
func (g *GridFS) findIDs(ctx context.Context, coll *mongo.Collection, p mongo.Pipeline) ([]bson.ObjectID, error) {
	cur, err := coll.Aggregate(ctx, p)
	if err != nil {
		return nil, err
	}

	var docs []struct {
		ID bson.ObjectID `bson:"_id"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		return nil, err
	}

	ids := make([]bson.ObjectID, len(docs))
	for i, d := range docs {
		ids[i] = d.ID
	}
	return ids, nil
}

// Run sweeps at the given interval, at most 1,000 bodies at a time. It blocks until ctx ends, and then returns nil. A failed
// sweep is logged and tried again after the interval.
func (g *GridFS) Run(ctx context.Context, every time.Duration) error {
	if every <= 0 {
		return fmt.Errorf("%w: bodies: invalid sweep interval %s: it must be positive", ErrConfiguration, every)
	}

	for {
		if n, err := g.Sweep(ctx, 1000); err != nil && ctx.Err() == nil {
			g.log.WarnContext(ctx, "sweeping claim check bodies fails; the next sweep tries again",
				"bucket", g.name, "swept", n, "error", err)
		}
		if retry.Sleep(ctx, every) != nil {
			return nil
		}
	}
}
