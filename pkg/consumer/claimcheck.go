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

// BodyStore keeps bodies that are too large for a record. *GridFS is one.
type BodyStore interface {
	// Put stores a body and returns a reference to it, without a semicolon. The body must not be lost once Put returned,
	// whatever becomes of a transaction of ctx.
	Put(ctx context.Context, body []byte) (ref string, err error)
	// Get reads a body. ErrBodyGone says that there is none.
	Get(ctx context.Context, ref string) ([]byte, error)
}

// ErrBodyGone says that a body is not in its store any more, or never was.
var ErrBodyGone = errors.New("the body is gone from its store")

// DefaultClaimThreshold is the size above which ClaimCheckOut puts a body elsewhere, if it is given 0.
const DefaultClaimThreshold = 256 << 10

// ClaimCheckOut puts bodies above threshold bytes into the store and a reference into the event: the record then has an empty
// value. It is to be the innermost middleware, inside of Encrypt. What it stored stays there if the transaction aborts,
// until the store sweeps it.
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
			if len(body) <= threshold || ev.HasHeader(headerClaimCheck) {
				return next(ctx, ev)
			}
			ref, err := store.Put(ctx, body)
			if err != nil {
				return fmt.Errorf("storing the body of event %s: %w", ev.ID(), err)
			}
			sum := sha256.Sum256(body)
			claim := ref + ";sha256=" + hex.EncodeToString(sum[:])
			return next(ctx, ev.With(event.WithPayload([]byte{}), event.WithHeader(headerClaimCheck, []byte(claim))))
		}
	}
}

// ClaimCheckIn is the other side: the handler gets a copy of the message with the whole body. It is to be the outermost
// middleware, outside of Decrypt. Retry topics and dead letters keep the reference. A body that is gone or was changed is an
// *InvalidError.
func ClaimCheckIn(store BodyStore) Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			claim, ok := m.Header(headerClaimCheck)
			if !ok {
				return next.Handle(ctx, m)
			}
			ref, want, _ := strings.Cut(string(claim), ";sha256=")
			body, err := store.Get(ctx, ref)
			switch sum := sha256.Sum256(body); {
			case errors.Is(err, ErrBodyGone):
				return &InvalidError{ID: m.ID, Type: m.Type, Problems: []string{"claim check: " + ErrBodyGone.Error()}, Err: err}
			case err != nil:
				return fmt.Errorf("reading the body of message %s: %w", m.ID, err)
			case hex.EncodeToString(sum[:]) != want:
				return &InvalidError{ID: m.ID, Type: m.Type, Problems: []string{"claim check: the body is not the one that was stored"}}
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

// GridFS keeps bodies in a bucket of MongoDB, each until it is swept: its time to live counts from when it was stored, by the
// clocks of those who store and sweep. It has to be longer than anything may take a message: retention of the outbox and the topic, retries,
// dead letters that somebody may want back.
//
// Bodies are written and read outside of any transaction: neither is undone or delayed by one.
type GridFS struct {
	bucket *mongo.GridFSBucket
	name   string
	ttl    time.Duration
	log    *slog.Logger
	now    func() time.Time
}

// GridFSOption configures GridFS.
type GridFSOption func(*GridFS)

// Bodies names the bucket. Defaults to DefaultBodies.
func Bodies(name string) GridFSOption { return func(g *GridFS) { g.name = name } }

// BodiesTTL sets how long bodies are kept. Defaults to DefaultBodiesTTL.
func BodiesTTL(d time.Duration) GridFSOption { return func(g *GridFS) { g.ttl = d } }

// BodiesLogger is where Run tells of sweeps that failed. Defaults to slog.Default.
func BodiesLogger(log *slog.Logger) GridFSOption { return func(g *GridFS) { g.log = log } }

// NewGridFS makes a store in db. It does no I/O.
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
		return nil, fmt.Errorf("%w: bodies are kept for %s; at least a second", ErrConfiguration, g.ttl)
	case g.log == nil:
		return nil, fmt.Errorf("%w: bodies: the logger is nil", ErrConfiguration)
	}
	sure := db.Client().Database(db.Name(), options.Database().SetWriteConcern(writeconcern.Majority()).
		SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary()))
	g.bucket = sure.GridFSBucket(options.GridFSBucket().SetName(g.name))
	return g, nil
}

// withoutSession is ctx without its session.
func withoutSession(ctx context.Context) context.Context { return mongo.NewSessionContext(ctx, nil) }

// Put is BodyStore's.
func (g *GridFS) Put(ctx context.Context, body []byte) (string, error) {
	ctx = withoutSession(ctx)
	id, err := g.bucket.UploadFromStream(ctx, "body", bytes.NewReader(body))
	if err != nil {
		return "", fmt.Errorf("writing to bucket %s: %w", g.name, err)
	}
	return id.Hex(), nil
}

// Get is BodyStore's.
func (g *GridFS) Get(ctx context.Context, ref string) ([]byte, error) {
	id, err := bson.ObjectIDFromHex(ref)
	if err != nil {
		return nil, fmt.Errorf("%w: %q is no reference to it", ErrBodyGone, clip(ref, 64))
	}
	stream, err := g.bucket.OpenDownloadStream(withoutSession(ctx), id)
	if errors.Is(err, mongo.ErrFileNotFound) {
		return nil, ErrBodyGone
	}
	if err != nil {
		return nil, fmt.Errorf("reading from bucket %s: %w", g.name, err)
	}
	defer stream.Close()
	body := make([]byte, 0, stream.GetFile().Length)
	buf := bytes.NewBuffer(body)
	if _, err := io.Copy(buf, stream); err != nil {
		if errors.Is(err, mongo.ErrMissingChunk) { // swept while it was read
			return nil, ErrBodyGone
		}
		return nil, fmt.Errorf("reading from bucket %s: %w", g.name, err)
	}
	return buf.Bytes(), nil
}

// sweepBatch is how many bodies one statement of a sweep deletes.
const sweepBatch = 100

// Sweep deletes at most limit bodies that are older than the time to live, oldest first, and returns how many. What an upload
// left behind that never ended goes with them.
func (g *GridFS) Sweep(ctx context.Context, limit int) (int, error) {
	ctx = withoutSession(ctx)
	files, chunks := g.bucket.GetFilesCollection(), g.bucket.GetChunksCollection()
	old := bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: bson.NewObjectIDFromTimestamp(g.now().Add(-g.ttl))}}}} // an id begins with its time
	total := 0
	for total < limit {
		ids, err := g.findIDs(ctx, files, mongo.Pipeline{
			{{Key: "$match", Value: old}},
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
		// The chunks first: a file without chunks is found again, chunks without their file are harder to find.
		if _, err := chunks.DeleteMany(ctx, bson.D{{Key: "files_id", Value: bson.D{{Key: "$in", Value: ids}}}}); err != nil {
			return total, g.wrapSweepError(err)
		}
		if _, err := files.DeleteMany(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}); err != nil {
			return total, g.wrapSweepError(err)
		}
		total += len(ids)
	}
	return total, g.sweepOrphans(ctx)
}

// sweepOrphans deletes chunks whose file was never finished.
func (g *GridFS) sweepOrphans(ctx context.Context) error {
	cut := bson.NewObjectIDFromTimestamp(g.now().Add(-g.ttl - 24*time.Hour))
	chunks := g.bucket.GetChunksCollection()
	ids, err := g.findIDs(ctx, chunks, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: bson.D{{Key: "$lt", Value: cut}}}}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		{{Key: "$limit", Value: sweepBatch}},
		{{Key: "$lookup", Value: bson.D{{Key: "from", Value: g.name + ".files"}, {Key: "localField", Value: "files_id"}, {Key: "foreignField", Value: "_id"}, {Key: "as", Value: "file"}}}},
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

// Run sweeps every so often until ctx ends, at most 1,000 bodies at a time. It returns nil then. A sweep that failed is
// logged and tried again.
func (g *GridFS) Run(ctx context.Context, every time.Duration) error {
	if every <= 0 {
		return fmt.Errorf("%w: bodies: a sweep every %s", ErrConfiguration, every)
	}
	for {
		if n, err := g.Sweep(ctx, 1000); err != nil && ctx.Err() == nil {
			g.log.WarnContext(ctx, "bodies of claim checks were not swept; the next sweep tries again", "bucket", g.name, "swept", n, "error", err)
		}
		if retry.Sleep(ctx, every) != nil {
			return nil
		}
	}
}
