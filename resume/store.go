package resume

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Collection is a watched collection as it was when a checkpoint was taken. A namespace that has another UUID today was
// dropped and made anew, and a token of the old one means nothing for it.
type Collection struct {
	NS   string   // "database.collection"
	UUID [16]byte // zero if it was not known
}

// Checkpoint is a position together with what must still be the same for its token to be of use.
type Checkpoint struct {
	Position
	Collections  []Collection // the watched collections, if the watcher tracks them
	PipelineHash string       // identity of the stream's pipeline; "" if not tracked
}

func (c Checkpoint) clone() Checkpoint {
	c.Position = c.Position.Clone()
	c.Collections = slices.Clone(c.Collections)
	return c
}

// What a Store answers, to be asked for with errors.Is.
var (
	// ErrNotFound says that no checkpoint of that name was ever saved.
	ErrNotFound = errors.New("no checkpoint")
	// ErrStale says that the stored checkpoint is further than the one to be saved, which was not stored: another process
	// is ahead of this one.
	ErrStale = errors.New("checkpoint goes back")
)

// Store keeps checkpoints by name. Implementations are safe for concurrent use, also by several processes, and atomic: of
// two writers the one with the further position wins, whatever the order in which they come.
type Store interface {
	// Load returns the checkpoint of that name, or ErrNotFound.
	Load(ctx context.Context, name string) (Checkpoint, error)
	// Save stores c durably. It refuses with ErrStale to go back; saving the stored position again is no error. A zero
	// position is refused.
	Save(ctx context.Context, name string, c Checkpoint) error
}

// errZero refuses a checkpoint that would say "from nowhere".
var errZero = errors.New("a checkpoint needs a token or a cluster time")

// NewMemory is a Store for tests and for programs that start afresh each time; it is lost with the process.
func NewMemory() Store { return &memory{m: make(map[string]Checkpoint)} }

type memory struct {
	mu sync.Mutex
	m  map[string]Checkpoint
}

func (s *memory) Load(ctx context.Context, name string) (Checkpoint, error) {
	if err := ctx.Err(); err != nil {
		return Checkpoint{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c, ok := s.m[name]
	if !ok {
		return Checkpoint{}, fmt.Errorf("loading checkpoint %q: %w", name, ErrNotFound)
	}
	return c.clone(), nil
}

func (s *memory) Save(ctx context.Context, name string, c Checkpoint) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.IsZero() {
		return fmt.Errorf("saving checkpoint %q: %w", name, errZero)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.m[name]; ok && c.Compare(old.Position) < 0 {
		return fmt.Errorf("saving checkpoint %q: %w", name, ErrStale)
	}
	s.m[name] = c.clone()
	return nil
}
