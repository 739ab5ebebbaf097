package tasks

import (
	"crypto/rand"
	"sync"
)

// maxShelved bounds the items of a shelf.
const maxShelved = 256

// Shelf stores the latest items under ids that cannot be guessed. It is safe for concurrent use.
type Shelf[T any] struct {
	mu    sync.Mutex
	byID  map[string]T
	order []string
}

// Put stores an item, and returns its id. The oldest item makes room.
func (s *Shelf[T]) Put(item T) string {
	id := rand.Text()
	s.PutOnce(id, item)
	return id
}

// PutOnce stores an item under id, unless there is one. It returns the item that is stored, and whether it is the given one.
func (s *Shelf[T]) PutOnce(id string, item T) (stored T, isNew bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if before, known := s.byID[id]; known {
		return before, false
	}

	if s.byID == nil {
		s.byID = map[string]T{}
	}
	s.byID[id] = item
	s.order = append(s.order, id)
	if len(s.order) > maxShelved {
		delete(s.byID, s.order[0])
		s.order = s.order[1:]
	}
	return item, true
}

// Get returns the item with this id. It returns false if there is none any more.
func (s *Shelf[T]) Get(id string) (T, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	item, known := s.byID[id]
	return item, known
}
