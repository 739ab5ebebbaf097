package memory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/hold"
	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Inbox is an inbox in a DB. Its methods have the same contracts as those of *inbox.Inbox, and its
// times refer to the clock of the database. Several Inboxes of one collection behave as those of
// several processes. It is safe for concurrent use.
//
// inbox.Remember is not necessary: a transaction of a DB always remembers the answers of its
// Inboxes.
type Inbox struct {
	db         *DB
	collection string
	retention  time.Duration
	lease      time.Duration
	identity   inbox.Identity
	recreated  inbox.Recreated

	markers *storedTable
	offsets *storedTable // watermarks
	claims  *storedTable // leases of claims

	// singleFlight makes calls of Once with the same identity wait for each other.
	singleFlight hold.Guard

	mu         sync.Mutex
	attached   map[partitionKey]int64 // generation at the last Attach
	heldClaims map[*claim]struct{}
}

var _ consumer.Inbox = (*Inbox)(nil)

// InboxOption configures an Inbox. See NewInbox.
type InboxOption func(*Inbox)

// InboxCollection sets the name of the inbox. Defaults to inbox.DefaultCollection.
func InboxCollection(name string) InboxOption { return func(x *Inbox) { x.collection = name } }

// InboxRetention sets the retention of markers: see inbox.WithRetention. A marker is ignored when
// it is over.
func InboxRetention(d time.Duration) InboxOption { return func(x *Inbox) { x.retention = d } }

// InboxLease sets the lease of claims: see inbox.WithLease.
func InboxLease(d time.Duration) InboxOption { return func(x *Inbox) { x.lease = d } }

// InboxIdentity sets what identifies a message: see inbox.WithIdentity.
func InboxIdentity(i inbox.Identity) InboxOption { return func(x *Inbox) { x.identity = i } }

// InboxRecreated sets how Attach treats a recreated topic: see inbox.WithRecreated.
func InboxRecreated(r inbox.Recreated) InboxOption { return func(x *Inbox) { x.recreated = r } }

// NewInbox returns an inbox in db. The error joins the problems of all options.
func NewInbox(db *DB, opts ...InboxOption) (*Inbox, error) {
	if db == nil {
		return nil, errors.New("inbox: the database is nil")
	}

	x := &Inbox{
		db:         db,
		collection: inbox.DefaultCollection,
		retention:  inbox.DefaultRetention,
		lease:      inbox.DefaultLease,
		attached:   map[partitionKey]int64{},
		heldClaims: map[*claim]struct{}{},
	}
	for _, o := range opts {
		o(x)
	}

	var errs []error
	if x.collection == "" || strings.ContainsAny(x.collection, "$\x00") || strings.HasPrefix(x.collection, "system.") {
		errs = append(errs, fmt.Errorf("inbox: invalid collection name %q", x.collection))
	}
	if x.retention < inbox.MinRetention {
		errs = append(errs, fmt.Errorf("inbox: invalid retention %s: it must be at least %s", x.retention, inbox.MinRetention))
	}
	if x.lease < inbox.MinLease || x.lease > x.retention {
		errs = append(errs, fmt.Errorf("inbox: invalid lease %s: it must be between %s and the retention", x.lease, inbox.MinLease))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	x.markers = db.findOrAddTable(x.collection)
	x.offsets = db.findOrAddTable(x.collection + "_offsets")
	x.claims = db.findOrAddTable(x.collection + "_claims")
	return x, nil
}

// marker records that an identity was handled, or that it was claimed.
type marker struct {
	handled  bool
	owner    *claim // of the last claim; nil without one
	attempts int
	expires  time.Time
}

// lease is the lease of a claim. It is a separate row, so that its renewal does not conflict with
// the transaction of the handler.
type lease struct {
	owner *claim // nil if the claim was given up
	until time.Time
}

// maxTextBytes is the largest length of a consumer, a namespace and an id.
const maxTextBytes = 1024

// validateEntries joins the errors of all invalid entries.
func validateEntries(list []inbox.Entry) error {
	errs := []error{validatePlaces(list)}
	for _, e := range list {
		k := e.Key
		if len(k.Consumer) > maxTextBytes || len(k.Namespace) > maxTextBytes || len(k.ID) > maxTextBytes {
			errs = append(errs, fmt.Errorf("%w: consumer, namespace or id of a message for %.64q has more than %d bytes",
				inbox.ErrInvalid, k.Consumer, maxTextBytes))
		}
	}
	return errors.Join(errs...)
}

// validatePlaces checks only what a watermark needs, which does not include the length of the
// identity.
func validatePlaces(list []inbox.Entry) error {
	var errs []error
	for _, e := range list {
		k, p := e.Key, e.Place
		if k.Consumer == "" || k.ID == "" {
			errs = append(errs, fmt.Errorf("%w: consumer or id of %s is empty", inbox.ErrInvalid, k))
		}

		if p.Topic != "" && (p.Partition < 0 || p.Offset < 0 || p.Lane < 0 || p.Lane >= inbox.Lanes) {
			errs = append(errs, fmt.Errorf("%w: %s has partition %d, lane %d and offset %d",
				inbox.ErrInvalid, k, p.Partition, p.Lane, p.Offset))
		}
	}

	return errors.Join(errs...)
}

// isPlaceID reports whether the id contains nothing but the place.
func isPlaceID(e inbox.Entry) bool {
	p := e.Place
	return p.Topic != "" && e.Key.ID == inbox.PlaceID(p.Topic, p.Partition, p.Offset)
}

// markerKey returns the key of the marker of an entry, in the given generation of its partition.
func (x *Inbox) markerKey(e inbox.Entry, generation int64) string {
	parts := []string{e.Key.Namespace, e.Key.ID}
	if x.identity == inbox.IDAndConsumer {
		parts = append(parts, e.Key.Consumer)
	}

	// The same place in a recreated topic is another message.
	if isPlaceID(e) {
		parts = append(parts, fmt.Sprint(generation))
	}
	return strings.Join(parts, "\x00")
}

// findMarker returns the marker with this key. It returns nil if there is none, or if its retention
// is over.
func (x *Inbox) findMarker(t *tx, id string) *marker {
	m, _ := t.getRow(x.markers, id).(*marker)
	if m == nil || !x.db.clock.Now().Before(m.expires) {
		return nil
	}
	return m
}

// liveLease returns the lease with this key, or nil if there is none or if it has expired.
func (x *Inbox) liveLease(t *tx, id string) *lease {
	l, _ := t.getRow(x.claims, id).(*lease)
	if l == nil || !x.db.clock.Now().Before(l.until) {
		return nil
	}
	return l
}

// newHandledMarker returns a marker for a handled message.
func (x *Inbox) newHandledMarker(attempts int) *marker {
	return &marker{handled: true, attempts: attempts, expires: x.db.clock.Now().Add(x.retention)}
}

// memoKey identifies an answer of an inbox in one attempt of a transaction.
type memoKey struct {
	collection string
	entry      inbox.Entry
}

// knownAnswer returns the answer for an entry, and whether there is one.
func (u *unitOfWork) knownAnswer(collection string, e inbox.Entry) (fresh, ok bool) {
	if u == nil {
		return false, false
	}

	u.mu.Lock()
	defer u.mu.Unlock()
	fresh, ok = u.answers[memoKey{collection, e}]
	return fresh, ok
}

// storeAnswer stores the answer for an entry, unless there is one. An entry without a place counts
// as equal to a fresh entry with the same key.
func (u *unitOfWork) storeAnswer(collection string, e inbox.Entry, fresh bool) {
	if u == nil {
		return
	}

	u.mu.Lock()
	defer u.mu.Unlock()

	if u.answers == nil {
		u.answers = map[memoKey]bool{}
	}
	if _, ok := u.answers[memoKey{collection, e}]; !ok {
		u.answers[memoKey{collection, e}] = fresh
	}
	if fresh {
		u.answers[memoKey{collection, inbox.Entry{Key: e.Key}}] = true
	}
}

// Admit reports for each entry whether it is fresh, and marks fresh entries as handled in the
// transaction of ctx. See inbox.Inbox.Admit.
func (x *Inbox) Admit(ctx context.Context, list []inbox.Entry) ([]bool, error) {
	if len(list) == 0 {
		return nil, nil
	}

	err := validateEntries(list)
	u := x.db.unitFromContext(ctx)
	if err == nil && u == nil {
		err = outbox.ErrNoTransaction
	}
	if err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}

	fresh := make([]bool, len(list))
	var unknown []inbox.Entry
	var index []int
	for i, e := range list {
		known, ok := u.knownAnswer(x.collection, e)
		fresh[i] = known
		if !ok {
			unknown = append(unknown, e)
			index = append(index, i)
		}
	}

	err = x.db.runOperation(ctx, func(t *tx) error {
		answers, err := x.admitEntries(t, unknown, true)
		for i, f := range answers {
			fresh[index[i]] = f
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("admitting: %w", err)
	}

	for i, e := range list {
		u.storeAnswer(x.collection, e, fresh[i])
	}

	return fresh, nil
}

// admitEntries decides about the entries. With write it also marks fresh entries and moves the
// watermarks.
func (x *Inbox) admitEntries(t *tx, list []inbox.Entry, write bool) ([]bool, error) {
	fresh := make([]bool, len(list))
	seen := map[string]bool{}
	marks := x.readMarks(t, list)

	for i, e := range list {
		var generation int64
		if e.Place.Topic != "" {
			l := entryLane(e)
			generation = marks.currentGeneration(l.partitionKey, l.lane)
			if err := x.checkAttached(l.partitionKey, generation); err != nil {
				return nil, err
			}
			if e.Place.Offset < marks.nextOffset(l, generation) {
				continue
			}
		}

		id := x.markerKey(e, generation)
		if seen[id] {
			continue
		}
		seen[id] = true

		// The watermark is sufficient.
		if isPlaceID(e) && x.identity == inbox.IDAndConsumer {
			fresh[i] = true
			continue
		}

		m := x.findMarker(t, id)
		attempts := 0
		if m != nil {
			if m.handled {
				continue
			}
			if l := x.liveLease(t, id); l != nil {
				return nil, &inbox.ClaimedError{Key: e.Key, Until: l.until}
			}
			attempts = m.attempts
		}

		fresh[i] = true
		if !write {
			continue
		}
		if err := t.putRow(x.markers, id, x.newHandledMarker(attempts)); err != nil {
			return nil, err
		}
	}

	if !write {
		return fresh, nil
	}

	return fresh, x.advanceWatermarks(t, list, marks)
}

// Pass moves the watermarks past the entries without marking them as handled. See inbox.Inbox.Pass.
func (x *Inbox) Pass(ctx context.Context, list []inbox.Entry) error {
	if err := validatePlaces(list); err != nil {
		return fmt.Errorf("passing: %w", err)
	}

	err := x.db.runOperation(ctx, func(t *tx) error {
		marks := x.readMarks(t, list)
		for _, e := range list {
			if e.Place.Topic == "" {
				continue
			}

			l := entryLane(e)
			if err := x.checkAttached(l.partitionKey, marks.currentGeneration(l.partitionKey, l.lane)); err != nil {
				return err
			}
		}

		return x.advanceWatermarks(t, list, marks)
	})
	if err != nil {
		return fmt.Errorf("passing: %w", err)
	}

	return nil
}

// Check returns the result that Admit would have, but changes nothing. If ctx has a transaction,
// Check joins it.
func (x *Inbox) Check(ctx context.Context, list []inbox.Entry) (fresh []bool, err error) {
	if err := validateEntries(list); err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}

	u := x.db.unitFromContext(ctx)
	err = x.db.runOperation(ctx, func(t *tx) (err error) {
		fresh, err = x.admitEntries(t, list, false)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}

	for i, e := range list {
		if known, ok := u.knownAnswer(x.collection, e); ok {
			fresh[i] = known
		}
	}

	return fresh, nil
}

// Exists reports whether there is a marker for a handled message.
func (x *Inbox) Exists(ctx context.Context, k inbox.Key) (found bool, err error) {
	e := inbox.Entry{Key: k}
	if err := validateEntries([]inbox.Entry{e}); err != nil {
		return false, err
	}

	err = x.db.runOperation(ctx, func(t *tx) error {
		m := x.findMarker(t, x.markerKey(e, 0))
		found = m != nil && m.handled
		return nil
	})
	return found, err
}

// Sweep removes the markers whose retention is over and returns their number.
func (x *Inbox) Sweep(ctx context.Context) (removed int64, err error) {
	err = x.db.runOperation(ctx, func(t *tx) error {
		removed = 0
		var expired []string
		t.scanRows(x.markers, func(id string, _ any) {
			if x.findMarker(t, id) == nil {
				expired = append(expired, id)
			}
		})

		for _, id := range expired {
			if err := t.putRow(x.markers, id, nil); err != nil {
				return err
			}
			removed++
		}

		return nil
	})
	return removed, err
}
