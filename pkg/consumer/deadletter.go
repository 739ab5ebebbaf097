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

// DefaultLetters is the default name of the collection of dead letters.
const DefaultLetters = "inbox_dead"

// LetterStore stores dead letters. *DeadLetters implements it.
type LetterStore interface {
	// Put stores the letter. If a letter with this id exists, Put leaves it unchanged. When Put has returned nil, the
	// letter cannot be lost any more.
	Put(ctx context.Context, l *Letter) error
}

const (
	maxInline  = 12 << 20 // bytes of a value in the letter itself; a document has at most 16 MiB
	chunkBytes = 8 << 20
)

// DeadLetters is the collection of a service's dead letters. Letters are kept until they are discarded, or for the time of
// LettersExpire. DeadLetters is safe for concurrent use. Put costs one write.
type DeadLetters struct {
	coll   *mongo.Collection
	expire time.Duration
	name   string
	node   string
}

// LettersOption configures DeadLetters.
type LettersOption func(*DeadLetters)

// LettersCollection sets the name of the collection. Defaults to DefaultLetters.
func LettersCollection(name string) LettersOption { return func(d *DeadLetters) { d.name = name } }

// LettersExpire removes letters when the given time has passed since they were stored. Defaults to never. EnsureIndexes
// applies it to all letters of the collection. If several services share the collection, the service that started last
// decides.
func LettersExpire(after time.Duration) LettersOption {
	return func(d *DeadLetters) { d.expire = after }
}

// LettersNode sets the name of the process in the source of the letters.
func LettersNode(name string) LettersOption { return func(d *DeadLetters) { d.node = name } }

// NewDeadLetters returns the dead letters of db. It does no I/O.
func NewDeadLetters(db *mongo.Database, opts ...LettersOption) (*DeadLetters, error) {
	d := &DeadLetters{name: DefaultLetters}
	for _, o := range opts {
		o(d)
	}

	switch {
	case db == nil:
		return nil, errors.New("consumer: dead letters: the database is nil")
	case d.name == "":
		return nil, errors.New("consumer: dead letters: the collection has no name")
	case d.expire < 0 || d.expire > 0 && d.expire < time.Second || d.expire/time.Second > math.MaxInt32:
		return nil, fmt.Errorf("consumer: dead letters: expiry after %s: set at least 1 s and at most 68 years", d.expire)
	}

	d.coll = majorityCollection(db, d.name)
	return d, nil
}

// majorityCollection returns a collection whose reads and writes cannot be rolled back.
func majorityCollection(db *mongo.Database, name string) *mongo.Collection {
	return db.Collection(name, options.Collection().SetWriteConcern(writeconcern.Majority()).
		SetReadConcern(readconcern.Majority()).SetReadPreference(readpref.Primary()))
}

// EnsureIndexes creates the indexes for queries and for the expiry.
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
		return &maintenanceError{Task: "creating the indexes of " + d.name, Err: err}
	}
	return nil
}

// ensureExpiry creates the TTL index of the letters. If the index exists with another expiry, it changes the expiry.
func (d *DeadLetters) ensureExpiry(ctx context.Context) error {
	const name, indexOptionsConflict = "expiry", 85
	seconds := int32(d.expire / time.Second)

	_, err := d.coll.Indexes().CreateOne(ctx, mongo.IndexModel{
		Keys:    bson.D{{Key: "movedAt", Value: 1}},
		Options: options.Index().SetName(name).SetExpireAfterSeconds(seconds),
	})
	if se, ok := errors.AsType[mongo.ServerError](err); !ok || !se.HasErrorCode(indexOptionsConflict) {
		return err
	}

	change := bson.D{{Key: "name", Value: name}, {Key: "expireAfterSeconds", Value: seconds}}
	err = d.coll.Database().RunCommand(ctx, bson.D{{Key: "collMod", Value: d.name}, {Key: "index", Value: change}}).Err()
	if err != nil {
		return fmt.Errorf("changing the expiry of letters to %s (grant collMod, or drop the index %s): %w",
			d.expire, name, err)
	}
	return nil
}

// Put implements LetterStore. It stores a value above 12 MiB in separate documents.
func (d *DeadLetters) Put(ctx context.Context, l *Letter) error {
	stored := *l
	if stored.Source.Node == "" {
		stored.Source.Node = d.node
	}

	// The chunks are stored before the letter, so that a letter is never without its value.
	if len(stored.Value) > 0 && stored.recordBytes() > maxInline {
		for data := range splitChunks(stored.Value) {
			if err := d.putChunk(ctx, l.ID, stored.Chunks, data); err != nil {
				return err
			}
			stored.Chunks++
		}
		stored.Value = nil
	}

	return d.upsertLetter(ctx, l.ID, stored)
}

// upsertLetter inserts a document with the time of the server. If a document with this id exists, its fields stay
// unchanged.
func (d *DeadLetters) upsertLetter(ctx context.Context, id LetterID, doc any) error {
	err := d.upsertStamped(ctx, id, bson.D{{Key: "$literal", Value: doc}})
	if isDocumentTooLarge(err) {
		return fmt.Errorf("writing dead letter %s: %w: %w", id, ErrUnfit, err)
	}

	// Two concurrent upserts of the same letter can collide. One of them has stored it.
	if err != nil && !mongo.IsDuplicateKeyError(err) {
		return fmt.Errorf("writing dead letter %s: %w", id, err)
	}
	return nil
}

// upsertStamped inserts a document with the time of the server in movedAt. The fields of an existing document win, so a
// repetition changes nothing.
func (d *DeadLetters) upsertStamped(ctx context.Context, id, fields any) error {
	merged := bson.D{{Key: "$mergeObjects", Value: bson.A{
		fields, bson.D{{Key: "movedAt", Value: "$$NOW"}}, "$$ROOT",
	}}}
	update := mongo.Pipeline{{{Key: "$replaceWith", Value: merged}}}

	_, err := d.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, update, options.UpdateOne().SetUpsert(true))
	return err
}

// recordBytes returns how many bytes of the letter come from the record.
func (l *Letter) recordBytes() int {
	n := len(l.Key) + len(l.Value)
	for _, h := range l.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// isDocumentTooLarge reports whether the server or the driver rejected a document because of its size.
func isDocumentTooLarge(err error) bool {
	const bsonObjectTooLarge, tooLargeMessage = 10334, "an inserted document is too large"
	var server mongo.ServerError
	if errors.As(err, &server) {
		return server.HasErrorCode(bsonObjectTooLarge) || server.HasErrorCode(17419) || server.HasErrorCode(17420)
	}
	return err != nil && strings.Contains(err.Error(), tooLargeMessage)
}

// chunkID is the id of a chunk of a large value. It differs from all ids of letters, which have no field chunk. A chunk
// document has no class, which letters have.
type chunkID struct {
	LetterID `bson:",inline"`
	Chunk    int `bson:"chunk"`
}

func (d *DeadLetters) putChunk(ctx context.Context, id LetterID, n int, data []byte) error {
	fields := bson.D{{Key: "data", Value: bson.D{{Key: "$literal", Value: data}}}}
	err := d.upsertStamped(ctx, chunkID{id, n}, fields)
	if err != nil && !mongo.IsDuplicateKeyError(err) {
		return fmt.Errorf("writing part %d of dead letter %s: %w", n+1, id, err)
	}
	return nil
}

// splitChunks iterates over the chunks of a large value.
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

// loadChunks reads the chunks of a large value into l.Value.
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

// ErrNoLetter reports that no dead letter has the id.
var ErrNoLetter = errors.New("no such dead letter")

// Get returns one letter with its whole value. It returns ErrNoLetter if the letter does not exist.
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
