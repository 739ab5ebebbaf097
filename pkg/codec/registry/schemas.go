package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/sr"

	"github.com/outrelay/outrelay/pkg/codec"
)

// findSchema returns the schema of schema with its id. It registers a definition that the registry does not have, if the client
// may.
func (c *Client) findSchema(ctx context.Context, schema Schema, kind sr.SchemaType) (sr.SubjectSchema, error) {
	if schema.Subject == "" {
		return sr.SubjectSchema{}, errors.New("registry: the subject of the schema is empty")
	}

	const latest = -1
	wanted := sr.Schema{Schema: schema.Definition, Type: kind}
	var found sr.SubjectSchema
	err := c.request(ctx, func(ctx context.Context) (err error) {
		// Without a definition, the newest version of the subject counts.
		switch {
		case schema.Definition == "":
			found, err = c.api.SchemaByVersion(ctx, schema.Subject, latest)
		case c.register:
			// The registry returns the existing version if it has the schema.
			found, err = c.api.CreateSchema(ctx, schema.Subject, wanted)
		default:
			found, err = c.api.LookupSchema(ctx, schema.Subject, wanted)
		}
		return err
	})
	if errors.Is(err, errUnknown) && !c.register {
		err = fmt.Errorf("%w: register it, or use WithRegister", err)
	}
	if err != nil {
		return found, fmt.Errorf("registry: reading the schema of subject %q: %w", schema.Subject, err)
	}
	// Subjects may be shared by mistake between formats.
	if found.Type != kind {
		return found, fmt.Errorf("%w: subject %q has a schema of type %v, not %v", ErrSchema, schema.Subject, found.Type, kind)
	}
	// Payloads with this id then need no request.
	c.schemas.put(found.ID, found.Schema)
	return found, nil
}

// schemaByID returns the schema of a payload. Producers choose the id, so known and unknown ids are remembered.
func (c *Client) schemaByID(ctx context.Context, id int) (sr.Schema, error) {
	return c.schemas.get(id, func() (schema sr.Schema, err error) {
		err = c.request(ctx, func(ctx context.Context) (err error) {
			schema, err = c.api.SchemaByID(ctx, id)
			return err
		})
		if err != nil {
			err = fmt.Errorf("registry: reading schema %d: %w", id, err)
		}
		return schema, err
	})
}

// eachReference calls visit for the schemas to which schema refers, deepest first. If several have one name, only the first of them
// counts, as in Confluent's clients: most often two schemas refer to a common one.
func (c *Client) eachReference(ctx context.Context, schema sr.Schema, visit func(name, definition string) error) error {
	return c.walkReferences(ctx, schema, map[string]bool{}, visit)
}

func (c *Client) walkReferences(ctx context.Context, schema sr.Schema, visited map[string]bool, visit func(name, definition string) error) error {
	for _, r := range schema.References {
		// References may also form a circle.
		if visited[r.Name] {
			continue
		}
		visited[r.Name] = true

		var found sr.SubjectSchema
		err := c.request(ctx, func(ctx context.Context) (err error) {
			// Payloads outlive the versions that a person deletes. Their ids stay valid, so their references do too.
			found, err = c.api.SchemaByVersion(sr.WithParams(ctx, sr.ShowDeleted), r.Subject, r.Version)
			return err
		})
		if err != nil {
			return fmt.Errorf("registry: reading version %d of subject %q: %w", r.Version, r.Subject, err)
		}

		if err := c.walkReferences(ctx, found.Schema, visited, visit); err != nil {
			return err
		}
		if err := visit(r.Name, found.Schema.Schema); err != nil {
			return err
		}
	}
	return nil
}

// errUnknown reports that the registry does not have a schema.
var errUnknown = fmt.Errorf("%w: the registry does not have it", ErrSchema)

// request calls callback within the time of one request. Its error wraps ErrSchema if the registry will give the same response again, and
// otherwise codec.ErrUnavailable.
func (c *Client) request(ctx context.Context, callback func(ctx context.Context) error) error {
	if c.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}

	err := callback(ctx)
	var response *sr.ResponseError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &response):
		return fmt.Errorf("%w: %w", codec.ErrUnavailable, err)
	// A missing schema may be registered later, and is reported apart for the hint. Without a code, the response comes from a proxy.
	case response.StatusCode == http.StatusNotFound && response.ErrorCode != 0:
		return fmt.Errorf("%w: %w", errUnknown, err)
	case response.StatusCode == http.StatusConflict || response.StatusCode == http.StatusUnprocessableEntity:
		return fmt.Errorf("%w: the registry rejects it: %w", ErrSchema, err)
	default:
		// The registry is overloaded or broken, or a person must change the login.
		return fmt.Errorf("%w: %w", codec.ErrUnavailable, err)
	}
}

const (
	// maxCached bounds the remembered ids, because producers choose them. A full cache begins again.
	maxCached = 1000
	// unknownFor is how long an id is remembered that the registry does not have.
	unknownFor = 30 * time.Second
)

// cache remembers values by the id of a schema, and for a while the ids that cannot have one. The zero value is empty.
type cache[V any] struct {
	mu      sync.Mutex
	entries map[int]cached[V]
}

type cached[V any] struct {
	value V
	err   error // wraps ErrSchema, or is nil
	until time.Time
}

// get returns the remembered value for id, or that of load. Several goroutines may load the same id at once.
func (c *cache[V]) get(id int, load func() (V, error)) (V, error) {
	c.mu.Lock()
	entry, ok := c.entries[id]
	c.mu.Unlock()
	if ok && (entry.err == nil || time.Now().Before(entry.until)) {
		return entry.value, entry.err
	}

	value, err := load()
	if err == nil || errors.Is(err, ErrSchema) {
		c.store(id, cached[V]{value: value, err: err, until: time.Now().Add(unknownFor)})
	}
	return value, err
}

func (c *cache[V]) put(id int, value V) { c.store(id, cached[V]{value: value}) }

func (c *cache[V]) store(id int, entry cached[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries == nil || len(c.entries) >= maxCached {
		c.entries = map[int]cached[V]{}
	}
	c.entries[id] = entry
}
