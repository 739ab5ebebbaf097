package memory

import (
	"context"
	"errors"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/boxtest"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

func newOutbox(t *testing.T, db *DB, opts ...outbox.Option) *outbox.Box {
	t.Helper()
	b, err := NewOutbox(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// listStored returns the committed envelopes.
func listStored(t *testing.T, box *outbox.Box) []bson.Raw {
	t.Helper()
	list, err := storeOf(box).Stored(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestOutboxContract(t *testing.T) {
	t.Parallel()
	boxtest.Run(t, func(t *testing.T) boxtest.Fixture {
		db := NewDB()
		box := newOutbox(t, db)
		return boxtest.Fixture{
			Box:         box,
			Plain:       newOutbox(t, db, outbox.WithoutTransaction()),
			Small:       newOutbox(t, db, outbox.WithMaxSize(boxtest.SmallSize)),
			With:        func(m ...outbox.Middleware) boxtest.Box { return newOutbox(t, db, outbox.WithMiddleware(m...)) },
			Transaction: db.Transaction,
			Stored: func(t *testing.T) [][]byte {
				var docs [][]byte
				for _, raw := range listStored(t, box) {
					docs = append(docs, raw)
				}

				return docs
			},
			Claim: func(t *testing.T, id event.ID) {
				if err := db.runOperation(t.Context(), func(x *tx) error {
					rows := storeOf(box).rows
					e := *x.getRow(rows, mustKey(id)).(*outboxEntry)
					e.claimed = true
					return x.putRow(rows, mustKey(id), &e)
				}); err != nil {
					t.Fatal(err)
				}
			},
		}
	})
}

// Outboxes with the same name share their events, and others do not.
func TestOutboxOptions(t *testing.T) {
	t.Parallel()
	db := NewDB()
	plain, audit := newOutbox(t, db), newOutbox(t, db, outbox.WithCollection("audit"))
	err := db.Transaction(t.Context(), func(ctx context.Context) error {
		return errors.Join(plain.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "1"}, "Placed", event.Bytes("", []byte("x")))), audit.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "2"}, "Placed", event.Bytes("", []byte("x")))))
	})
	if err != nil {
		t.Fatal(err)
	}

	if n, m := len(listStored(t, plain)), len(listStored(t, audit)); n != 1 || m != 1 {
		t.Errorf("%d and %d envelopes, want 1 and 1", n, m)
	}

	if again := listStored(t, newOutbox(t, db, outbox.WithCollection("audit"))); len(again) != 1 {
		t.Errorf("another of the name sees %s", again)
	}
}
