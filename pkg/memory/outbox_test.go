package memory

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox/outboxtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newOutbox(t *testing.T, db *DB, opts ...OutboxOption) *Outbox {
	t.Helper()
	b, err := NewOutbox(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestOutboxContract(t *testing.T) {
	t.Parallel()
	outboxtest.Run(t, func(t *testing.T) outboxtest.Fixture {
		db := NewDB()
		box := newOutbox(t, db)
		return outboxtest.Fixture{
			Box:         box,
			Plain:       newOutbox(t, db, WithoutTransaction()),
			Small:       newOutbox(t, db, WithMaxSize(outboxtest.SmallSize)),
			Transaction: db.Transaction,
			Stored: func(*testing.T) [][]byte {
				var docs [][]byte
				for _, raw := range box.Envelopes() {
					docs = append(docs, raw)
				}
				return docs
			},
			Claim: func(t *testing.T, id event.ID) {
				if err := db.do(t.Context(), func(x *tx) error {
					e := *x.get(box.rows, mustKey(id)).(*envelope)
					e.claim = true
					return x.put(box.rows, mustKey(id), &e)
				}); err != nil {
					t.Fatal(err)
				}
			},
		}
	})
}
