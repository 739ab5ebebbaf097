package entity

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/internal/service/usage"
)

const (
	defaultChunk        = 500
	defaultVersionField = "version"

	// maxChunk is small enough that the events of a chunk fit in one insert command, and its ids in
	// one filter.
	maxChunk = 10_000
)

// Option configures a Collection, a Recorded or a Projector.
type Option interface{ configure(c *config) }

type option func(c *config)

func (o option) configure(cfg *config) { o(cfg) }

type config struct {
	registry     *bson.Registry
	versionField string
	version      any  // func(*T) *int64
	project      any  // func(T) (any, error)
	plain        bool // calls may run without a transaction
	tombstones   bool
	chunk        int
	storage      entities.Storage
	target       string // name of the collection, for errors
}

// WithStorage stores entities in storage, and the collection that is passed with it may be nil. Defaults to the collection. It is for
// packages of this module: others cannot name the type of its argument.
func WithStorage(storage entities.Storage) Option {
	return option(func(cfg *config) { cfg.storage = storage })
}

// newConfig applies the options for coll and checks them. The result has the name of the collection even with an error.
func newConfig(coll *mongo.Collection, opts []Option) (config, error) {
	cfg := config{versionField: defaultVersionField, chunk: defaultChunk}
	for _, o := range opts {
		o.configure(&cfg)
	}
	if cfg.registry == nil {
		cfg.registry = NewRegistry()
	}

	var errs []error
	switch {
	case cfg.storage.View != nil:
		cfg.target = cfg.storage.View.Name()
	case cfg.storage.Documents != nil:
		cfg.target = cfg.storage.Documents.Name()
	case coll != nil:
		cfg.target = coll.Name()
		if err := usage.Claim(coll, "entities"); err != nil {
			errs = append(errs, err)
		}
	default:
		errs = append(errs, errors.New("the collection is nil"))
	}
	// The version is addressed by its path in updates, so its name must not look like a path or an operator.
	if field := cfg.versionField; field == "" || field == "_id" || strings.HasPrefix(field, "$") || strings.ContainsAny(field, ".\x00") {
		errs = append(errs, fmt.Errorf("invalid field %q for the version", field))
	}
	if cfg.chunk < 1 || cfg.chunk > maxChunk {
		errs = append(errs, fmt.Errorf("invalid chunk size %d: it must be between 1 and %d", cfg.chunk, maxChunk))
	}

	return cfg, errors.Join(errs...)
}

// WithVersion sets the function that returns a pointer to the version in an entity. A Collection then
// stores a version with each entity, beginning with 1. Update and DeleteEntity fail if the entity
// was changed since it was loaded. By default, a Collection has no versions. A Recorded always has
// versions, and checks them with this option only.
func WithVersion[T any](version func(*T) *int64) Option {
	return option(func(cfg *config) { cfg.version = version })
}

// WithVersionField sets the name of the document field that contains the version. Defaults to
// "version".
func WithVersionField(name string) Option {
	return option(func(cfg *config) { cfg.versionField = cmp.Or(name, defaultVersionField) })
}

// WithRegistry sets the registry with which T is encoded and decoded. Defaults to NewRegistry.
func WithRegistry(registry *bson.Registry) Option {
	return option(func(cfg *config) { cfg.registry = registry })
}

// WithoutTransaction allows calls of a Collection without a transaction. Each call is then a
// separate write. A Recorded rejects this option, and a Projector does not need it.
func WithoutTransaction() Option { return option(func(cfg *config) { cfg.plain = true }) }

// WithTombstones makes a Recorded report a deletion by a record with a null value, which removes
// the entity from a compacted topic. By default, the value of the record contains the id and the
// version.
func WithTombstones() Option { return option(func(cfg *config) { cfg.tombstones = true }) }

// WithChunk sets how many entities a Recorded writes with one statement. Methods that start their
// own transactions start one for each chunk. Defaults to 500: MongoDB recommends at
// most 1000 documents for a transaction, and each entity has an event as well. n must be between 1 and 10,000.
func WithChunk(n int) Option {
	return option(func(cfg *config) { cfg.chunk = cmp.Or(n, defaultChunk) })
}

// WithProjection makes a Projector store the result of project instead of the entity: a document of another
// form, with the same id. An error of project is returned by Projector.Handle.
func WithProjection[T any](project func(T) (any, error)) Option {
	return option(func(cfg *config) { cfg.project = project })
}
