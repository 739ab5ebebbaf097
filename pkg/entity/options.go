package entity

import (
	"errors"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// DefaultVersionField is where versions are stored unless WithVersionField says another name.
const DefaultVersionField = "version"

const (
	defaultChunk = 500
	// maxChunk keeps the events of a chunk in one insert command, and its ids in one filter.
	maxChunk = 10_000
)

// Option configures a Collection, a Recorded or a Projector.
type Option func(*config)

type config struct {
	registry     *bson.Registry
	versionField string
	version      any // func(*T) *int64
	project      any // func(T) (any, error)
	plain        bool
	tombstones   bool
	chunk        int
}

func newConfig(opts []Option) (config, error) {
	c := config{versionField: DefaultVersionField, chunk: defaultChunk}
	for _, o := range opts {
		o(&c)
	}
	if c.registry == nil {
		c.registry = NewRegistry()
	}
	var errs []error
	if f := c.versionField; f == "" || f == "_id" || strings.HasPrefix(f, "$") || strings.ContainsAny(f, ".\x00") {
		errs = append(errs, fmt.Errorf("%q cannot be the field of the version", f))
	}
	if c.chunk < 1 || c.chunk > maxChunk {
		errs = append(errs, fmt.Errorf("chunks of %d entities; 1 to %d is allowed", c.chunk, maxChunk))
	}
	return c, errors.Join(errs...)
}

// Versioned says where in T the version is. A Collection then stores a version with each entity, 1 at first, and Update and
// Delete refuse an entity that was changed since it was loaded. Defaults to no versions in a Collection; a Recorded has
// them always, and with this option guards by them.
func Versioned[T any](version func(*T) *int64) Option {
	return func(c *config) { c.version = version }
}

// WithVersionField names the field of the document that holds the version. Defaults to DefaultVersionField.
func WithVersionField(name string) Option { return func(c *config) { c.versionField = name } }

// WithRegistry sets the codecs of T. Defaults to NewRegistry.
func WithRegistry(r *bson.Registry) Option { return func(c *config) { c.registry = r } }

// WithoutTransaction lets a Collection also work where the context has no transaction: then each call is a write by itself.
// A Recorded refuses it, and a Projector needs no leave.
func WithoutTransaction() Option { return func(c *config) { c.plain = true } }

// WithTombstones makes a Recorded say that an entity was deleted by a record with a null value, which removes the entity
// from a compacted topic. Defaults to a record whose value names the id and the version.
func WithTombstones() Option { return func(c *config) { c.tombstones = true } }

// WithChunk sets how many entities a Recorded takes in one statement, and in one transaction of the calls that make their
// own. Defaults to 500; at most 10,000.
func WithChunk(n int) Option { return func(c *config) { c.chunk = n } }

// ProjectAs lets a Projector store what f makes of an entity instead of the entity: a document of another shape, under the
// same id. An error of f is that of Handle.
func ProjectAs[T any](f func(T) (any, error)) Option { return func(c *config) { c.project = f } }
