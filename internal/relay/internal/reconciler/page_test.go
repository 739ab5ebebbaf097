package reconciler

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// slowStore calls read after the server has read the first page and before the sender gets it, and passed when the sender has passed it.
type slowStore struct {
	Store
	read, passed func()
}

func (s *slowStore) ReadPage(ctx context.Context, scan *waiting.Scan, limit int, take func(raw bson.Raw) error) (bool, error) {
	var page []bson.Raw
	more, err := s.Store.ReadPage(ctx, scan, limit, func(raw bson.Raw) error {
		page = append(page, slices.Clone(raw))
		return nil
	})
	s.read()

	for _, raw := range page {
		if taken := take(raw); errors.Is(taken, waiting.ErrLeave) {
			more = true
			break
		} else if taken != nil {
			return false, taken
		}
	}

	s.passed()
	return more, err
}

// A page may have been read before an earlier envelope of its key was stored: the stream of a new owner repeats it after a later one, which
// waits already. The resolved position, which passes both meanwhile, does not make the later one ready.
func TestN15_AnEnvelopeThatIsStoredWhileAPageIsReadIsNotOvertaken(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		others int // envelopes of the key before those of the test, which wait for another topic
		moment func(s *slowStore, once func())
	}{
		"before the sender gets the page": {0, func(s *slowStore, once func()) { s.read = once }},
		"before the next page":            {firstResponse, func(s *slowStore, once func()) { s.passed = once }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newScene(t)
			te := h.newTerm()
			te.out.setReached("82000001")
			for n := range c.others {
				h.enter(h.newEntry(100+n, "k", waiting.Parked, pending("b")))
			}
			h.enter(h.newEntry(200, "k", waiting.Parked), h.newEntry(201, "k", waiting.Blocked), h.newEntry(202, "k", waiting.Blocked))

			store := &slowStore{Store: te.x.config.Store, read: func() {}, passed: func() {}}
			c.moment(store, sync.OnceFunc(func() {
				e := h.newEntry(50, "k", waiting.Blocked)
				h.enter(e)
				te.out.setReached("82000300")
				te.entered.Put(&e)
			}))
			te.x.config.Store = store
			te.run()

			h.waitEmpty()
			h.broker.checkRecords("a", "e000050", "e000200", "e000201", "e000202")
		})
	}
}
