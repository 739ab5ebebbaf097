package memory

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/internal/inbox/inboxtest"
)

func newInbox(t *testing.T, db *DB, opts ...InboxOption) *Inbox {
	t.Helper()
	x, err := NewInbox(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestInboxContract(t *testing.T) {
	t.Parallel()
	inboxtest.Run(t, func(t *testing.T) inboxtest.Setup {
		db := NewDB()
		x := newInbox(t, db)
		every := func(ctx context.Context, table *storedTable, change func(v any) any) error {
			return db.runOperation(ctx, func(t *tx) error {
				var errs []error
				t.scanRows(table, func(key string, v any) { errs = append(errs, t.putRow(table, key, change(v))) })
				return errors.Join(errs...)
			})
		}

		return inboxtest.Setup{
			Inbox: x, Other: newInbox(t, db), Halting: newInbox(t, db, InboxRecreated(inbox.Halt)),
			Transaction: db.Transaction,
			Expire: func(ctx context.Context) error {
				return every(ctx, x.markers, func(any) any { return nil })
			},
			Lapse: func(ctx context.Context) error {
				return every(ctx, x.claims, func(v any) any { return &lease{owner: v.(*lease).owner} })
			},
		}
	})
}

// Retention and leases use the clock of the database.
func TestInboxGoesByTheClock(t *testing.T) {
	t.Parallel()
	clock := NewManualClock(noon)
	db := NewDB(WithClock(clock))
	x := newInbox(t, db, InboxRetention(time.Hour), InboxLease(time.Minute))
	ctx := t.Context()
	once := func(id string) error { return x.Once(ctx, "c", id, func(context.Context) error { return nil }) }
	if err := once("1"); err != nil {
		t.Fatal(err)
	}

	claimed := inbox.Entry{Key: inbox.Key{Consumer: "c", ID: "2"}}
	if _, err := x.Claim(ctx, claimed, 0); err != nil {
		t.Fatal(err)
	}

	clock.Advance(time.Minute - time.Millisecond)
	if _, err := x.Claim(ctx, claimed, 0); !errors.Is(err, inbox.ErrClaimed) {
		t.Errorf("within the lease: %v", err)
	}

	clock.Advance(time.Millisecond)
	if c, err := x.Claim(ctx, claimed, 0); err != nil || c.Attempt() != 2 {
		t.Errorf("after the lease: %v", err)
	}

	clock.Advance(time.Hour - time.Minute - time.Millisecond)
	if err := once("1"); !errors.Is(err, inbox.ErrDuplicate) {
		t.Errorf("within the retention: %v", err)
	}

	clock.Advance(time.Millisecond)
	if n, err := x.Sweep(ctx); n != 1 || err != nil {
		t.Errorf("%d swept, %v", n, err)
	}

	if err := once("1"); err != nil {
		t.Errorf("after the retention: %v", err)
	}
}

func TestInboxRefusesBadOptions(t *testing.T) {
	t.Parallel()
	for name, opt := range map[string]InboxOption{"name": InboxCollection("a$"), "retention": InboxRetention(time.Second), "lease": InboxLease(time.Millisecond)} {
		if _, err := NewInbox(NewDB(), opt); err == nil {
			t.Errorf("a bad %s is accepted", name)
		}
	}
	if _, err := NewInbox(nil); err == nil {
		t.Error("no database is accepted")
	}
}

// If the id alone identifies a message, only the first consumer handles it.
func TestInboxIdentity(t *testing.T) {
	t.Parallel()
	for identity, effects := range map[inbox.Identity]int{inbox.IDAndConsumer: 2, inbox.IDOnly: 1} {
		x := newInbox(t, NewDB(), InboxIdentity(identity))
		n := 0
		for _, consumer := range []string{"a", "b"} {
			err := x.Once(t.Context(), consumer, "1", func(context.Context) error { n++; return nil })
			if err != nil && !errors.Is(err, inbox.ErrDuplicate) {
				t.Fatal(err)
			}
		}

		if n != effects {
			t.Errorf("identity %d: %d effects, %d are wanted", identity, n, effects)
		}
	}
}
