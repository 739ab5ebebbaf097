package memory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/hold"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Inbox is an inbox in a DB, by the database's clock. What its methods promise is said at those of *inbox.Inbox. Two of one
// collection are as the inboxes of two processes. It is safe for concurrent use.
//
// Where *inbox.Inbox needs inbox.Remember, a transaction of DB remembers by itself what was answered in it.
type Inbox struct {
	db         *DB
	collection string
	retention  time.Duration
	lease      time.Duration
	identity   inbox.Identity
	recreated  inbox.Recreated

	markers, offsets, claims *rows

	guard hold.Guard

	mu       sync.Mutex
	attached map[partitionKey]int64
	held     map[*claim]struct{}
}

var _ consumer.Inbox = (*Inbox)(nil)

// InboxOption configures an Inbox.
type InboxOption func(*Inbox)

// InboxCollection names the inbox. Defaults to inbox.DefaultCollection.
func InboxCollection(name string) InboxOption { return func(x *Inbox) { x.collection = name } }

// InboxRetention is inbox.WithRetention; markers are gone when it is over.
func InboxRetention(d time.Duration) InboxOption { return func(x *Inbox) { x.retention = d } }

// InboxLease is inbox.WithLease.
func InboxLease(d time.Duration) InboxOption { return func(x *Inbox) { x.lease = d } }

// InboxIdentity is inbox.WithIdentity.
func InboxIdentity(i inbox.Identity) InboxOption { return func(x *Inbox) { x.identity = i } }

// InboxRecreated is inbox.WithRecreated.
func InboxRecreated(r inbox.Recreated) InboxOption { return func(x *Inbox) { x.recreated = r } }

// NewInbox makes an inbox in db. Problems of the options are reported all at once.
func NewInbox(db *DB, opts ...InboxOption) (*Inbox, error) {
	if db == nil {
		return nil, errors.New("inbox: the database is nil")
	}
	x := &Inbox{
		db: db, collection: inbox.DefaultCollection, retention: inbox.DefaultRetention, lease: inbox.DefaultLease,
		attached: map[partitionKey]int64{}, held: map[*claim]struct{}{},
	}
	for _, o := range opts {
		o(x)
	}
	var errs []error
	if x.collection == "" || strings.ContainsAny(x.collection, "$\x00") || strings.HasPrefix(x.collection, "system.") {
		errs = append(errs, fmt.Errorf("inbox: %q is not a legal collection name", x.collection))
	}
	if x.retention < inbox.MinRetention {
		errs = append(errs, fmt.Errorf("inbox: a retention of %s; it must be at least %s", x.retention, inbox.MinRetention))
	}
	if x.lease < inbox.MinLease || x.lease > x.retention {
		errs = append(errs, fmt.Errorf("inbox: a lease of %s; it must be at least %s and at most the retention", x.lease, inbox.MinLease))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	x.markers, x.offsets, x.claims = db.table(x.collection), db.table(x.collection+"_offsets"), db.table(x.collection+"_claims")
	return x, nil
}

// marker says that an identity was handled, or is claimed.
type marker struct {
	handled  bool
	owner    *claim // of the last claim; nil without one
	attempts int
	expires  time.Time
}

// lease is that of a claim. It is a row of its own, so that its renewal is no conflict for the handler's transaction.
type lease struct {
	owner *claim // nil: it was given up
	until time.Time
}

const maxText = 1024

func validate(list []inbox.Entry) error {
	errs := []error{validatePlaces(list)}
	for _, e := range list {
		if k := e.Key; len(k.Consumer) > maxText || len(k.Namespace) > maxText || len(k.ID) > maxText {
			errs = append(errs, fmt.Errorf("%w: consumer, namespace or id of a message for %.64q has more than %d bytes", inbox.ErrInvalid, k.Consumer, maxText))
		}
	}
	return errors.Join(errs...)
}

// validatePlaces checks what a watermark needs of the entries.
func validatePlaces(list []inbox.Entry) error {
	var errs []error
	for _, e := range list {
		k, p := e.Key, e.Place
		if k.Consumer == "" || k.ID == "" {
			errs = append(errs, fmt.Errorf("%w: consumer or id of %s is empty", inbox.ErrInvalid, k))
		}
		if p.Topic != "" && (p.Partition < 0 || p.Offset < 0 || p.Lane < 0 || p.Lane >= inbox.Lanes) {
			errs = append(errs, fmt.Errorf("%w: %s has partition %d, lane %d and offset %d", inbox.ErrInvalid, k, p.Partition, p.Lane, p.Offset))
		}
	}
	return errors.Join(errs...)
}

// derived says whether the id says no more than the place.
func derived(e inbox.Entry) bool {
	p := e.Place
	return p.Topic != "" && e.Key.ID == inbox.PlaceID(p.Topic, p.Partition, p.Offset)
}

// id is the key of an entry's marker in a generation of its partition.
func (x *Inbox) id(e inbox.Entry, generation int64) string {
	parts := []string{e.Key.Namespace, e.Key.ID}
	if x.identity == inbox.IDAndConsumer {
		parts = append(parts, e.Key.Consumer)
	}
	if derived(e) {
		parts = append(parts, fmt.Sprint(generation)) // the same place of the topic's next life is another message
	}
	return strings.Join(parts, "\x00")
}

// marker is the one of that key, nil if there is none or its retention is over.
func (x *Inbox) marker(t *tx, id string) *marker {
	m, _ := t.get(x.markers, id).(*marker)
	if m == nil || !x.db.clock.Now().Before(m.expires) {
		return nil
	}
	return m
}

// holder is the lease of a claim that somebody holds, nil if nobody does.
func (x *Inbox) holder(t *tx, id string) *lease {
	l, _ := t.get(x.claims, id).(*lease)
	if l == nil || !x.db.clock.Now().Before(l.until) {
		return nil
	}
	return l
}

func (x *Inbox) handled(attempts int) *marker {
	return &marker{handled: true, attempts: attempts, expires: x.db.clock.Now().Add(x.retention)}
}

// memo is what was answered in one attempt of a transaction.
type memoKey struct {
	collection string
	entry      inbox.Entry
}

func (u *unit) known(collection string, e inbox.Entry) (fresh, ok bool) {
	if u == nil {
		return false, false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	fresh, ok = u.memo[memoKey{collection, e}]
	return fresh, ok
}

// remember keeps an answer; an entry without a place is the same as any with its key that was fresh.
func (u *unit) remember(collection string, e inbox.Entry, fresh bool) {
	if u == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.memo == nil {
		u.memo = map[memoKey]bool{}
	}
	if _, ok := u.memo[memoKey{collection, e}]; !ok {
		u.memo[memoKey{collection, e}] = fresh
	}
	if fresh {
		u.memo[memoKey{collection, inbox.Entry{Key: e.Key}}] = true
	}
}

// Admit says for each entry whether it is fresh, and marks the fresh as handled, in the transaction of ctx.
func (x *Inbox) Admit(ctx context.Context, list []inbox.Entry) ([]bool, error) {
	if len(list) == 0 {
		return nil, nil
	}
	err := validate(list)
	u := x.db.unitOf(ctx)
	if err == nil && u == nil {
		err = outbox.ErrNoTransaction
	}
	if err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}
	fresh := make([]bool, len(list))
	var ask []inbox.Entry
	var at []int
	for i, e := range list {
		known, ok := u.known(x.collection, e)
		if fresh[i] = known; !ok {
			ask, at = append(ask, e), append(at, i)
		}
	}
	err = x.db.do(ctx, func(t *tx) error {
		answers, err := x.admit(t, ask, true)
		for i, f := range answers {
			fresh[at[i]] = f
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}
	for i, e := range list {
		u.remember(x.collection, e, fresh[i])
	}
	return fresh, nil
}

// admit judges the entries, and if it is to write marks the fresh and moves the watermarks.
func (x *Inbox) admit(t *tx, list []inbox.Entry, write bool) ([]bool, error) {
	fresh := make([]bool, len(list))
	seen := map[string]bool{}
	marks := x.marks(t, list)
	for i, e := range list {
		var generation int64
		if e.Place.Topic != "" {
			l := laneOf(e)
			generation = marks.generation(l.partitionKey, l.lane)
			if err := x.checkAttached(l.partitionKey, generation); err != nil {
				return nil, err
			}
			if e.Place.Offset < marks.next(l, generation) {
				continue
			}
		}
		id := x.id(e, generation)
		if seen[id] {
			continue
		}
		seen[id] = true
		if derived(e) && x.identity == inbox.IDAndConsumer {
			fresh[i] = true // known by its place alone
			continue
		}
		m := x.marker(t, id)
		attempts := 0
		if m != nil {
			if m.handled {
				continue
			}
			if l := x.holder(t, id); l != nil {
				return nil, &inbox.ClaimedError{Key: e.Key, Until: l.until}
			}
			attempts = m.attempts
		}
		fresh[i] = true
		if !write {
			continue
		}
		if err := t.put(x.markers, id, x.handled(attempts)); err != nil {
			return nil, err
		}
	}
	if !write {
		return fresh, nil
	}
	return fresh, x.advance(t, list, marks)
}

// Pass moves the watermarks past the entries without marking them.
func (x *Inbox) Pass(ctx context.Context, list []inbox.Entry) error {
	if err := validatePlaces(list); err != nil {
		return fmt.Errorf("passing: %w", err)
	}
	err := x.db.do(ctx, func(t *tx) error {
		marks := x.marks(t, list)
		for _, e := range list {
			if e.Place.Topic == "" {
				continue
			}
			l := laneOf(e)
			if err := x.checkAttached(l.partitionKey, marks.generation(l.partitionKey, l.lane)); err != nil {
				return err
			}
		}
		return x.advance(t, list, marks)
	})
	if err != nil {
		return fmt.Errorf("passing: %w", err)
	}
	return nil
}

// Check is Admit without a trace: it says what would be fresh. It joins a transaction that is in ctx and needs none.
func (x *Inbox) Check(ctx context.Context, list []inbox.Entry) (fresh []bool, err error) {
	if err := validate(list); err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}
	u := x.db.unitOf(ctx)
	err = x.db.do(ctx, func(t *tx) (err error) {
		fresh, err = x.admit(t, list, false)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}
	for i, e := range list {
		if known, ok := u.known(x.collection, e); ok {
			fresh[i] = known
		}
	}
	return fresh, nil
}

// Exists says whether there is a marker that the message was handled.
func (x *Inbox) Exists(ctx context.Context, k inbox.Key) (found bool, err error) {
	e := inbox.Entry{Key: k}
	if err := validate([]inbox.Entry{e}); err != nil {
		return false, err
	}
	err = x.db.do(ctx, func(t *tx) error {
		m := x.marker(t, x.id(e, 0))
		found = m != nil && m.handled
		return nil
	})
	return found, err
}

// Sweep removes the markers whose retention is over and says how many those were.
func (x *Inbox) Sweep(ctx context.Context) (removed int64, err error) {
	err = x.db.do(ctx, func(t *tx) error {
		removed = 0
		var old []string
		t.scan(x.markers, func(id string, _ any) {
			if x.marker(t, id) == nil {
				old = append(old, id)
			}
		})
		for _, id := range old {
			if err := t.put(x.markers, id, nil); err != nil {
				return err
			}
			removed++
		}
		return nil
	})
	return removed, err
}
