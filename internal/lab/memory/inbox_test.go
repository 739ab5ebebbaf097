package memory

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrelay/outrelay/internal/lab/inboxtest"
	engine "github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/inbox"
)

func newInbox(t *testing.T, db *DB, s engine.Settings) *engine.Inbox {
	t.Helper()
	x, err := openInbox(db, s)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestInboxContract(t *testing.T) {
	t.Parallel()
	inboxtest.Run(t, func(t *testing.T) inboxtest.Setup {
		db := NewDB()
		every := func(ctx context.Context, table string, change func(v any) any) error {
			return db.runOperation(ctx, func(t *tx) error {
				var errs []error
				rows := db.findOrAddTable(table)
				for key, v := range rowsOf[any](t, rows) {
					errs = append(errs, t.putRow(rows, key, change(v)))
				}
				return errors.Join(errs...)
			})
		}

		return inboxtest.Setup{
			Inbox:       newInbox(t, db, engine.Settings{}),
			Other:       newInbox(t, db, engine.Settings{}),
			Halting:     newInbox(t, db, engine.Settings{HaltOnRecreated: true}),
			Transaction: db.Transaction,
			Expire: func(ctx context.Context) error {
				return every(ctx, "inbox", func(any) any { return nil })
			},
			Lapse: func(ctx context.Context) error {
				return every(ctx, "inbox_claims", func(v any) any {
					l := v.(engine.Lease)
					l.Until = time.Time{}
					return l
				})
			},
		}
	})
}

// Retention and leases follow the clock.
func TestInboxGoesByTheClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x := newInbox(t, NewDB(), engine.Settings{Retention: time.Hour, Lease: time.Minute})
		ctx := t.Context()
		once := func(id string) error {
			return x.Once(ctx, engine.Entry{Key: engine.Key{Consumer: "c", ID: id}}, nothing, engine.OnceConfig{})
		}
		if err := once("1"); err != nil {
			t.Fatal(err)
		}

		claimed := engine.Entry{Key: engine.Key{Consumer: "c", ID: "2"}}
		if _, err := x.Claim(ctx, claimed, 0); err != nil {
			t.Fatal(err)
		}

		<-time.After(time.Minute - time.Millisecond)
		if _, err := x.Claim(ctx, claimed, 0); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("within the lease: %v", err)
		}

		<-time.After(time.Millisecond)
		if c, err := x.Claim(ctx, claimed, 0); err != nil || c.Attempt() != 2 {
			t.Errorf("after the lease: %v", err)
		}

		<-time.After(time.Hour - time.Minute - time.Millisecond)
		if err := once("1"); !errors.Is(err, inbox.ErrDuplicate) {
			t.Errorf("within the retention: %v", err)
		}

		<-time.After(time.Millisecond)
		if n, err := x.Sweep(ctx, 0); n != 1 || err != nil {
			t.Errorf("%d swept, %v", n, err)
		}

		if err := once("1"); err != nil {
			t.Errorf("after the retention: %v", err)
		}
	})
}

func nothing(context.Context) error { return nil }

func TestInboxRejectsBadOptions(t *testing.T) {
	t.Parallel()
	for name, opt := range map[string]inbox.Option{"name": inbox.WithCollection("a$"), "retention": inbox.WithRetention(time.Second)} {
		if _, err := NewInbox(NewDB(), opt); !errors.Is(err, inbox.ErrInvalid) {
			t.Errorf("a bad %s: %v", name, err)
		}
	}
	if _, err := NewInbox(nil, inbox.WithCollection("a$")); !errors.Is(err, inbox.ErrInvalid) || !strings.Contains(err.Error(), "a$") {
		t.Errorf("no database: %v", err)
	}
}
