package consumer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/schema"
)

// DefaultLetters is the name of the collection of dead letters.
const DefaultLetters = "inbox_dead"

// LetterStore keeps dead letters. *DeadLetters is one.
type LetterStore interface {
	// Put stores the letter, or leaves the one that is there under its id as it is. It returns when the letter cannot be
	// lost any more.
	Put(ctx context.Context, l *Letter) error
}

const (
	maxInline  = 12 << 20 // bytes of a value in the letter itself; a document has at most 16 MiB
	chunkBytes = 8 << 20
)

// DeadLetters is the collection of a service's dead letters. They are kept until somebody discards them, or for as long as
// LettersExpire says. It is safe for concurrent use. Put costs one write.
type DeadLetters struct {
	coll   *mongo.Collection
	expire time.Duration
	name   string
	node   string
}

// LettersOption configures DeadLetters.
type LettersOption func(*DeadLetters)

// LettersCollection names the collection. Defaults to DefaultLetters.
func LettersCollection(name string) LettersOption { return func(d *DeadLetters) { d.name = name } }

// LettersExpire removes letters that long after they were moved. Defaults to never. It takes effect by EnsureIndexes, for
// all letters of the collection: of services that share it, the one that started last decides.
func LettersExpire(after time.Duration) LettersOption {
	return func(d *DeadLetters) { d.expire = after }
}

// LettersNode is the name of the process in the letters' source.
func LettersNode(name string) LettersOption { return func(d *DeadLetters) { d.node = name } }

// NewDeadLetters makes the dead letters in db. It does no I/O.
func NewDeadLetters(db *mongo.Database, opts ...LettersOption) (*DeadLetters, error) {
	d := &DeadLetters{name: DefaultLetters}
	for _, o := range opts {
		o(d)
	}
	switch {
	case db == nil:
		return nil, fmt.Errorf("%w: dead letters: the database is nil", ErrConfiguration)
	case d.name == "":
		return nil, fmt.Errorf("%w: dead letters: the collection has no name", ErrConfiguration)
	case d.expire < 0 || d.expire > 0 && d.expire < time.Second || d.expire/time.Second > math.MaxInt32:
		return nil, fmt.Errorf("%w: dead letters expire after %s; at least a second, at most 68 years", ErrConfiguration, d.expire)
	}
	d.coll = majorityCollection(db, d.name)
	return d, nil
}

// majorityCollection is a collection whose reads and writes cannot be rolled back.
func majorityCollection(db *mongo.Database, name string) *mongo.Collection {
	return db.Collection(name, options.Collection().SetWriteConcern(writeconcern.Majority()).
		SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary()))
}

// EnsureIndexes makes the indexes of queries and of expiry.
func (d *DeadLetters) EnsureIndexes(ctx context.Context) error {
	models := []mongo.IndexModel{
		{Keys: bson.D{{Key: "movedAt", Value: -1}, {Key: "_id", Value: 1}}},
		{Keys: bson.D{{Key: "class", Value: 1}, {Key: "movedAt", Value: -1}}},
		{Keys: bson.D{{Key: "_id.id", Value: 1}}},
	}
	err := schema.Change(ctx, d.coll, func(ctx context.Context) error {
		_, err := d.coll.Indexes().CreateMany(ctx, models)
		if err == nil && d.expire > 0 {
			err = d.ensureExpiry(ctx)
		}
		return err
	})
	if err != nil {
		return &MaintenanceError{Task: "creating the indexes of " + d.name, Err: err}
	}
	return nil
}

// ensureExpiry makes the index by which the server removes letters, or changes the time of the one that is there.
func (d *DeadLetters) ensureExpiry(ctx context.Context) error {
	const name, indexOptionsConflict = "expiry", 85
	seconds := int32(d.expire / time.Second)
	_, err := d.coll.Indexes().CreateOne(ctx, mongo.IndexModel{
		Keys: bson.D{{Key: "movedAt", Value: 1}}, Options: options.Index().SetName(name).SetExpireAfterSeconds(seconds),
	})
	if se, ok := errors.AsType[mongo.ServerError](err); !ok || !se.HasErrorCode(indexOptionsConflict) {
		return err
	}
	change := bson.D{{Key: "name", Value: name}, {Key: "expireAfterSeconds", Value: seconds}}
	err = d.coll.Database().RunCommand(ctx, bson.D{{Key: "collMod", Value: d.name}, {Key: "index", Value: change}}).Err()
	if err != nil {
		return fmt.Errorf("changing the expiry of letters to %s (grant collMod, or drop the index %s): %w", d.expire, name, err)
	}
	return nil
}

// Put is LetterStore's. A value above 12 MiB is kept in documents of its own beside the letter.
func (d *DeadLetters) Put(ctx context.Context, l *Letter) error {
	kept := *l
	if kept.Source.Node == "" {
		kept.Source.Node = d.node
	}
	if len(kept.Value) > 0 && kept.recordBytes() > maxInline {
		for part := range splitChunks(kept.Value) {
			if err := d.putChunk(ctx, l.ID, kept.Chunks, part); err != nil {
				return err
			}
			kept.Chunks++
		}
		kept.Value = nil
	}
	return d.upsertLetter(ctx, l.ID, kept)
}

// upsertLetter upserts a document with the server's time; one that is there keeps all of its fields.
func (d *DeadLetters) upsertLetter(ctx context.Context, id LetterID, doc any) error {
	stamped := bson.D{{Key: "$mergeObjects", Value: bson.A{
		bson.D{{Key: "$literal", Value: doc}}, bson.D{{Key: "movedAt", Value: "$$NOW"}}, "$$ROOT",
	}}}
	_, err := d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, mongo.Pipeline{{{Key: "$replaceWith", Value: stamped}}}, options.UpdateOne().SetUpsert(true))
	if isDocumentTooLarge(err) {
		return fmt.Errorf("writing dead letter %s: %w: %w", id, ErrUnfit, err)
	}
	if err != nil && !mongo.IsDuplicateKeyError(err) { // a race of two that put the same letter
		return fmt.Errorf("writing dead letter %s: %w", id, err)
	}
	return nil
}

// recordBytes is how much of the letter comes from the record.
func (l *Letter) recordBytes() int {
	n := len(l.Key) + len(l.Value)
	for _, h := range l.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// isDocumentTooLarge reports whether the server or the driver refuses a document for its size.
func isDocumentTooLarge(err error) bool {
	const bsonObjectTooLarge, tooLargeMessage = 10334, "an inserted document is too large"
	var server mongo.ServerError
	if errors.As(err, &server) {
		return server.HasErrorCode(bsonObjectTooLarge) || server.HasErrorCode(17419) || server.HasErrorCode(17420)
	}
	return err != nil && strings.Contains(err.Error(), tooLargeMessage)
}

// chunkID is the id of a part of a large value. Letters have no field chunk in theirs, and a part has no class.
type chunkID struct {
	LetterID `bson:",inline"`
	Chunk    int `bson:"chunk"`
}

func (d *DeadLetters) putChunk(ctx context.Context, id LetterID, n int, data []byte) error {
	stamped := bson.D{{Key: "$mergeObjects", Value: bson.A{
		bson.D{{Key: "data", Value: bson.D{{Key: "$literal", Value: data}}}, {Key: "movedAt", Value: "$$NOW"}}, "$$ROOT",
	}}}
	_, err := d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: chunkID{id, n}}}, mongo.Pipeline{{{Key: "$replaceWith", Value: stamped}}}, options.UpdateOne().SetUpsert(true))
	if err != nil && !mongo.IsDuplicateKeyError(err) {
		return fmt.Errorf("writing part %d of dead letter %s: %w", n+1, id, err)
	}
	return nil
}

// splitChunks walks the parts of a large value.
func splitChunks(value []byte) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for len(value) > 0 {
			n := min(len(value), chunkBytes)
			if !yield(value[:n]) {
				return
			}
			value = value[n:]
		}
	}
}

// loadChunks puts the parts of a large value together again.
func (d *DeadLetters) loadChunks(ctx context.Context, l *Letter) error {
	for n := range l.Chunks {
		var part struct {
			Data []byte `bson:"data"`
		}
		if err := d.coll.FindOne(ctx, bson.D{{Key: "_id", Value: chunkID{l.ID, n}}}).Decode(&part); err != nil {
			return fmt.Errorf("reading part %d of dead letter %s: %w", n+1, l.ID, err)
		}
		l.Value = append(l.Value, part.Data...)
	}
	l.Chunks = 0
	return nil
}

// ErrNoLetter says that there is no dead letter of that id.
var ErrNoLetter = errors.New("no such dead letter")

// Get reads one letter, whole.
func (d *DeadLetters) Get(ctx context.Context, id LetterID) (*Letter, error) {
	var l Letter
	err := d.coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Decode(&l)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil, fmt.Errorf("%w: %s", ErrNoLetter, id)
	}
	if err != nil {
		return nil, fmt.Errorf("reading dead letter %s: %w", id, err)
	}
	return &l, d.loadChunks(ctx, &l)
}
