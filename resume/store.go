package resume

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Collection is a watched collection at the time of a checkpoint. If its namespace has another UUID
// now, the collection was dropped and created again, and a token for the old one is not valid for
// the new one.
type Collection struct {
	// NS is the namespace, "database.collection".
	NS string

	// UUID is the UUID of the collection, or zero if it is unknown.
	UUID [16]byte
}

// Checkpoint is a position, together with the conditions under which its token is valid.
type Checkpoint struct {
	Position

	// Collections contains the watched collections, if the watcher records them.
	Collections []Collection

	// PipelineHash identifies the pipeline of the stream. It is empty if it is not recorded.
	PipelineHash string
}

// cloneCheckpoint returns a copy that shares no memory with c.
func (c Checkpoint) cloneCheckpoint() Checkpoint {
	c.Position = c.Position.Clone()
	c.Collections = slices.Clone(c.Collections)
	return c
}

// Errors of a Store. Test for them with errors.Is.
var (
	// ErrNotFound means that no checkpoint with this name exists.
	ErrNotFound = errors.New("no checkpoint")

	// ErrStale means that the stored checkpoint is later than the new one, which was not stored.
	// Another process has a later position.
	ErrStale = errors.New("checkpoint goes back")
)

// Store stores checkpoints by name. It is safe for concurrent use, also by several processes. Save
// is atomic: of two simultaneous calls, the one with the later position wins.
type Store interface {
	// Load returns the checkpoint with this name. If it does not exist, the error is ErrNotFound.
	Load(ctx context.Context, name string) (Checkpoint, error)

	// Save stores c durably. If the stored position is later, the error is ErrStale. To save the
	// stored position again is not an error. A zero position is an error.
	Save(ctx context.Context, name string, c Checkpoint) error
}

// errZeroPosition rejects a checkpoint without a position.
var errZeroPosition = errors.New("a checkpoint needs a token or a cluster time")

// NewMemory returns a Store in memory, for tests and for programs that always start from the
// beginning.
func NewMemory() Store { return &memoryStore{m: make(map[string]Checkpoint)} }

// memoryStore is a Store in memory.
type memoryStore struct {
	mu sync.Mutex
	m  map[string]Checkpoint
}

// Load returns a copy of the checkpoint with this name: see Store.
func (s *memoryStore) Load(ctx context.Context, name string) (Checkpoint, error) {
	if err := ctx.Err(); err != nil {
		return Checkpoint{}, err
	}

	s.mu.Lock()
	defer s.mu.Unlock()

	checkpoint, ok := s.m[name]
	if !ok {
		return Checkpoint{}, fmt.Errorf("loading checkpoint %q: %w", name, ErrNotFound)
	}

	return checkpoint.cloneCheckpoint(), nil
}

// Save stores a copy of the checkpoint: see Store.
func (s *memoryStore) Save(ctx context.Context, name string, checkpoint Checkpoint) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if checkpoint.IsZero() {
		return fmt.Errorf("saving checkpoint %q: %w", name, errZeroPosition)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.m[name]; ok && checkpoint.Compare(old.Position) < 0 {
		return fmt.Errorf("saving checkpoint %q: %w", name, ErrStale)
	}

	s.m[name] = checkpoint.cloneCheckpoint()
	return nil
}
